//! Weight tiles of the portable GPU engine, in the order in which `mma.sync.m16n8k16` wants its A fragments.
//!
//! A tile is one fragment of 16 rows, 64 K long: 512 bytes of codes (16 bytes a lane: one 32-bit word for each 16 of K),
//! then 64 bytes of scales. One lane reads its codes with one 16-byte load, and its scales (rows g and g+8, four blocks
//! each) with one 8-byte load. The tiles of 96 row tiles lie side by side: so a kernel's
//! tile, of a number of rows that divides those, reads one run of bytes for each step along K.
//!
//! The 8 codes of a lane's word are stored with their bits apart ([`spread`]), and so are the four scales of a row
//! ([`spread_scales`]), so that the operands of the tensor core come out with as few instructions as possible
//! ([`fragment_registers`], [`scale_pairs`]).
//!
//! Fragment map (PTX ISA, "Matrix Fragments for mma.m16n8k16", .f16): lane = 4g + q holds in register r the columns
//! 8(r/2) + 2q + {0, 1} of row g + 8(r%2).

use super::packed::{NibbleOffset, TileOrder};
use super::{BLOCK, e2m1, ue4m3};

/// Rows of a fragment: M of the instruction.
pub const FRAGMENT_ROWS: usize = 16;
/// K of the instruction, and one block of NVFP4.
pub const FRAGMENT_K: usize = BLOCK;

/// A code as the high byte of an f16: its sign is the f16's, its exponent and mantissa are where an f16's lowest exponent bits
/// and highest mantissa bit are; in each byte of a word.
const DECODED: u32 = 0x8E8E_8E8E;
/// The same in the high byte of each half only.
const DECODED_HIGH: u32 = DECODED & 0xFF00_FF00;

/// How far the second codes of a stored word's bytes must go: their magnitudes right, their signs left.
const MAGNITUDE_SHIFT: u32 = 3;
const SIGN_SHIFT: u32 = 7;

/// Nibble `register` of each half, decoded to a byte.
#[inline(always)]
const fn decode(nibbles: u32, register: u32) -> u32 {
    let codes = (nibbles >> (4 * register)) & 0x000F_000F;
    ((codes << 4) | (codes << 1)) & DECODED
}

/// Inverse of [`decode`], of the high bytes of both halves.
#[inline(always)]
const fn encode(high: u32, register: u32) -> u32 {
    (((high >> 12) & 0x0008_0008) | ((high >> 9) & 0x0007_0007)) << (4 * register)
}

/// The stored form of a word of 8 codes (nibble r of each half: register r). Each of its bytes has two codes: that of register 0
/// (high byte of a half) or 1 (low byte) decoded, and where a decoded byte has no bits that of register 2 or 3, whose bits are
/// exclusive ors with those that meet them in `second_codes`.
#[inline(always)]
pub const fn spread(nibbles: u32) -> u32 {
    let second = (decode(nibbles, 2) << 8) | decode(nibbles, 3);
    let mut word = (decode(nibbles, 0) << 8) | decode(nibbles, 1);
    let mut byte = 0;
    while byte < 4 {
        // What meets them is in the first codes, and in the magnitudes of the byte below.
        let (magnitude, sign) = (0x0E << (8 * byte), 0x80 << (8 * byte));
        let [a, b] = second_codes(word);
        let missing = second ^ a ^ b;
        word |= ((missing & magnitude) << MAGNITUDE_SHIFT) | ((missing & sign) >> SIGN_SHIFT);
        byte += 1;
    }
    word
}

/// Inverse of [`spread`].
#[inline(always)]
pub fn gather(word: u32) -> u32 {
    let [zero, one, two, three] = fragment_registers(word, xor_and);
    encode(zero, 0) | encode(one, 1) | encode(two, 2) | encode(three, 3)
}

/// `(a ^ b) & mask`, which [`fragment_registers`] takes from its caller: a GPU has one instruction for it.
#[inline(always)]
pub const fn xor_and(a: u32, b: u32, mask: u32) -> u32 {
    (a ^ b) & mask
}

/// What gives the second codes of a stored word's bytes, decoded, by an exclusive or, and bits between that mean nothing: their
/// magnitudes and their signs come from different distances, and what each drags to the other's place is undone by how they
/// are stored.
#[inline(always)]
const fn second_codes(word: u32) -> [u32; 2] {
    [word >> MAGNITUDE_SHIFT, word << SIGN_SHIFT]
}

