//! The grouped GEMM: for every local expert, its weights times its slots' activations. L1 (gate and up) and L2 (down)
//! are the same kernel with another epilogue. One module for each family of GPUs.

#[cfg(all(target_arch = "nvptx64", not(nvfp4_arch = "sm90")))]
mod epilogue;
#[cfg(any(nvfp4_arch = "sm90", nvfp4_arch = "sm120"))]
mod ring;
pub mod sm120;
pub mod sm80;
pub mod sm90;
#[cfg(target_arch = "nvptx64")]
mod tile;

/// Fragments of 16 rows of a warp whose results leave from registers: with two, it holds whole blocks of 16 columns of h.
const ROW_FRAGMENTS: usize = 2;

/// Weight rows of a unit, the smallest part of a matrix that the kernels for few slots share among multiprocessors.
pub const UNIT_ROWS: usize = 2 * 16;

/// The usual expected slots of a variant: a fifth less than a tile has, so that few experts need a second tile and read their
/// weights again.
const fn with_margin(slots: usize) -> usize {
    slots * 4 / 5
}

/// One compiled variant of a grouped GEMM, as the host must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Entry point.
    pub kernel: &'static str,
    /// Weight rows of a tile.
    pub rows: usize,
    /// Slots of a tile.
    pub slots: usize,
    /// Expected slots of an expert up to which a plan takes this variant rather than the next one.
    pub expected_slots: usize,
    /// Expected units of the first matrix ([`UNIT_ROWS`] of an expert that has slots) a multiprocessor, up to which a plan takes
    /// this variant rather than the next one.
    pub expected_units: usize,
    /// Entries of `topk_ids` up to which it finds first slots and token tiles of the experts itself, so that the first GEMM need
    /// not wait for the routing.
    pub routes_entries: usize,
    /// Threads of a block.
    pub threads: u32,
    /// Registers that a thread may take at launch.
    pub registers: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether it can quantize its results where the scale is known beforehand.
    pub quantizes: bool,
    /// Whether it reads (and so writes) quantized activations in tiles, a row a slot, instead of in rows: see
    /// [`crate::format::slot_groups`]. It then quantizes results of SwiGLU only.
    pub tiles: bool,
}
