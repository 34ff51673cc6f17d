//! E2M1, the 4-bit element of NVFP4: 1 sign, 2 exponent, 1 mantissa bit.
//!
//! Bit 3 is the sign, magnitudes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0, section 5.3.3).
//! No infinity and no NaN.

/// Magnitude of each code without its sign bit.
pub const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Nearest code of `x`, ties to the even code, saturating at 6.
///
/// The sign bit is set for every `x < 0`, also where the magnitude rounds to 0 (code 8); -0.0 and NaN give code 0.
/// Infinities saturate.
///
/// ```
/// use nvfp4_moe_device::format::e2m1::encode;
/// assert_eq!(encode(2.5), 4); // tie between 2 (code 4) and 3 (code 5)
/// assert_eq!(encode(-0.1), 8);
/// ```
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let magnitude = f32::from_bits(x.to_bits() & 0x7FFF_FFFF);
    // Midpoints between neighbours; a tie goes up exactly where the upper code is even.
    let code = (magnitude > 0.25) as u8
        + (magnitude >= 0.75) as u8
        + (magnitude > 1.25) as u8
        + (magnitude >= 1.75) as u8
        + (magnitude > 2.5) as u8
        + (magnitude >= 3.5) as u8
        + (magnitude > 5.0) as u8;
    code | (((x < 0.0) as u8) << 3)
}

/// Value of the low four bits of `code`; exact. Code 8 is -0.0.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    let sign = ((code as u32) & 8) << 28;
    // Exponent and mantissa placed at the top of f32's own give the value times 2^-126.
    f32::from_bits(sign | (((code as u32) & 7) << 22)) * f32::from_bits((127 + 126) << 23)
}

/// Twice the value of the low four bits of `code`, an integer in -12..=12.
#[inline(always)]
pub const fn decode_doubled(code: u8) -> i8 {
    const DOUBLED: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let magnitude = DOUBLED[(code & 7) as usize];
    if code & 8 != 0 { -magnitude } else { magnitude }
}
