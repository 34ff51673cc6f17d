//! Conversions (PTX ISA 9.7.9.21: `cvt`).

use super::{Decoder, Operation, Refusal, Statement, unary};
use crate::types::{Type, sign_extend, truncate};

/// Integer to integer: the value as a wide signed number, saturated or cut off.
fn integer(a: u64, from: Type, to: Type, saturate: bool) -> u64 {
    let value =
        if from.is_signed() { i128::from(sign_extend(a, from.bits())) } else { i128::from(truncate(a, from.bits())) };
    let value = if saturate {
        let bits = to.bits();
        let (low, high) =
            if to.is_signed() { (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1) } else { (0, (1i128 << bits) - 1) };
        value.clamp(low, high)
    } else {
        value
    };
    truncate(value as u64, to.bits())
}

pub(super) fn decode(d: &mut Decoder<'_>, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "cvt" {
        return Ok(None);
    }
    let saturate = s.modifiers.take("sat");
    let to = s.modifiers.kind()?;
    let from = s.modifiers.kind()?;
    if !to.is_integer() || !from.is_integer() {
        return Err("a conversion between these types".into());
    }
    let (destination, a) = (d.wide_destination(s, 0, to)?, d.wide_source(s, 1, from)?);
    let width = d.width(destination);
    let extend = move |value: u64| {
        if to.is_signed() { truncate(sign_extend(value, to.bits()) as u64, width) } else { value }
    };
    Ok(Some(unary(destination, a, move |a| extend(integer(a, from, to, saturate)))))
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
}
