//! The kernel for few slots: every warp copies its own weights into its own ring in shared memory, and waits for no other.
//!
//! A unit is 32 rows of one expert times up to 32 slots, all of K. A block has an equal share of all units, and as many of
//! its warps work as share it most evenly: few tokens leave few units, so evenness decides.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::dequantize::Weights;
use super::{STREAM_DEEP_STAGES, STREAM_ROWS, STREAM_SLOTS, STREAM_STAGE_BYTES, STREAM_STAGES, STREAM_WARPS};
use crate::format::packed::TileOrder;
use crate::format::tile_mma::{LOAD_K, MmaTile};
use crate::kernels::grouped_gemm::ROW_FRAGMENTS;
use crate::kernels::grouped_gemm::epilogue::{Accumulators, Warp, write_results};
use crate::kernels::grouped_gemm::tile::{Run, Tile};
use crate::params::GroupedGemmParams;
use crate::ptx::asynchronous::{commit_group, copy_16_if, wait_group};
use crate::ptx::matrix::mma_m16n8k16_f16;
use crate::ptx::thread::{block_idx_x, grid_dim_x, thread_idx_x};
use crate::ptx::warp::{sync_warp, uniform};
use crate::ptx::{global, grid, shared};

const TILE_CHUNKS: u32 = super::TILE_CHUNKS as u32;

/// Copies of 16 bytes of a lane for a tile of both fragments.
const COPIES: usize = STREAM_STAGE_BYTES.div_ceil(32 * 16);

/// A warp's ring, and what the lane copies into it.
struct Ring {
    /// This lane's first 16 bytes of tile 0 of the first fragment, and how many bytes further the next tile along K is.
    first: *const u8,
    step: u32,
    /// Bytes of one such tile of the fragments that exist: one or both.
    bytes: u32,
    shared: u32,
    stages: u32,
    lane: u32,
}

impl Ring {
    /// Starts the first copies of a unit; the ring is not read any more.
    #[inline(always)]
    unsafe fn start(params: &GroupedGemmParams, tile: &Tile, shared: u32, stages: u32, lane: u32) -> Self {
        let row_tile = tile.row as usize / MmaTile::ROWS;
        let Run { first, step } = tile.weight_run(params, 0);
        let both = row_tile + 1 < params.row_tiles as usize;
        let ring = Self {
            first: first.wrapping_add(lane as usize * 16),
            step,
            bytes: if both { STREAM_STAGE_BYTES } else { MmaTile::BYTES } as u32,
            shared,
            stages,
            lane,
        };
        let mut i = 0;
        while i < stages {
            // SAFETY: only tiles that exist are read.
            unsafe { ring.copy(i * STREAM_STAGE_BYTES as u32, i, i < params.k_tiles) };
            commit_group();
            i += 1;
        }
        ring
    }

    /// Starts the copy of one tile of K of both fragments, if there is one.
    #[inline(always)]
    unsafe fn copy(&self, place: u32, k_tile: u32, exists: bool) {
        let from = self.first.wrapping_add(k_tile as usize * self.step as usize);
        let to = self.shared + place + self.lane * 16;
        let mut i = 0;
        while i < COPIES {
            let further = i as u32 * 32 * 16;
            let exists = exists && self.lane * 16 + further < self.bytes;
            // SAFETY: the tile exists, the place is one of the ring's, and all lanes have read what was there.
            unsafe { copy_16_if(exists, to + further, from.wrapping_add(further as usize)) };
            i += 1;
        }
    }

    /// Waits until the stage behind the one that was waited for before is here, for all lanes.
    #[inline(always)]
    fn wait(&self) {
        if self.stages == STREAM_DEEP_STAGES {
            wait_group::<{ STREAM_DEEP_STAGES - 2 }>();
        } else {
            wait_group::<{ STREAM_STAGES - 2 }>();
        }
        sync_warp();
    }

