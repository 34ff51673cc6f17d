//! Weight tiles and activation rows of the FP4 tensor cores of sm_120, in the order of the operands of
//! `mma.sync.m16n8k64.kind::mxf4nvf4`.
//!
//! A weight tile is 64 rows x 64 K: 4 A fragments of 16 rows, each 512 bytes of codes (a lane's 4 registers follow each
//! other), then one word of 4 scales a row. Tiles of one row tile follow each other along K.
//!
//! Fragment map (PTX ISA, "Matrix Fragments for mma.m16n8k64", .e2m1): lane = 4g + q holds in register r of A the columns
//! 8q + 32(r/2) .. + 8 of row g + 8(r%2), in register r of B the rows 8q + 32r .. + 8 of column g, lowest nibble first.
//! Scale words ("Block Scaling for mma.sync", scale_vec::4X): row m of A from lane 4(m%8) + 2t + m/8, t its thread
//! selector, so one register serves 2 fragments; column n of B from lane 4n + t, so one register serves 4.

use super::BLOCK;
use super::packed::{NibbleOffset, TileOrder};

/// Rows of an A fragment: M of the instruction.
pub const FRAGMENT_ROWS: usize = 16;
/// K of the instruction.
pub const FRAGMENT_K: usize = 64;
/// Bytes of codes of an A fragment.
pub const FRAGMENT_CODE_BYTES: usize = 512;
/// Bytes of the scales of one row of a tile.
pub const ROW_SCALE_BYTES: usize = FRAGMENT_K / BLOCK;

/// The order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mxf4Tile {}

impl TileOrder for Mxf4Tile {
    const ROWS: usize = 64;
    const K: usize = FRAGMENT_K;
    const CODE_BYTES: usize = 64 * FRAGMENT_K / 2;
    const SCALE_BYTES: usize = 64 * ROW_SCALE_BYTES;
    /// A lane holds rows g and g+8 of the accumulator: gate in the one, up in the other.
    const INTERLEAVE: usize = 8;

    #[inline(always)]
    fn code_offset(row: usize, k: usize) -> NibbleOffset {
        let (fragment, row) = (row / FRAGMENT_ROWS, row % FRAGMENT_ROWS);
        let lane = row % 8 * 4 + k % 32 / 8;
        let register = row / 8 + k / 32 * 2;
        NibbleOffset {
            byte: fragment * FRAGMENT_CODE_BYTES + lane * 16 + register * 4 + k % 8 / 2,
            high: !k.is_multiple_of(2),
        }
    }

    #[inline(always)]
    fn code_position(offset: NibbleOffset) -> (usize, usize) {
        let fragment = offset.byte / FRAGMENT_CODE_BYTES;
        let lane = offset.byte % FRAGMENT_CODE_BYTES / 16;
        let register = offset.byte % 16 / 4;
        let row = fragment * FRAGMENT_ROWS + lane / 4 + register % 2 * 8;
        (row, register / 2 * 32 + lane % 4 * 8 + offset.byte % 4 * 2 + offset.high as usize)
    }

    #[inline(always)]
    fn scale_offset(row: usize, block: usize) -> usize {
        row * ROW_SCALE_BYTES + block
    }

    #[inline(always)]
    fn scale_position(offset: usize) -> (usize, usize) {
        (offset / ROW_SCALE_BYTES, offset % ROW_SCALE_BYTES)
    }
}

/// Row of a tile whose scale word lane `lane` holds for the pair `pair` of fragments.
#[inline(always)]
pub const fn weight_scale_row(pair: usize, lane: usize) -> usize {
    pair * 2 * FRAGMENT_ROWS + lane % 4 * 8 + lane / 4
}

/// Inverse of [`weight_scale_row`]: (pair, lane).
#[inline(always)]
pub const fn weight_scale_lane(row: usize) -> (usize, usize) {
    (row / (2 * FRAGMENT_ROWS), row % 8 * 4 + row % (2 * FRAGMENT_ROWS) / 8)
}

/// Columns of a row of quantized activations in device memory: whole stages, so that the scales of each begin at a
/// multiple of 8 bytes. A row has half as many bytes of codes and a sixteenth of scales, of which those of the first `k`
/// columns mean something.
#[inline(always)]
pub const fn row_stride(k: usize) -> usize {
    k.next_multiple_of(ActivationStage::K)
}

/// Activations of [`ActivationStage::K`] columns in shared memory.
///
/// Codes: a row has 4 chunks of 16 bytes; chunk c of row n lies at c ^ (n/2 % 4), so that the 8 rows of an `ldmatrix`
/// meet no bank twice. Scales: the row's two words, in groups of 32 rows in the order of the lanes that want them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationStage {}

impl ActivationStage {
    /// Columns.
    pub const K: usize = 2 * FRAGMENT_K;
    /// Bytes of codes of a row.
    pub const ROW_CODE_BYTES: usize = Self::K / 2;
    /// Chunks of 16 bytes of a row.
    pub const CHUNKS: usize = Self::ROW_CODE_BYTES / 16;
    /// Bytes of scales of a row.
    pub const ROW_SCALE_BYTES: usize = Self::K / BLOCK;

    /// First byte of a chunk.
    #[inline(always)]
    pub const fn chunk_offset(row: usize, chunk: usize) -> usize {
        row * Self::ROW_CODE_BYTES + (chunk ^ (row / 2 % Self::CHUNKS)) * 16
    }

    /// Inverse of [`Self::chunk_offset`]: (row, chunk).
    #[inline(always)]
    pub const fn chunk_position(offset: usize) -> (usize, usize) {
        let row = offset / Self::ROW_CODE_BYTES;
        (row, (offset % Self::ROW_CODE_BYTES / 16) ^ (row / 2 % Self::CHUNKS))
    }

    /// First byte of a row's scales, among the scales.
    #[inline(always)]
    pub const fn scale_offset(row: usize) -> usize {
        (row / 32 * 32 + row % 8 * 4 + row % 32 / 8) * Self::ROW_SCALE_BYTES
    }

    /// Inverse of [`Self::scale_offset`].
    #[inline(always)]
    pub const fn scale_row(offset: usize) -> usize {
        let position = offset / Self::ROW_SCALE_BYTES;
        position / 32 * 32 + position % 4 * 8 + position % 32 / 4
    }
}
