//! The kernel for few slots: every warp reads its own weights from device memory straight into registers.
//!
//! A unit is 32 rows of one expert times up to 32 slots, all of K. A block has an equal share of all units, and as many of
//! its warps work as share it most evenly: few tokens leave few units, so evenness decides.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::dequantize::dequantize;
use super::{STREAM_ROWS, STREAM_SLOTS, STREAM_THREADS};
use crate::format::packed::TileOrder;
use crate::format::tile_mma::{LANE_WORDS, MmaTile, scale_pairs};
use crate::kernels::grouped_gemm::epilogue::{Accumulators, ROW_FRAGMENTS, Warp, write_results};
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::GroupedGemmParams;
use crate::ptx::global;
use crate::ptx::matrix::mma_m16n8k16_f16;
use crate::ptx::thread::{block_idx_x, grid_dim_x, thread_idx_x};

/// Chunks of 16 bytes of an activation row of one K tile.
const TILE_CHUNKS: u32 = (MmaTile::K * 2 / 16) as u32;

/// A lane's part of one weight tile.
#[derive(Clone, Copy)]
struct Weights {
    codes: [u32; 4],
    scales: [u32; 2],
}

/// Where a lane reads.
struct Sources<const SLOT_FRAGMENTS: usize> {
    codes: [*const u8; ROW_FRAGMENTS],
    scales: [*const u8; ROW_FRAGMENTS],
    activations: *const u8,
    /// First chunk of 16 bytes of each row.
    chunks: [u32; SLOT_FRAGMENTS],
}

impl<const SLOT_FRAGMENTS: usize> Sources<SLOT_FRAGMENTS> {
    /// Rows and slots that do not exist are replaced by ones that do: nobody writes their results.
    #[inline(always)]
    unsafe fn new(params: &GroupedGemmParams, tile: &Tile, lane: u32) -> Self {
        let (g, q) = (lane / 4, lane % 4);
        let run = params.k_tiles as usize * MmaTile::BYTES;
        let row_tile = tile.row / MmaTile::ROWS as u32;
        let mut sources = Self {
            codes: [core::ptr::null(); ROW_FRAGMENTS],
            scales: [core::ptr::null(); ROW_FRAGMENTS],
            activations: params.activations as *const u8,
            chunks: [0; SLOT_FRAGMENTS],
        };
        // SAFETY: the tile's weights and slots are as the params say.
        unsafe {
            let mut m = 0;
            while m < ROW_FRAGMENTS {
                let exists = row_tile + (m as u32) < params.row_tiles;
                let first = tile.weights.add((row_tile as usize + if exists { m } else { 0 }) * run);
                sources.codes[m] = first.add(lane as usize * 16);
                sources.scales[m] = first.add(MmaTile::CODE_BYTES + g as usize * 8);
                m += 1;
            }
            let mut n = 0;
            while n < SLOT_FRAGMENTS {
                let inner = n as u32 * 8 + g;
                let slot = tile.slot + if inner < tile.slots { inner } else { 0 };
                let row = if params.gather == 0 { slot } else { *(params.gather as *const u32).add(slot as usize) };
                sources.chunks[n] = row * params.k_tiles * TILE_CHUNKS + q * (LANE_WORDS as u32 / 4);
                n += 1;
            }
        }
        sources
    }