    /// The place behind this one.
    #[inline(always)]
    fn behind(&self, place: u32) -> u32 {
        let behind = place + STREAM_STAGE_BYTES as u32;
        if behind == self.stages * STREAM_STAGE_BYTES as u32 { 0 } else { behind }
    }

    /// A tile of K from its place in the ring.
    #[inline(always)]
    unsafe fn weights(&self, place: u32) -> [Weights; ROW_FRAGMENTS] {
        let mut weights = [Weights { codes: [0; 4], scales: [0; 2] }; ROW_FRAGMENTS];
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            // A fragment that does not exist is replaced by one that does: nobody writes its results.
            let tile = m as u32 * MmaTile::BYTES as u32;
            let fragment = self.shared + place + if tile < self.bytes { tile } else { 0 };
            // SAFETY: the tile has landed.
            unsafe { weights[m] = Weights::load(fragment, self.lane) };
            m += 1;
        }
        weights
    }
}

/// Where a lane's rows of activations begin.
struct Slots<const SLOT_FRAGMENTS: usize> {
    activations: *const u8,
    /// First chunk of 16 bytes of each row.
    chunks: [u32; SLOT_FRAGMENTS],
}

impl<const SLOT_FRAGMENTS: usize> Slots<SLOT_FRAGMENTS> {
    /// A slot that does not exist is replaced by one that does: nobody writes its results.
    #[inline(always)]
    unsafe fn new(params: &GroupedGemmParams, tile: &Tile, lane: u32) -> Self {
        let mut chunks = [0; SLOT_FRAGMENTS];
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            let inner = n as u32 * 8 + lane / 4;
            let slot = tile.slot + if inner < tile.slots { inner } else { 0 };
            // SAFETY: the tile's slots are as the params say.
            let row =
                if params.gather == 0 { slot } else { unsafe { *(params.gather as *const u32).add(slot as usize) } };
            chunks[n] = row * params.k_tiles * TILE_CHUNKS + lane % 4;
            n += 1;
        }
        Self { activations: params.activations as *const u8, chunks }
    }

    /// The words of half a tile: of two steps.
    #[inline(always)]
    unsafe fn half(&self, half: u32) -> [[u32; 4]; SLOT_FRAGMENTS] {
        let mut words = [[0; 4]; SLOT_FRAGMENTS];
        let chunk = half * (LOAD_K as u32 * 2 / 16);
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            let offset = (self.chunks[n] + chunk) as usize * 16;
            // SAFETY: a row has 128 bytes for each tile along K; chunks are counted in 32 bits.
            words[n] = unsafe { global::load_v4(self.activations.add(offset) as *const u32) };
            n += 1;
        }
        words
    }
}

/// Multiplies half a tile of K (two steps) into the accumulators.
#[inline(always)]
fn multiply<const SLOT_FRAGMENTS: usize>(
    accumulators: &mut Accumulators<SLOT_FRAGMENTS>,
    weights: &[Weights; ROW_FRAGMENTS],
    half: usize,
    activations: &[[u32; 4]; SLOT_FRAGMENTS],
) {
    let mut i = 0;
    while i < 2 {
        let step = 2 * half + i;
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            let a = weights[m].operand(step);
            let mut n = 0;
            while n < SLOT_FRAGMENTS {
                let words = activations[n];
                mma_m16n8k16_f16(&mut accumulators[m][n], a, [words[2 * i], words[2 * i + 1]]);
                n += 1;
            }
            m += 1;
        }
        i += 1;
    }
}

