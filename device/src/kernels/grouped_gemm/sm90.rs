//! Grouped GEMM on `wgmma` (sm_90a) for many slots: weights dequantized exactly in registers, as the portable kernels do it,
//! with the same packed weights and the same order of K, so the bits are the same.
//!
//! M is weight rows, N slots. The tiles of [`MmaTile`] are fragments of A, so any warp may take any of them; a warp takes one,
//! and the next warp has the other half of the same blocks of 16 columns of h. Activations are in [`slot_groups`] tiles.
//!
//! One block a multiprocessor: one lane finds the tiles and copies, stage after stage, and says what
//! they are; three warpgroups multiply 64 rows each. N is what the tile needs, in steps of 16: an expert's slots are shared
//! evenly among its token tiles.
//!
//! [`slot_groups`]: crate::format::slot_groups

use super::{Variant, sm80};
use crate::format::BLOCK;
use crate::format::packed::TileOrder;
use crate::format::slot_groups::{GROUP_SLOTS, TILE_BYTES};
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};

/// Warpgroups that multiply, and their warps.
const CONSUMERS: u32 = 3;
const CONSUMER_WARPS: u32 = CONSUMERS * 4;
/// Weight tiles of a stage: one a warp.
const ROW_TILES: usize = CONSUMER_WARPS as usize;
/// Weight rows of a tile.
pub const ROWS: usize = ROW_TILES * FRAGMENT_ROWS;
/// Slots of a tile.
pub const SLOTS: usize = 192;
/// Stages of the ring: 64 of K each.
pub const STAGES: usize = 6;
/// Threads of a block: those that multiply, and a warpgroup of which one warp copies.
pub const THREADS: u32 = (CONSUMERS + 1) * 128;

/// Bytes of a stage's activations; weights follow.
const ACTIVATION_BYTES: usize = SLOTS / GROUP_SLOTS * TILE_BYTES;
/// Bytes of a stage; an atom of the swizzle begins at a multiple of its 1024 bytes.
pub const STAGE_BYTES: usize = (ACTIVATION_BYTES + ROW_TILES * MmaTile::BYTES).next_multiple_of(1024);

/// Slots whose elements of h two warps, which have the halves of the same blocks, quantize at a time.
const STAGED_SLOTS: usize = 32;
/// f32 elements from one slot to the next where h is staged: the lanes of a fragment (8 rows, every second slot) meet no bank
/// twice.
const STAGED_STRIDE: usize = BLOCK + 4;
/// Bytes of what two warps stage.
const STAGED_BYTES: usize = STAGED_SLOTS * STAGED_STRIDE * 4;
/// Bytes of what is said of a tile, and where that is: behind the ring and its barriers. One more than stages, so that it stays
/// until the tile's results are written: the copying lane is ahead by a tile for each stage at most.
const JOB_BYTES: usize = 3 * 16;
const JOBS: usize = STAGES + 1;
const JOBS_AT: usize = (STAGES * (STAGE_BYTES + 2 * 8)).next_multiple_of(16);
/// Where the staged elements are: behind those.
const STAGED_AT: usize = JOBS_AT + JOBS * JOB_BYTES;

/// Registers of a thread at launch; then those that multiply take more, and the others leave theirs.
const REGISTERS: u32 = 128;
const CONSUMER_REGISTERS: u32 = 152;
const PRODUCER_REGISTERS: u32 = 56;

/// The variants: few slots as on every GPU, then this kernel.
pub const VARIANTS: [Variant; 2] = [
    sm80::VARIANTS[0],
    Variant {
        kernel: "grouped_gemm_wgmma",
        rows: ROWS,
        slots: SLOTS,
        threads: THREADS,
        registers: REGISTERS,
        shared_bytes: (STAGED_AT + CONSUMER_WARPS as usize / 2 * STAGED_BYTES) as u32,
        quantizes: true,
        tiles: true,
    },
];

const _: () = {
    // A block starts with what it has, and leaves before it takes.
    assert!(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * REGISTERS);
    // What sm_90 gives a block.
    assert!(VARIANTS[1].shared_bytes <= 227 * 1024);
    // A tile's share of K is one run of bytes.
    assert!(MmaTile::GROUP.is_multiple_of(ROW_TILES));
    assert!(TILE_BYTES == 1024);
};

#[cfg(nvfp4_arch = "sm90")]
mod device;
#[cfg(nvfp4_arch = "sm90")]
mod epilogue;
