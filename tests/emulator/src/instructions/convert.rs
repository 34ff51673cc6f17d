//! Conversions (PTX ISA 9.7.9.21: `cvt`).

use super::small_float::{Format, Rounding};
use super::{Decoder, Operation, Refusal, Statement, binary, unary};
use crate::decode::Modifiers;
use crate::types::{Type, sign_extend, truncate};

/// A scalar floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    Narrow(Format),
    Double,
}

impl Float {
    fn of(kind: Type) -> Option<Self> {
        Some(match kind {
            Type::F16 => Self::Narrow(Format::F16),
            Type::Bf16 => Self::Narrow(Format::BF16),
            Type::F32 => Self::Narrow(Format::F32),
            Type::F64 => Self::Double,
            _ => return None,
        })
    }

    fn decode(self, bits: u64) -> f64 {
        match self {
            Self::Narrow(format) => format.decode(bits as u32),
            Self::Double => f64::from_bits(bits),
        }
    }

    fn encode(self, value: f64, rounding: Rounding, saturate: bool) -> u64 {
        match self {
            Self::Narrow(format) => u64::from(format.encode(value, rounding, saturate)),
            Self::Double => value.to_bits(),
        }
    }
}

/// Modifiers of a floating-point conversion.
#[derive(Clone, Copy)]
struct Finish {
    rounding: Rounding,
    /// To the unit interval; NaN becomes 0.
    unit: bool,
    /// To the largest number.
    finite: bool,
    relu: bool,
    flush: bool,
}

impl Finish {
    fn before(self, value: f64, from: Float) -> f64 {
        let flushes = self.flush && from == Float::Narrow(Format::F32) && value.abs() < f64::from(f32::MIN_POSITIVE);
        if flushes { 0f64.copysign(value) } else { value }
    }

    fn after(self, value: f64, to: Float) -> u64 {
        let value = if self.unit { if value > 0.0 { value.min(1.0) } else { 0.0 } } else { value };
        let value = if self.relu && value <= 0.0 { 0.0 } else { value };
        let single = to == Float::Narrow(Format::F32);
        let flushes = self.flush && single && Format::F32.is_tiny(value, self.rounding);
        to.encode(if flushes { 0f64.copysign(value) } else { value }, self.rounding, self.finite)
    }
}

/// Integer to integer: the value as a wide signed number, saturated or cut off.
fn integer(a: u64, from: Type, to: Type, saturate: bool) -> u64 {
    let value = wide(a, from);
    let value = if saturate {
        let (low, high) = range(to);
        value.clamp(low, high)
    } else {
        value
    };
    truncate(value as u64, to.bits())
}

fn wide(a: u64, from: Type) -> i128 {
    if from.is_signed() { i128::from(sign_extend(a, from.bits())) } else { i128::from(truncate(a, from.bits())) }
}

fn range(kind: Type) -> (i128, i128) {
    let bits = kind.bits();
    if kind.is_signed() { (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) }
}

/// Floating point to integer, clamped to its range.
fn float_to_integer(value: f64, rounding: Rounding, to: Type, wide: bool) -> u64 {
    if value.is_nan() {
        // Zero, but for 64-bit types on either side the lowest number, or the same bits.
        return if wide { 1 << (to.bits() - 1) } else { 0 };
    }
    let (low, high) = range(to);
    truncate((rounding.integral(value) as i128).clamp(low, high) as u64, to.bits())
}

/// Integer to floating point. The integer may have more bits than f64: it is split, and the low part decides ties.
fn integer_to_float(value: i128, to: Float, rounding: Rounding) -> u64 {
    if to == Float::Double {
        let nearest = value as f64;
        let error = value - nearest as i128;
        // Nearest to even is what `as` does; the others step to the neighbour on the wanted side.
        let step = match rounding {
            Rounding::NearestEven | Rounding::NearestAway => 0,
            Rounding::Zero => if value > 0 { error.min(0) } else { error.max(0) }.signum(),
            Rounding::Down => error.min(0).signum(),
            Rounding::Up => error.max(0).signum(),
        };
        let result = match step {
            -1 => nearest.next_down(),
            1 => nearest.next_up(),
            _ => nearest,
        };
        return result.to_bits();
    }
    let high = (value >> 32) as f64 * 4_294_967_296.0;
    let low = (value & 0xFFFF_FFFF) as f64;
    to.encode(super::small_float::add_odd(high, low), rounding, false)
}

