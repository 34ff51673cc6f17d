//! Weight tiles of the portable GPU engine, in the order in which `mma.sync.m16n8k16` wants its A fragments.
//!
//! A tile is 64 rows x 64 K: 4 fragments of 16 rows, each 512 bytes of codes (16 bytes a lane: one 32-bit word for each
//! 16 of K), then the scales of the 4 fragments, 64 bytes each. One lane reads its fragment of 16 x 64 with one
//! 16-byte load, and its scales (rows g and g+8, four blocks each) with one 8-byte load. Tiles of one row tile follow
//! each other along K, so 64 rows are one contiguous stream.
//!
//! Fragment map (PTX ISA, "Matrix Fragments for mma.m16n8k16", .f16): lane = 4g + q holds in register r the columns
//! 8(r/2) + 2q + {0, 1} of row g + 8(r%2).

use super::packed::{NibbleOffset, TileOrder};

/// Rows of a fragment: M of the instruction.
pub const FRAGMENT_ROWS: usize = 16;
/// K of the instruction, and one block of NVFP4.
pub const FRAGMENT_K: usize = 16;
/// Bytes of codes of 16 rows x 64 K.
pub const FRAGMENT_CODE_BYTES: usize = 512;
/// Bytes of scales of 16 rows x 64 K.
pub const FRAGMENT_SCALE_BYTES: usize = 64;

/// The order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaTile {}

impl TileOrder for MmaTile {
    const ROWS: usize = 64;
    const K: usize = 64;
    const CODE_BYTES: usize = 64 * 64 / 2;
    const SCALE_BYTES: usize = 64 * 4;
    /// A lane holds rows g and g+8 of the accumulator: gate in the one, up in the other.
    const INTERLEAVE: usize = 8;

    #[inline(always)]
    fn code_offset(row: usize, k: usize) -> NibbleOffset {
        let (fragment, row) = (row / FRAGMENT_ROWS, row % FRAGMENT_ROWS);
        let (step, k) = (k / FRAGMENT_K, k % FRAGMENT_K);
        let lane = (row % 8) * 4 + (k % 8) / 2;
        let register = row / 8 + 2 * (k / 8);
        // Element 0 of a register's pair sits in the word's low half, element 1 in its high half: nibble 4*(k%2) + register.
        NibbleOffset {
            byte: fragment * FRAGMENT_CODE_BYTES + lane * 16 + step * 4 + (k % 2) * 2 + register / 2,
            high: register % 2 == 1,
        }
    }

    #[inline(always)]
    fn code_position(offset: NibbleOffset) -> (usize, usize) {
        let fragment = offset.byte / FRAGMENT_CODE_BYTES;
        let lane = (offset.byte % FRAGMENT_CODE_BYTES) / 16;
        let step = (offset.byte % 16) / 4;
        let register = (offset.byte % 2) * 2 + offset.high as usize;
        let odd = (offset.byte % 4) / 2;
        let row = fragment * FRAGMENT_ROWS + lane / 4 + 8 * (register % 2);
        (row, step * FRAGMENT_K + 8 * (register / 2) + 2 * (lane % 4) + odd)
    }

    #[inline(always)]
    fn scale_offset(row: usize, block: usize) -> usize {
        let (fragment, row) = (row / FRAGMENT_ROWS, row % FRAGMENT_ROWS);
        fragment * FRAGMENT_SCALE_BYTES + (row % 8) * 8 + (row / 8) * 4 + block
    }

    #[inline(always)]
    fn scale_position(offset: usize) -> (usize, usize) {
        let fragment = offset / FRAGMENT_SCALE_BYTES;
        let inner = offset % FRAGMENT_SCALE_BYTES;
        (fragment * FRAGMENT_ROWS + ((inner % 8) / 4) * 8 + inner / 8, inner % 4)
    }
}
