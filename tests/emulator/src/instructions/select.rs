//! Selection by a number (PTX ISA 9.7.6.4: `slct`), comparison into a register (9.7.6.1, 9.7.7.1: `set`), and properties of
//! floating-point numbers (9.7.3.1: `testp`).

use std::cmp::Ordering;

use super::compare::{Comparison, Relation, comparison};
use super::{Decoder, Operation, Refusal, Statement, ternary};
use crate::execute::lanes::{Combine, Compare};
use crate::execute::{Condition, Context, Execute, Fault, Reg, Step};
use crate::types::{Type, sign_extend};

/// `set`: `truth` where the comparison holds, else 0.
struct Set {
    relation: Relation,
    order: fn(u64, u64) -> Option<Ordering>,
    truth: u64,
    d: Reg,
    a: Reg,
    b: Reg,
    with: Option<(Combine, Condition)>,
}

impl Execute for Set {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (a, b) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?);
        let holds = |lane: usize| self.relation.holds((self.order)(a[lane], b[lane]));
        let mut bits = (0..32).fold(0, |bits, lane| bits | u32::from(holds(lane)) << lane);
        if let Some((combine, condition)) = self.with {
            bits = combine.apply(bits, cx.holds(condition, lanes)?);
        }
        cx.write(self.d, lanes, &std::array::from_fn(|lane| if bits >> lane & 1 == 1 { self.truth } else { 0 }));
        Ok(Step::Next)
    }
}

/// What `set` writes for true.
fn truth(kind: Type) -> Result<u64, Refusal> {
    Ok(match kind {
        Type::U32 | Type::S32 => 0xFFFF_FFFF,
        Type::U16 | Type::S16 => 0xFFFF,
        Type::F32 => u64::from(1f32.to_bits()),
        Type::F16 => 0x3C00,
        Type::Bf16 => 0x3F80,
        _ => return Err("a result of this type".into()),
    })
}

fn set(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let mut result = Type::U32;
    let Comparison { relation, combine, order, kind, .. } = comparison(s, |s| {
        result = s.modifiers.kind()?;
        s.modifiers.kind()
    })?;
    if matches!(kind, Type::F16x2 | Type::Bf16x2) {
        return Err("a comparison of this type".into());
    }
    let truth = truth(result)?;
    let destination = d.destination(s, 0, result)?;
    let (a, b) = (d.source(s, 1, kind)?, d.source(s, 2, kind)?);
    let with = combine.map(|combine| Ok::<_, Refusal>((combine, d.predicate_source(s, 3)?))).transpose()?;
    Ok(Box::new(Set { relation, order, truth, d: destination, a, b, with }))
}

fn slct(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let flush = s.modifiers.take("ftz");
    let (kind, by) = (s.modifiers.kind()?, s.modifiers.kind()?);
    let keeps: fn(u64) -> bool = match by {
        Type::S32 if !flush => |c| sign_extend(c, 32) >= 0,
        Type::F32 if flush => |c| super::float::flush(f32::from_bits(c as u32)) >= 0.0,
        Type::F32 => |c| f32::from_bits(c as u32) >= 0.0,
        _ => return Err("a selection by this type".into()),
    };
    let sources = [d.source(s, 1, kind)?, d.source(s, 2, kind)?, d.source(s, 3, by)?];
    Ok(ternary(d.destination(s, 0, kind)?, sources, move |a, b, c| if keeps(c) { a } else { b }))
}

fn testp(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    // In f64 of the number's class: zeros count as normal.
    let tests: [(&str, fn(std::num::FpCategory) -> bool); 6] = {
        use std::num::FpCategory::{Infinite, Nan, Normal, Subnormal, Zero};
        [
            ("finite", |class| !matches!(class, Nan | Infinite)),
            ("infinite", |class| class == Infinite),
            ("number", |class| class != Nan),
            ("notanumber", |class| class == Nan),
            ("normal", |class| matches!(class, Normal | Zero)),
            ("subnormal", |class| class == Subnormal),
        ]
    };
    let test = s.modifiers.one_of(&tests).ok_or("without a property")?;
    let kind = s.modifiers.kind()?;
    let class: fn(u64) -> std::num::FpCategory = match kind {
        Type::F32 => |a| f32::from_bits(a as u32).classify(),
        Type::F64 => |a| f64::from_bits(a).classify(),
        _ => return Err("this type".into()),
    };
    let p = d.predicate_destination(s, 0)?;
    let a = d.source(s, 1, kind)?;
    Ok(Box::new(Compare { f: move |a, _| test(class(a)), p, q: None, a, b: a, with: None }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "slct" => slct(d, s)?,
        "set" => set(d, s)?,
        "testp" => testp(d, s)?,
        _ => return Ok(None),
    }))
}