const FLOAT_ROUNDINGS: [(&str, Rounding); 5] = [
    ("rn", Rounding::NearestEven),
    ("rna", Rounding::NearestAway),
    ("rz", Rounding::Zero),
    ("rm", Rounding::Down),
    ("rp", Rounding::Up),
];

const INTEGER_ROUNDINGS: [(&str, Rounding); 4] =
    [("rni", Rounding::NearestEven), ("rzi", Rounding::Zero), ("rmi", Rounding::Down), ("rpi", Rounding::Up)];

/// The packed formats of two elements, and the width of one.
const PACKED: [(&str, (Format, u32)); 5] = [
    ("e4m3x2", (Format::E4M3, 8)),
    ("e5m2x2", (Format::E5M2, 8)),
    ("e2m1x2", (Format::E2M1, 4)),
    ("f16x2", (Format::F16, 16)),
    ("bf16x2", (Format::BF16, 16)),
];

/// A type of `cvt`.
enum Kind {
    Scalar(Type),
    Packed(Format, u32),
    Tf32,
}

fn kind(modifiers: &mut Modifiers<'_>) -> Result<Kind, Refusal> {
    let name = modifiers.next().ok_or("its types")?;
    if let Some(&(_, (format, bits))) = PACKED.iter().find(|(packed, _)| *packed == name) {
        return Ok(Kind::Packed(format, bits));
    }
    if name == "tf32" {
        return Ok(Kind::Tf32);
    }
    let scalar = Type::named(name).filter(|kind| kind.is_integer() || Float::of(*kind).is_some());
    scalar.map(Kind::Scalar).ok_or_else(|| format!("type .{name}").into())
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "cvt" {
        return Ok(None);
    }
    if s.modifiers.has("pack") {
        return Ok(None);
    }
    let integral = s.modifiers.one_of(&INTEGER_ROUNDINGS);
    let rounding = s.modifiers.one_of(&FLOAT_ROUNDINGS);
    let finish = Finish {
        rounding: rounding.unwrap_or(Rounding::NearestEven),
        unit: s.modifiers.take("sat"),
        finite: s.modifiers.take("satfinite"),
        relu: s.modifiers.take("relu"),
        flush: s.modifiers.take("ftz"),
    };
    let (to, from) = (kind(&mut s.modifiers)?, kind(&mut s.modifiers)?);
    match (to, from) {
        (Kind::Scalar(to), Kind::Scalar(from)) => {
            scalar(d, s, [to, from], integral, rounding.is_some(), finish).map(Some)
        }
        (Kind::Tf32, Kind::Scalar(Type::F32)) if rounding.is_some() && integral.is_none() => {
            if finish.relu && finish.rounding == Rounding::NearestAway {
                return Err("modifier .relu".into());
            }
            // The f32 format with 10 bits of mantissa; the rest is 0.
            let (destination, a) = (d.destination(s, 0, Type::B32)?, d.source(s, 1, Type::F32)?);
            Ok(Some(unary(destination, a, move |a| tf32(a, finish))))
        }
        (Kind::Packed(format, bits), from) if rounding.is_some() && integral.is_none() => {
            packed(d, s, (format, bits), from, finish).map(Some)
        }
        _ => Err("a conversion between these types".into()),
    }
}

