//! Grouped GEMM of sm_90a: weights dequantized exactly in registers, as the portable kernels do it, with the same packed weights
//! and the same order of K, so the bits are the same. For many slots on `wgmma`, as follows; for few on `mma.sync` (`few`).
//!
//! M is weight rows, N slots. The tiles of [`MmaTile`] are fragments of A, so any warp may take any of them; a warp takes one
//! or two. Two that follow each other have the halves of the same blocks of 16 columns of h. Activations are in [`slot_groups`] tiles.
//!
//! One block a multiprocessor: one lane copies weights, stage after stage, and says what the tiles are, one copies activations;
//! three warpgroups multiply 64 or 128 rows each. N is what the tile needs, in steps of 8: an expert's slots are shared
//! evenly among its token tiles.
//!
//! [`slot_groups`]: crate::format::slot_groups

use super::{ROW_FRAGMENTS, UNIT_ROWS, Variant, with_margin};
use crate::format::BLOCK;
use crate::format::packed::TileOrder;
use crate::format::slot_groups::{GROUP_SLOTS, TILE_BYTES};
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};
use crate::kernels::quantize;
use crate::kernels::route::MOST_EXPERTS;

/// Warpgroups that multiply, and their warps.
const CONSUMERS: u32 = 3;
const CONSUMER_WARPS: u32 = CONSUMERS * 4;
/// Threads of a block: those that multiply, and a warpgroup of which two warps copy.
const THREADS: u32 = (CONSUMERS + 1) * 128;

/// Tile of one variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    /// Row tiles of a warp.
    pub row_fragments: usize,
    /// Fragments of 8 slots.
    pub slot_fragments: usize,
    /// Stages of the ring: 64 of K each.
    pub stages: usize,
}

impl TileShape {
    /// Row tiles: one run of bytes for each 64 of K.
    const fn row_tiles(&self) -> usize {
        CONSUMER_WARPS as usize * self.row_fragments
    }

    /// Weight rows of a tile.
    pub const fn rows(&self) -> usize {
        self.row_tiles() * FRAGMENT_ROWS
    }

    /// Slots of a tile.
    pub const fn slots(&self) -> usize {
        self.slot_fragments * GROUP_SLOTS
    }

    /// Bytes of a stage's activations; weights follow.
    const fn activation_bytes(&self) -> usize {
        self.slot_fragments * TILE_BYTES
    }

    /// Bytes of a stage; an atom of the swizzle begins at a multiple of its 1024 bytes.
    pub const fn stage_bytes(&self) -> usize {
        (self.activation_bytes() + self.row_tiles() * MmaTile::BYTES).next_multiple_of(1024)
    }

    /// Where the jobs are: behind the ring and its barriers. There is one more than stages, so that a job stays until its
    /// results are written: the copying lane is ahead by a tile for each stage at most.
    const fn jobs_at(&self) -> usize {
        (self.stages * (self.stage_bytes() + 2 * 8)).next_multiple_of(16)
    }

    /// Where elements of h are staged: behind the jobs.
    const fn staged_at(&self) -> usize {
        self.jobs_at() + (self.stages + 1) * JOB_BYTES
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        (self.staged_at() + self.row_tiles() / 2 * STAGED_BYTES) as u32
    }
}

/// Two row tiles a warp for fewer slots, where dequantization bounds: so that more of it is independent. One for many, whose sums
/// take the registers.
pub const TILES: [TileShape; 2] = [
    TileShape { row_fragments: 2, slot_fragments: 12, stages: 7 },
    TileShape { row_fragments: 1, slot_fragments: 24, stages: 6 },
];

/// Kernel names of [`TILES`].
const KERNELS: [&str; TILES.len()] = ["grouped_gemm_wgmma_n96", "grouped_gemm_wgmma_n192"];

/// Bytes of what is said of a tile.
const JOB_BYTES: usize = 3 * 16;

