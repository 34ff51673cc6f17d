//! f32 and f64 arithmetic (PTX ISA 9.7.3).
//!
//! f32 in all four roundings, f64 to nearest even. The `.approx` functions are what their argument's exact result rounds to, which is
//! inside every bound that the document states.

use super::small_float::{Format, Rounding, add_odd};
use super::{Decoder, Operation, Refusal, Statement, binary, ternary, unary};
use crate::types::Type;

/// What arithmetic yields where the result is no number.
const NAN32: u32 = 0x7FFF_FFFF;

/// Subnormal numbers become zeros of the same sign.
#[inline(always)]
pub(super) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[inline(always)]
fn bits(x: f32) -> u64 {
    u64::from(if x.is_nan() { NAN32 } else { x.to_bits() })
}

#[inline(always)]
fn number(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

/// `min`, `max` (9.7.3.11, 9.7.3.12): the other operand where one is NaN, -0 below +0.
pub(super) fn extreme(a: f64, b: f64, max: bool, nan: bool) -> f64 {
    if a.is_nan() || b.is_nan() {
        let other = if a.is_nan() { b } else { a };
        return if nan { f64::NAN } else { other };
    }
    let below = if a == b { a.is_sign_negative() } else { a < b };
    if below == max { b } else { a }
}

fn clamp_unit(x: f32) -> f32 {
    // NaN becomes +0.
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// What f32 instructions do before and after.
#[derive(Clone, Copy)]
pub(super) struct Around {
    pub(super) flush: bool,
    pub(super) saturate: bool,
}

impl Around {
    #[inline(always)]
    pub(super) fn before(self, x: u64) -> f32 {
        if self.flush { flush(number(x)) } else { number(x) }
    }

    /// What `exact` was rounded to. Where it is the smallest normal number, whether it is flushed depends on what it was.
    #[inline(always)]
    pub(super) fn after_rounding(self, rounded: f32, rounding: Rounding, exact: impl FnOnce() -> f64) -> u64 {
        let at_the_edge = self.flush && rounded.abs() == f32::MIN_POSITIVE;
        let flushes = at_the_edge && Format::F32.is_tiny(exact(), rounding);
        self.after(if flushes { 0f32.copysign(rounded) } else { rounded })
    }

    /// `a * b`, rounded to nearest.
    #[inline(always)]
    pub(super) fn product(self, a: u64, b: u64) -> u64 {
        let (a, b) = (self.before(a), self.before(b));
        self.after_rounding(a * b, Rounding::NearestEven, || f64::from(a) * f64::from(b))
    }

    /// `a * b + c`, rounded once to nearest.
    #[inline(always)]
    pub(super) fn fused(self, a: u64, b: u64, c: u64) -> u64 {
        let (a, b, c) = (self.before(a), self.before(b), self.before(c));
        let exact = || add_odd(f64::from(a) * f64::from(b), c.into());
        self.after_rounding(a.mul_add(b, c), Rounding::NearestEven, exact)
    }

    /// A result that cannot come from between the largest subnormal and the smallest normal number: a sum (a multiple of the
    /// smallest subnormal number), a quotient (nearer to the former), a root, one operand.
    #[inline(always)]
    pub(super) fn after(self, x: f32) -> u64 {
        let x = if self.flush { flush(x) } else { x };
        bits(if self.saturate { clamp_unit(x) } else { x })
    }
}

fn is_family(name: &str) -> bool {
    matches!(name, "add" | "sub" | "mul" | "fma" | "mad" | "div" | "rcp" | "sqrt" | "rsqrt" | "min" | "max" | "abs")
        || matches!(name, "neg" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign")
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if !is_family(s.name) {
        return Ok(None);
    }
    if s.modifiers.take("f64") {
        return double(d, s).map(Some);
    }
    if !s.modifiers.take("f32") {
        return Ok(None);
    }
    let arithmetic = matches!(s.name, "add" | "sub" | "mul" | "fma" | "mad");
    let extremes = matches!(s.name, "min" | "max");
    let nan = extremes && s.modifiers.take("NaN");
    let xorsign = extremes && s.modifiers.take("xorsign");
    if xorsign {
        s.modifiers.need("abs")?;
    }
    let around = Around {
        flush: s.name != "copysign" && s.modifiers.take("ftz"),
        saturate: arithmetic && s.modifiers.take("sat"),
    };
    let rounds = arithmetic || matches!(s.name, "div" | "rcp" | "sqrt");
    let directed = [("rz", Rounding::Zero), ("rm", Rounding::Down), ("rp", Rounding::Up)];
    if rounds && let Some(rounding) = s.modifiers.one_of(&directed) {
        return directed_rounding(d, s, around, rounding).map(Some);
    }
    let mut approximate = false;
    match s.name {
        "fma" | "mad" => s.modifiers.need("rn")?,
        "add" | "sub" | "mul" => {
            s.modifiers.take("rn");
        }
        "div" => {
            let forms = [("rn", false), ("full", false), ("approx", true)];
            approximate = s.modifiers.one_of(&forms).ok_or("its rounding")?;
        }
        "rcp" | "sqrt" => {
            s.modifiers.one_of(&[("rn", ()), ("approx", ())]).ok_or("its rounding")?;
        }
        "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => s.modifiers.need("approx")?,
        _ => {}
    }
    let destination = d.destination(s, 0, Type::F32)?;
    let a = d.source(s, 1, Type::F32)?;
    let one = |f: fn(f64) -> f64| {
        // In f64, then rounded: within the document's bounds, and correctly rounded but for ties of that first rounding.
        unary(destination, a, move |a| around.after(f(f64::from(around.before(a))) as f32))
    };
    Ok(Some(match s.name {
        "abs" => unary(destination, a, move |a| u64::from(around.before(a).to_bits() & 0x7FFF_FFFF)),
        "neg" => unary(destination, a, move |a| u64::from(around.before(a).to_bits() ^ 0x8000_0000)),
        "rcp" => unary(destination, a, move |a| around.after(1.0 / around.before(a))),
        "sqrt" => unary(destination, a, move |a| around.after(around.before(a).sqrt())),
        "rsqrt" => one(|a| 1.0 / a.sqrt()),
        "ex2" => one(f64::exp2),
        "lg2" => one(|a| if a == 0.0 { f64::NEG_INFINITY } else { a.log2() }),
        "sin" => one(f64::sin),
        "cos" => one(f64::cos),
        "tanh" => one(f64::tanh),
        "fma" | "mad" => {
            let sources = [a, d.source(s, 2, Type::F32)?, d.source(s, 3, Type::F32)?];
            ternary(destination, sources, move |a, b, c| around.fused(a, b, c))
        }
        name => {
            let sources = [a, d.source(s, 2, Type::F32)?];
            match name {
                "add" => binary(destination, sources, move |a, b| around.after(around.before(a) + around.before(b))),
                "sub" => binary(destination, sources, move |a, b| around.after(around.before(a) - around.before(b))),
                "mul" => binary(destination, sources, move |a, b| around.product(a, b)),
                "div" if approximate => binary(destination, sources, move |a, b| {
                    around.after(divide_approximately(around.before(a), around.before(b)))
                }),
                "div" => binary(destination, sources, move |a, b| around.after(around.before(a) / around.before(b))),
                "min" | "max" => {
                    let max = name == "max";
                    binary(destination, sources, move |a, b| {
                        let (mut x, mut y) = (f64::from(around.before(a)), f64::from(around.before(b)));
                        if xorsign {
                            (x, y) = (x.abs(), y.abs());
                        }
                        let result = around.after(extreme(x, y, max, nan) as f32);
                        let sign = if xorsign && !number(result).is_nan() { (a ^ b) & 0x8000_0000 } else { 0 };
                        result | sign
                    })
                }
                // 9.7.3.2: the sign of the first, the magnitude of the second.
                "copysign" => binary(destination, sources, |a, b| a & 0x8000_0000 | b & 0x7FFF_FFFF),
                _ => return Err(format!("opcode {name}").into()),
            }
        }
    }))
}

/// `div.approx` (9.7.3.8) is a product with a reciprocal, which is 0 for divisors above 2^126.
fn divide_approximately(a: f32, b: f32) -> f32 {
    if b.is_finite() && b.abs() > 2f32.powi(126) { a * 0f32.copysign(b) } else { a / b }
}

/// The exact quotient or root, rounded to odd in f64: one more rounding gives what rounding once would. `rest` is what
/// the f64 result leaves over, with the sign of what it lacks.
fn to_odd(result: f64, rest: f64) -> f64 {
    if rest == 0.0 || !result.is_finite() || !rest.is_finite() || result.to_bits() & 1 == 1 {
        return result;
    }
    let grows = (rest > 0.0) == (result > 0.0);
    f64::from_bits(if grows { result.to_bits() + 1 } else { result.to_bits() - 1 })
}

/// Arithmetic with `.rz`, `.rm` or `.rp`.
fn directed_rounding(
    d: &mut Decoder,
    s: &mut Statement<'_>,
    around: Around,
    rounding: Rounding,
) -> Result<Operation, Refusal> {
    let finish = move |exact: f64| {
        let rounded = f32::from_bits(Format::F32.encode(exact, rounding, false));
        around.after_rounding(rounded, rounding, || exact)
    };
    // An exact zero of two opposite numbers is negative when rounding down.
    let sum = move |a: f64, b: f64| {
        let sum = add_odd(a, b);
        let cancels = sum == 0.0 && a.is_sign_negative() != b.is_sign_negative();
        if cancels && rounding == Rounding::Down { -0.0 } else { sum }
    };
    let divide = |a: f64, b: f64| {
        let quotient = a / b;
        let rest = (-quotient).mul_add(b, a);
        to_odd(quotient, if b < 0.0 { -rest } else { rest })
    };
    let before = move |x: u64| f64::from(around.before(x));
    let destination = d.destination(s, 0, Type::F32)?;
    let a = d.source(s, 1, Type::F32)?;
    if s.name == "rcp" {
        return Ok(unary(destination, a, move |a| finish(divide(1.0, before(a)))));
    }
    if s.name == "sqrt" {
        return Ok(unary(destination, a, move |a| {
            let a = before(a);
            let root = a.sqrt();
            finish(to_odd(root, (-root).mul_add(root, a)))
        }));
    }
    let b = d.source(s, 2, Type::F32)?;
    Ok(match s.name {
        "add" => binary(destination, [a, b], move |a, b| finish(sum(before(a), before(b)))),
        "sub" => binary(destination, [a, b], move |a, b| finish(sum(before(a), -before(b)))),
        "mul" => binary(destination, [a, b], move |a, b| finish(before(a) * before(b))),
        "div" => binary(destination, [a, b], move |a, b| finish(divide(before(a), before(b)))),
        _ => {
            let c = d.source(s, 3, Type::F32)?;
            ternary(destination, [a, b, c], move |a, b, c| finish(sum(before(a) * before(b), before(c))))
        }
    })
}

fn double(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let number = f64::from_bits;
    match s.name {
        "fma" | "mad" | "div" | "rcp" | "sqrt" => s.modifiers.need("rn")?,
        "add" | "sub" | "mul" => {
            s.modifiers.take("rn");
        }
        _ => {}
    }
    let destination = d.destination(s, 0, Type::F64)?;
    let a = d.source(s, 1, Type::F64)?;
    Ok(match s.name {
        "abs" => unary(destination, a, |a| a & !(1 << 63)),
        "neg" => unary(destination, a, |a| a ^ 1 << 63),
        "copysign" => {
            let sources = [a, d.source(s, 2, Type::F64)?];
            binary(destination, sources, |a, b| a & 1 << 63 | b & !(1 << 63))
        }
        "rcp" => unary(destination, a, move |a| (1.0 / number(a)).to_bits()),
        "sqrt" => unary(destination, a, move |a| number(a).sqrt().to_bits()),
        "fma" | "mad" => {
            let sources = [a, d.source(s, 2, Type::F64)?, d.source(s, 3, Type::F64)?];
            ternary(destination, sources, move |a, b, c| number(a).mul_add(number(b), number(c)).to_bits())
        }
        name => {
            let sources = [a, d.source(s, 2, Type::F64)?];
            match name {
                "add" => binary(destination, sources, move |a, b| (number(a) + number(b)).to_bits()),
                "sub" => binary(destination, sources, move |a, b| (number(a) - number(b)).to_bits()),
                "mul" => binary(destination, sources, move |a, b| (number(a) * number(b)).to_bits()),
                "div" => binary(destination, sources, move |a, b| (number(a) / number(b)).to_bits()),
                "min" => {
                    binary(destination, sources, move |a, b| extreme(number(a), number(b), false, false).to_bits())
                }
                "max" => binary(destination, sources, move |a, b| extreme(number(a), number(b), true, false).to_bits()),
                _ => return Err(format!("opcode {name} with .f64").into()),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimum_and_maximum() {
        assert_eq!(extreme(f64::NAN, 2.0, false, false), 2.0);
        assert!(extreme(f64::NAN, 2.0, false, true).is_nan());
        assert!(extreme(0.0, -0.0, false, false).is_sign_negative());
        assert!(extreme(-0.0, 0.0, true, false).is_sign_positive());
        assert_eq!(extreme(1.0, 2.0, true, false), 2.0);
        assert_eq!(extreme(1.0, 2.0, false, false), 1.0);
    }

    #[test]
    fn saturation_and_flushing() {
        let around = Around { flush: true, saturate: true };
        assert_eq!(around.after(f32::NAN), 0);
        assert_eq!(around.after(1.5), u64::from(1f32.to_bits()));
        assert_eq!(around.before(0x8000_0001).to_bits(), 0x8000_0000);
        assert_eq!(bits(-f32::NAN), 0x7FFF_FFFF);
    }
}
