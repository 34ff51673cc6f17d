//! The NVFP4 quantizer: one rule for weights and activations (ModelOpt's), f32 arithmetic, IEEE division.

use super::{BLOCK, e2m1, float16, ue4m3};

/// Largest value of an NVFP4 block before the global scale: 6 * 448.
pub const MAX: f32 = e2m1::MAX * ue4m3::MAX;

/// Sixteen quantized elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Sixteen E2M1 codes, element i at bits 4i..4i+3: the checkpoint's bytes, little-endian.
    pub codes: u64,
    /// UE4M3 scale; [`ue4m3::NAN`] when an element was not finite.
    pub scale: u8,
}

/// Bits of |x|: as integers they order like the magnitudes, with infinity and then NaN above all finite numbers.
#[inline(always)]
pub fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// Whether [`magnitude_bits`] are those of a finite number.
#[inline(always)]
pub fn is_finite_magnitude(bits: u32) -> bool {
    bits < 0x7F80_0000
}

/// Decode scale g of a tensor or row whose largest magnitude has these bits: `amax / 2688`.
///
/// Never 0, infinite or NaN: a zero or not finite amax gives 1, also where the quotient underflows to 0.
#[inline(always)]
pub fn global_scale(amax_bits: u32) -> f32 {
    let g = f32::from_bits(amax_bits) / MAX;
    if !is_finite_magnitude(amax_bits) || g == 0.0 { 1.0 } else { g }
}

/// UE4M3 scale of a block whose largest magnitude has these bits, under the decode scale `g`.
#[inline(always)]
pub fn block_scale(amax_bits: u32, g: f32) -> u8 {
    if !is_finite_magnitude(amax_bits) {
        return ue4m3::NAN;
    }
    let s = f32::from_bits(amax_bits) / (e2m1::MAX * g);
    let s = if s == 0.0 { 1.0 } else { s };
    let s = if s < ue4m3::MIN_SUBNORMAL { ue4m3::MIN_SUBNORMAL } else { s };
    ue4m3::encode(s)
}

/// What the elements of a block with this scale are divided by.
#[inline(always)]
pub fn divisor(scale: u8, g: f32) -> f32 {
    ue4m3::decode(scale) * g
}

/// Quantizes sixteen elements under the decode scale `g`.
///
/// `s = amax / (6 g)`, 1 where that is 0; `scale = ue4m3(clamp(s, 2^-9, 448))`; `code = e2m1(x / (scale * g))`.
/// A block that holds NaN or infinity gets the scale NaN and zero codes.
#[inline(always)]
pub fn quantize(x: &[f32; BLOCK], g: f32) -> Block {
    let mut amax_bits = 0;
    for &value in x {
        let bits = magnitude_bits(value);
        if bits > amax_bits {
            amax_bits = bits;
        }
    }
    let scale = block_scale(amax_bits, g);
    let mut codes = 0;
    if scale != ue4m3::NAN {
        let divisor = divisor(scale, g);
        let mut i = 0;
        while i < BLOCK {
            codes |= (e2m1::encode(x[i] / divisor) as u64) << (4 * i);
            i += 1;
        }
    }
    Block { codes, scale }
}

impl Block {
    /// E2M1 code of element `i`.
    #[inline(always)]
    pub fn code(&self, i: usize) -> u8 {
        ((self.codes >> (4 * i)) & 15) as u8
    }

    /// `code * scale` of element `i` in f16; exact, NaN where the scale is NaN.
    #[inline(always)]
    pub fn f16(&self, i: usize) -> u16 {
        float16::exact_f32_to_f16(e2m1::decode(self.code(i)) * ue4m3::decode(self.scale))
    }
}