/// Slots whose elements of h the one or two warps that have the same blocks quantize at a time.
const STAGED_SLOTS: usize = 32;
/// f32 elements from one slot to the next where h is staged: the lanes of a fragment (8 rows, every second slot) meet no bank
/// twice.
const STAGED_STRIDE: usize = BLOCK + 4;
/// Bytes of a staged column of blocks.
const STAGED_BYTES: usize = STAGED_SLOTS * STAGED_STRIDE * 4;

/// Warp schedulers of a multiprocessor; warps of a block take turns on them.
#[cfg(nvfp4_arch = "sm90")]
const SCHEDULERS: u32 = 4;

/// Fragments of 8 slots of the kernels for few slots.
const FEW_SLOT_FRAGMENTS: usize = 3;
/// Token tiles whose units are multiplied at once, at most.
const FEW_PARTS: usize = 2;
/// Bytes of a stage's activations; weights follow.
const FEW_ACTIVATION_BYTES: usize = FEW_PARTS * FEW_SLOT_FRAGMENTS * TILE_BYTES;
/// Bytes of the barriers in front of the routing and of the block's claim, and of the claim.
const OFFSETS_BARRIER_BYTES: usize = 32;
/// Bytes of an expert's first slot and first token tile.
const OFFSETS_BYTES: usize = 8;
/// Bytes of what is said of one turn.
const FEW_TURN_BYTES: usize = 16 + FEW_PARTS * JOB_BYTES;

/// One variant of the kernel for few slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewShape {
    /// Warps that multiply; two more copy weights and activations.
    warps: u32,
    /// Row tiles of a warp.
    row_fragments: usize,
    /// Stages of the ring: 64 of K each.
    pub stages: usize,
    /// Registers of a thread: so few that a block of `quantize_tiles` fits beside one of these.
    registers: u32,
}

impl FewShape {
    /// Units (two row tiles of a token tile) that are multiplied at once.
    const fn units(&self) -> u32 {
        self.warps * self.row_fragments as u32 / ROW_FRAGMENTS as u32
    }

    /// Units of as many warps as a multiprocessor has schedulers.
    #[cfg(nvfp4_arch = "sm90")]
    const fn even(&self) -> u32 {
        SCHEDULERS * self.row_fragments as u32 / ROW_FRAGMENTS as u32
    }

    /// Bytes of a stage; an atom of the swizzle begins at a multiple of its 1024 bytes.
    const fn stage_bytes(&self) -> usize {
        (FEW_ACTIVATION_BYTES + self.warps as usize * self.row_fragments * MmaTile::BYTES).next_multiple_of(1024)
    }

    /// Where it is said what is multiplied, behind the ring and its barriers. There is one place more than stages, as for
    /// [`TILES`].
    const fn turns_at(&self) -> usize {
        (self.stages * (self.stage_bytes() + 2 * 8)).next_multiple_of(16)
    }

    /// Where elements of h are staged.
    const fn staged_at(&self) -> usize {
        self.turns_at() + (self.stages + 1) * FEW_TURN_BYTES
    }

    /// Where the copying warps have the routing, behind its barrier: for as many experts as routing takes.
    const fn offsets_at(&self) -> usize {
        self.staged_at() + self.units() as usize * STAGED_BYTES
    }

    const fn threads(&self) -> u32 {
        (self.warps + 2) * 32
    }

    const fn variant(&self, kernel: &'static str, expected_units: usize) -> Variant {
        Variant {
            kernel,
            rows: UNIT_ROWS,
            slots: FEW_SLOT_FRAGMENTS * GROUP_SLOTS,
            expected_slots: FEW_EXPECTED_SLOTS,
            expected_units,
            routes_entries: FEW_ROUTED_ENTRIES,
            threads: self.threads(),
            registers: self.registers,
            shared_bytes: (self.offsets_at() + OFFSETS_BARRIER_BYTES + (MOST_EXPERTS as usize + 1) * OFFSETS_BYTES)
                as u32,
            quantizes: true,
            tiles: true,
        }
    }
}

