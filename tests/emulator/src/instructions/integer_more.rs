//! Less usual integer arithmetic (PTX ISA 9.7.1): products of 24 bits, absolute differences, dot products, bit masks.

use super::{Decoder, Operation, Refusal, Statement, binary, ternary};
use crate::types::{Type, sign_extend, truncate};

/// The low 24 bits as a number.
fn low24(a: u64, signed: bool) -> i64 {
    if signed { sign_extend(a, 24) } else { truncate(a, 24) as i64 }
}

/// `mul24` (9.7.1.5): the lower 32 bits of the 48 of a product, or the upper 32.
fn product24(a: u64, b: u64, signed: bool, high: bool) -> i64 {
    let product = low24(a, signed) * low24(b, signed);
    if high { product >> 16 } else { product }
}

/// `fns` (9.7.1.17): the n-th set bit of `mask` from bit `base` on, up or down.
///
/// The offset -2^31 has no magnitude in `.s32`, of which the document does not speak: `ptxas` negates it to itself, takes it
/// for fewer than there are bits, and halves the mask towards bit 0 whatever it holds.
fn nth_set(mask: u64, base: u64, offset: u64) -> u64 {
    const NO_MAGNITUDE: u64 = 1 << 31;
    if offset == NO_MAGNITUDE {
        return 0;
    }
    let set = |at: i64| mask >> at & 1 == 1;
    let (base, offset) = (base as i64, sign_extend(offset, 32));
    let found = match offset {
        0 => Some(base).filter(|&at| set(at)),
        1.. => (base..32).filter(|&at| set(at)).nth(offset as usize - 1),
        _ => (0..=base).rev().filter(|&at| set(at)).nth(offset.unsigned_abs() as usize - 1),
    };
    found.map_or(0xFFFF_FFFF, |at| at as u64)
}

/// `szext` (9.7.1.21): the low `n` bits, extended.
fn extend(a: u64, n: u64, signed: bool, clamp: bool) -> u64 {
    match n {
        32.. if clamp => a,
        _ if n.is_multiple_of(32) => 0,
        _ if signed => truncate(sign_extend(a, n as u32 % 32) as u64, 32),
        _ => truncate(a, n as u32 % 32),
    }
}

/// `bmsk` (9.7.1.22): `width` ones from bit `at` on.
fn mask(at: u64, width: u64, clamp: bool) -> u64 {
    let (at, width) = if clamp { (at.min(32), width.min(32)) } else { (at % 32, width % 32) };
    truncate(truncate(u64::MAX, width as u32) << at, 32)
}

/// The `i`-th part of `bits` bits.
fn part(word: u64, i: u32, bits: u32, signed: bool) -> i64 {
    let part = truncate(word >> (i * bits), bits);
    if signed { sign_extend(part, bits) } else { part as i64 }
}

/// `dp4a` (9.7.1.23) and `dp2a` (9.7.1.24): sums of products of bytes, or of halves with the lower or upper two bytes.
fn dot(a: u64, b: u64, c: u64, signed: [bool; 2], halves_from: Option<u32>) -> u64 {
    let products: i64 = match halves_from {
        None => (0..4).map(|i| part(a, i, 8, signed[0]) * part(b, i, 8, signed[1])).sum(),
        Some(first) => (0..2).map(|i| part(a, i, 16, signed[0]) * part(b, first + i, 8, signed[1])).sum(),
    };
    truncate(c.wrapping_add(products as u64), 32)
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "mul24" | "mad24" => {
            let high = s.modifiers.one_of(&[("lo", false), ("hi", true)]).ok_or("without .lo or .hi")?;
            let saturate = s.name == "mad24" && high && s.modifiers.has("s32") && s.modifiers.take("sat");
            let (kind, signed) = word_kind(s)?;
            let (destination, a, b) = (d.destination(s, 0, kind)?, d.source(s, 1, kind)?, d.source(s, 2, kind)?);
            if s.name == "mul24" {
                return Ok(Some(binary(destination, [a, b], move |a, b| {
                    truncate(product24(a, b, signed, high) as u64, 32)
                })));
            }
            ternary(destination, [a, b, d.source(s, 3, kind)?], move |a, b, c| {
                let sum = product24(a, b, signed, high) + sign_extend(c, 32);
                let sum = if saturate { sum.clamp(i32::MIN.into(), i32::MAX.into()) } else { sum };
                truncate(sum as u64, 32)
            })
        }
        // 9.7.1.7
        "sad" => {
            let kind = s.modifiers.kind()?;
            if !kind.is_integer() || kind.bits() < 16 {
                return Err("this type".into());
            }
            let bits = kind.bits();
            let sources = [d.source(s, 1, kind)?, d.source(s, 2, kind)?, d.source(s, 3, kind)?];
            ternary(d.destination(s, 0, kind)?, sources, move |a, b, c| {
                let difference =
                    if kind.is_signed() { sign_extend(a, bits).abs_diff(sign_extend(b, bits)) } else { a.abs_diff(b) };
                truncate(c.wrapping_add(difference), bits)
            })
        }
        "fns" => {
            s.modifiers.need("b32")?;
            let sources = [d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?, d.source(s, 3, Type::S32)?];
            ternary(d.destination(s, 0, Type::B32)?, sources, |mask, base, offset| nth_set(mask, base & 31, offset))
        }
        "szext" | "bmsk" => {
            let clamp = s.modifiers.one_of(&[("clamp", true), ("wrap", false)]).ok_or("without .clamp or .wrap")?;
            if s.name == "bmsk" {
                s.modifiers.need("b32")?;
                let sources = [d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?];
                return Ok(Some(binary(d.destination(s, 0, Type::B32)?, sources, move |a, b| mask(a, b, clamp))));
            }
            let (kind, signed) = word_kind(s)?;
            let sources = [d.source(s, 1, kind)?, d.source(s, 2, Type::U32)?];
            binary(d.destination(s, 0, kind)?, sources, move |a, b| extend(a, b, signed, clamp))
        }
        "dp4a" | "dp2a" => {
            let halves_from = match s.name {
                "dp2a" => Some(s.modifiers.one_of(&[("lo", 0), ("hi", 2)]).ok_or("without .lo or .hi")?),
                _ => None,
            };
            let ((kind_a, signed_a), (kind_b, signed_b)) = (word_kind(s)?, word_kind(s)?);
            let sources = [d.source(s, 1, kind_a)?, d.source(s, 2, kind_b)?, d.source(s, 3, Type::B32)?];
            let signed = [signed_a, signed_b];
            ternary(d.destination(s, 0, Type::B32)?, sources, move |a, b, c| dot(a, b, c, signed, halves_from))
        }
        _ => return Ok(None),
    }))
}

/// `.u32` or `.s32`, and whether it is signed.
fn word_kind(s: &mut Statement<'_>) -> Result<(Type, bool), Refusal> {
    let kinds = [(Type::U32, false), (Type::S32, true)];
    let kind = s.modifiers.kind()?;
    kinds.into_iter().find(|(known, _)| *known == kind).ok_or_else(|| "neither .u32 nor .s32".into())
}
