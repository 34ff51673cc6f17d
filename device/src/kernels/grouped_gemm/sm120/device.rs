//! The kernel: the warp that copies and the warps that multiply.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::*;
use crate::format::BLOCK;
use crate::format::tile_mxf4::{FRAGMENT_CODE_BYTES, row_stride, weight_scale_row};
use crate::kernels::grouped_gemm::epilogue::{Accumulators, Warp, write_results};
use crate::kernels::grouped_gemm::ring;
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::GroupedGemmParams;
use crate::ptx::asynchronous::{copy_8, copy_16};
use crate::ptx::matrix::load_x4;
use crate::ptx::matrix_fp4::mma_m16n8k64_mxf4nvf4;
use crate::ptx::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};
use crate::ptx::warp::sync_warp;
use crate::ptx::{mbarrier, shared};

/// Columns that are multiplied for a tile of so many slots: those of both slot warps.
#[inline(always)]
fn columns(slots: u32) -> u32 {
    let half = SLOTS as u32 / 8;
    if slots <= half {
        half
    } else if slots <= 2 * half {
        2 * half
    } else if slots <= 4 * half {
        4 * half
    } else {
        8 * half
    }
}

type Cursor = ring::Cursor<STAGES, STAGE_BYTES>;

/// Bytes of `whole` that exist where `left` columns do, `columns` of them a byte.
#[inline(always)]
fn existing_bytes(left: u32, columns_a_byte: u32, whole: u32) -> u32 {
    let bytes = left / columns_a_byte;
    if bytes < whole { bytes } else { whole }
}

/// Copies the weights and activations of one tile, stage after stage.
#[inline(always)]
unsafe fn produce(params: &GroupedGemmParams, tile: &Tile, cursor: &mut Cursor, lane: u32) {
    const CHUNKS: u32 = ActivationStage::CHUNKS as u32;
    // A lane copies chunk lane % 4 of every 8th row, and the scales of every 32nd.
    const CODE_ROWS: usize = SLOTS / 8;
    const SCALE_ROWS: usize = SLOTS / 32;
    let columns = columns(tile.slots);
    let (first, chunk) = (lane / CHUNKS, lane % CHUNKS);
    let stride = row_stride(params.k as usize);
    let row_tile = tile.row / Mxf4Tile::ROWS as u32;
    let row_tiles = if row_tile + 1 < params.row_tiles { 2 } else { 1 };
    // SAFETY: rows that do not exist and columns from k on are zero-filled, not read; the ring is inside the planned
    // shared memory, and a stage is only written after its readers gave it back.
    unsafe {
        let source = |inner: u32| {
            if inner >= tile.slots {
                0
            } else if params.gather == 0 {
                tile.slot + inner
            } else {
                *(params.gather as *const u32).add((tile.slot + inner) as usize)
            }
        };
        let mut code_rows = [0; CODE_ROWS];
        let mut i = 0;
        while i < CODE_ROWS {
            code_rows[i] = source(first + 8 * i as u32);
            i += 1;
        }
        let mut scale_rows = [0; SCALE_ROWS];
        let mut i = 0;
        while i < SCALE_ROWS {
            scale_rows[i] = source(lane + 32 * i as u32);
            i += 1;
        }
        let mut weights = tile.weights.add((row_tile * params.k_tiles) as usize * Mxf4Tile::BYTES);
        let next_row_tile = params.k_tiles as usize * Mxf4Tile::BYTES;
        let mut k_tile = 0;
        while k_tile < params.k_tiles {
            mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
            let (stage, full) = (cursor.data(), cursor.full());
            if lane == 0 {
                let tiles = if k_tile + 1 < params.k_tiles { STAGE_TILES } else { 1 };
                let bytes = (tiles * Mxf4Tile::BYTES) as u32;
                mbarrier::arrive_expect(full, bytes * row_tiles);
                mbarrier::copy_bulk(stage, weights, bytes, full);
                if row_tiles == 2 {
                    mbarrier::copy_bulk(stage + ROW_TILE_BYTES as u32, weights.add(next_row_tile), bytes, full);
                }
            }
            weights = weights.add(ROW_TILE_BYTES);
            let k = k_tile * Mxf4Tile::K as u32;
            let k_left = params.k - k;
            let chunk_k = chunk * 32;
            let chunk_left = if chunk_k < k_left { k_left - chunk_k } else { 0 };
            let bytes = existing_bytes(chunk_left, 2, 16);
            // Where nothing is read, the address is one that exists.
            let at = if bytes == 0 { k } else { k + chunk_k };
            let mut i = 0;
            while i < CODE_ROWS {
                let inner = first + 8 * i as u32;
                if inner < columns {
                    let bytes = if inner < tile.slots { bytes } else { 0 };
                    let offset = (code_rows[i] as usize * stride + at as usize) / 2;
                    let to = stage + (CODES_AT + ActivationStage::chunk_offset(inner as usize, chunk as usize)) as u32;
                    copy_16(to, (params.activations as *const u8).add(offset), bytes);
                }
                i += 1;
            }
            let bytes = existing_bytes(k_left, BLOCK as u32, ActivationStage::ROW_SCALE_BYTES as u32);
            let mut i = 0;
            while i < SCALE_ROWS {
                let inner = lane + 32 * i as u32;
                if inner < columns {
                    let bytes = if inner < tile.slots { bytes } else { 0 };
                    let offset = (scale_rows[i] as usize * stride + k as usize) / BLOCK;
                    let to = stage + (SCALES_AT + ActivationStage::scale_offset(inner as usize)) as u32;
                    copy_8(to, (params.block_scales as *const u8).add(offset), bytes);
                }
                i += 1;
            }
            mbarrier::arrive_after_copies(full);
            *cursor = cursor.next();
            k_tile += STAGE_TILES as u32;
        }
    }
}