/// One row tile a warp where a multiprocessor has so few units that their warps would leave it idle; two otherwise, which takes
/// fewer instructions.
pub const FEW_SHAPES: [FewShape; 2] = [
    FewShape { warps: 22, row_fragments: 1, stages: 8, registers: 72 },
    FewShape { warps: 16, row_fragments: 2, stages: 7, registers: 96 },
];

/// Registers of a thread at launch; then those that multiply take more, and the others leave theirs.
const REGISTERS: u32 = 128;
const CONSUMER_REGISTERS: u32 = 152;
const PRODUCER_REGISTERS: u32 = 56;

/// Entries that the kernels for few slots route themselves: 16 a lane.
const FEW_ROUTED_ENTRIES: usize = 512;

/// Expected slots up to which a kernel for few slots is taken: on an H200 with 8, it takes 1% more time than the next one for
/// deepseek-v4-pro-ep8 (64 tokens), and 14% less for qwen3-30b (128 tokens).
const FEW_EXPECTED_SLOTS: usize = 8;

/// The variants: [`FEW_SHAPES`], then [`TILES`].
pub const VARIANTS: [Variant; FEW_SHAPES.len() + TILES.len()] = {
    let [few_units, few] = FEW_SHAPES;
    let few_units = few_units.variant("grouped_gemm_few_m16", few_units.units() as usize);
    let mut variants = [few_units; FEW_SHAPES.len() + TILES.len()];
    variants[1] = few.variant("grouped_gemm_few_m32", usize::MAX);
    let mut i = 0;
    while i < TILES.len() {
        let tile = TILES[i];
        variants[FEW_SHAPES.len() + i] = Variant {
            kernel: KERNELS[i],
            rows: tile.rows(),
            slots: tile.slots(),
            expected_slots: with_margin(tile.slots()),
            expected_units: usize::MAX,
            routes_entries: 0,
            threads: THREADS,
            registers: REGISTERS,
            shared_bytes: tile.shared_bytes(),
            quantizes: true,
            tiles: true,
        };
        i += 1;
    }
    variants
};

const _: () = {
    assert!(TILE_BYTES == 1024);
    assert!(UNIT_ROWS == ROW_FRAGMENTS * FRAGMENT_ROWS);
    // They are counted in 16 bits.
    assert!(FEW_ROUTED_ENTRIES < 1 << 16);
    let mut i = 0;
    while i < FEW_SHAPES.len() {
        assert!(VARIANTS[i].shared_bytes <= 227 * 1024);
        // A lane copies the row tiles of one group, and a part has two lanes.
        assert!(FEW_SHAPES[i].units() as usize * ROW_FRAGMENTS <= MmaTile::GROUP);
        let registers = FEW_SHAPES[i].threads() * FEW_SHAPES[i].registers + quantize::FEW_THREADS * quantize::REGISTERS;
        assert!(registers <= 65536);
        // Warps that share a unit meet at a barrier of its own, besides the block's.
        assert!(FEW_SHAPES[i].row_fragments == ROW_FRAGMENTS || FEW_SHAPES[i].units() < 16);
        i += 1;
    }
    // A block starts with what it has, and leaves before it takes.
    assert!(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * REGISTERS);
    let mut i = 0;
    while i < TILES.len() {
        // What sm_90 gives a block.
        assert!(TILES[i].shared_bytes() <= 227 * 1024);
        assert!(MmaTile::GROUP.is_multiple_of(TILES[i].row_tiles()));
        // Each warp, or both that have the same blocks, stage a column of blocks.
        assert!(TILES[i].row_fragments == 1 || TILES[i].row_fragments == 2);
        i += 1;
    }
};

#[cfg(nvfp4_arch = "sm90")]
mod device;
#[cfg(nvfp4_arch = "sm90")]
mod epilogue;
#[cfg(nvfp4_arch = "sm90")]
mod few;
#[cfg(nvfp4_arch = "sm90")]
mod job;
mod last_shares;
pub use last_shares::LastShares;
#[cfg(nvfp4_arch = "sm90")]
mod offsets;
#[cfg(nvfp4_arch = "sm90")]
mod turns;
