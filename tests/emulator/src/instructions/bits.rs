//! Logic, shifts and bit fields (PTX ISA 9.7.8 and 9.7.1).

use super::{Decoder, Operation, Refusal, Statement, binary, quaternary, ternary, unary};
use crate::execute::lanes::Combine;
use crate::execute::{Condition, Context, Execute, Fault, Pred, Step};
use crate::types::{Type, sign_extend, truncate};

/// `and`, `or`, `xor`, `not` (9.7.8.1 to 9.7.8.4) of predicates.
struct PredicateLogic {
    combine: Combine,
    d: Pred,
    a: Condition,
    b: Condition,
}

impl Execute for PredicateLogic {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let value = self.combine.apply(cx.holds(self.a, lanes)?, cx.holds(self.b, lanes)?);
        cx.write_predicate(self.d, lanes, value);
        Ok(Step::Next)
    }
}

/// `shl` (9.7.8.8): amounts of the width and more give 0.
fn shift_left(a: u64, b: u64, bits: u32) -> u64 {
    if b >= u64::from(bits) { 0 } else { truncate(a << b, bits) }
}

/// `shr` (9.7.8.9): amounts of the width and more give 0, or the sign.
fn shift_right(a: u64, b: u64, kind: Type) -> u64 {
    let bits = kind.bits();
    let b = b.min(u64::from(bits));
    if kind.is_signed() {
        truncate((sign_extend(a, bits) >> b.min(63)) as u64, bits)
    } else {
        a.checked_shr(b as u32).unwrap_or(0)
    }
}

/// A position or length of `bfe` and `bfi`. The document has both in 8 bits; so they are for 32 bits, where an instruction
/// takes them from a byte. For 64 bits there is none: `ptxas` shifts by them, and a shift takes the whole number.
fn amount(given: u64, bits: u32) -> u64 {
    if bits == 64 { given } else { given & 255 }
}

/// `bfe` (9.7.1.19): beyond the top the sign, or 0.
fn extract(a: u64, position: u64, length: u64, kind: Type) -> u64 {
    let bits = kind.bits();
    let (position, length) = (amount(position, bits), amount(length, bits));
    let top = u64::from(bits) - 1;
    let negative = kind.is_signed() && length > 0 && a >> (position + length - 1).min(top) & 1 == 1;
    (0..u64::from(bits)).fold(0, |field, i| {
        let inside = i < length && position + i <= top;
        let bit = if inside { a >> (position + i) & 1 == 1 } else { negative };
        field | u64::from(bit) << i
    })
}

/// `bfi` (9.7.1.20).
fn insert(a: u64, b: u64, position: u64, length: u64, bits: u32) -> u64 {
    let (position, length) = (amount(position, bits), amount(length, bits));
    (0..length).take_while(|i| position + i < u64::from(bits)).fold(b, |result, i| {
        let at = position + i;
        result & !(1 << at) | (if i < 64 { a >> i & 1 } else { 0 }) << at
    })
}

/// `bfind` (9.7.1.16): position of the leading bit that is not the sign.
fn find(a: u64, kind: Type, shift_amount: bool) -> u64 {
    let bits = kind.bits();
    let a = if kind.is_signed() && sign_extend(a, bits) < 0 { truncate(!a, bits) } else { a };
    if a == 0 {
        return 0xFFFF_FFFF;
    }
    let position = 63 - a.leading_zeros();
    u64::from(if shift_amount { bits - 1 - position } else { position })
}

/// `lop3.b32` (9.7.8.6): the immediate is the truth table.
fn look_up(a: u64, b: u64, c: u64, table: u64) -> u64 {
    (0..8).filter(|i| table >> i & 1 == 1).fold(0, |result, i| {
        let pick = |x: u64, bit: u64| if i >> bit & 1 == 1 { x } else { !x };
        result | pick(a, 2) & pick(b, 1) & pick(c, 0)
    }) & 0xFFFF_FFFF
}

/// `shf` (9.7.8.7): funnel shift of `b:a`.
fn funnel(a: u64, b: u64, amount: u64, left: bool, wrap: bool) -> u64 {
    let pair = a | b << 32;
    let amount = if wrap { amount & 31 } else { amount.min(32) };
    truncate(if left { (u128::from(pair) << amount >> 32) as u64 } else { pair >> amount }, 32)
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "and" | "or" | "xor" | "not" | "cnot" => logic(d, s)?,
        "shl" | "shr" => {
            let kind = s.modifiers.kind()?;
            let bits = kind.bits();
            let destination = d.destination(s, 0, kind)?;
            let sources = [d.source(s, 1, kind)?, d.source(s, 2, Type::U32)?];
            match (s.name, kind.is_untyped()) {
                ("shl", true) => binary(destination, sources, move |a, b| shift_left(a, b, bits)),
                ("shr", _) => binary(destination, sources, move |a, b| shift_right(a, b, kind)),
                _ => return Err("a left shift has an untyped operand".into()),
            }
        }
        "bfe" => {
            let kind = s.modifiers.kind()?;
            let destination = d.destination(s, 0, kind)?;
            let sources = [d.source(s, 1, kind)?, d.source(s, 2, Type::U32)?, d.source(s, 3, Type::U32)?];
            ternary(destination, sources, move |a, b, c| extract(a, b, c, kind))
        }
        "bfi" => {
            let kind = s.modifiers.kind()?;
            let (bits, destination) = (kind.bits(), d.destination(s, 0, kind)?);
            let (a, b) = (d.source(s, 1, kind)?, d.source(s, 2, kind)?);
            let sources = [a, b, d.source(s, 3, Type::U32)?, d.source(s, 4, Type::U32)?];
            quaternary(destination, sources, move |a, b, c, e| insert(a, b, c, e, bits))
        }
        "popc" | "clz" | "brev" | "bfind" => {
            let shift_amount = s.name == "bfind" && s.modifiers.take("shiftamt");
            let kind = s.modifiers.kind()?;
            let bits = kind.bits();
            let destination = d.destination(s, 0, if s.name == "brev" { kind } else { Type::U32 })?;
            let a = d.source(s, 1, kind)?;
            match s.name {
                // 9.7.1.14, 9.7.1.15 and 9.7.1.18.
                "popc" => unary(destination, a, |a| u64::from(a.count_ones())),
                "clz" => unary(destination, a, move |a| u64::from(a.leading_zeros() + bits - 64)),
                "brev" => unary(destination, a, move |a| a.reverse_bits() >> (64 - bits)),
                _ => unary(destination, a, move |a| find(a, kind, shift_amount)),
            }
        }
        "lop3" => {
            s.modifiers.need("b32")?;
            let destination = d.destination(s, 0, Type::B32)?;
            let sources = [d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?, d.source(s, 3, Type::B32)?];
            let table = d.integer(s, 4)?;
            ternary(destination, sources, move |a, b, c| look_up(a, b, c, table))
        }
        "shf" => {
            let left = s.modifiers.one_of(&[("l", true), ("r", false)]).ok_or("without .l or .r")?;
            let wrap = s.modifiers.one_of(&[("wrap", true), ("clamp", false)]).ok_or("without .wrap or .clamp")?;
            s.modifiers.need("b32")?;
            let destination = d.destination(s, 0, Type::B32)?;
            let sources = [d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?, d.source(s, 3, Type::U32)?];
            ternary(destination, sources, move |a, b, c| funnel(a, b, c, left, wrap))
        }
        _ => return Ok(None),
    }))
}

