//! The kernel itself.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::dequantize::dequantize;
use super::*;
use crate::format::packed::{Half, interleaved_row};
use crate::format::tile_mma::{FRAGMENT_K, scale_pairs};
use crate::kernels::activation::activate;
use crate::kernels::grouped_gemm::sm80::dequantize::UNSCALE;
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::{Epilogue, ExpertScales, GroupedGemmParams};
use crate::ptx::asynchronous::{commit_group, copy_16, wait_group};
use crate::ptx::float::Gpu;
use crate::ptx::matrix::mma_m16n8k16_f16;
use crate::ptx::shared;
use crate::ptx::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};

const TILE_CHUNKS: u32 = super::TILE_CHUNKS as u32;

/// Where chunk `chunk` of a row of activations lies in shared memory, for a row of this number modulo 8: an odd row's are
/// exchanged between the halves of the banks.
#[inline(always)]
fn swizzle(chunk: u32, row: u32) -> u32 {
    chunk ^ (row % 2 * 4 + row / 2)
}

/// Starts the copies of one stage: tile `k_tile` along K, zeros where the matrix or the expert's slots end.
#[inline(always)]
unsafe fn fetch_stage<const ROWS: usize, const SLOTS: usize, const COPIES: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    sources: &[u32; COPIES],
    stage: u32,
    k_tile: u32,
) {
    let thread = thread_idx_x();
    const { assert!(MmaTile::GROUP.is_multiple_of(ROWS / MmaTile::ROWS)) };
    let weight_bytes = (ROWS / MmaTile::ROWS * MmaTile::BYTES) as u32;
    // SAFETY: what does not exist is zero-filled, not read.
    unsafe {
        // Row tiles lie side by side in memory, as they do in the stage.
        let run = tile.weight_run(params, 0);
        let weights = run.first.wrapping_add(k_tile as usize * run.step as usize);
        let existing = (params.row_tiles - tile.row / MmaTile::ROWS as u32) * MmaTile::BYTES as u32;
        let mut offset = thread * 16;
        while offset < weight_bytes {
            let exists = offset < existing;
            let source = weights.add(if exists { offset as usize } else { 0 });
            copy_16(stage + offset, source, if exists { 16 } else { 0 });
            offset += THREADS * 16;
        }
        let activations = stage + weight_bytes;
        let (row, chunk) = (thread / TILE_CHUNKS, thread % TILE_CHUNKS);
        let mut i = 0;
        while i < COPIES {
            let row = row + (i * THREADS as usize / TILE_CHUNKS as usize) as u32;
            if row < SLOTS as u32 {
                let bytes = if row < tile.slots { 16 } else { 0 };
                let shared = activations + (row * TILE_CHUNKS + swizzle(chunk, row % 8)) * 16;
                let source = (sources[i] + k_tile * TILE_CHUNKS) as usize * 16;
                copy_16(shared, (params.activations as *const u8).add(source), bytes);
            }
            i += 1;
        }
    }
}

