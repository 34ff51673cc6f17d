//! The kernel: the warp that copies and the warpgroups that multiply.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::*;
use crate::format::slot_groups::SlotGroups;
use crate::format::tile_mma::{FRAGMENT_K, scale_pairs};
use crate::kernels::grouped_gemm::epilogue::{Accumulators, Warp, write_results};
use crate::kernels::grouped_gemm::ring;
use crate::kernels::grouped_gemm::sm80::dequantize::dequantize;
use crate::kernels::grouped_gemm::tile::{Tile, WeightRun};
use crate::params::GroupedGemmParams;
use crate::ptx::thread::{block_idx_x, grid_dim_x, leave_registers, sync_threads, take_registers, thread_idx_x};
use crate::ptx::wgmma::{self, Fragments, Multiply};
use crate::ptx::{grid, mbarrier, shared};

/// Steps of the instruction in a stage.
const STEPS: usize = MmaTile::K / FRAGMENT_K;

type Cursor = ring::Cursor<STAGES, STAGE_BYTES>;

/// Where a stage's weights are, behind its activations.
#[inline(always)]
fn weights_of(cursor: &Cursor) -> u32 {
    cursor.data() + ACTIVATION_BYTES as u32
}

/// Fragments of 8 slots that are multiplied for a tile of so many slots.
#[inline(always)]
fn slot_fragments(slots: u32) -> u32 {
    slots.div_ceil(16) * 2
}

/// Copies the weights and activations of one tile, stage after stage; one lane does it all.
#[inline(always)]
unsafe fn produce(params: &GroupedGemmParams, tile: &Tile, mut cursor: Cursor) -> Cursor {
    let k_tiles = params.k_tiles as usize;
    let WeightRun { first: mut weights, step: weight_bytes } = tile.weight_run(params);
    // Groups behind the expert's last one are read and multiplied too: they exist, and nobody writes their results.
    let groups = SlotGroups::new(tile.expert as usize, tile.expert_slot as usize, tile.expert_slots as usize);
    let first_group = (tile.slot - tile.expert_slot) as usize / GROUP_SLOTS;
    let mut activations = (params.activations as *const u8).wrapping_add(groups.tile(k_tiles, 0, first_group) * 2);
    let activation_bytes = slot_fragments(tile.slots) * TILE_BYTES as u32;
    let mut k_tile = 0;
    while k_tile < params.k_tiles {
        // SAFETY: the tiles exist, and the stage is written after its readers gave it back.
        unsafe {
            mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
            mbarrier::arrive_expect(cursor.full(), weight_bytes + activation_bytes);
            mbarrier::copy_bulk(weights_of(&cursor), weights, weight_bytes, cursor.full());
            mbarrier::copy_bulk(cursor.data(), activations, activation_bytes, cursor.full());
        }
        weights = weights.wrapping_add(weight_bytes as usize);
        activations = activations.wrapping_add(groups.count * TILE_BYTES);
        cursor = cursor.next();
        k_tile += 1;
    }
    cursor
}

/// A lane's part of the weight tiles of one stage.
#[derive(Clone, Copy)]
struct Weights {
    codes: [[u32; 4]; ROW_FRAGMENTS],
    scales: [[u32; 2]; ROW_FRAGMENTS],
}

impl Weights {
    /// From a stage, whose tiles of this warp are at these places.
    #[inline(always)]
    unsafe fn load(stage: u32, places: &[u32; ROW_FRAGMENTS], lane: u32) -> Self {
        let mut weights = Self { codes: [[0; 4]; ROW_FRAGMENTS], scales: [[0; 2]; ROW_FRAGMENTS] };
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            let tile = stage + places[m];
            // SAFETY: the stage is full.
            unsafe {
                weights.codes[m] = shared::load_v4(tile + lane * 16);
                weights.scales[m] = shared::load_v2(tile + MmaTile::CODE_BYTES as u32 + lane / 4 * 8);
            }
            m += 1;
        }
        weights
    }

    /// A operands of the steps from `first` on.
    #[inline(always)]
    fn operands<const STEPS: usize>(&self, first: usize) -> [[[u32; 4]; ROW_FRAGMENTS]; STEPS] {
        let mut a = [[[0; 4]; ROW_FRAGMENTS]; STEPS];
        let mut i = 0;
        while i < STEPS {
            let mut m = 0;
            while m < ROW_FRAGMENTS {
                a[i][m] = dequantize(self.codes[m][first + i], &self.scales[m].map(scale_pairs), first + i);
                m += 1;
            }
            i += 1;
        }
        a
    }
}

/// Matrix descriptor of a stage's activations (PTX ISA, "Matrix Descriptor Format"): the address, the distance from one
/// group to the next, and the 128-byte swizzle, all in units of 16 bytes.
#[inline(always)]
fn descriptor(address: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    (address as u64 & 0x3_FFFF) >> 4 | 1 << 16 | (TILE_BYTES as u64 >> 4) << 32 | SWIZZLE_128
}