/// Multiplies one stage into a warp's accumulators.
#[inline(always)]
unsafe fn multiply_stage<const SLOT_FRAGMENTS: usize>(
    accumulators: &mut Accumulators<SLOT_FRAGMENTS>,
    stage: u32,
    tiles: u32,
    warp: &Warp,
) {
    let lane = warp.lane;
    let pair = warp.row / (ROW_FRAGMENTS * FRAGMENT_ROWS) as u32;
    let pairs_a_tile = (Mxf4Tile::ROWS / (ROW_FRAGMENTS * FRAGMENT_ROWS)) as u32;
    let weights = stage + pair / pairs_a_tile * ROW_TILE_BYTES as u32;
    let codes_at = weights + pair % pairs_a_tile * (ROW_FRAGMENTS * FRAGMENT_CODE_BYTES) as u32 + lane * 16;
    let scale_row = weight_scale_row((pair % pairs_a_tile) as usize, lane as usize) as u32;
    let scales_at = weights + Mxf4Tile::CODE_BYTES as u32 + scale_row * 4;
    // SAFETY: addresses inside the stage, which is full.
    unsafe {
        // One register holds the scales of 4 fragments; where there are fewer, lanes repeat them.
        let mut slot_scales = [[0; 2]; SLOTS / SLOT_WARPS / 32];
        let mut i = 0;
        while i < SLOT_FRAGMENTS.div_ceil(4) {
            let fragment = lane % 4 % SLOT_FRAGMENTS as u32;
            let slot = warp.slot + 32 * i as u32 + fragment * 8 + lane / 4;
            slot_scales[i] = shared::load_v2(stage + (SCALES_AT + ActivationStage::scale_offset(slot as usize)) as u32);
            i += 1;
        }
        let mut step = 0;
        while step < STAGE_TILES {
            if step == 0 || tiles > step as u32 {
                let tile = (step * Mxf4Tile::BYTES) as u32;
                let a =
                    [shared::load_v4(codes_at + tile), shared::load_v4(codes_at + tile + FRAGMENT_CODE_BYTES as u32)];
                let row_scales = shared::load_u32(scales_at + tile);
                let mut n = 0;
                while n < SLOT_FRAGMENTS {
                    // Lanes 8i..8i+7 address: i % 2, the half of 32 K; i / 2, the fragment of 8 slots (lanes 16..31
                    // repeat the first where there is only one).
                    let fragment = if SLOT_FRAGMENTS > 1 { n as u32 + lane / 16 } else { 0 };
                    let slot = warp.slot + fragment * 8 + lane % 8;
                    let chunk = step as u32 * 2 + lane / 8 % 2;
                    let at = CODES_AT + ActivationStage::chunk_offset(slot as usize, chunk as usize);
                    let b = load_x4(stage + at as u32);
                    let mut i = 0;
                    while i < 2 && n + i < SLOT_FRAGMENTS {
                        let scales = slot_scales[(n + i) / 4][step];
                        let mut m = 0;
                        while m < ROW_FRAGMENTS {
                            mma_m16n8k64_mxf4nvf4(
                                &mut accumulators[m][n + i],
                                a[m],
                                [b[2 * i], b[2 * i + 1]],
                                (row_scales, m as u16),
                                (scales, ((n + i) % 4) as u16),
                            );
                            m += 1;
                        }
                        i += 1;
                    }
                    n += 2;
                }
            }
            step += 1;
        }
    }
}

