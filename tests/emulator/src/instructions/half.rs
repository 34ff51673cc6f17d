//! f16 and bf16 arithmetic, single and packed (PTX ISA 9.7.4).

use super::float::extreme;
use super::small_float::{Format, Rounding, add_odd};
use super::{Decoder, Operation, Refusal, Statement, binary, ternary, unary};
use crate::types::Type;

/// The format of an element and how many a register holds.
fn format(kind: Type) -> Option<(Format, bool)> {
    Some(match kind {
        Type::F16 => (Format::F16, false),
        Type::F16x2 => (Format::F16, true),
        Type::Bf16 => (Format::BF16, false),
        Type::Bf16x2 => (Format::BF16, true),
        _ => return None,
    })
}

/// Applies `f` to each 16-bit element.
#[inline(always)]
fn elements<const N: usize>(packed: bool, sources: [u64; N], f: impl Fn([u32; N]) -> u32) -> u64 {
    let low = u64::from(f(sources.map(|x| x as u32 & 0xFFFF)));
    if packed { low | u64::from(f(sources.map(|x| (x >> 16) as u32 & 0xFFFF))) << 16 } else { low }
}

/// What happens to a result before and after it is rounded.
#[derive(Clone, Copy)]
struct Finish {
    format: Format,
    flush: bool,
    saturate: bool,
    relu: bool,
}

impl Finish {
    fn before(self, bits: u32) -> f64 {
        let value = self.format.decode(bits);
        let smallest = if self.format == Format::F16 { super::small_float::power(-14) } else { 0.0 };
        if self.flush && value.abs() < smallest { 0f64.copysign(value) } else { value }
    }

    /// An operand's bits, or a zero instead of a subnormal number.
    fn flushed(self, bits: u32) -> u32 {
        if self.flush && bits & 0x7C00 == 0 { bits & 0x8000 } else { bits }
    }

    fn after(self, value: f64) -> u32 {
        let value = if self.saturate { if value > 0.0 { value.min(1.0) } else { 0.0 } } else { value };
        let value = if self.relu && value <= 0.0 { 0.0 } else { value };
        let flushes = self.flush && self.format.is_tiny(value, Rounding::NearestEven);
        self.format.encode(if flushes { 0f64.copysign(value) } else { value }, Rounding::NearestEven, false)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if !matches!(s.name, "add" | "sub" | "mul" | "fma" | "min" | "max" | "abs" | "neg" | "tanh" | "ex2") {
        return Ok(None);
    }
    let kinds = [("f16", Type::F16), ("f16x2", Type::F16x2), ("bf16", Type::Bf16), ("bf16x2", Type::Bf16x2)];
    let Some(kind) = s.modifiers.one_of(&kinds) else { return Ok(None) };
    let (format, packed) = format(kind).ok_or("its type")?;
    let extremes = matches!(s.name, "min" | "max");
    let nan = extremes && s.modifiers.take("NaN");
    let xorsign = extremes && s.modifiers.take("xorsign");
    if xorsign {
        s.modifiers.need("abs")?;
    }
    let rounds = matches!(s.name, "add" | "sub" | "mul" | "fma");
    if s.name == "fma" {
        s.modifiers.need("rn")?;
    } else if rounds {
        s.modifiers.take("rn");
    }
    if matches!(s.name, "tanh" | "ex2") {
        s.modifiers.need("approx")?;
        if format == Format::BF16 && s.name == "ex2" {
            s.modifiers.need("ftz")?;
        }
    }
    let finish = Finish {
        format,
        flush: format == Format::F16 && !matches!(s.name, "tanh" | "ex2") && s.modifiers.take("ftz"),
        saturate: rounds && format == Format::F16 && s.modifiers.take("sat"),
        relu: s.name == "fma" && s.modifiers.take("relu"),
    };
    let destination = d.destination(s, 0, kind)?;
    let a = d.source(s, 1, kind)?;
    Ok(Some(match s.name {
        "abs" => unary(destination, a, move |a| elements(packed, [a], |[a]| finish.flushed(a) & 0x7FFF)),
        "neg" => unary(destination, a, move |a| elements(packed, [a], |[a]| finish.flushed(a) ^ 0x8000)),
        // 9.7.4.9 and 9.7.4.10, as precise as the result can be.
        "tanh" => unary(destination, a, move |a| elements(packed, [a], |[a]| finish.after(finish.before(a).tanh()))),
        "ex2" => unary(destination, a, move |a| {
            elements(packed, [a], |[a]| {
                let bits = finish.after(finish.before(a).exp2());
                // The bf16 form flushes its result.
                if format == Format::BF16 && bits & 0x7F80 == 0 { 0 } else { bits }
            })
        }),
        "fma" => {
            let sources = [a, d.source(s, 2, kind)?, d.source(s, 3, kind)?];
            ternary(destination, sources, move |a, b, c| {
                elements(packed, [a, b, c], |x| {
                    let [a, b, c] = x.map(|x| finish.before(x));
                    finish.after(add_odd(a * b, c))
                })
            })
        }
        name => {
            let f: fn(f64, f64) -> f64 = match name {
                "add" => add_odd,
                "sub" => |a, b| add_odd(a, -b),
                "mul" => |a, b| a * b,
                "min" if nan => |a, b| extreme(a, b, false, true),
                "min" => |a, b| extreme(a, b, false, false),
                _ if nan => |a, b| extreme(a, b, true, true),
                _ => |a, b| extreme(a, b, true, false),
            };
            let sources = [a, d.source(s, 2, kind)?];
            if name == "mul" && format == Format::F16 && !finish.flush && !finish.saturate {
                // The products of dequantization: most of what is executed here.
                return Ok(Some(binary(destination, sources, move |a, b| elements(packed, [a, b], multiply_f16))));
            }
            binary(destination, sources, move |a, b| {
                elements(packed, [a, b], |x| {
                    let [a, b] = x.map(|bits| finish.before(if xorsign { bits & 0x7FFF } else { bits }));
                    let result = f(a, b);
                    let sign = if xorsign && !result.is_nan() { (x[0] ^ x[1]) & 0x8000 } else { 0 };
                    finish.after(result) | sign
                })
            })
        }
    }))
}

/// f16 product: exact in f32 (22 bits), then rounded once.
#[inline(always)]
fn multiply_f16([a, b]: [u32; 2]) -> u32 {
    let product = f16_to_f32(a as u16) * f16_to_f32(b as u16);
    if product.is_nan() { 0x7FFF } else { u32::from(half::f16::from_f32_const(product).to_bits()) }
}

/// f16 to f32 without branches: shifted into place, then scaled by 2^112, which also normalizes.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23);
    let special = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 | magnitude } else { scaled.to_bits() };
    f32::from_bits(special | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_f16() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn packed_products() {
        // 1.5 * 2 and -0.5 * 4.
        let product = elements(true, [0xB800_3E00, 0x4400_4000], multiply_f16);
        assert_eq!(product, 0xC000_4200);
        for (a, b) in (0..=u16::MAX).step_by(251).flat_map(|a| (0..=u16::MAX).step_by(239).map(move |b| (a, b))) {
            let exact = Format::F16.decode(a.into()) * Format::F16.decode(b.into());
            let expected = Format::F16.encode(exact, Rounding::NearestEven, false);
            assert_eq!(multiply_f16([a.into(), b.into()]), expected, "{a:#x} {b:#x}");
        }
    }
}
