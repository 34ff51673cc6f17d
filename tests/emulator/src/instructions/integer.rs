//! Integer arithmetic (PTX ISA 9.7.1).

use super::{Decoder, Operation, Refusal, Statement, binary, ternary, unary};
use crate::types::{Type, sign_extend, truncate};

/// What half of a product is wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Low,
    High,
    Wide,
}

/// The wanted part of the full product, not truncated.
fn product(a: u64, b: u64, kind: Type, half: Half) -> u64 {
    let bits = kind.bits();
    let product = if kind.is_signed() {
        (i128::from(sign_extend(a, bits)) * i128::from(sign_extend(b, bits))) as u128
    } else {
        u128::from(a) * u128::from(b)
    };
    (if half == Half::High { product >> bits } else { product }) as u64
}

/// `div` and `rem` (9.7.1.8, 9.7.1.9). By zero: all ones and the dividend, where PTX says unspecified.
fn divide(a: u64, b: u64, kind: Type, remainder: bool) -> u64 {
    let bits = kind.bits();
    let result = if kind.is_signed() {
        let (a, b) = (sign_extend(a, bits), sign_extend(b, bits));
        if b == 0 {
            if remainder { a as u64 } else { u64::MAX }
        } else if remainder {
            a.wrapping_rem(b) as u64
        } else {
            a.wrapping_div(b) as u64
        }
    } else if remainder {
        a.checked_rem(b).unwrap_or(a)
    } else {
        a.checked_div(b).unwrap_or(u64::MAX)
    };
    truncate(result, bits)
}

fn saturated(value: i64) -> u64 {
    truncate(value.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u64, 32)
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if !matches!(s.name, "add" | "sub" | "mul" | "mad" | "div" | "rem" | "abs" | "neg" | "min" | "max") {
        return Ok(None);
    }
    let Some(kind) = s.modifiers.integer_kind() else { return Ok(None) };
    let bits = kind.bits();
    if bits < 16 {
        return Err("8-bit arithmetic".into());
    }
    if matches!(s.name, "mul" | "mad") {
        return multiply(d, s, kind).map(Some);
    }
    let destination = d.destination(s, 0, kind)?;
    let a = d.source(s, 1, kind)?;
    if matches!(s.name, "abs" | "neg") {
        if !kind.is_signed() {
            return Err("an unsigned type".into());
        }
        return Ok(Some(if s.name == "neg" {
            unary(destination, a, move |a| truncate(a.wrapping_neg(), bits))
        } else {
            unary(destination, a, move |a| truncate(sign_extend(a, bits).wrapping_abs() as u64, bits))
        }));
    }
    let operands = [a, d.source(s, 2, kind)?];
    let saturate = kind == Type::S32 && matches!(s.name, "add" | "sub") && s.modifiers.take("sat");
    Ok(Some(match (s.name, kind.is_signed()) {
        ("add", _) if saturate => {
            binary(destination, operands, |a, b| saturated(sign_extend(a, 32) + sign_extend(b, 32)))
        }
        ("sub", _) if saturate => {
            binary(destination, operands, |a, b| saturated(sign_extend(a, 32) - sign_extend(b, 32)))
        }
        ("add", _) => binary(destination, operands, move |a, b| truncate(a.wrapping_add(b), bits)),
        ("sub", _) => binary(destination, operands, move |a, b| truncate(a.wrapping_sub(b), bits)),
        ("div", _) => binary(destination, operands, move |a, b| divide(a, b, kind, false)),
        ("rem", _) => binary(destination, operands, move |a, b| divide(a, b, kind, true)),
        ("min", false) => binary(destination, operands, u64::min),
        ("max", false) => binary(destination, operands, u64::max),
        ("min", true) => {
            binary(destination, operands, move |a, b| if sign_extend(a, bits) < sign_extend(b, bits) { a } else { b })
        }
        _ => binary(destination, operands, move |a, b| if sign_extend(a, bits) > sign_extend(b, bits) { a } else { b }),
    }))
}

/// `mul` (9.7.1.3) and `mad` (9.7.1.4).
fn multiply(d: &mut Decoder, s: &mut Statement<'_>, kind: Type) -> Result<Operation, Refusal> {
    let halves = [("lo", Half::Low), ("hi", Half::High), ("wide", Half::Wide)];
    let half = s.modifiers.one_of(&halves).ok_or("without .lo, .hi or .wide")?;
    let saturate = s.name == "mad" && half == Half::High && kind == Type::S32 && s.modifiers.take("sat");
    let result = match (half, kind) {
        (Half::Wide, Type::U16) => Type::U32,
        (Half::Wide, Type::S16) => Type::S32,
        (Half::Wide, Type::U32) => Type::U64,
        (Half::Wide, Type::S32) => Type::S64,
        (Half::Wide, _) => return Err("a wide product of 64-bit numbers".into()),
        _ => kind,
    };
    let bits = result.bits();
    let destination = d.destination(s, 0, result)?;
    let (a, b) = (d.source(s, 1, kind)?, d.source(s, 2, kind)?);
    if s.name == "mad" {
        let sources = [a, b, d.source(s, 3, result)?];
        if saturate {
            return Ok(ternary(destination, sources, move |a, b, c| {
                saturated(product(a, b, kind, half) as i64 + sign_extend(c, 32))
            }));
        }
        return Ok(ternary(destination, sources, move |a, b, c| {
            truncate(product(a, b, kind, half).wrapping_add(c), bits)
        }));
    }
    Ok(match (half, kind.is_signed()) {
        // The low bits do not depend on the sign, and most products are these.
        (Half::Low, _) => binary(destination, [a, b], move |a, b| truncate(a.wrapping_mul(b), bits)),
        (Half::Wide, false) => binary(destination, [a, b], u64::wrapping_mul),
        _ => binary(destination, [a, b], move |a, b| truncate(product(a, b, kind, half), bits)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products() {
        assert_eq!(product(0xFFFF_FFFF, 2, Type::S32, Half::Wide), u64::MAX - 1);
        assert_eq!(product(0xFFFF_FFFF, 2, Type::U32, Half::Wide), 0x1_FFFF_FFFE);
        assert_eq!(product(u64::MAX, u64::MAX, Type::U64, Half::High), u64::MAX - 1);
        assert_eq!(product(u64::MAX, u64::MAX, Type::S64, Half::High), 0);
        assert_eq!(truncate(product(0x8000, 0x8000, Type::S16, Half::High), 16), 0x4000);
    }

    #[test]
    fn quotients() {
        assert_eq!(divide(0xFFFF_FFF9, 2, Type::S32, false), 0xFFFF_FFFD);
        assert_eq!(divide(0xFFFF_FFF9, 2, Type::S32, true), 0xFFFF_FFFF);
        assert_eq!(divide(0x8000_0000, 0xFFFF_FFFF, Type::S32, false), 0x8000_0000);
        assert_eq!(divide(7, 0, Type::U32, false), 0xFFFF_FFFF);
        assert_eq!(divide(7, 0, Type::U32, true), 7);
    }
}