/// Multiplies one tile, for `SLOT_FRAGMENTS` fragments of 8 slots a warp, and writes its results.
#[inline(always)]
unsafe fn consume<const SLOT_FRAGMENTS: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    cursor: &mut Cursor,
    warp_index: u32,
    lane: u32,
) {
    let warp = Warp {
        lane,
        row: warp_index % ROW_WARPS as u32 * (ROW_FRAGMENTS * FRAGMENT_ROWS) as u32,
        slot: warp_index / ROW_WARPS as u32 * (SLOT_FRAGMENTS * 8) as u32,
    };
    let works = warp.slot < tile.slots && tile.row + warp.row < params.row_tiles * Mxf4Tile::ROWS as u32;
    let mut accumulators = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
    let mut k_tile = 0;
    // SAFETY: see the functions called.
    unsafe {
        while k_tile < params.k_tiles {
            mbarrier::wait(cursor.full(), cursor.parity);
            if works {
                multiply_stage(&mut accumulators, cursor.data(), params.k_tiles - k_tile, &warp);
            }
            // All lanes have read the stage.
            sync_warp();
            if lane == 0 {
                mbarrier::arrive(cursor.empty());
            }
            *cursor = cursor.next();
            k_tile += STAGE_TILES as u32;
        }
        if works {
            write_results(params, tile, &accumulators, &warp);
        }
    }
}

/// The grouped GEMM.
///
/// # Safety
/// The params' pointers are as documented there; any number of blocks, threads and shared memory as [`VARIANTS`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn grouped_gemm_fp4(params: GroupedGemmParams) {
    let (thread, shared) = (thread_idx_x(), shared::dynamic());
    let (warp, lane) = (thread / 32, thread % 32);
    let mut cursor = Cursor::new(shared);
    // SAFETY: see the functions called; the barriers are inside the planned shared memory.
    unsafe {
        if thread == 0 {
            // Filled by the lane that announces bytes, and by each lane's own copies.
            Cursor::init(shared, 1 + 32, CONSUMERS as u32);
        }
        sync_threads();
        let block_rows = params.row_tiles.div_ceil((ROWS / Mxf4Tile::ROWS) as u32);
        let tiles = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
        let mut index = block_idx_x();
        while index < tiles {
            let tile = Tile::find::<false>(&params, index, block_rows, [ROWS as u32, SLOTS as u32]);
            if warp == CONSUMERS as u32 {
                produce(&params, &tile, &mut cursor, lane);
            } else {
                match columns(tile.slots) / (SLOT_WARPS as u32 * 8) {
                    1 => consume::<1>(&params, &tile, &mut cursor, warp, lane),
                    2 => consume::<2>(&params, &tile, &mut cursor, warp, lane),
                    4 => consume::<4>(&params, &tile, &mut cursor, warp, lane),
                    _ => consume::<8>(&params, &tile, &mut cursor, warp, lane),
                }
            }
            index += grid_dim_x();
        }
    }
}