/// `cvt.tf32.f32` (9.7.9.21).
fn tf32(a: u64, finish: Finish) -> u64 {
    let value = Format::F32.decode(a as u32);
    if finish.rounding == Rounding::NearestAway {
        // No instruction does this: `ptxas` adds half of what is cut off to finite numbers, and takes the last place off what is
        // not finite then. Of a NaN too it cuts the low bits, without which it may be an infinity.
        let rounded = (a + if value.is_finite() { 0x1000 } else { 0 }) & 0xFFFF_E000;
        let saturates = finish.finite && rounded & 0x7F80_0000 == 0x7F80_0000;
        return if saturates { rounded - 0x2000 } else { rounded };
    }
    if value.is_nan() {
        return 0x7FFF_E000;
    }
    let value = if finish.relu && value <= 0.0 { 0.0 } else { value };
    // Drop 13 bits: as an integer the magnitude rounds like the number.
    let bits = (value as f32).to_bits();
    let (sign, magnitude) = (bits & 0x8000_0000, f64::from(bits & 0x7FFF_FFFF));
    let rounded = (finish.rounding.integral(magnitude / 8192.0) * 8192.0) as u32;
    let rounded = if finish.finite { rounded.min(0x7F7F_E000) } else { rounded.min(0x7F80_0000) };
    u64::from(sign | rounded)
}

/// `cvt` (9.7.9.21) of one number; 6.5.1 says which conversions there are.
fn scalar(
    d: &mut Decoder,
    s: &mut Statement<'_>,
    [to, from]: [Type; 2],
    integral: Option<Rounding>,
    rounds: bool,
    finish: Finish,
) -> Result<Operation, Refusal> {
    let (destination, a) = (d.wide_destination(s, 0, to)?, d.wide_source(s, 1, from)?);
    let width = d.width(destination);
    let extend =
        move |value: u64| if to.is_signed() { truncate(sign_extend(value, to.bits()) as u64, width) } else { value };
    Ok(match (Float::of(to), Float::of(from)) {
        (None, None) if integral.is_none() && !rounds => {
            unary(destination, a, move |a| extend(integer(a, from, to, finish.unit)))
        }
        (None, Some(source)) => {
            let rounding = integral.ok_or("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")?;
            let wide = from == Type::F64 || to.bits() == 64;
            unary(destination, a, move |a| {
                let value = finish.before(source.decode(a), source);
                extend(float_to_integer(value, rounding, to, wide))
            })
        }
        (Some(target), None) if integral.is_none() && rounds => {
            unary(destination, a, move |a| integer_to_float(wide(a, from), target, finish.rounding))
        }
        (Some(target), Some(source)) if integral.is_some() && to == from && !rounds => {
            let rounding = integral.unwrap_or(Rounding::NearestEven);
            unary(destination, a, move |a| {
                let value = finish.before(source.decode(a), source);
                finish.after(rounding.integral(value), target)
            })
        }
        (Some(target), Some(source)) if integral.is_none() && (rounds || from.bits() <= to.bits()) => {
            unary(destination, a, move |a| finish.after(finish.before(source.decode(a), source), target))
        }
        _ => return Err("its rounding".into()),
    })
}

