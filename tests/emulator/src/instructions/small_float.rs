//! Narrow floating-point formats: exact values, and rounding into them.

/// How a value is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    /// To nearest, ties to even.
    NearestEven,
    /// To nearest, ties away from zero.
    NearestAway,
    /// Toward zero.
    Zero,
    /// Toward negative infinity.
    Down,
    /// Toward positive infinity.
    Up,
}

impl Rounding {
    /// `value` to an integer.
    pub(super) fn integral(self, value: f64) -> f64 {
        match self {
            Self::NearestEven => value.round_ties_even(),
            Self::NearestAway => value.round(),
            Self::Zero => value.trunc(),
            Self::Down => value.floor(),
            Self::Up => value.ceil(),
        }
    }
}

/// A binary format with a sign bit, at most 32 bits wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    exponent: u32,
    mantissa: u32,
    bias: i32,
    /// Bits of infinity, where there is one.
    infinity: Option<u32>,
    /// Bits of the NaN that conversions yield, where there is one.
    nan: Option<u32>,
    /// Bits of the largest finite number.
    largest: u32,
}

impl Format {
    const fn ieee(exponent: u32, mantissa: u32) -> Self {
        let bias = (1 << (exponent - 1)) - 1;
        let infinity = ((1 << exponent) - 1) << mantissa;
        let nan = (1 << (exponent + mantissa)) - 1;
        Self { exponent, mantissa, bias, infinity: Some(infinity), nan: Some(nan), largest: infinity - 1 }
    }

    pub(super) const F32: Self = Self::ieee(8, 23);
    pub(super) const F16: Self = Self::ieee(5, 10);
    pub(super) const BF16: Self = Self::ieee(8, 7);
    pub(super) const E5M2: Self = Self::ieee(5, 2);
    pub(super) const E4M3: Self =
        Self { exponent: 4, mantissa: 3, bias: 7, infinity: None, nan: Some(0x7F), largest: 0x7E };
    pub(super) const E2M1: Self = Self { exponent: 2, mantissa: 1, bias: 1, infinity: None, nan: None, largest: 7 };

    /// Value of the low bits, exactly.
    pub(super) fn decode(self, bits: u32) -> f64 {
        let magnitude = bits & ((1 << (self.exponent + self.mantissa)) - 1);
        let negative = bits >> (self.exponent + self.mantissa) & 1 == 1;
        let value = if magnitude > self.largest {
            if self.infinity == Some(magnitude) { f64::INFINITY } else { f64::NAN }
        } else {
            let exponent = (magnitude >> self.mantissa) as i32;
            let fraction = magnitude & ((1 << self.mantissa) - 1);
            let significand = if exponent == 0 { fraction } else { fraction | 1 << self.mantissa };
            f64::from(significand) * power(exponent.max(1) - self.bias - self.mantissa as i32)
        };
        if negative { -value } else { value }
    }

    /// Whether `.ftz` flushes `value`: it does what is still below the smallest normal number when it is rounded as if
    /// exponents had no lower end. So (1 - 2^-24) * 2^-126, that f32 can only round up, becomes 0, and (1 - 2^-46) * 2^-126 does not.
    pub(super) fn is_tiny(self, value: f64, rounding: Rounding) -> bool {
        // Twice as large there are enough bits for it.
        let magnitude = self.encode(2.0 * value, rounding, false) & ((1 << (self.exponent + self.mantissa)) - 1);
        magnitude < 2 << self.mantissa
    }

