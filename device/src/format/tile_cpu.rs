//! Weight tiles of the CPU engine: 16 rows x 16 K, 128 bytes of codes and 16 of scales.
//!
//! One 32-bit lane of a vector belongs to one row and holds four consecutive K, as byte dot-product instructions want
//! it. 64 bytes hold 8 of K: K 0..3 in the low nibbles, 4..7 in the high ones. Dimensions are multiples of 16, so
//! nothing is ever padded.

use super::packed::{NibbleOffset, TileOrder};

/// The order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuTile {}

impl TileOrder for CpuTile {
    const ROWS: usize = 16;
    const K: usize = 16;
    const CODE_BYTES: usize = 128;
    const SCALE_BYTES: usize = 16;
    /// A gate tile is followed by its up tile: the same lane of two vectors.
    const INTERLEAVE: usize = 16;

    #[inline(always)]
    fn code_offset(row: usize, k: usize) -> NibbleOffset {
        NibbleOffset { byte: (k / 8) * 64 + row * 4 + k % 4, high: (k / 4) % 2 == 1 }
    }

    #[inline(always)]
    fn code_position(offset: NibbleOffset) -> (usize, usize) {
        let k = (offset.byte / 64) * 8 + (offset.high as usize) * 4 + offset.byte % 4;
        ((offset.byte % 64) / 4, k)
    }

    #[inline(always)]
    fn scale_offset(row: usize, _block: usize) -> usize {
        row
    }

    #[inline(always)]
    fn scale_position(offset: usize) -> (usize, usize) {
        (offset, 0)
    }
}
