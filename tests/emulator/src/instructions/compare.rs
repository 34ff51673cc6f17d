//! Comparison into predicates (PTX ISA 9.7.6.2 and 9.7.7.2: `setp`).

use super::{Decoder, Operation, Refusal, Statement};
use crate::execute::lanes::{Combine, Compare};
use crate::execute::{Condition, Context, Execute, Fault, Pred, Reg, Step};
use crate::types::{Type, sign_extend};
use std::cmp::Ordering;

/// A comparison: which orders satisfy it, and whether unordered operands do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Relation {
    less: bool,
    equal: bool,
    greater: bool,
    unordered: bool,
}

impl Relation {
    /// The relation of a modifier, for floating-point or integer types.
    pub(super) fn named(name: &str, float: bool) -> Option<Self> {
        let relation = |less, equal, greater, unordered| Some(Self { less, equal, greater, unordered });
        match name {
            "eq" => relation(false, true, false, false),
            "ne" => relation(true, false, true, false),
            "lt" => relation(true, false, false, false),
            "le" => relation(true, true, false, false),
            "gt" => relation(false, false, true, false),
            "ge" => relation(false, true, true, false),
            "lo" if !float => relation(true, false, false, false),
            "ls" if !float => relation(true, true, false, false),
            "hi" if !float => relation(false, false, true, false),
            "hs" if !float => relation(false, true, true, false),
            "equ" if float => relation(false, true, false, true),
            "neu" if float => relation(true, false, true, true),
            "ltu" if float => relation(true, false, false, true),
            "leu" if float => relation(true, true, false, true),
            "gtu" if float => relation(false, false, true, true),
            "geu" if float => relation(false, true, true, true),
            "num" if float => relation(true, true, true, false),
            "nan" if float => relation(false, false, false, true),
            _ => None,
        }
    }

    #[inline(always)]
    pub(super) fn holds(self, order: Option<Ordering>) -> bool {
        match order {
            Some(Ordering::Less) => self.less,
            Some(Ordering::Equal) => self.equal,
            Some(Ordering::Greater) => self.greater,
            None => self.unordered,
        }
    }
}

/// Order of two values of a type; none where one is NaN.
fn order(a: u64, b: u64, kind: Type) -> Option<Ordering> {
    match kind {
        Type::F32 => f32::from_bits(a as u32).partial_cmp(&f32::from_bits(b as u32)),
        Type::F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        Type::F16 => half::f16::from_bits(a as u16).partial_cmp(&half::f16::from_bits(b as u16)),
        Type::Bf16 => half::bf16::from_bits(a as u16).partial_cmp(&half::bf16::from_bits(b as u16)),
        _ if kind.is_signed() => Some(sign_extend(a, kind.bits()).cmp(&sign_extend(b, kind.bits()))),
        _ => Some(a.cmp(&b)),
    }
}

/// The order of a type's values, subnormal ones flushed or not.
fn order_of(kind: Type, flush: bool) -> fn(u64, u64) -> Option<Ordering> {
    match (kind, flush) {
        (Type::F32, true) => |a, b| {
            let flushed = |x: u64| super::float::flush(f32::from_bits(x as u32));
            flushed(a).partial_cmp(&flushed(b))
        },
        (Type::F16, true) => |a, b| {
            let flushed = |x: u64| if x & 0x7C00 == 0 { x & 0x8000 } else { x };
            order(flushed(a), flushed(b), Type::F16)
        },
        (Type::F32, false) => |a, b| order(a, b, Type::F32),
        (Type::F64, _) => |a, b| order(a, b, Type::F64),
        (Type::F16, false) => |a, b| order(a, b, Type::F16),
        (Type::Bf16, _) => |a, b| order(a, b, Type::Bf16),
        (Type::S16, _) => |a, b| order(a, b, Type::S16),
        (Type::S32, _) => |a, b| order(a, b, Type::S32),
        (Type::S64, _) => |a, b| order(a, b, Type::S64),
        _ => |a, b| Some(a.cmp(&b)),
    }
}

/// A comparison as `setp` and `set` name it.
pub(super) struct Comparison {
    pub(super) relation: Relation,
    pub(super) combine: Option<Combine>,
    pub(super) order: fn(u64, u64) -> Option<Ordering>,
    pub(super) kind: Type,
    pub(super) flush: bool,
}

