//! Grouped GEMM on `wgmma` (sm_90a) for many slots: weights dequantized exactly in registers, as the portable kernels do it,
//! with the same packed weights and the same order of K, so the bits are the same.
//!
//! M is weight rows, N slots. The tiles of [`MmaTile`] are fragments of A, so any warp may take any of them: a warp takes two
//! that follow each other, and with them whole blocks of 16 columns of h. Activations are in [`slot_groups`] tiles.
//!
//! One block a multiprocessor: one warp copies, stage after stage, tile after tile; two warpgroups multiply 128 rows each. N
//! is what the tile needs, in steps of 16: an expert's slots are shared evenly among its token tiles.
//!
//! [`slot_groups`]: crate::format::slot_groups

use super::{ROW_FRAGMENTS, Variant, sm80};
use crate::format::packed::TileOrder;
use crate::format::slot_groups::{GROUP_SLOTS, TILE_BYTES};
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};

/// Warpgroups that multiply.
const CONSUMERS: usize = 2;
/// Warps of a warpgroup.
const GROUP_WARPS: usize = 4;
/// Weight rows of a tile.
pub const ROWS: usize = CONSUMERS * GROUP_WARPS * ROW_FRAGMENTS * FRAGMENT_ROWS;
/// Slots of a tile.
pub const SLOTS: usize = 144;
/// Stages of the ring: 64 of K each.
pub const STAGES: usize = 8;
/// Threads of a block: those that multiply, and a warpgroup of which one warp copies.
pub const THREADS: u32 = ((CONSUMERS + 1) * GROUP_WARPS * 32) as u32;

/// Bytes of a stage's activations; weights follow.
const ACTIVATION_BYTES: usize = SLOTS / GROUP_SLOTS * TILE_BYTES;
/// Weight tiles of a stage.
const ROW_TILES: usize = ROWS / MmaTile::ROWS;
/// Bytes of a stage.
pub const STAGE_BYTES: usize = ACTIVATION_BYTES + ROW_TILES * MmaTile::BYTES;
/// Where the barriers are, behind the ring: full and empty ones.
const BARRIERS_AT: usize = STAGES * STAGE_BYTES;

/// Registers of a thread at launch; then those that multiply take more, and the others leave theirs.
const REGISTERS: u32 = 168;
const CONSUMER_REGISTERS: u32 = 232;
const PRODUCER_REGISTERS: u32 = 40;

/// The variants: few slots as on every GPU, then this kernel.
pub const VARIANTS: [Variant; 2] = [
    sm80::VARIANTS[0],
    Variant {
        kernel: "grouped_gemm_wgmma",
        rows: ROWS,
        slots: SLOTS,
        threads: THREADS,
        registers: REGISTERS,
        shared_bytes: (BARRIERS_AT + STAGES * 2 * 8) as u32,
        quantizes: true,
        tiles: true,
    },
];

const _: () = {
    // A block starts with what it has, and leaves before it takes.
    assert!(CONSUMERS as u32 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS as u32 + 1) * REGISTERS);
    // What sm_90 gives a block.
    assert!(VARIANTS[1].shared_bytes <= 227 * 1024);
    // A tile's share of K is one run of bytes.
    assert!(ROW_TILES == MmaTile::GROUP);
    // An atom of the swizzle begins at a multiple of its 1024 bytes.
    assert!(STAGE_BYTES.is_multiple_of(1024) && TILE_BYTES == 1024);
};

#[cfg(nvfp4_arch = "sm90")]
mod device;
