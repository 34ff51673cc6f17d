//! UE4M3, the block scale of NVFP4: an E4M3 byte whose bit 7 is zero.
//!
//! Bias 7, largest 448 (0x7E), 0x7F is NaN, smallest normal 2^-6, smallest subnormal 2^-9 (OCP 8-bit Floating Point
//! Specification 1.0, section 5).

/// The NaN byte.
pub const NAN: u8 = 0x7F;

/// Largest value.
pub const MAX: f32 = 448.0;

/// Smallest value above zero, 2^-9.
pub const MIN_SUBNORMAL: f32 = 1.0 / 512.0;

/// Nearest byte of `x >= 0`, ties to even, saturating at 448. NaN gives 0x7F; negative numbers give 0.
///
/// ```
/// use nvfp4_moe_device::format::ue4m3::encode;
/// assert_eq!(encode(1.0), 0x38);
/// assert_eq!(encode(1e9), 0x7E);
/// ```
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return NAN;
    }
    if x >= MAX {
        return 0x7E;
    }
    if x < 1.0 / 64.0 {
        // The sum's unit in the last place is 2^-9, so adding rounds to a multiple of it, ties to even.
        let shifted = if x > 0.0 { x } else { 0.0 } + 16384.0;
        return (shifted.to_bits() & 0xF) as u8;
    }
    let bits = x.to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    ((rounded >> 20) - (120 << 3)) as u8
}

/// Value of `byte`; exact. 0x7F is NaN; bit 7 is ignored.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    let bits = (byte & 0x7F) as u32;
    if bits == NAN as u32 {
        return f32::NAN;
    }
    // The byte's exponent field in f32's gives the value times 2^-120, subnormals included.
    f32::from_bits(bits << 20) * f32::from_bits((127 + 120) << 23)
}

/// Power of two by which an f16 whose bits 7..13 are the byte's is smaller than the byte's value, subnormals included.
pub const F16_SCALE_LOG2: i32 = -8;