/// Multiplies one unit, whose first copies are under way, with `AHEAD` half tiles of activations in flight; starts the next
/// one's copies by `next`, and writes its results meanwhile.
#[inline(always)]
unsafe fn unit<const SLOT_FRAGMENTS: usize, const AHEAD: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    ring: &Ring,
    next: impl FnOnce(),
) {
    const { assert!(4usize.is_multiple_of(AHEAD)) };
    let (k_tiles, halves) = (params.k_tiles, 2 * params.k_tiles);
    // SAFETY: only tiles along K that exist are read.
    unsafe {
        let slots = Slots::<SLOT_FRAGMENTS>::new(params, tile, ring.lane);
        let mut accumulators = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
        let mut ahead = [[[0; 4]; SLOT_FRAGMENTS]; AHEAD];
        let mut i = 0;
        while i < AHEAD {
            ahead[i] = slots.half(if (i as u32) < halves { i as u32 } else { 0 });
            i += 1;
        }
        // Two more groups than the wait leaves out were committed, so this waits for one more than it must: once a unit.
        ring.wait();
        let mut weights = [ring.weights(0); 2];
        // Where the tile that is multiplied next came from: its copy goes there that is a ring later.
        let mut place = 0;
        let mut k_tile = 0;
        while k_tile < k_tiles {
            let mut i = 0;
            while i < 2 {
                let here = k_tile + i as u32;
                if here < k_tiles {
                    let behind = ring.behind(place);
                    // The next tile is here, and all lanes have read this one. Behind the last tile, the last again.
                    ring.wait();
                    weights[1 - i] = ring.weights(if here + 1 < k_tiles { behind } else { place });
                    ring.copy(place, here + ring.stages, here + ring.stages < k_tiles);
                    commit_group();
                    place = behind;
                    let mut half = 0;
                    while half < 2 {
                        let turn = (2 * i + half) % AHEAD;
                        multiply(&mut accumulators, &weights[i], half, &ahead[turn]);
                        let next = 2 * here + (half + AHEAD) as u32;
                        ahead[turn] = slots.half(if next < halves { next } else { 2 * here });
                        half += 1;
                    }
                }
                i += 1;
            }
            k_tile += 2;
        }
        // The next unit's copies may not overtake the last reads.
        sync_warp();
        next();
        write_results(params, tile, &accumulators, &Warp { lane: ring.lane, row: 0, slot: 0 });
    }
}

/// The grouped GEMM for few slots.
///
/// # Safety
/// The params' pointers are as documented there; any number of blocks, threads and shared memory as
/// [`super::VARIANTS`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn grouped_gemm_stream(params: GroupedGemmParams) {
    grid::follow();
    let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
    // SAFETY: see the functions called.
    unsafe {
        let block_rows = params.row_tiles.div_ceil((STREAM_ROWS / MmaTile::ROWS) as u32);
        let units = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
        let share = |block: u32| (units as u64 * block as u64 / grid_dim_x() as u64) as u32;
        let (first, end) = (share(block_idx_x()), share(block_idx_x() + 1));
        // As many rounds as all warps would need, by as few warps as do it in so many.
        let rounds = (end - first).div_ceil(STREAM_WARPS);
        if rounds == 0 {
            return;
        }
        let warps = uniform((end - first).div_ceil(rounds));
        if warp >= warps {
            return;
        }
        // Few warps need more in flight each.
        let deep = warps * STREAM_DEEP_STAGES <= STREAM_WARPS * STREAM_STAGES;
        let stages = if deep { STREAM_DEEP_STAGES } else { STREAM_STAGES };
        let shared = shared::dynamic() + warp * stages * STREAM_STAGE_BYTES as u32;
        let find =
            |index: u32| Tile::find::<false>(&params, index, block_rows, [STREAM_ROWS as u32, STREAM_SLOTS as u32]);
        let start = |index: u32| Ring::start(&params, &find(index), shared, stages, lane);
        let mut index = first + warp;
        let mut ring = start(index);
        loop {
            // Found again, rather than kept beside the one before it: registers are scarce.
            let tile = find(index);
            index += warps;
            let mut following = None;
            let next = || {
                if index < end {
                    following = Some(start(index));
                }
            };
            if tile.slots > 16 {
                unit::<3, 2>(&params, &tile, &ring, next);
            } else if tile.slots > 8 {
                unit::<2, 2>(&params, &tile, &ring, next);
            } else {
                unit::<1, 4>(&params, &tile, &ring, next);
            }
            match following {
                Some(started) => ring = started,
                None => return,
            }
        }
    }
}
