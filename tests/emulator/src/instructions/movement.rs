//! Moves between registers, vectors of registers and addresses (PTX ISA 9.7.9: `mov`, `cvta`, `prmt`; 9.7.6: `selp`).

use super::{Decoder, Operation, Refusal, Statement, ternary, unary};
use crate::execute::{Condition, Context, Execute, Fault, Pred, Reg, Step};
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::parse::ast::Operand;
use crate::types::{Type, truncate};

/// `mov` (9.7.9.4) from a vector: the elements, first lowest, become one register.
struct Pack {
    d: Reg,
    sources: Vec<Reg>,
    bits: u32,
}

impl Execute for Pack {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let mut packed = [0; 32];
        for (i, &source) in self.sources.iter().enumerate() {
            let values = cx.read(source, lanes)?;
            for (packed, value) in packed.iter_mut().zip(values) {
                *packed |= truncate(value, self.bits) << (i as u32 * self.bits);
            }
        }
        cx.write(self.d, lanes, &packed);
        Ok(Step::Next)
    }
}

/// `mov` (9.7.9.4) to a vector.
struct Unpack {
    destinations: Vec<Option<Reg>>,
    a: Reg,
    bits: u32,
}

impl Execute for Unpack {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let values = cx.read(self.a, lanes)?;
        for (i, destination) in self.destinations.iter().enumerate() {
            if let Some(register) = *destination {
                let element = values.map(|value| truncate(value >> (i as u32 * self.bits), self.bits));
                cx.write(register, lanes, &element);
            }
        }
        Ok(Step::Next)
    }
}

/// `mov.pred` (9.7.9.3).
struct MovePredicate {
    d: Pred,
    a: Condition,
}

impl Execute for MovePredicate {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let values = cx.holds(self.a, lanes)?;
        cx.write_predicate(self.d, lanes, values);
        Ok(Step::Next)
    }
}

/// `selp` (9.7.6.3).
struct Select {
    d: Reg,
    a: Reg,
    b: Reg,
    condition: Condition,
}

impl Execute for Select {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let chosen = cx.holds(self.condition, lanes)?;
        let (a, b) = (cx.read(self.a, lanes & chosen)?, cx.read(self.b, lanes & !chosen)?);
        let values = std::array::from_fn(|i| if chosen >> i & 1 == 1 { a[i] } else { b[i] });
        cx.write(self.d, lanes, &values);
        Ok(Step::Next)
    }
}

/// `mov` (9.7.9.3, 9.7.9.4).
fn mov(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let kind = s.modifiers.kind()?;
    if kind == Type::Pred {
        let destination = d.predicate_destination(s, 0)?.ok_or("operand form")?;
        return Ok(Box::new(MovePredicate { d: destination, a: d.predicate_source(s, 1)? }));
    }
    let element = |count: usize| {
        let bits = kind.bits() as usize;
        let whole = kind.is_untyped() && count > 1 && bits.is_multiple_of(count);
        let kinds = [Type::B8, Type::B16, Type::B32];
        let kind = kinds.into_iter().find(|kind| whole && kind.bits() as usize == bits / count);
        kind.ok_or(format!("a vector of {count} elements"))
    };
    if let Operand::Vector(elements) = s.operand(1)? {
        let kind_of_element = element(elements.len())?;
        let sources = d.sources(s, 1, kind_of_element, false)?;
        return Ok(Box::new(Pack { d: d.destination(s, 0, kind)?, sources, bits: kind_of_element.bits() }));
    }
    if let Operand::Vector(elements) = s.operand(0)? {
        let kind_of_element = element(elements.len())?;
        let destinations = d.destinations(s, 0, kind_of_element, false)?;
        return Ok(Box::new(Unpack { destinations, a: d.source(s, 1, kind)?, bits: kind_of_element.bits() }));
    }
    Ok(unary(d.destination(s, 0, kind)?, d.source(s, 1, kind)?, |a| a))
}