/// Takes relation and combination; the type is taken by `kind`, behind the others.
pub(super) fn comparison(
    s: &mut Statement<'_>,
    kind: impl FnOnce(&mut Statement<'_>) -> Result<Type, Refusal>,
) -> Result<Comparison, Refusal> {
    let name = s.modifiers.next().ok_or("without a comparison")?;
    let combine = s.modifiers.one_of(&[("and", Combine::And), ("or", Combine::Or), ("xor", Combine::Xor)]);
    let flush = s.modifiers.take("ftz");
    let kind = kind(s)?;
    let element = match kind {
        Type::F16x2 => Type::F16,
        Type::Bf16x2 => Type::Bf16,
        kind => kind,
    };
    let float = matches!(element, Type::F16 | Type::Bf16 | Type::F32 | Type::F64);
    let relation = Relation::named(name, float).ok_or_else(|| format!("comparison .{name} of this type"))?;
    if kind.is_untyped() && !matches!(name, "eq" | "ne") {
        return Err("untyped operands are equal or not".into());
    }
    if kind.is_signed() && matches!(name, "lo" | "ls" | "hi" | "hs") {
        return Err(format!("comparison .{name} of a signed type").into());
    }
    if matches!(kind, Type::Pred | Type::B8 | Type::U8 | Type::S8 | Type::B128) {
        return Err("a comparison of this type".into());
    }
    if flush && !matches!(element, Type::F32 | Type::F16) {
        return Err("modifier .ftz".into());
    }
    Ok(Comparison { relation, combine, order: order_of(element, flush), kind, flush })
}

/// `setp` of two elements: `p` is the lower one's result, `q` the upper one's.
struct CompareElements {
    relation: Relation,
    order: fn(u64, u64) -> Option<Ordering>,
    p: Option<Pred>,
    q: Option<Pred>,
    a: Reg,
    b: Reg,
    with: Option<(Combine, Condition)>,
}

impl Execute for CompareElements {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (a, b) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?);
        let with = self.with.map(|(combine, c)| Ok::<_, Fault>((combine, cx.holds(c, lanes)?))).transpose()?;
        for (shift, register) in [(0, self.p), (16, self.q)] {
            let element = |x: u64| x >> shift & 0xFFFF;
            let holds = |lane: usize| self.relation.holds((self.order)(element(a[lane]), element(b[lane])));
            let bits = (0..32).fold(0, |bits, lane| bits | u32::from(holds(lane)) << lane);
            if let Some(register) = register {
                cx.write_predicate(register, lanes, with.map_or(bits, |(combine, c)| combine.apply(bits, c)));
            }
        }
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "setp" {
        return Ok(None);
    }
    let Comparison { relation, combine, order, kind, flush } = comparison(s, |s| s.modifiers.kind())?;
    let (p, q) = d.predicate_pair(s, 0)?;
    let (a, b) = (d.source(s, 1, kind)?, d.source(s, 2, kind)?);
    let with = combine.map(|combine| Ok::<_, Refusal>((combine, d.predicate_source(s, 3)?))).transpose()?;
    Ok(Some(match kind {
        Type::F16x2 | Type::Bf16x2 => Box::new(CompareElements { relation, order, p, q, a, b, with }),
        // The usual ones are inlined.
        Type::F32 if !flush => Box::new(Compare {
            f: move |a, b| relation.holds(super::compare::order(a, b, Type::F32)),
            p,
            q,
            a,
            b,
            with,
        }),
        Type::U32 | Type::B32 | Type::U64 | Type::B64 => {
            Box::new(Compare { f: move |a: u64, b: u64| relation.holds(Some(a.cmp(&b))), p, q, a, b, with })
        }
        _ => Box::new(Compare { f: move |a, b| relation.holds(order(a, b)), p, q, a, b, with }),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unordered_relations() {
        let nan = u64::from(f32::NAN.to_bits());
        let one = u64::from(1f32.to_bits());
        let holds = |name, a, b| Relation::named(name, true).unwrap().holds(order(a, b, Type::F32));
        for (name, with_nan, equal) in [
            ("eq", false, true),
            ("ne", false, false),
            ("neu", true, false),
            ("geu", true, true),
            ("ge", false, true),
            ("nan", true, false),
            ("num", false, true),
        ] {
            assert_eq!(holds(name, nan, one), with_nan, "{name}");
            assert_eq!(holds(name, one, one), equal, "{name}");
        }
        assert!(holds("eq", u64::from((-0f32).to_bits()), 0));
        assert!(Relation::named("lo", true).is_none());
        assert_eq!(order(0xFFFF, 1, Type::S16), Some(Ordering::Less));
        assert_eq!(order(0xFFFF, 1, Type::U16), Some(Ordering::Greater));
    }
}
