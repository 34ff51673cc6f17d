//! The quantizer of [`block`] in few instructions, with fused multiply-add: the same bits.
//!
//! # Division
//!
//! All elements of a block are divided by one d, so `r = 1/d` (rounded to nearest) is computed once, and
//! `q0 = x r; e = x - d q0; q = q0 + r e`, each rounded once, is `x / d` rounded to nearest. Proof, with d and x scaled
//! into `[1, 2)` and nothing below the normal numbers: r is off by at most 2^-25, so `x r` by less than one unit u in the
//! last place of the quotient. Let m be a midpoint between two numbers, k and k + u.
//! - If `x/d` is further from m than 2^-40 of it: `q0 + r e` is within 2^-44 of `x/d`, so on the same side of m.
//! - Otherwise `x r` lies between k - u/2 and k + 3u/2, so q0 is one of m's neighbours, and `|e|` is about `d u / 2`: e is
//!   exact. `x = d m` is impossible (a quotient of two 24-bit numbers has no 25-bit value). So `|e|` differs from
//!   `d u / 2` by at least one unit of `d u` 2^-24, if it is smaller then `r |e| <= (1/d + 2^-25)(d/2 - 2^-24) u < u/2`
//!   because `1/d > d/4`; likewise if it is larger. Hence `q0 + r e` is on the side of m where `x/d` is.
//!
//! That holds as long as e, a multiple of (unit of d) (unit of q0), is not below 2^-149, and r is normal: for quotients
//! from 1/8 on if d is in [`USUAL_DIVISORS`]. Smaller quotients may be wrong, but stay small.
//!
//! # Rounding
//!
//! `c` is the power of two at or below the quotient, 1 at least. In the binade of `1.5 * 2^22 c` numbers lie c/2 apart,
//! as those of E2M1 around the quotient do, so the sum rounds as E2M1 does, ties to the even code; subtracting is exact.
//!
//! # Sign
//!
//! The code's sign is set where the quotient is below 0, not where it is -0.0 or underflows to it: for
//! `x < -d 2^-150`. `x + d 2^-150`, rounded once, has just that sign, and is x where x is not tiny beside d.

use super::{block, e2m1, ue4m3};

/// Instructions that `core` has no stable name for.
pub trait Arithmetic: Copy {
    /// `a * b + c`, rounded once.
    fn fused(self, a: f32, b: f32, c: f32) -> f32;
    /// `min(x, bound)` and `max(x, bound)`; NaN stays NaN.
    fn at_most(self, x: f32, bound: f32) -> f32;
    /// See [`at_most`](Self::at_most).
    fn at_least(self, x: f32, bound: f32) -> f32;
    /// `c - a * b`, rounded once.
    fn fused_negative(self, a: f32, b: f32, c: f32) -> f32;
    /// `1 / x`, rounded to nearest, where x and the reciprocal are normal numbers.
    fn reciprocal(self, x: f32) -> f32;
    /// The larger of `a >= 0` and `|x|`; NaN if one is.
    fn larger_magnitude(self, a: f32, x: f32) -> f32;
    /// `value`, of which the compiler then knows nothing.
    fn opaque(self, value: u32) -> u32;
}

/// The processor's instructions, of the same meaning as the GPU's.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Processor;

#[cfg(not(target_arch = "nvptx64"))]
impl Arithmetic for Processor {
    #[inline(always)]
    fn fused(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn at_most(self, x: f32, bound: f32) -> f32 {
        if x > bound { bound } else { x }
    }

    #[inline(always)]
    fn at_least(self, x: f32, bound: f32) -> f32 {
        if x < bound { bound } else { x }
    }

    #[inline(always)]
    fn fused_negative(self, a: f32, b: f32, c: f32) -> f32 {
        (-a).mul_add(b, c)
    }

    #[inline(always)]
    fn reciprocal(self, x: f32) -> f32 {
        1.0 / x
    }

    #[inline(always)]
    fn larger_magnitude(self, a: f32, x: f32) -> f32 {
        if a.is_nan() || x.is_nan() { f32::NAN } else { a.max(x.abs()) }
    }

    #[inline(always)]
    fn opaque(self, value: u32) -> u32 {
        value
    }
}

/// Bits of the divisors for which the short division is exact where it matters: 2^-100 to 2^126.
pub const USUAL_DIVISORS: core::ops::RangeInclusive<u32> = (127 - 100) << 23..=(127 + 126) << 23;

/// Bits of the dividends and divisors for which it is always exact: 2^-60 to 2^60.
pub const MODERATE: core::ops::RangeInclusive<u32> = (127 - 60) << 23..=(127 + 60) << 23;

const fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

#[inline(always)]
fn is_in(bits: u32, range: &core::ops::RangeInclusive<u32>) -> bool {
    bits.wrapping_sub(*range.start()) <= *range.end() - *range.start()
}

/// Quantized elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Values<const N: usize> {
    /// Values of the E2M1 codes; meaningless where the scale is NaN.
    pub values: [f32; N],
    /// Value of the UE4M3 scale.
    pub scale: f32,
}

/// Largest magnitude; NaN if an element is.
#[inline(always)]
pub fn largest_magnitude<const N: usize>(x: &[f32; N], arithmetic: impl Arithmetic) -> f32 {
    let mut largest = 0.0;
    let mut i = 0;
    while i < N {
        largest = arithmetic.larger_magnitude(largest, x[i]);
        i += 1;
    }
    largest
}

