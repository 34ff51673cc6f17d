//! Grouped GEMM on the FP4 tensor cores of sm_120 and sm_121: weights and activations stay codes and scales all the way
//! into `mma.sync.m16n8k64.kind::mxf4nvf4`, f32 accumulation.
//!
//! ```text
//! out[slot, row] = epilogue(sum_k weight[row, k] * activation[slot, k])
//! ```
//! M is weight rows, N slots, so few tokens fill few columns. K goes in ascending steps of 64 into one accumulator, however
//! many slots a tile has: a slot's result does not depend on the batch.
//!
//! A persistent grid takes tiles of 128 rows x up to 128 slots in the order expert, row tile, token tile. How many columns
//! are multiplied (16, 32, 64 or 128) follows from the tile's number of slots, so it is the device that chooses, for each
//! tile. One warp fills a ring of stages: weights by bulk copies, activation rows (gathered by token where the first GEMM
//! quantizes each token once) by `cp.async`; one mbarrier a stage tells the 8 others that it is full, another one that
//! they are done with it. Results leave from registers.

use super::{ROW_FRAGMENTS, Variant, with_margin};
use crate::format::packed::TileOrder;
use crate::format::tile_mxf4::{ActivationStage, FRAGMENT_ROWS, Mxf4Tile};

/// Weight rows of a tile.
const ROWS: usize = 128;
/// Slots of a tile.
const SLOTS: usize = 128;
/// Warps side by side along the rows.
const ROW_WARPS: usize = 4;
/// Warps side by side along the slots.
const SLOT_WARPS: usize = 2;
/// Warps that multiply; one more copies.
const CONSUMERS: usize = ROW_WARPS * SLOT_WARPS;
/// K tiles of a stage.
const STAGE_TILES: usize = ActivationStage::K / Mxf4Tile::K;
/// Stages of the ring.
const STAGES: usize = 5;

/// Bytes of the weights of a stage, for one tile of 64 rows.
const ROW_TILE_BYTES: usize = STAGE_TILES * Mxf4Tile::BYTES;
/// First byte of the activations' codes in a stage, behind the weights.
const CODES_AT: usize = ROWS / Mxf4Tile::ROWS * ROW_TILE_BYTES;
/// First byte of the activations' scales in a stage.
const SCALES_AT: usize = CODES_AT + SLOTS * ActivationStage::ROW_CODE_BYTES;
/// Bytes of a stage.
const STAGE_BYTES: usize = SCALES_AT + SLOTS * ActivationStage::ROW_SCALE_BYTES;
/// First byte of the mbarriers, behind the ring: the full ones, then the empty ones.
const BARRIERS_AT: usize = STAGES * STAGE_BYTES;

const _: () = {
    assert!(ROW_WARPS * ROW_FRAGMENTS * FRAGMENT_ROWS == ROWS);
    assert!(STAGE_BYTES.is_multiple_of(128));
    // What a block of sm_120 can have.
    assert!(VARIANTS[0].shared_bytes <= 99 * 1024);
};

/// The one variant.
pub const VARIANTS: [Variant; 1] = [Variant {
    kernel: "grouped_gemm_fp4",
    rows: ROWS,
    slots: SLOTS,
    expected_slots: with_margin(SLOTS),
    expected_units: usize::MAX,
    routes_entries: 0,
    threads: (CONSUMERS as u32 + 1) * 32,
    registers: 168,
    shared_bytes: (BARRIERS_AT + 2 * STAGES * 8) as u32,
    quantizes: true,
    tiles: false,
}];

#[cfg(nvfp4_arch = "sm120")]
mod device;