/// `and`, `or`, `xor`, `not`, `cnot` (9.7.8.1 to 9.7.8.5).
fn logic(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let kind = s.modifiers.kind()?;
    if kind == Type::Pred {
        let destination = d.predicate_destination(s, 0)?.ok_or("operand form")?;
        let a = d.predicate_source(s, 1)?;
        let (combine, b) = match s.name {
            "and" => (Combine::And, d.predicate_source(s, 2)?),
            "or" => (Combine::Or, d.predicate_source(s, 2)?),
            "xor" => (Combine::Xor, d.predicate_source(s, 2)?),
            "not" => {
                let a = Condition { negated: !a.negated, ..a };
                return Ok(Box::new(PredicateLogic { combine: Combine::And, d: destination, a, b: a }));
            }
            _ => return Err("a predicate".into()),
        };
        return Ok(Box::new(PredicateLogic { combine, d: destination, a, b }));
    }
    if !kind.is_untyped() {
        return Err("logic has untyped operands".into());
    }
    let bits = kind.bits();
    let (destination, a) = (d.destination(s, 0, kind)?, d.source(s, 1, kind)?);
    Ok(match s.name {
        "not" => unary(destination, a, move |a| truncate(!a, bits)),
        "cnot" => unary(destination, a, |a| u64::from(a == 0)),
        name => {
            let sources = [a, d.source(s, 2, kind)?];
            match name {
                "and" => binary(destination, sources, |a, b| a & b),
                "or" => binary(destination, sources, |a, b| a | b),
                _ => binary(destination, sources, |a, b| a ^ b),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts() {
        assert_eq!(shift_left(1, 31, 32), 0x8000_0000);
        assert_eq!(shift_left(1, 32, 32), 0);
        assert_eq!(shift_right(0x8000_0000, 40, Type::S32), 0xFFFF_FFFF);
        assert_eq!(shift_right(0x8000_0000, 31, Type::U32), 1);
        assert_eq!(shift_right(1 << 63, 64, Type::B64), 0);
        assert_eq!(funnel(0x1234_5678, 0x9ABC_DEF0, 8, true, true), 0xBCDE_F012);
        assert_eq!(funnel(0x1234_5678, 0x9ABC_DEF0, 40, false, false), 0x9ABC_DEF0);
    }

    #[test]
    fn fields() {
        assert_eq!(extract(0xABCD_EF01, 8, 8, Type::U32), 0xEF);
        assert_eq!(extract(0xABCD_EF01, 8, 8, Type::S32), 0xFFFF_FFEF);
        assert_eq!(extract(0xABCD_EF01, 28, 16, Type::S32), 0xFFFF_FFFA);
        assert_eq!(extract(0xABCD_EF01, 0, 0, Type::S32), 0);
        assert_eq!(insert(0xFF, 0, 4, 8, 32), 0xFF0);
        assert_eq!(insert(0xFF, 0, 28, 8, 32), 0xF000_0000);
        assert_eq!(insert(0xFF, 0, 0x104, 0x108, 32), 0xFF0);
        assert_eq!(extract(0xFF, 0x104, 4, Type::U32), 0xF);
        assert_eq!(insert(0xFF, 7, 0x104, 8, 64), 7);
        assert_eq!(insert(0xFF, 7, 4, 0x108, 64), 0xFF7);
        assert_eq!(extract(0xFF, 0x104, 4, Type::U64), 0);
        assert_eq!(extract(1 << 63, 0x104, 4, Type::S64), u64::MAX);
        assert_eq!(find(0x10, Type::U32, false), 4);
        assert_eq!(find(0xFFFF_FFFE, Type::S32, false), 0);
        assert_eq!(find(0, Type::U32, false), 0xFFFF_FFFF);
        assert_eq!(look_up(0xF0, 0xCC, 0xAA, 0x80), 0x80);
        assert_eq!(look_up(0xF0, 0xCC, 0xAA, 0x96), (0xF0 ^ 0xCC ^ 0xAA));
    }
}
