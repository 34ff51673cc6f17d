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
//! memory once. Shared memory: a ring of stages of (weight tiles, activation rows); a row of activations is 8 chunks of 16
//! bytes for each K tile, exchanged from row to row so that few lanes of a load meet in a bank.

use super::{ROW_FRAGMENTS, Variant, with_margin};
use crate::format::packed::TileOrder;
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};

/// Threads of a block: 4 warps.
pub const THREADS: u32 = 128;
const WARPS: usize = 4;
/// Tile of one variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    /// Warps side by side along the rows; the others split the slots.
    pub row_warps: usize,
    /// Fragments of 16 rows of a warp.
    pub row_fragments: usize,
    /// Fragments of 8 slots of a warp.
    pub slot_fragments: usize,
    /// Stages of the copy pipeline, each one tile of K.
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
        self.rows() / MmaTile::ROWS * MmaTile::BYTES + self.slots() * TILE_CHUNKS * 16
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        (self.stages * self.stage_bytes()) as u32
    }
}

/// Chunks of 16 bytes of an activation row of one K tile.
pub const TILE_CHUNKS: usize = MmaTile::K * 2 / 16;

/// The tiled variants, by slots of a tile: `grouped_gemm_n64` and so on.
pub const TILES: [TileShape; 2] = [
    TileShape { row_warps: 4, row_fragments: 2, slot_fragments: 8, stages: 4, registers: 168 },
    TileShape { row_warps: 4, row_fragments: 2, slot_fragments: 16, stages: 4, registers: 256 },
];

/// Kernel names of [`TILES`].
const KERNELS: [&str; TILES.len()] = ["grouped_gemm_n64", "grouped_gemm_n128"];

/// Weight rows of a unit of the kernel for few slots.
pub const STREAM_ROWS: usize = ROW_FRAGMENTS * FRAGMENT_ROWS;
/// Slots of a unit.
pub const STREAM_SLOTS: usize = 24;
/// Warps of its block: one block a multiprocessor.
pub const STREAM_WARPS: u32 = 16;
/// Weight tiles in flight of each of a warp's fragments, where all warps work.
pub const STREAM_STAGES: u32 = 5;
/// The same where only half of them do.
pub const STREAM_DEEP_STAGES: u32 = 8;
/// Bytes of a stage of one warp.
pub const STREAM_STAGE_BYTES: usize = STREAM_ROWS / MmaTile::ROWS * MmaTile::BYTES;

/// All variants as the host sees them: the one for few slots, then [`TILES`].
pub const VARIANTS: [Variant; 1 + TILES.len()] = {
    let mut variants = [Variant {
        kernel: "grouped_gemm_stream",
        rows: STREAM_ROWS,
        slots: STREAM_SLOTS,
        expected_slots: with_margin(STREAM_SLOTS),
        expected_units: usize::MAX,
        routes_entries: 0,
        threads: STREAM_WARPS * 32,
        registers: 128,
        shared_bytes: STREAM_WARPS * STREAM_STAGES * STREAM_STAGE_BYTES as u32,
        quantizes: true,
        tiles: false,
    }; 1 + TILES.len()];
    let mut i = 0;
    while i < TILES.len() {
        let (kernel, tile) = (KERNELS[i], TILES[i]);
        variants[1 + i] = Variant {
            kernel,
            rows: tile.rows(),
            slots: tile.slots(),
            expected_slots: with_margin(tile.slots()),
            expected_units: usize::MAX,
            routes_entries: 0,
            threads: THREADS,
            registers: tile.registers,
            shared_bytes: tile.shared_bytes(),
            quantizes: false,
            tiles: false,
        };
        i += 1;
    }
    variants
};

const _: () = {
    // Every architecture from sm_80 on gives a block 99 KiB.
    assert!(VARIANTS[0].shared_bytes <= 99 * 1024);
    let mut i = 0;
    while i < TILES.len() {
        let tile = TILES[i];
        assert!(tile.slots() == 64 << i);
        assert!(tile.rows().is_multiple_of(MmaTile::ROWS));
        // Every architecture from sm_80 on gives a block 99 KiB.
        assert!(tile.shared_bytes() <= 99 * 1024);
        assert!(tile.slots() * tile.staging_stride() * 4 <= tile.shared_bytes() as usize);
        i += 1;
    }
};

#[cfg(nvfp4_arch = "sm80")]
pub(super) mod dequantize;
#[cfg(all(nvfp4_arch = "sm80", not(nvfp4_arch = "sm90")))]
mod device;
#[cfg(all(nvfp4_arch = "sm80", not(nvfp4_arch = "sm90")))]
mod stream;
