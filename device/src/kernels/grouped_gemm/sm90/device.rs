//! The kernel: the warp that copies and the warpgroups that multiply.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::epilogue::{Place, write_sums};
use super::*;
use crate::format::slot_groups::SlotGroups;
use crate::format::tile_mma::{FRAGMENT_K, scale_pairs};
use crate::kernels::grouped_gemm::ring;
use crate::kernels::grouped_gemm::sm80::dequantize::dequantize;
use crate::kernels::grouped_gemm::tile::{Tile, WeightRun};
use crate::params::{ExpertScales, GroupedGemmParams};
use crate::ptx::thread::{anew, block_idx_x, grid_dim_x, leave_registers, sync_threads, take_registers, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::{self, Descriptor, Fragments, Multiply};
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

/// Row tiles that exist of a tile from this row on.
#[inline(always)]
fn row_tiles(params: &GroupedGemmParams, row: u32) -> u32 {
    let left = params.row_tiles - row / FRAGMENT_ROWS as u32;
    if left < ROW_TILES as u32 { left } else { ROW_TILES as u32 }
}

/// What those who multiply must know of a tile.
struct Job {
    /// Without the place of its weights.
    tile: Tile,
    scales: ExpertScales,
}

impl Job {
    /// Writes it; no slots mean that there are no more.
    #[inline(always)]
    unsafe fn put(&self, place: JobPlace) {
        let Tile { expert, row, slot, slots, expert_slot, expert_slots, .. } = self.tile;
        let ExpertScales { gate, up, down, l1_input, l2_input } = self.scales;
        let place = place.address();
        // SAFETY: inside the planned shared memory, and nobody reads it any more.
        unsafe {
            shared::store_v4(place, [expert, row, slot, slots]);
            shared::store_v4(place + 16, [expert_slot, expert_slots, gate.to_bits(), up.to_bits()]);
            shared::store_v4(place + 32, [down.to_bits(), l1_input.to_bits(), l2_input.to_bits(), 0]);
        }
    }

    /// Reads it.
    #[inline(always)]
    unsafe fn get(place: JobPlace) -> Self {
        let place = place.address();
        // SAFETY: inside the planned shared memory; the tile's first stage was full.
        unsafe {
            let [expert, row, slot, slots] = shared::load_v4(place);
            let [expert_slot, expert_slots, gate, up] = shared::load_v4(place + 16);
            let [down, l1_input, l2_input, _] = shared::load_v4(place + 32);
            let [gate, up, down, l1_input, l2_input] = [gate, up, down, l1_input, l2_input].map(f32::from_bits);
            let tile = Tile { weights: core::ptr::null(), expert, row, slot, slots, expert_slot, expert_slots };
            Self { tile, scales: ExpertScales { gate, up, down, l1_input, l2_input } }
        }
    }
}

/// Where the job of a tile is: one place after the other.
#[derive(Clone, Copy)]
struct JobPlace(u32);

impl JobPlace {
    #[inline(always)]
    fn address(self) -> u32 {
        shared::dynamic() + JOBS_AT as u32 + self.0 * JOB_BYTES as u32
    }

    #[inline(always)]
    fn next(self) -> Self {
        Self(if self.0 + 1 == JOBS as u32 { 0 } else { self.0 + 1 })
    }
}

/// Copies the weights and activations of one tile, stage after stage; one lane does it all.
#[inline(always)]
unsafe fn produce(params: &GroupedGemmParams, job: &Job, place: JobPlace, mut cursor: Cursor) -> Cursor {
    let tile = &job.tile;
    let k_tiles = params.k_tiles as usize;
    let WeightRun { first: mut weights, step } = tile.weight_run(params);
    let weight_bytes = row_tiles(params, tile.row) * MmaTile::BYTES as u32;
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
            if k_tile == 0 {
                job.put(place);
            }
            mbarrier::arrive_expect(cursor.full(), weight_bytes + activation_bytes);
            mbarrier::copy_bulk(weights_of(&cursor), weights, weight_bytes, cursor.full());
            mbarrier::copy_bulk(cursor.data(), activations, activation_bytes, cursor.full());
        }
        weights = weights.wrapping_add(step as usize);
        activations = activations.wrapping_add(groups.count * TILE_BYTES);
        cursor = cursor.next();
        k_tile += 1;
    }
    cursor
}

/// A lane's part of one weight tile.
#[derive(Clone, Copy)]
struct Weights {
    codes: [u32; 4],
    scales: [u32; 2],
}

impl Weights {
    /// From shared memory.
    #[inline(always)]
    unsafe fn load(tile: u32, lane: u32) -> Self {
        // SAFETY: the stage is full.
        unsafe {
            Self {
                codes: shared::load_v4(tile + lane * 16),
                scales: shared::load_v2(tile + MmaTile::CODE_BYTES as u32 + lane / 4 * 8),
            }
        }
    }

    /// A operand of one step.
    #[inline(always)]
    fn operand(&self, step: usize) -> [u32; 4] {
        dequantize(self.codes[step], &self.scales.map(scale_pairs), step)
    }
}

/// Matrix descriptor of a stage's activations (PTX ISA, "Matrix Descriptor Format"): the address, the distance from one
/// group to the next, and the 128-byte swizzle, all in units of 16 bytes.
#[inline(always)]
fn descriptor(address: u32) -> Descriptor {
    const SWIZZLE_128: u32 = 1 << 30;
    Descriptor { low: uniform((address & 0x3_FFFF) >> 4 | 1 << 16), high: TILE_BYTES as u32 >> 4 | SWIZZLE_128 }
}

/// Sums of one tile.
type Sums = Fragments<{ SLOTS / GROUP_SLOTS }>;