/// `cvta{.to}.space` (9.7.9.20): between generic addresses and those of a space.
fn cvta(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let to = s.modifiers.take("to");
    let windows = [
        ("global", 0),
        ("const", 0),
        ("shared", SHARED_WINDOW),
        ("shared::cta", SHARED_WINDOW),
        ("shared::cluster", SHARED_WINDOW),
        ("local", LOCAL_WINDOW),
        ("param", PARAM_WINDOW),
    ];
    let window = s.modifiers.one_of(&windows).ok_or("without a state space")?;
    let kind = s.modifiers.kind()?;
    let (destination, a) = (d.destination(s, 0, kind)?, d.source(s, 1, kind)?);
    if kind.bits() != 64 {
        return Err("only 64-bit generic addresses".into());
    }
    Ok(if to {
        unary(destination, a, move |a| a.wrapping_sub(window))
    } else {
        unary(destination, a, move |a| a.wrapping_add(window))
    })
}

/// `prmt.b32` (9.7.9.7) without mode: each selector nibble picks a byte of `b:a`, its top bit that byte's sign.
pub(super) fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let pool = (a | b << 32).to_le_bytes();
    let byte = |i: u32| {
        let nibble = selector >> (4 * i) & 15;
        let byte = pool[(nibble & 7) as usize];
        let byte = if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        u64::from(byte) << (8 * i)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// `prmt` with a mode: the selector's low two bits say which window (PTX ISA 9.7.9.7, table of modes).
fn mode_selector(mode: &str, control: u64) -> u64 {
    let c = control & 3;
    let nibbles = match mode {
        "f4e" => [c, c + 1, c + 2, c + 3],
        "b4e" => [c, (c + 7) & 7, (c + 6) & 7, (c + 5) & 7],
        "rc8" => [c; 4],
        "ecl" => [c, c.max(1), c.max(2), 3],
        "ecr" => [0, c.min(1), c.min(2), c],
        _ => [2 * (c & 1), 2 * (c & 1) + 1, 2 * (c & 1), 2 * (c & 1) + 1],
    };
    nibbles.iter().enumerate().fold(0, |selector, (i, nibble)| selector | nibble << (4 * i))
}

fn prmt(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.need("b32")?;
    let modes = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"].map(|mode| (mode, mode));
    let mode = s.modifiers.one_of(&modes);
    let destination = d.destination(s, 0, Type::B32)?;
    let sources = [d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?, d.source(s, 3, Type::B32)?];
    Ok(match mode {
        None => ternary(destination, sources, permute),
        Some(mode) => ternary(destination, sources, move |a, b, c| permute(a, b, mode_selector(mode, c))),
    })
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "mov" => mov(d, s)?,
        "cvta" => cvta(d, s)?,
        "prmt" => prmt(d, s)?,
        "selp" => {
            let kind = s.modifiers.kind()?;
            let (destination, a, b) = (d.destination(s, 0, kind)?, d.source(s, 1, kind)?, d.source(s, 2, kind)?);
            Box::new(Select { d: destination, a, b, condition: d.predicate_source(s, 3)? })
        }
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permuted_bytes() {
        assert_eq!(permute(0x8877_6655, 0x4433_2211, 0x3210), 0x8877_6655);
        assert_eq!(permute(0x8877_6655, 0x4433_2211, 0x7654), 0x4433_2211);
        assert_eq!(permute(0x8877_6655, 0x4433_2211, 0xB804), 0xFF00_5511);
        assert_eq!(permute(0x8877_6655, 0, mode_selector("rc16", 1)), 0x8877_8877);
        assert_eq!(permute(0x8877_6655, 0x4433_2211, mode_selector("f4e", 2)), 0x2211_8877);
        assert_eq!(permute(0x8877_6655, 0x4433_2211, mode_selector("b4e", 1)), 0x3344_5566);
    }
}
