//! bf16 and f16 as bit patterns: the conversions that the kernels and the CPU engine need, bit for bit alike.

/// Value of a bf16 bit pattern; exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Nearest bf16 of `x`, ties to even; overflow gives infinity, NaN stays (quiet) NaN.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Value of an f16 bit pattern; exact, subnormals, infinities and NaN included.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let magnitude = (bits & 0x7FFF) as u32;
    let value = if magnitude >= 0x7C00 {
        0x7F80_0000 | ((magnitude & 0x3FF) << 13)
    } else {
        (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits()
    };
    f32::from_bits(sign | value)
}

/// f16 bit pattern of `x`, which must be NaN, zero, or an f16 normal number with at most 11 significant bits: then
/// exact. Every product of an E2M1 and a UE4M3 number is one.
#[inline(always)]
pub fn exact_f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return 0x7FFF;
    }
    if magnitude == 0 {
        return sign;
    }
    sign | ((magnitude >> 13) - (112 << 10)) as u16
}
