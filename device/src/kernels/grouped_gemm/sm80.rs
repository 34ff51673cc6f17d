//! Grouped GEMM on f16 `mma.sync` (sm_80 and newer): weights dequantized exactly in registers, f32 accumulation.
//!
//! ```text
//! out[slot, row] = epilogue(2^7 * sum_k weight[row, k] * 2^-7 * activation[slot, k])
//! ```
//! M is weight rows, N slots, K hidden or intermediate. Weights are the A operand (their fragments come packed, so no
//! lane ever shares a weight with another warp row), activations the B operand, already exact f16. K goes in ascending
//! steps of 16 into one accumulator, whatever the tile: a slot's result does not depend on the tile or the batch.
//!
//! A persistent grid takes tiles in the order expert, row tile, token tile, so that an expert's weights are read from
//! memory once. Shared memory: `STAGES` stages of (weight tiles, activation rows); a row of 64 activations is 8 chunks of
//! 16 bytes, chunk c of row n at c ^ (n % 8), so that `ldmatrix` meets no bank twice.

use crate::format::packed::TileOrder;
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};

/// Threads of a block: 4 warps.
pub const THREADS: u32 = 128;
const WARPS: usize = 4;
const STAGE_K: usize = MmaTile::K;
const ACTIVATION_ROW_BYTES: usize = STAGE_K * 2;

/// Tile of one variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    /// Warps side by side along the rows; the others split the slots.
    pub row_warps: usize,
    /// Fragments of 16 rows of a warp.
    pub row_fragments: usize,
    /// Fragments of 8 slots of a warp.
    pub slot_fragments: usize,
    /// Stages of the copy pipeline.
    pub stages: usize,
    /// Registers that a thread takes, about: for the number of resident blocks.
    pub registers: u32,
}

impl TileShape {
    /// Weight rows of a tile.
    pub const fn rows(&self) -> usize {
        self.row_warps * self.row_fragments * FRAGMENT_ROWS
    }

    /// Slots of a tile.
    pub const fn slots(&self) -> usize {
        WARPS / self.row_warps * self.slot_fragments * 8
    }

    /// f32 elements from one slot to the next where results are staged: bank 4 more a slot, so that the lanes of a
    /// fragment (8 rows, every second slot) meet no bank twice.
    pub const fn staging_stride(&self) -> usize {
        self.rows() + 4
    }

    /// Bytes of one stage.
    pub const fn stage_bytes(&self) -> usize {
        self.rows() / MmaTile::ROWS * MmaTile::BYTES + self.slots() * ACTIVATION_ROW_BYTES
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        (self.stages * self.stage_bytes()) as u32
    }
}

/// The variants, by slots of a tile: `grouped_gemm_n8` and so on.
pub const TILES: [TileShape; 5] = [
    TileShape { row_warps: 4, row_fragments: 1, slot_fragments: 1, stages: 8, registers: 64 },
    TileShape { row_warps: 4, row_fragments: 1, slot_fragments: 2, stages: 7, registers: 72 },
    TileShape { row_warps: 4, row_fragments: 1, slot_fragments: 4, stages: 6, registers: 80 },
    TileShape { row_warps: 4, row_fragments: 2, slot_fragments: 8, stages: 4, registers: 168 },
    TileShape { row_warps: 4, row_fragments: 2, slot_fragments: 16, stages: 4, registers: 256 },
];

/// Kernel names of [`TILES`].
pub const KERNELS: [&str; 5] =
    ["grouped_gemm_n8", "grouped_gemm_n16", "grouped_gemm_n32", "grouped_gemm_n64", "grouped_gemm_n128"];