/// Multiplies one tile, of `SLOT_FRAGMENTS` fragments of 8 slots; each warp a row tile, whose weights are at `place` in a
/// stage. While a step is multiplied, the operand of the next one is dequantized.
#[inline(always)]
unsafe fn multiply<const SLOT_FRAGMENTS: usize>(
    k_tiles: u32,
    sums: &mut Sums,
    a: &mut [[u32; 4]; 2],
    mut weights: Weights,
    mut cursor: Cursor,
    place: u32,
    lane: u32,
) -> Cursor
where
    Sums: Multiply<SLOT_FRAGMENTS>,
{
    // SAFETY: see the functions called.
    unsafe {
        let mut k_tile = 0;
        loop {
            let b = descriptor(cursor.data());
            let next = cursor.next();
            // Behind the last stage, the last again.
            let ahead = if k_tile + 1 < k_tiles { next } else { cursor };
            let mut following = weights;
            let mut step = 0;
            while step < STEPS {
                wgmma::fence();
                sums.multiply(a[step % 2], b.further((step * FRAGMENT_K * 2 / 16) as u32));
                wgmma::commit_group();
                if step == STEPS / 2 {
                    mbarrier::wait(ahead.full(), ahead.parity);
                    following = Weights::load(weights_of(&ahead) + place, lane);
                }
                // All but this step: so the operand of the last one may be overwritten.
                wgmma::wait_group::<1>();
                step += 1;
                a[step % 2] = if step < STEPS { weights.operand(step) } else { following.operand(0) };
            }
            wgmma::wait_group::<0>();
            // Each lane for what it has read itself: one for all would do, but then no tool that does not follow the order
            // among the lanes of a warp could check it.
            mbarrier::arrive(cursor.empty());
            weights = following;
            cursor = next;
            k_tile += 1;
            // There is one at least.
            if k_tile >= k_tiles {
                break;
            }
        }
    }
    cursor
}

/// Multiplies one tile of so many slots, from this row on, whose first stage is full, and writes its results.
#[inline(always)]
unsafe fn consume(
    params: &GroupedGemmParams,
    job: JobPlace,
    [row, slots]: [u32; 2],
    cursor: Cursor,
    warp: u32,
    lane: u32,
) -> Cursor {
    let mut sums: Sums = [[0.0; 4]; SLOTS / GROUP_SLOTS];
    // A row tile that does not exist is replaced by one that does: nobody writes its results.
    let count = row_tiles(params, row);
    let place = if warp < count { warp } else { count - 1 } * MmaTile::BYTES as u32;
    let k = params.k_tiles;
    // SAFETY: see the functions called.
    unsafe {
        let weights = Weights::load(weights_of(&cursor) + place, lane);
        let mut a = [weights.operand(0), [0; 4]];
        let cursor = match uniform(slot_fragments(slots)) {
            2 => multiply::<2>(k, &mut sums, &mut a, weights, cursor, place, lane),
            4 => multiply::<4>(k, &mut sums, &mut a, weights, cursor, place, lane),
            6 => multiply::<6>(k, &mut sums, &mut a, weights, cursor, place, lane),
            8 => multiply::<8>(k, &mut sums, &mut a, weights, cursor, place, lane),
            10 => multiply::<10>(k, &mut sums, &mut a, weights, cursor, place, lane),
            12 => multiply::<12>(k, &mut sums, &mut a, weights, cursor, place, lane),
            14 => multiply::<14>(k, &mut sums, &mut a, weights, cursor, place, lane),
            16 => multiply::<16>(k, &mut sums, &mut a, weights, cursor, place, lane),
            18 => multiply::<18>(k, &mut sums, &mut a, weights, cursor, place, lane),
            20 => multiply::<20>(k, &mut sums, &mut a, weights, cursor, place, lane),
            22 => multiply::<22>(k, &mut sums, &mut a, weights, cursor, place, lane),
            _ => multiply::<24>(k, &mut sums, &mut a, weights, cursor, place, lane),
        };
        wgmma::settle(&mut sums, &mut a);
        if warp < count {
            // Read again, rather than kept.
            let Job { tile, scales } = Job::get(job);
            let row = tile.row + warp * FRAGMENT_ROWS as u32;
            write_sums(params, &tile, &sums, &Place { scales, lane: anew(lane), warp: anew(warp), row });
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
    let (warp, lane) = (uniform(thread / 32), thread % 32);
    let (mut cursor, mut job) = (Cursor::new(shared), JobPlace(0));
    // SAFETY: see the functions called; the barriers are inside the planned shared memory.
    unsafe {
        if thread == 0 {
            Cursor::init(shared, 1, CONSUMER_WARPS * 32);
        }
        sync_threads();
        grid::follow();
        if warp >= CONSUMER_WARPS {
            leave_registers::<PRODUCER_REGISTERS>();
            if warp == CONSUMER_WARPS && lane == 0 {
                let block_rows = params.row_tiles.div_ceil(ROW_TILES as u32);
                let tiles = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
                let mut index = block_idx_x();
                while index < tiles {
                    let tile = Tile::find::<ROWS, SLOTS, true>(&params, index, block_rows);
                    let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
                    cursor = produce(&params, &Job { tile, scales }, job, cursor);
                    job = job.next();
                    index += grid_dim_x();
                }
                mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                shared::store_v4(job.address(), [0; 4]);
                mbarrier::arrive(cursor.full());
            }
        } else {
            take_registers::<CONSUMER_REGISTERS>();
            loop {
                mbarrier::wait(cursor.full(), cursor.parity);
                let [_, row, _, slots] = shared::load_v4(job.address());
                if slots == 0 {
                    return;
                }
                cursor = consume(&params, job, [row, slots], cursor, warp, lane);
                job = job.next();
            }
        }
    }
}