/// Multiplies one tile and writes its results. While `AHEAD` steps are multiplied, the operands of as many are dequantized.
#[inline(always)]
unsafe fn consume<const SLOT_FRAGMENTS: usize, const AHEAD: usize, const TURN: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    mut cursor: Cursor,
    warp: &Warp,
) -> Cursor
where
    Fragments<SLOT_FRAGMENTS>: Multiply,
{
    const { assert!(STEPS.is_multiple_of(AHEAD)) };
    // SAFETY: see the functions called.
    unsafe {
        let mut accumulators: Accumulators<SLOT_FRAGMENTS> = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
        // A row tile that does not exist is replaced by one that does: nobody writes its results.
        let last = tile.weight_run(params).step / MmaTile::BYTES as u32 - 1;
        let mut places = [0; ROW_FRAGMENTS];
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            let row_tile = warp.row / FRAGMENT_ROWS as u32 + m as u32;
            places[m] = if row_tile < last { row_tile } else { last } * MmaTile::BYTES as u32;
            m += 1;
        }
        mbarrier::wait(cursor.full(), cursor.parity);
        let mut weights = Weights::load(weights_of(&cursor), &places, warp.lane);
        let mut a = weights.operands::<AHEAD>(0);
        let mut k_tile = 0;
        while k_tile < params.k_tiles {
            k_tile += 1;
            let b = descriptor(cursor.data());
            let next = cursor.next();
            // Behind the last stage, the last again.
            let ahead = if k_tile < params.k_tiles { next } else { cursor };
            let mut following = weights;
            let mut step = 0;
            while step < STEPS {
                wgmma::fence();
                let mut i = 0;
                while i < AHEAD {
                    let mut m = 0;
                    while m < ROW_FRAGMENTS {
                        accumulators[m].multiply(a[i][m], b + ((step + i) * FRAGMENT_K * 2 / 16) as u64);
                        m += 1;
                    }
                    i += 1;
                }
                wgmma::commit_group();
                step += AHEAD;
                // Early, unless that takes registers which accumulators need.
                if step == if SLOT_FRAGMENTS > 16 { STEPS } else { STEPS / 2 } {
                    mbarrier::wait(ahead.full(), ahead.parity);
                    following = Weights::load(weights_of(&ahead), &places, warp.lane);
                }
                let operands = if step < STEPS { weights.operands(step) } else { following.operands(0) };
                // With anything still under way the assembler would not let operands be written, and wait after each
                // instruction. The other warpgroup multiplies meanwhile.
                wgmma::wait_group::<0>();
                a = operands;
            }
            // Each lane for what it has read itself: one for all would do, but then no tool that does not follow the order
            // among the lanes of a warp could check it.
            mbarrier::arrive(cursor.empty());
            weights = following;
            cursor = next;
        }
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            accumulators[m].settle();
            m += 1;
        }
        if warp.row / FRAGMENT_ROWS as u32 <= last {
            write_results::<_, TURN, true>(params, tile, &accumulators, warp);
        }
        cursor
    }
}

/// The grouped GEMM for many slots.
///
/// # Safety
/// The params' pointers are as documented there; any number of blocks, threads and shared memory as [`VARIANTS`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn grouped_gemm_wgmma(params: GroupedGemmParams) {
    let (thread, shared) = (thread_idx_x(), shared::dynamic());
    let (warp, lane) = (thread / 32, thread % 32);
    const CONSUMER_WARPS: u32 = (CONSUMERS * GROUP_WARPS) as u32;
    let mut cursor = Cursor::new(shared);
    // SAFETY: see the functions called; the barriers are inside the planned shared memory.
    unsafe {
        if thread == 0 {
            Cursor::init(shared, 1, CONSUMER_WARPS * 32);
        }
        sync_threads();
        grid::follow();
        let block_rows = params.row_tiles.div_ceil(ROW_TILES as u32);
        // Read again for each tile, rather than kept: accumulators take all registers.
        let tiles = || *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
        let mut index = block_idx_x();
        if warp >= CONSUMER_WARPS {
            leave_registers::<PRODUCER_REGISTERS>();
            if warp == CONSUMER_WARPS && lane == 0 {
                while index < tiles() {
                    let tile = Tile::find::<ROWS, SLOTS, true>(&params, index, block_rows);
                    cursor = produce(&params, &tile, cursor);
                    index += grid_dim_x();
                }
            }
        } else {
            take_registers::<CONSUMER_REGISTERS>();
            let warp = Warp { lane, row: warp * (ROW_FRAGMENTS * FRAGMENT_ROWS) as u32, slot: 0 };
            while index < tiles() {
                let tile = Tile::find::<ROWS, SLOTS, true>(&params, index, block_rows);
                cursor = match slot_fragments(tile.slots) {
                    2 => consume::<2, 2, 2>(&params, &tile, cursor, &warp),
                    4 => consume::<4, 2, 2>(&params, &tile, cursor, &warp),
                    6 => consume::<6, 2, 2>(&params, &tile, cursor, &warp),
                    8 => consume::<8, 2, 2>(&params, &tile, cursor, &warp),
                    10 => consume::<10, 2, 2>(&params, &tile, cursor, &warp),
                    12 => consume::<12, 2, 2>(&params, &tile, cursor, &warp),
                    14 => consume::<14, 2, 2>(&params, &tile, cursor, &warp),
                    16 => consume::<16, 2, 1>(&params, &tile, cursor, &warp),
                    _ => consume::<18, 1, 1>(&params, &tile, cursor, &warp),
                };
                index += grid_dim_x();
            }
        }
    }
}