    #[inline(always)]
    unsafe fn weights(&self, k_tile: u32) -> [Weights; ROW_FRAGMENTS] {
        let mut weights = [Weights { codes: [0; 4], scales: [0; 2] }; ROW_FRAGMENTS];
        let offset = k_tile as usize * MmaTile::BYTES;
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            // SAFETY: the tile exists.
            unsafe {
                weights[m] = Weights {
                    codes: global::load_once_v4(self.codes[m].add(offset) as *const u32),
                    scales: global::load_once_v2(self.scales[m].add(offset) as *const u32),
                };
            }
            m += 1;
        }
        weights
    }

    /// The words of half a tile: of two steps.
    #[inline(always)]
    unsafe fn activations(&self, half: u32) -> [[u32; 4]; SLOT_FRAGMENTS] {
        let mut words = [[0; 4]; SLOT_FRAGMENTS];
        let chunk = half / 2 * TILE_CHUNKS + half % 2;
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
            let Weights { codes, scales } = weights[m];
            let a = dequantize(codes[step], &scales.map(scale_pairs), step);
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

/// Multiplies one unit and writes its results, with `DEPTH` tiles of weights and `AHEAD` half tiles of activations in
/// flight.
#[inline(always)]
unsafe fn unit<const SLOT_FRAGMENTS: usize, const DEPTH: usize, const AHEAD: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    lane: u32,
) {
    const { assert!((2 * DEPTH).is_multiple_of(AHEAD)) };
    let (k_tiles, halves) = (params.k_tiles, 2 * params.k_tiles);
    // SAFETY: only tiles along K that exist are read.
    unsafe {
        let sources = Sources::<SLOT_FRAGMENTS>::new(params, tile, lane);
        let mut accumulators = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
        let mut ring = [[Weights { codes: [0; 4], scales: [0; 2] }; ROW_FRAGMENTS]; DEPTH];
        let mut i = 0;
        while i < DEPTH {
            if (i as u32) < k_tiles {
                ring[i] = sources.weights(i as u32);
            }
            i += 1;
        }
        let mut ahead = [[[0; 4]; SLOT_FRAGMENTS]; AHEAD];
        let mut i = 0;
        while i < AHEAD {
            if (i as u32) < halves {
                ahead[i] = sources.activations(i as u32);
            }
            i += 1;
        }
        let mut k_tile = 0;
        while k_tile < k_tiles {
            let mut i = 0;
            while i < DEPTH {
                let here = k_tile + i as u32;
                if here < k_tiles {
                    let mut half = 0;
                    while half < 2 {
                        let place = (2 * i + half) % AHEAD;
                        multiply(&mut accumulators, &ring[i], half, &ahead[place]);
                        let next = 2 * here + (half + AHEAD) as u32;
                        if next < halves {
                            ahead[place] = sources.activations(next);
                        }
                        half += 1;
                    }
                    if here + (DEPTH as u32) < k_tiles {
                        ring[i] = sources.weights(here + DEPTH as u32);
                    }
                }
                i += 1;
            }
            k_tile += DEPTH as u32;
        }
        write_results(params, tile, &accumulators, &Warp { lane, row: 0, slot: 0 });
    }
}

/// The grouped GEMM for few slots.
///
/// # Safety
/// The params' pointers are as documented there; any number of blocks of [`STREAM_THREADS`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn grouped_gemm_stream(params: GroupedGemmParams) {
    let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
    // SAFETY: see the functions called.
    unsafe {
        let block_rows = params.row_tiles.div_ceil((STREAM_ROWS / MmaTile::ROWS) as u32);
        let units = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
        let share = |block: u32| (units as u64 * block as u64 / grid_dim_x() as u64) as u32;
        let (first, end) = (share(block_idx_x()), share(block_idx_x() + 1));
        // As many rounds as all warps would need, by as few warps as do it in so many.
        let rounds = (end - first).div_ceil(STREAM_THREADS / 32);
        if rounds == 0 {
            return;
        }
        let warps = (end - first).div_ceil(rounds);
        if warp >= warps {
            return;
        }
        let mut index = first + warp;
        while index < end {
            let tile = Tile::find::<STREAM_ROWS, STREAM_SLOTS>(&params, index, block_rows);
            if tile.slots <= 8 {
                unit::<1, 4, 4>(&params, &tile, lane);
            } else if tile.slots <= 16 {
                unit::<2, 3, 2>(&params, &tile, lane);
            } else {
                unit::<4, 2, 1>(&params, &tile, lane);
            }
            index += warps;
        }
    }
}