const _: () = {
    let mut i = 0;
    while i < TILES.len() {
        let tile = TILES[i];
        assert!(tile.slots() == 8 << i);
        assert!(tile.rows().is_multiple_of(MmaTile::ROWS));
        // Every architecture from sm_80 on gives a block 99 KiB.
        assert!(tile.shared_bytes() <= 99 * 1024);
        assert!(tile.slots() * tile.staging_stride() * 4 <= tile.shared_bytes() as usize);
        i += 1;
    }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::*;
    use crate::format::packed::{Half, interleaved_row};
    use crate::format::tile_mma::{FRAGMENT_CODE_BYTES, FRAGMENT_K, FRAGMENT_SCALE_BYTES};
    use crate::format::{e2m1, ue4m3};
    use crate::kernels::{
        activation::activate,
        device_rows::{div_rem, find_expert},
    };
    use crate::params::{Epilogue, ExpertScales, GroupedGemmParams};
    use crate::ptx::asynchronous::{commit_group, copy_16, wait_group};
    use crate::ptx::matrix::{load_x4, mma_m16n8k16_f16, multiply_f16x2};
    use crate::ptx::shared;
    use crate::ptx::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};

    /// 2^15 in both halves: makes a block scale of 2^-8 times its value one of 2^7 times.
    const SCALE_UP: u32 = 0x7800_7800;
    /// Undoes the 2^-7 that all weights of the tensor-core product carry.
    const UNSCALE: f32 = 128.0;
    const _: () = assert!(e2m1::F16_SCALE_LOG2 + ue4m3::F16_SCALE_LOG2 + 15 == -7);

    const CHUNKS: usize = ACTIVATION_ROW_BYTES / 16;
    /// Activation rows that the block copies at a time, a chunk a thread.
    const COPY_ROWS: usize = THREADS as usize / CHUNKS;

    /// What one tile is about.
    struct Tile {
        weights: *const u8,
        expert: u32,
        /// First packed row.
        row: u32,
        /// First slot, and how many of the tile's slots exist.
        slot: u32,
        slots: u32,
    }

    #[inline(always)]
    unsafe fn find_tile<const ROWS: usize, const SLOTS: usize>(
        params: &GroupedGemmParams,
        index: u32,
        block_rows: u32,
    ) -> Tile {
        // SAFETY: offsets as documented in GroupedGemmParams; index is below the number of tiles.
        unsafe {
            let tile_offset = params.tile_offset as *const u32;
            let expert = find_expert(tile_offset, params.experts, div_rem(index, block_rows).0);
            let first = *tile_offset.add(expert as usize);
            let token_tiles = *tile_offset.add(expert as usize + 1) - first;
            let inner = index - first * block_rows;
            let (row_tile, token_tile) = div_rem(inner, token_tiles);
            let expert_offset = params.expert_offset as *const u32;
            let slot = *expert_offset.add(expert as usize) + token_tile * SLOTS as u32;
            let left = *expert_offset.add(expert as usize + 1) - slot;
            Tile {
                weights: (params.weights + expert as u64 * params.expert_bytes) as *const u8,
                expert,
                row: row_tile * ROWS as u32,
                slot,
                slots: if left < SLOTS as u32 { left } else { SLOTS as u32 },
            }
        }
    }

    /// Starts the copies of one stage.
    #[inline(always)]
    unsafe fn fetch_stage<const ROWS: usize, const SLOTS: usize, const COPIES: usize>(
        params: &GroupedGemmParams,
        tile: &Tile,
        sources: &[u32; COPIES],
        stage: u32,
        k_tile: u32,
    ) {
        let thread = thread_idx_x();
        let tiles = ROWS / MmaTile::ROWS;
        // SAFETY: weight tiles beyond the matrix and slots beyond the expert are zero-filled, not read.
        unsafe {
            let mut i = 0;
            while i < tiles {
                let row_tile = tile.row / MmaTile::ROWS as u32 + i as u32;
                let exists = row_tile < params.row_tiles;
                let index = if exists { row_tile as usize * params.k_tiles as usize + k_tile as usize } else { 0 };
                let source = tile.weights.add(index * MmaTile::BYTES);
                let mut offset = thread * 16;
                while offset < MmaTile::BYTES as u32 {
                    let shared = stage + (i * MmaTile::BYTES) as u32 + offset;
                    copy_16(shared, source.add(offset as usize), if exists { 16 } else { 0 });
                    offset += THREADS * 16;
                }
                i += 1;
            }
            let activations = stage + (tiles * MmaTile::BYTES) as u32;
            let (row, chunk) = (thread / CHUNKS as u32, thread % CHUNKS as u32);
            let mut i = 0;
            while i < sources.len() {
                let row = row + (i * COPY_ROWS) as u32;
                if row < SLOTS as u32 {
                    let exists = row < tile.slots;
                    let shared = activations + row * ACTIVATION_ROW_BYTES as u32 + (chunk ^ (row % 8)) * 16;
                    let source =
                        (params.activations as *const u8).add((sources[i] + k_tile * CHUNKS as u32) as usize * 16);
                    copy_16(shared, source, if exists { 16 } else { 0 });
                }
                i += 1;
            }
        }
    }

    /// f16 fragment of 16 rows x 16 K, 2^-7 times the weights, from its word of codes and the two rows' scales.
    #[inline(always)]
    fn dequantize(codes: u32, scales: [u32; 2]) -> [u32; 4] {
        [
            multiply_f16x2(e2m1::pair_to_f16x2_scaled(codes << 12), scales[0]),
            multiply_f16x2(e2m1::pair_to_f16x2_scaled(codes << 8), scales[1]),
            multiply_f16x2(e2m1::pair_to_f16x2_scaled(codes << 4), scales[0]),
            multiply_f16x2(e2m1::pair_to_f16x2_scaled(codes), scales[1]),
        ]
    }

    #[inline(always)]
    fn scale_pair(words: [u32; 2], step: usize) -> [u32; 2] {
        let one = |word: u32| multiply_f16x2(ue4m3::to_f16x2_scaled((word >> (8 * step)) & 0xFF), SCALE_UP);
        [one(words[0]), one(words[1])]
    }

    /// Multiplies one stage into the accumulators.
    #[inline(always)]
    unsafe fn multiply_stage<const ROW_FRAGMENTS: usize, const SLOT_FRAGMENTS: usize>(
        accumulators: &mut [[[f32; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS],
        weights: u32,
        first_fragment: u32,
        activations: u32,
        lane: u32,
    ) {
        const FRAGMENTS_A_TILE: u32 = (MmaTile::ROWS / FRAGMENT_ROWS) as u32;
        // A warp's fragments lie in one tile.
        const { assert!(FRAGMENTS_A_TILE as usize % ROW_FRAGMENTS == 0) };
        let tile = weights + first_fragment / FRAGMENTS_A_TILE * MmaTile::BYTES as u32;
        let inner = first_fragment % FRAGMENTS_A_TILE;
        let codes_at = tile + inner * FRAGMENT_CODE_BYTES as u32 + lane * 16;
        let scales_at = tile + (MmaTile::CODE_BYTES as u32) + inner * FRAGMENT_SCALE_BYTES as u32 + lane / 4 * 8;
        // SAFETY: addresses inside the stage, which has been waited for.
        unsafe {
            let mut step = 0;
            while step < STAGE_K / FRAGMENT_K {
                let mut a = [[0; 4]; ROW_FRAGMENTS];
                let mut m = 0;
                while m < ROW_FRAGMENTS {
                    let codes = shared::load_u32(codes_at + (m * FRAGMENT_CODE_BYTES + step * 4) as u32);
                    let scales = shared::load_v2(scales_at + (m * FRAGMENT_SCALE_BYTES) as u32);
                    a[m] = dequantize(codes, scale_pair(scales, step));
                    m += 1;
                }
                let mut n = 0;
                while n < SLOT_FRAGMENTS {
                    // Lanes 8i..8i+7 address: i % 2, the half of 8 K; i / 2, the fragment of 8 slots (lanes 16..31 repeat
                    // the first where there is only one).
                    let fragment = if SLOT_FRAGMENTS > 1 { n as u32 + lane / 16 } else { 0 };
                    let row = activations + (fragment * 8 + lane % 8) * ACTIVATION_ROW_BYTES as u32;
                    let chunk = (step as u32 * 2 + lane / 8 % 2) ^ (lane % 8);
                    let b = load_x4(row + chunk * 16);
                    let mut pair = 0;
                    while pair < 2 && n + pair < SLOT_FRAGMENTS {
                        let mut m = 0;
                        while m < ROW_FRAGMENTS {
                            mma_m16n8k16_f16(&mut accumulators[m][n + pair], a[m], [b[2 * pair], b[2 * pair + 1]]);
                            m += 1;
                        }
                        pair += 1;
                    }
                    n += 2;
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
                let g = *(params.row_scales as *const f32).add(source);
                let staged = |row: u32| f32::from_bits(shared::load_u32(shared + (inner * stride + row) * 4));
                let value = if gated {
                    let gate = staged(interleaved_row(MmaTile::INTERLEAVE, Half::Gate, column as usize) as u32);
                    let up = staged(interleaved_row(MmaTile::INTERLEAVE, Half::Up, column as usize) as u32);
                    activate(&params.activation, gate * (g * scales.gate), up * (g * scales.up))
                } else if params.epilogue == Epilogue::Down as u32 {
                    staged(column) * (g * scales.down)
                } else {
                    activate(&params.activation, 0.0, staged(column) * (g * scales.up))
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
        const STAGES: usize,
        const PENDING: u32,
    >(
        params: &GroupedGemmParams,
        shape: &TileShape,
    ) {
        let ahead = STAGES as u32 - 1;
        let (thread, shared) = (thread_idx_x(), shared::dynamic());
        let (warp, lane) = (thread / 32, thread % 32);
        let (warp_row, warp_slot) = (warp % ROW_WARPS as u32, warp / ROW_WARPS as u32);
        let block_rows = params.row_tiles.div_ceil((ROWS / MmaTile::ROWS) as u32);
        // SAFETY: see the functions called; the ring's stages are inside the planned shared memory.
        unsafe {
            let tiles = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
            let mut index = block_idx_x();
            while index < tiles {
                let tile = find_tile::<ROWS, SLOTS>(params, index, block_rows);

                // First chunk of 16 bytes that this thread copies of each of its activation rows.
                let mut sources = [0; COPIES];
                let mut i = 0;
                while i < COPIES {
                    let inner = thread / CHUNKS as u32 + (i * COPY_ROWS) as u32;
                    if inner < tile.slots {
                        let slot = tile.slot + inner;
                        let row =
                            if params.gather == 0 { slot } else { *(params.gather as *const u32).add(slot as usize) };
                        sources[i] = row * params.k_tiles * CHUNKS as u32 + thread % CHUNKS as u32;
                    }
                    i += 1;
                }

                let mut accumulators = [[[0.0; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];
                let mut fetched = 0;
                while fetched < ahead {
                    if fetched < params.k_tiles {
                        let stage = shared + fetched * shape.stage_bytes() as u32;
                        fetch_stage::<ROWS, SLOTS, COPIES>(params, &tile, &sources, stage, fetched);
                    }
                    commit_group();
                    fetched += 1;
                }
                let (mut read_stage, mut write_stage) = (0, ahead);
                let mut k_tile = 0;
                while k_tile < params.k_tiles {
                    // All of stage k_tile is here, and everyone is done with the stage that is fetched next.
                    wait_group::<PENDING>();
                    sync_threads();
                    if fetched < params.k_tiles {
                        let stage = shared + write_stage * shape.stage_bytes() as u32;
                        fetch_stage::<ROWS, SLOTS, COPIES>(params, &tile, &sources, stage, fetched);
                    }
                    commit_group();
                    fetched += 1;
                    write_stage = if write_stage + 1 == STAGES as u32 { 0 } else { write_stage + 1 };

                    let weights = shared + read_stage * shape.stage_bytes() as u32;
                    let activations = weights
                        + (ROWS / MmaTile::ROWS * MmaTile::BYTES) as u32
                        + warp_slot * (SLOT_FRAGMENTS * 8 * ACTIVATION_ROW_BYTES) as u32;
                    let first_fragment = warp_row * ROW_FRAGMENTS as u32;
                    multiply_stage(&mut accumulators, weights, first_fragment, activations, lane);
                    read_stage = if read_stage + 1 == STAGES as u32 { 0 } else { read_stage + 1 };
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
                        { TILE.slots().div_ceil(COPY_ROWS) },
                        { TILE.stages },
                        { TILE.stages as u32 - 2 },
                    >(&params, &TILE)
                }
            }
        };
    }
    variant!(grouped_gemm_n8, 0);
    variant!(grouped_gemm_n16, 1);
    variant!(grouped_gemm_n32, 2);
    variant!(grouped_gemm_n64, 3);
    variant!(grouped_gemm_n128, 4);
}