/// Multiplies a stage into the accumulators.
#[inline(always)]
unsafe fn multiply_stage<const ROW_FRAGMENTS: usize, const SLOT_FRAGMENTS: usize>(
    accumulators: &mut [[[f32; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS],
    weights: u32,
    activations: u32,
    lane: u32,
) {
    let (g, q) = (lane / 4, lane % 4);
    // SAFETY: addresses inside the stage, which has been waited for.
    unsafe {
        let mut codes = [[0; 4]; ROW_FRAGMENTS];
        let mut scales = [[[0; 2]; 2]; ROW_FRAGMENTS];
        let mut m = 0;
        while m < ROW_FRAGMENTS {
            let fragment = weights + (m * MmaTile::BYTES) as u32;
            codes[m] = shared::load_v4(fragment + lane * 16);
            let [low, high] = shared::load_v2(fragment + MmaTile::CODE_BYTES as u32 + g * 8);
            scales[m] = [scale_pairs(low), scale_pairs(high)];
            m += 1;
        }
        let mut step = 0;
        while step < MmaTile::K / FRAGMENT_K {
            let mut a = [[0; 4]; ROW_FRAGMENTS];
            let mut m = 0;
            while m < ROW_FRAGMENTS {
                a[m] = dequantize(codes[m][step], &scales[m], step);
                m += 1;
            }
            let mut n = 0;
            while n < SLOT_FRAGMENTS {
                let row = activations + (n as u32 * 8 + g) * TILE_CHUNKS * 16;
                // A lane's words of two steps share a chunk.
                let chunk = swizzle(step as u32 / 2 * 4 + q, g);
                let b = shared::load_v2(row + chunk * 16 + step as u32 % 2 * 8);
                let mut m = 0;
                while m < ROW_FRAGMENTS {
                    mma_m16n8k16_f16(&mut accumulators[m][n], a[m], b);
                    m += 1;
                }
                n += 1;
            }
            step += 1;
        }
    }
}

/// Puts a warp's accumulators into shared memory, `[slot][row]`.
#[inline(always)]
unsafe fn stage_results<const ROW_FRAGMENTS: usize, const SLOT_FRAGMENTS: usize>(
    accumulators: &[[[f32; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS],
    shared: u32,
    stride: u32,
    warp_row: u32,
    warp_slot: u32,
    lane: u32,
) {
    let mut m = 0;
    while m < ROW_FRAGMENTS {
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            let mut i = 0;
            while i < 4 {
                let row = warp_row + (m * FRAGMENT_ROWS) as u32 + lane / 4 + i as u32 / 2 * 8;
                let slot = warp_slot + n as u32 * 8 + lane % 4 * 2 + i as u32 % 2;
                let address = shared + (slot * stride + row) * 4;
                // SAFETY: TileShape::shared_bytes covers the staging; all reads of the stages are done.
                unsafe { shared::store_u32(address, (accumulators[m][n][i] * UNSCALE).to_bits()) };
                i += 1;
            }
            n += 1;
        }
        m += 1;
    }
}

/// Writes a tile's results from shared memory: alpha, then (first GEMM) the activation.
#[inline(always)]
unsafe fn write_results<const ROWS: usize>(params: &GroupedGemmParams, tile: &Tile, shared: u32, stride: u32) {
    let gated = params.epilogue == Epilogue::Gated as u32;
    let columns = if gated { ROWS as u32 / 2 } else { ROWS as u32 };
    // SAFETY: slots below the expert's end, columns below `columns`.
    unsafe {
        let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
        let mut index = thread_idx_x();
        while index < tile.slots * columns {
            let (inner, column) = (index / columns, index % columns);
            let slot = (tile.slot + inner) as usize;
            let source = if params.gather == 0 { slot } else { *(params.gather as *const u32).add(slot) as usize };
            let g = if params.row_scales != 0 {
                *(params.row_scales as *const f32).add(source)
            } else if params.epilogue == Epilogue::Down as u32 {
                scales.l2_input
            } else {
                scales.l1_input
            };
            let staged = |row: u32| f32::from_bits(shared::load_u32(shared + (inner * stride + row) * 4));
            let value = if gated {
                let gate = staged(interleaved_row(MmaTile::INTERLEAVE, Half::Gate, column as usize) as u32);
                let up = staged(interleaved_row(MmaTile::INTERLEAVE, Half::Up, column as usize) as u32);
                activate(&params.activation, gate * (g * scales.gate), up * (g * scales.up), Gpu)
            } else if params.epilogue == Epilogue::Down as u32 {
                staged(column) * (g * scales.down)
            } else {
                activate(&params.activation, 0.0, staged(column) * (g * scales.up), Gpu)
            };
            let column = column + if gated { tile.row / 2 } else { tile.row };
            if column < params.columns {
                *(params.output as *mut f32).add(slot * params.columns as usize + column as usize) = value;
            }
            index += THREADS;
        }
    }
}

#[inline(always)]
unsafe fn grouped_gemm<
    const ROW_WARPS: usize,
    const ROW_FRAGMENTS: usize,
    const SLOT_FRAGMENTS: usize,
    const ROWS: usize,
    const SLOTS: usize,
    const COPIES: usize,
    const PENDING: u32,
>(
    params: &GroupedGemmParams,
    shape: &TileShape,
) {
    let stages = PENDING + 2;
    let (thread, shared) = (thread_idx_x(), shared::dynamic());
    let (warp, lane) = (thread / 32, thread % 32);
    let (warp_row, warp_slot) = (warp % ROW_WARPS as u32, warp / ROW_WARPS as u32);
    let block_rows = params.row_tiles.div_ceil((ROWS / MmaTile::ROWS) as u32);
    // SAFETY: see the functions called; the ring's stages are inside the planned shared memory.
    unsafe {
        let tiles = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
        let mut index = block_idx_x();
        while index < tiles {
            let tile = Tile::find::<false>(params, index, block_rows, [ROWS as u32, SLOTS as u32]);

            // First chunk of 16 bytes that this thread copies of each of its activation rows.
            let mut sources = [0; COPIES];
            let mut i = 0;
            while i < COPIES {
                let inner = thread / TILE_CHUNKS + (i * THREADS as usize / TILE_CHUNKS as usize) as u32;
                if inner < tile.slots {
                    let slot = tile.slot + inner;
                    let row = if params.gather == 0 { slot } else { *(params.gather as *const u32).add(slot as usize) };
                    sources[i] = row * params.k_tiles * TILE_CHUNKS + thread % TILE_CHUNKS;
                }
                i += 1;
            }

            let mut accumulators = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
            let mut fetched = 0;
            let mut write_stage = shared;
            while write_stage < shared + (stages - 1) * shape.stage_bytes() as u32 {
                if fetched < params.k_tiles {
                    fetch_stage::<ROWS, SLOTS, COPIES>(params, &tile, &sources, write_stage, fetched);
                }
                commit_group();
                fetched += 1;
                write_stage += shape.stage_bytes() as u32;
            }
            let mut read_stage = shared;
            let mut k_tile = 0;
            while k_tile < params.k_tiles {
                // All of this stage is here, and everyone is done with the one that is fetched next.
                wait_group::<PENDING>();
                sync_threads();
                if fetched < params.k_tiles {
                    fetch_stage::<ROWS, SLOTS, COPIES>(params, &tile, &sources, write_stage, fetched);
                }
                commit_group();
                fetched += 1;
                write_stage = next_stage(write_stage, shared, shape);

                let weights = read_stage + warp_row * (ROW_FRAGMENTS * MmaTile::BYTES) as u32;
                let activations = read_stage
                    + (ROWS / MmaTile::ROWS * MmaTile::BYTES) as u32
                    + warp_slot * (SLOT_FRAGMENTS * 8) as u32 * TILE_CHUNKS * 16;
                multiply_stage::<ROW_FRAGMENTS, SLOT_FRAGMENTS>(&mut accumulators, weights, activations, lane);
                read_stage = next_stage(read_stage, shared, shape);
                k_tile += 1;
            }
            let (row, slot) =
                (warp_row * (ROW_FRAGMENTS * FRAGMENT_ROWS) as u32, warp_slot * (SLOT_FRAGMENTS * 8) as u32);
            // The ring is idle now (its last groups were empty) and becomes the results' staging.
            sync_threads();
            let stride = shape.staging_stride() as u32;
            stage_results::<ROW_FRAGMENTS, SLOT_FRAGMENTS>(&accumulators, shared, stride, row, slot, lane);
            sync_threads();
            write_results::<ROWS>(params, &tile, shared, stride);
            // The next tile's copies may not overtake this tile's last reads.
            sync_threads();
            index += grid_dim_x();
        }
    }
}

/// Address of the stage behind `stage` in the ring.
#[inline(always)]
fn next_stage(stage: u32, shared: u32, shape: &TileShape) -> u32 {
    let next = stage + shape.stage_bytes() as u32;
    if next == shared + shape.shared_bytes() { shared } else { next }
}

macro_rules! variant {
    ($name:ident, $index:literal) => {
        /// One variant of the grouped GEMM.
        ///
        /// # Safety
        /// The params' pointers are as documented there; any number of blocks of [`THREADS`], the shared memory of
        /// its [`TILES`] entry.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(params: GroupedGemmParams) {
            const TILE: TileShape = TILES[$index];
            // SAFETY: the kernel's contract.
            unsafe {
                grouped_gemm::<
                    { TILE.row_warps },
                    { TILE.row_fragments },
                    { TILE.slot_fragments },
                    { TILE.rows() },
                    { TILE.slots() },
                    { (TILE.slots() * TILE_CHUNKS as usize).div_ceil(THREADS as usize) },
                    { TILE.stages as u32 - 2 },
                >(&params, &TILE)
            }
        }
    };
}
variant!(grouped_gemm_n64, 0);
variant!(grouped_gemm_n128, 1);