/// The 4 registers of an A fragment from a stored word: pairs of f16, each 2^-14 times the code's value. `xor_and` is
/// [`xor_and`] or that instruction.
///
/// A code's exponent and mantissa bits are an f16's own, so no table and no conversion is needed; the 0.5 code becomes an
/// f16 subnormal. Eight instructions, of which three are shifts to the left that a multiplier can do.
#[inline(always)]
pub fn fragment_registers(word: u32, xor_and: impl Fn(u32, u32, u32) -> u32) -> [u32; 4] {
    const LOW: u32 = DECODED & !DECODED_HIGH;
    let [a, b] = second_codes(word);
    [word & DECODED_HIGH, (word & LOW) << 8, xor_and(a, b, DECODED_HIGH), xor_and(a, b, LOW) << 8]
}

/// Power of two by which [`fragment_registers`] are smaller than the values.
pub const CODE_SCALE_LOG2: i32 = -14;

/// Powers of two that a stored scale carries: the largest that keeps 448 an f16.
pub const BLOCK_SCALE_LOG2: i32 = 7;

/// High bits of an f16 without its sign: all that is not 0 in 2^7 times a UE4M3 number, so that one byte holds them.
const STORED_SCALE_SHIFT: u32 = 7;

/// The byte of an f16 that a scale is stored as; NaN stays NaN.
#[inline(always)]
pub const fn stored_scale(byte: u8) -> u8 {
    if byte == ue4m3::NAN {
        return 0xFF;
    }
    let (exponent, mantissa) = (byte >> 3, byte & 7);
    if exponent != 0 {
        // The biases: 7 of UE4M3, 15 of an f16.
        return ((exponent + (15 - 7) + BLOCK_SCALE_LOG2 as u8) << 3) | mantissa;
    }
    if mantissa == 0 {
        return 0;
    }
    // A subnormal, mantissa * 2^-9: its leading bit becomes implicit.
    let shift = 3 - mantissa.ilog2() as u8;
    ((1 + (15 - 7) + BLOCK_SCALE_LOG2 as u8 - shift) << 3) | ((mantissa << shift) & 7)
}

/// Inverse of [`stored_scale`].
#[inline(always)]
pub const fn unstored_scale(stored: u8) -> u8 {
    const FIRST_NORMAL: u8 = 1 + (15 - 7) + BLOCK_SCALE_LOG2 as u8;
    let (exponent, mantissa) = (stored >> 3, stored & 7);
    if stored == 0xFF {
        ue4m3::NAN
    } else if stored == 0 {
        0
    } else if exponent >= FIRST_NORMAL {
        ((exponent - FIRST_NORMAL + 1) << 3) | mantissa
    } else {
        (8 | mantissa) >> (FIRST_NORMAL - exponent)
    }
}

/// Where the stored scales of blocks 0 and 2 are in each half of a word, as bits of an f16.
const EVEN_SCALES: u32 = 0x7F80_7F80;

/// The stored form of a word of four scales: blocks 0 and 1 in the low half, 2 and 3 in the high half, so that both pairs
/// of [`scale_pairs`] are one mask away.
#[inline(always)]
pub const fn spread_scales(word: u32) -> u32 {
    let [zero, one, two, three] = word.to_le_bytes();
    let even =
        (stored_scale(zero) as u32) << STORED_SCALE_SHIFT | (stored_scale(two) as u32) << (16 + STORED_SCALE_SHIFT);
    let odd =
        (stored_scale(one) as u32) << STORED_SCALE_SHIFT | (stored_scale(three) as u32) << (16 + STORED_SCALE_SHIFT);
    even | odd.rotate_right(8)
}

/// Inverse of [`spread_scales`].
#[inline(always)]
pub const fn gather_scales(stored: u32) -> u32 {
    let [even, odd] = scale_pairs(stored);
    let (even, odd) = (even >> STORED_SCALE_SHIFT, odd >> STORED_SCALE_SHIFT);
    u32::from_le_bytes([
        unstored_scale(even as u8),
        unstored_scale(odd as u8),
        unstored_scale((even >> 16) as u8),
        unstored_scale((odd >> 16) as u8),
    ])
}

/// Scales of the blocks (0, 2) and (1, 3) of a row from its stored word, as pairs of f16, each 2^7 times the value.
#[inline(always)]
pub const fn scale_pairs(stored: u32) -> [u32; 2] {
    [stored & EVEN_SCALES, stored.rotate_left(8) & EVEN_SCALES]
}