/// `cvt` (9.7.9.21) to two packed elements: from two f32, the first operand to the upper one, or from another packed pair.
fn packed(
    d: &mut Decoder,
    s: &mut Statement<'_>,
    (format, bits): (Format, u32),
    from: Kind,
    finish: Finish,
) -> Result<Operation, Refusal> {
    let narrow = bits < 16;
    if narrow && !(finish.finite && finish.rounding == Rounding::NearestEven) {
        return Err("without .rn.satfinite".into());
    }
    let container = |bits: u32| match bits {
        16 => Type::B32,
        8 => Type::B16,
        _ => Type::B8,
    };
    let destination = d.destination(s, 0, container(bits))?;
    let element = move |value: f64| finish.after(value, Float::Narrow(format));
    match from {
        Kind::Scalar(Type::F32) => {
            let sources = [d.source(s, 1, Type::F32)?, d.source(s, 2, Type::F32)?];
            Ok(binary(destination, sources, move |a, b| {
                let [a, b] = [a, b].map(|x| element(Format::F32.decode(x as u32)));
                a << bits | b
            }))
        }
        Kind::Packed(source, source_bits) if narrow != (source_bits < 16) => {
            if !narrow && format != Format::F16 {
                return Err("a conversion between these types".into());
            }
            let a = d.source(s, 1, container(source_bits))?;
            Ok(unary(destination, a, move |a| {
                let low = element(source.decode(truncate(a, source_bits) as u32));
                let high = element(source.decode(truncate(a >> source_bits, source_bits) as u32));
                high << bits | low
            }))
        }
        _ => Err("a conversion between these types".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers() {
        assert_eq!(integer(0xFF, Type::S8, Type::U32, false), 0xFFFF_FFFF);
        assert_eq!(integer(0xFF, Type::U8, Type::S32, false), 0xFF);
        assert_eq!(integer(0x1_0000_0005, Type::U64, Type::U32, false), 5);
        assert_eq!(integer(300, Type::U32, Type::U8, true), 255);
        assert_eq!(integer(0xFFFF_FFFF, Type::S32, Type::U8, true), 0);
        assert_eq!(integer(0xFFFF_FFFF, Type::U32, Type::S32, true), 0x7FFF_FFFF);
    }

    #[test]
    fn floats_to_integers() {
        let convert = |x, rounding| float_to_integer(x, rounding, Type::S32, false);
        assert_eq!(convert(2.5, Rounding::NearestEven), 2);
        assert_eq!(convert(-2.5, Rounding::Down), 0xFFFF_FFFD);
        assert_eq!(convert(1e20, Rounding::Zero), 0x7FFF_FFFF);
        assert_eq!(convert(f64::NAN, Rounding::Zero), 0);
        assert_eq!(float_to_integer(f64::NAN, Rounding::Zero, Type::S64, true), 1 << 63);
        assert_eq!(float_to_integer(-1.0, Rounding::Zero, Type::U32, false), 0);
        assert_eq!(float_to_integer(f64::INFINITY, Rounding::Zero, Type::U64, true), u64::MAX);
    }

    #[test]
    fn integers_to_floats() {
        let f32_of = |x, rounding| f32::from_bits(integer_to_float(x, Float::Narrow(Format::F32), rounding) as u32);
        assert_eq!(f32_of(16_777_217, Rounding::NearestEven), 16_777_216.0);
        assert_eq!(f32_of(16_777_217, Rounding::Up), 16_777_218.0);
        assert_eq!(f32_of(-16_777_217, Rounding::Zero), -16_777_216.0);
        // Just above a tie, by a bit that f64 alone would lose.
        let above_tie = (1i128 << 63) + (1 << 39) + 1;
        assert_eq!(f32_of(above_tie, Rounding::NearestEven), 9_223_373_136_366_403_584.0);
        assert_eq!(f32_of(above_tie - 1, Rounding::NearestEven), 9_223_372_036_854_775_808.0);
        let f64_of = |x, rounding| f64::from_bits(integer_to_float(x, Float::Double, rounding));
        assert_eq!(f64_of((1 << 53) + 1, Rounding::Up), 9_007_199_254_740_994.0);
        assert_eq!(f64_of((1 << 53) + 1, Rounding::Down), 9_007_199_254_740_992.0);
    }

    #[test]
    fn tensor_floats() {
        let finish = |rounding| Finish { rounding, unit: false, finite: false, relu: false, flush: false };
        assert_eq!(tf32(0x3F80_1000, finish(Rounding::NearestEven)), 0x3F80_0000);
        assert_eq!(tf32(0x3F80_1000, finish(Rounding::NearestAway)), 0x3F80_2000);
        assert_eq!(tf32(0xBF80_1FFF, finish(Rounding::Zero)), 0xBF80_0000);
        assert_eq!(tf32(0xFF80_1FFF, finish(Rounding::NearestAway)), 0xFF80_0000);
        assert_eq!(tf32(0x7F80_2000, finish(Rounding::NearestAway)), 0x7F80_2000);
        let saturating = Finish { finite: true, ..finish(Rounding::NearestAway) };
        assert_eq!(tf32(0x7F7F_FFFF, finish(Rounding::NearestAway)), 0x7F80_0000);
        assert_eq!(tf32(0xFF7F_FFFF, saturating), 0xFF7F_E000);
        assert_eq!(tf32(0x7F80_0000, saturating), 0x7F7F_E000);
        assert_eq!(tf32(0x7FC0_0000, saturating), 0x7FBF_E000);
    }
}