    /// `value` rounded once. Beyond the largest number: with `saturate` (or without infinity) the largest, else as the
    /// rounding says. NaN: the format's, or the largest number where it has none.
    pub(super) fn encode(self, value: f64, rounding: Rounding, saturate: bool) -> u32 {
        let sign = u32::from(value.is_sign_negative()) << (self.exponent + self.mantissa);
        if value.is_nan() {
            return self.nan.unwrap_or(self.largest);
        }
        let overflow = || match (self.infinity, rounding) {
            _ if saturate => sign | self.largest,
            (None, _) => sign | self.nan.unwrap_or(self.largest),
            (Some(infinity), _) if value.is_infinite() => sign | infinity,
            (Some(infinity), Rounding::NearestEven | Rounding::NearestAway) => sign | infinity,
            (Some(infinity), Rounding::Up) if value > 0.0 => infinity,
            (Some(infinity), Rounding::Down) if value < 0.0 => sign | infinity,
            _ => sign | self.largest,
        };
        if value.is_infinite() {
            return overflow();
        }
        let exponent = ((value.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(1 - self.bias);
        let scaled = rounding.integral(value / power(exponent - self.mantissa as i32)).abs() as u32;
        // Carries into the exponent, also from the subnormal numbers.
        let magnitude = (((exponent + self.bias - 1) as u32) << self.mantissa) + scaled;
        if exponent + self.bias - 1 > 1 << self.exponent || magnitude > self.largest {
            overflow()
        } else {
            sign | magnitude
        }
    }
}

/// 2^n, also subnormal.
pub(super) fn power(n: i32) -> f64 {
    if n >= -1022 { f64::from_bits(((n + 1023) as u64) << 52) } else { f64::from_bits(1 << (n + 1074)) }
}

/// `a + b` so that one more rounding to a much narrower format gives what rounding the exact sum gives (round to odd).
#[inline(always)]
pub(super) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let virtual_b = sum - a;
    // NaN where the sum is not finite.
    let error = (a - (sum - virtual_b)) + (b - virtual_b);
    let bits = sum.to_bits();
    let is_changed = error.abs() > 0.0 && bits & 1 == 0;
    let away = (error > 0.0) == (sum > 0.0);
    let step = if away { 1 } else { u64::MAX };
    f64::from_bits(bits.wrapping_add(if is_changed { step } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_survives() {
        for (format, bits) in
            [(Format::F16, 16), (Format::BF16, 16), (Format::E5M2, 8), (Format::E4M3, 8), (Format::E2M1, 4)]
        {
            for pattern in 0..1u32 << bits {
                let value = format.decode(pattern);
                if value.is_nan() {
                    continue;
                }
                for rounding in [Rounding::NearestEven, Rounding::Zero, Rounding::Up, Rounding::Down] {
                    assert_eq!(format.encode(value, rounding, false), pattern, "{format:?} {pattern:#x}");
                }
            }
        }
        for pattern in (0..0x7F80_0000u32).step_by(9973) {
            assert_eq!(Format::F32.decode(pattern), f64::from(f32::from_bits(pattern)));
            assert_eq!(Format::F32.encode(f64::from(f32::from_bits(pattern)), Rounding::Zero, false), pattern);
        }
    }

    #[test]
    fn against_half() {
        for bits in (0..u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            if !x.is_nan() {
                let exact = f64::from(x);
                assert_eq!(
                    Format::F16.encode(exact, Rounding::NearestEven, false),
                    u32::from(half::f16::from_f32(x).to_bits())
                );
                assert_eq!(
                    Format::BF16.encode(exact, Rounding::NearestEven, false),
                    u32::from(half::bf16::from_f32(x).to_bits())
                );
            }
        }
    }

    #[test]
    fn ties_and_ends() {
        let e2m1 = |x| Format::E2M1.encode(x, Rounding::NearestEven, true);
        let expected = [(0.25, 0), (0.26, 1), (0.75, 2), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (100.0, 7), (-0.1, 8)];
        for (x, code) in expected {
            assert_eq!(e2m1(x), code, "{x}");
        }
        assert_eq!(e2m1(f64::NAN), 7);
        let e4m3 = |x| Format::E4M3.encode(x, Rounding::NearestEven, true);
        assert_eq!((e4m3(448.0), e4m3(1e9), e4m3(f64::NAN), e4m3(-500.0)), (0x7E, 0x7E, 0x7F, 0xFE));
        assert_eq!((e4m3(power(-10)), e4m3(power(-10) * 1.1), e4m3(power(-9))), (0, 1, 1));
        assert_eq!(Format::F16.encode(65_520.0, Rounding::NearestEven, false), 0x7C00);
        assert_eq!(Format::F16.encode(65_519.0, Rounding::NearestEven, false), 0x7BFF);
        assert_eq!(Format::F16.encode(1e9, Rounding::Zero, false), 0x7BFF);
        assert_eq!(Format::F16.encode(1e-9, Rounding::Up, false), 1);
    }

    #[test]
    fn tiny_numbers() {
        use Rounding::{Down, NearestEven, Up, Zero};
        for (format, smallest) in [(Format::F32, power(-126)), (Format::F16, power(-14))] {
            let half_ulp = power(-2 - format.mantissa as i32);
            // Below the tie between the last number before the smallest normal one and it; the tie; above it.
            let cases = [
                (1.0 - 1.5 * half_ulp, [true, true, true, false]),
                (1.0 - half_ulp, [false, true, true, false]),
                (1.0 - 0.5 * half_ulp, [false, true, true, false]),
                (1.0 - 2.0 * half_ulp, [true; 4]),
                (1.0, [false; 4]),
                (0.25, [true; 4]),
                (0.0, [true; 4]),
                (f64::INFINITY, [false; 4]),
                (f64::NAN, [false; 4]),
            ];
            for (x, expected) in cases {
                for (rounding, expected) in [NearestEven, Zero, Down, Up].into_iter().zip(expected) {
                    assert_eq!(format.is_tiny(x * smallest, rounding), expected, "{format:?} {x} {rounding:?}");
                }
                assert_eq!(format.is_tiny(-x * smallest, Down), expected[3], "{format:?} -{x}");
            }
        }
    }

    #[test]
    fn sums_rounded_to_odd() {
        // 1 + 2^-11 is a tie for f16; a crumb above it decides.
        let sum = add_odd(1.0 + power(-11), power(-80));
        assert_eq!(Format::F16.encode(sum, Rounding::NearestEven, false), 0x3C01);
        let sum = add_odd(1.0 + power(-11), -power(-80));
        assert_eq!(Format::F16.encode(sum, Rounding::NearestEven, false), 0x3C00);
    }
}