/// Power of two that a product of code and scale carries: with it every product of the 16 x 127 pairs is an f16.
pub const PRODUCT_LOG2: i32 = CODE_SCALE_LOG2 + BLOCK_SCALE_LOG2;

const _: () = assert!(PRODUCT_LOG2 == -7);
// The smallest product above zero is still a multiple of the smallest f16, the largest scale below the f16 maximum.
const _: () = assert!(-1 - 9 + PRODUCT_LOG2 >= -24);
const _: () = assert!((ue4m3::MAX as u32) << BLOCK_SCALE_LOG2 < 65520);
const _: () = assert!(e2m1::MAX as u32 == 6);

/// The order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaTile {}

impl TileOrder for MmaTile {
    const ROWS: usize = FRAGMENT_ROWS;
    const K: usize = 64;
    const CODE_BYTES: usize = Self::ROWS * Self::K / 2;
    const SCALE_BYTES: usize = Self::ROWS * Self::K / BLOCK;
    /// A multiple of the row tiles of every kernel's tiles: 2, 8, 12 and 24; and no fewer than a block of the kernel for few slots
    /// takes at a time, from anywhere: so they are in two groups at most.
    const GROUP: usize = 96;
    /// A lane holds rows g and g+8 of the accumulator: gate in the one, up in the other.
    const INTERLEAVE: usize = 8;

    #[inline(always)]
    fn code_offset(row: usize, k: usize) -> NibbleOffset {
        let (step, k) = (k / FRAGMENT_K, k % FRAGMENT_K);
        let lane = (row % 8) * 4 + (k % 8) / 2;
        let register = row / 8 + 2 * (k / 8);
        // Element 0 of a register's pair sits in the word's low half, element 1 in its high half: nibble 4*(k%2) + register.
        NibbleOffset { byte: lane * 16 + step * 4 + (k % 2) * 2 + register / 2, high: register % 2 == 1 }
    }

    #[inline(always)]
    fn code_position(offset: NibbleOffset) -> (usize, usize) {
        let lane = offset.byte / 16;
        let step = (offset.byte % 16) / 4;
        let register = (offset.byte % 2) * 2 + offset.high as usize;
        let odd = (offset.byte % 4) / 2;
        (lane / 4 + 8 * (register % 2), step * FRAGMENT_K + 8 * (register / 2) + 2 * (lane % 4) + odd)
    }

    #[inline(always)]
    fn scale_offset(row: usize, block: usize) -> usize {
        (row % 8) * 8 + (row / 8) * 4 + block
    }

    #[inline(always)]
    fn scale_position(offset: usize) -> (usize, usize) {
        ((offset % 8) / 4 * 8 + offset / 8, offset % 4)
    }

    #[inline(always)]
    fn stored(nibbles: u32) -> u32 {
        spread(nibbles)
    }

    #[inline(always)]
    fn nibbles(stored: u32) -> u32 {
        gather(stored)
    }

    #[inline(always)]
    fn stored_scales(bytes: u32) -> u32 {
        spread_scales(bytes)
    }

    #[inline(always)]
    fn scales(stored: u32) -> u32 {
        gather_scales(stored)
    }
}

/// Columns of activations that one 16-byte load of each lane serves: two steps.
pub const LOAD_K: usize = 2 * FRAGMENT_K;

/// Place of column `k` in a row of activations (f16): inside each [`LOAD_K`] columns, the 16 bytes of lane q = 0 of the B
/// operand, then those of lane 1 and so on; a lane's words are register 0 and 1 of the first step, then of the second.
///
/// B map (PTX ISA, as above): lane = 4g + q holds in register r the rows 8r + 2q + {0, 1} of column g.
#[inline(always)]
pub const fn activation_place(k: usize) -> usize {
    let (load, step, inner) = (k / LOAD_K, k % LOAD_K / FRAGMENT_K, k % FRAGMENT_K);
    let (register, lane, odd) = (inner / 8, inner % 8 / 2, inner % 2);
    load * LOAD_K + lane * 8 + step * 4 + register * 2 + odd
}

/// Inverse of [`activation_place`].
#[inline(always)]
pub const fn activation_column(place: usize) -> usize {
    let (load, lane) = (place / LOAD_K, place % LOAD_K / 8);
    let (step, register, odd) = (place % 8 / 4, place % 4 / 2, place % 2);
    load * LOAD_K + step * FRAGMENT_K + 8 * register + 2 * lane + odd
}