/// Value of [`block::block_scale`] of a block with this largest magnitude.
#[inline(always)]
pub fn block_scale(amax: f32, g: f32, arithmetic: impl Arithmetic) -> f32 {
    let six_g = e2m1::MAX * g;
    // The same for many blocks, so the compiler moves it out of loops.
    let reciprocal = 1.0 / six_g;
    let s = if is_in(amax.to_bits(), &MODERATE) && is_in(six_g.to_bits(), &MODERATE) {
        let quotient = amax * reciprocal;
        arithmetic.fused(arithmetic.fused_negative(six_g, quotient, amax), reciprocal, quotient)
    } else if block::is_finite_magnitude(amax.to_bits()) {
        amax / six_g
    } else {
        f32::NAN
    };
    let s = if s == 0.0 { 1.0 } else { s };
    let s = if s < ue4m3::MIN_SUBNORMAL { ue4m3::MIN_SUBNORMAL } else { s };
    let s = if s > ue4m3::MAX { ue4m3::MAX } else { s };
    // As with the codes: numbers of the addend's binade lie as far apart as UE4M3's around s.
    let addend = f32::from_bits(s.to_bits() & 0x7F80_0000) * power_of_two(20);
    let least = power_of_two(14);
    let addend = if addend < least { least } else { addend };
    (s + addend) - addend
}

/// Codes of elements whose block has this largest magnitude and scale.
#[inline(always)]
pub fn round<const N: usize>(x: &[f32; N], amax: f32, scale: f32, g: f32, arithmetic: impl Arithmetic) -> Values<N> {
    // Where quotients are clamped: they round to 6 there.
    const BOUND: f32 = 6.5;
    let mut x = *x;
    let mut d = scale * g;
    if !is_in(d.to_bits(), &USUAL_DIVISORS) {
        // IEEE divisions, and then a division by 1. One loop that is not unrolled, so the array rotates.
        let mut i = arithmetic.opaque(0);
        while i < N as u32 {
            let quotient = x[0] / d;
            let clamped = if quotient > BOUND {
                BOUND
            } else if quotient < -BOUND {
                -BOUND
            } else if quotient.is_nan() {
                0.0
            } else {
                quotient
            };
            let mut j = 1;
            while j < N {
                x[j - 1] = x[j];
                j += 1;
            }
            x[N - 1] = clamped;
            i = arithmetic.opaque(i + 1);
        }
        d = 1.0;
    } else if amax > BOUND * d {
        let bound = BOUND * d;
        let mut i = 0;
        while i < N {
            x[i] = arithmetic.at_least(arithmetic.at_most(x[i], bound), -bound);
            i += 1;
        }
    }
    let reciprocal = arithmetic.reciprocal(d);
    let shift = d * power_of_two(-24);
    let mut values = [0.0; N];
    let mut i = 0;
    while i < N {
        let x = arithmetic.fused(shift, power_of_two(-126), x[i]);
        let quotient = x * reciprocal;
        let quotient = arithmetic.fused(arithmetic.fused_negative(d, quotient, x), reciprocal, quotient);
        let binade = f32::from_bits(quotient.to_bits() & 0x7F80_0000).max(1.0);
        let rounded = arithmetic.fused(binade, 1.5 * power_of_two(22), quotient);
        let value = arithmetic.fused(binade, -1.5 * power_of_two(22), rounded);
        values[i] = f32::from_bits(value.to_bits() | (x.to_bits() & 0x8000_0000));
        i += 1;
    }
    Values { values, scale }
}

/// [`block::quantize`], with any number of elements.
#[inline(always)]
pub fn quantize<const N: usize>(x: &[f32; N], g: f32, arithmetic: impl Arithmetic) -> Values<N> {
    let amax = largest_magnitude(x, arithmetic);
    round(x, amax, block_scale(amax, g, arithmetic), g, arithmetic)
}

impl<const N: usize> Values<N> {
    /// The scale's byte.
    #[inline(always)]
    pub fn scale_byte(&self) -> u8 {
        if self.scale.is_nan() {
            return ue4m3::NAN;
        }
        ((self.scale * power_of_two(-120)).to_bits() >> 20) as u8
    }

    /// E2M1 codes of elements `i` (bits 0..3) and `j` (bits 4..7); 0 where the scale is NaN.
    #[inline(always)]
    pub fn codes(&self, i: usize, j: usize) -> u32 {
        if self.scale.is_nan() {
            return 0;
        }
        let (low, high) = (self.values[i], self.values[j]);
        #[cfg(nvfp4_arch = "sm120")]
        return crate::ptx::matrix_fp4::convert_e2m1x2(low, high);
        #[cfg(not(nvfp4_arch = "sm120"))]
        {
            // The inverse of `e2m1::decode`.
            let code = |value: f32| {
                let bits = (value * power_of_two(-126)).to_bits();
                ((bits >> 22) & 7) | ((bits >> 28) & 8)
            };
            code(low) | code(high) << 4
        }
    }

    /// `code * scale` of elements `i` (low half) and `j` in f16; exact, NaN where the scale is NaN.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub fn f16_pair(&self, i: usize, j: usize) -> u32 {
        use crate::ptx::float::{convert_f16x2, multiply_f16x2};
        multiply_f16x2(convert_f16x2(self.values[i], self.values[j]), convert_f16x2(self.scale, self.scale))
    }
}

impl Values<{ super::BLOCK }> {
    /// As [`block::quantize`] returns it.
    #[inline(always)]
    pub fn block(&self) -> block::Block {
        let mut codes = 0;
        let mut i = 0;
        while i < super::BLOCK {
            codes |= (self.codes(i, i + 1) as u64) << (4 * i);
            i += 2;
        }
        block::Block { codes, scale: self.scale_byte() }
    }
}
