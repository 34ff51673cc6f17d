//! Weight tiles of the portable GPU engine, in the order in which `mma.sync.m16n8k16` wants its A fragments.
//!
//! A tile is 64 rows x 64 K: 4 fragments of 16 rows, each 512 bytes of codes (16 bytes a lane: one 32-bit word for each
//! 16 of K), then the scales of the 4 fragments, 64 bytes each. One lane reads its fragment of 16 x 64 with one
//! 16-byte load, and its scales (rows g and g+8, four blocks each) with one 8-byte load. Tiles of one row tile follow
//! each other along K, so 64 rows are one contiguous stream.
//!
//! The 8 codes of a lane's word are stored with their bits apart ([`spread`]), so that the operands of the tensor core
//! come out with as few instructions as possible ([`fragment_registers`]).
//!
//! Fragment map (PTX ISA, "Matrix Fragments for mma.m16n8k16", .f16): lane = 4g + q holds in register r the columns
//! 8(r/2) + 2q + {0, 1} of row g + 8(r%2).

use super::packed::{NibbleOffset, TileOrder};
use super::{e2m1, ue4m3};

/// Rows of a fragment: M of the instruction.
pub const FRAGMENT_ROWS: usize = 16;
/// K of the instruction, and one block of NVFP4.
pub const FRAGMENT_K: usize = 16;
/// Bytes of codes of 16 rows x 64 K.
pub const FRAGMENT_CODE_BYTES: usize = 512;
/// Bytes of scales of 16 rows x 64 K.
pub const FRAGMENT_SCALE_BYTES: usize = 64;

/// Sign bit of a code in the high bit of an f16, exponent and mantissa where an f16's lowest exponent and highest
/// mantissa bits are; in both halves of a word.
const SIGN: u32 = 0x8000_8000;
const MAGNITUDE: u32 = 0x0E00_0E00;

/// Places of sign and magnitude in each half of a stored word, by register: how far left they must go to become an f16's.
const SIGN_SHIFT: [u32; 4] = [0, 3, 1, 2];
const MAGNITUDE_SHIFT: [u32; 4] = [0, 3, 6, 9];

/// The stored form of a word of 8 codes (nibble r of each half: register r).
#[inline(always)]
pub const fn spread(nibbles: u32) -> u32 {
    let (mut word, mut register) = (0, 0);
    while register < 4 {
        let code = nibbles >> (4 * register);
        word |= ((code << 12) & SIGN) >> SIGN_SHIFT[register];
        word |= ((code << 9) & MAGNITUDE) >> MAGNITUDE_SHIFT[register];
        register += 1;
    }
    word
}

/// Inverse of [`spread`].
#[inline(always)]
pub const fn gather(word: u32) -> u32 {
    let (mut nibbles, mut register) = (0, 0);
    while register < 4 {
        let sign = (word << SIGN_SHIFT[register]) & SIGN;
        let magnitude = (word << MAGNITUDE_SHIFT[register]) & MAGNITUDE;
        nibbles |= ((sign >> 12) | (magnitude >> 9)) << (4 * register);
        register += 1;
    }
    nibbles
}

/// The 4 registers of an A fragment from a stored word: pairs of f16, each 2^-14 times the code's value.
///
/// A code's exponent and mantissa bits are an f16's own, so no table and no conversion is needed; the 0.5 code becomes an
/// f16 subnormal.
#[inline(always)]
pub const fn fragment_registers(word: u32) -> [u32; 4] {
    let one = (word << 3) & (SIGN | MAGNITUDE);
    let two = ((word << 6) & MAGNITUDE) | ((word << 1) & SIGN);
    let three = ((word << 9) & MAGNITUDE) | ((word << 2) & SIGN);
    [word & (SIGN | MAGNITUDE), one, two, three]
}

/// Power of two by which [`fragment_registers`] are smaller than the values.
pub const CODE_SCALE_LOG2: i32 = -14;

/// Scales of the blocks (0, 2) and (1, 3) of a row from its word of four, as pairs of f16, each 2^-8 times the value.
#[inline(always)]
pub const fn scale_pairs(word: u32) -> [u32; 2] {
    [(word & 0x007F_007F) << 7, (word >> 1) & 0x3F80_3F80]
}

/// Power of two by which [`scale_pairs`] are smaller than the values.
pub const BLOCK_SCALE_LOG2: i32 = ue4m3::F16_SCALE_LOG2;

/// What makes a scale of [`scale_pairs`] one of 2^7 times its value: the largest power that keeps 448 an f16.
pub const SCALE_UP_LOG2: i32 = 15;

/// Power of two that a product of code and scale carries: with it every product of the 16 x 127 pairs is an f16.
pub const PRODUCT_LOG2: i32 = CODE_SCALE_LOG2 + BLOCK_SCALE_LOG2 + SCALE_UP_LOG2;

const _: () = assert!(PRODUCT_LOG2 == -7);
// The smallest product above zero is still a multiple of the smallest f16, the largest scale below the f16 maximum.
const _: () = assert!(-1 - 9 + PRODUCT_LOG2 >= -24);
const _: () = assert!((ue4m3::MAX as u32) << (SCALE_UP_LOG2 + BLOCK_SCALE_LOG2) < 65520);
const _: () = assert!(e2m1::MAX as u32 == 6);

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

    #[inline(always)]
    fn stored(nibbles: u32) -> u32 {
        spread(nibbles)
    }

    #[inline(always)]
    fn nibbles(stored: u32) -> u32 {
        gather(stored)
    }
}
