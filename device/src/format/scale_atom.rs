//! The tensor-core scale layout of sm_100 and sm_120: atoms of 128 rows x 4 blocks, 512 bytes each.
//!
//! Source of the map: the scale-factor layout for block-scaled `tcgen05.mma` and `mma.sync` in the PTX ISA
//! (`tcgen05.cp.32x128b.warpx4`), also published by cuBLAS as its 1D block scaling-factor layout.

/// Rows of an atom.
pub const ATOM_ROWS: usize = 128;
/// Blocks of K of an atom.
pub const ATOM_BLOCKS: usize = 4;
/// Bytes of an atom.
pub const ATOM_BYTES: usize = ATOM_ROWS * ATOM_BLOCKS;

/// Bytes of the scales of a matrix of `rows` x `blocks` (K/16), padding included.
#[inline(always)]
pub const fn bytes(rows: usize, blocks: usize) -> usize {
    rows.div_ceil(ATOM_ROWS) * blocks.div_ceil(ATOM_BLOCKS) * ATOM_BYTES
}

/// Byte of the scale of row `row` and block `block` in a matrix of `blocks` blocks a row.
#[inline(always)]
pub const fn offset(blocks: usize, row: usize, block: usize) -> usize {
    let atom = (row / ATOM_ROWS) * blocks.div_ceil(ATOM_BLOCKS) + block / ATOM_BLOCKS;
    atom * ATOM_BYTES + (row % 32) * 16 + ((row % ATOM_ROWS) / 32) * 4 + block % ATOM_BLOCKS
}

/// Inverse of [`offset`]: (row, block), which may be padding.
#[inline(always)]
pub const fn position(blocks: usize, offset: usize) -> (usize, usize) {
    let atoms_a_row = blocks.div_ceil(ATOM_BLOCKS);
    let atom = offset / ATOM_BYTES;
    let inner = offset % ATOM_BYTES;
    let row = (atom / atoms_a_row) * ATOM_ROWS + ((inner % 16) / 4) * 32 + inner / 16;
    (row, (atom % atoms_a_row) * ATOM_BLOCKS + inner % 4)
}

/// Four scale bytes of consecutive blocks in one word, the first in the low byte.
#[inline(always)]
pub const fn pack4(scales: [u8; 4]) -> u32 {
    u32::from_le_bytes(scales)
}

/// Inverse of [`pack4`].
#[inline(always)]
pub const fn unpack4(word: u32) -> [u8; 4] {
    word.to_le_bytes()
}
