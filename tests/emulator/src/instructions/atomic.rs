//! Atomic operations (PTX ISA 9.7.13.5 `atom`, 9.7.13.6 `red`).

use super::float::flush;
use super::memory::{ordered, space, take_scope};
use super::small_float::{Format, Rounding, add_odd};
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::execute::access::Space;
use crate::execute::{Context, Execute, Fault, Reg, Step, each};
use crate::memory::global_races::Access;
use crate::types::{Type, sign_extend, truncate};

/// `atom` (9.7.13.5), and `red` (9.7.13.6), which has no destination.
struct Atomic<F> {
    space: Space,
    address: Source,
    bytes: usize,
    access: Access,
    d: Option<Reg>,
    b: Reg,
    c: Option<Reg>,
    f: F,
    /// The same in shared memory.
    in_shared: F,
}

impl<F: Fn(u64, u64, u64) -> u64 + Send + Sync> Execute for Atomic<F> {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (bases, b) = (cx.read(self.address.base, lanes)?, cx.read(self.b, lanes)?);
        let c = self.c.map_or(Ok([0; 32]), |register| cx.read(register, lanes))?;
        let mut old = [0; 32];
        for lane in each(lanes) {
            let address = self.address.address(bases[lane]);
            let (b, c) = (b[lane], c[lane]);
            let shared = self.space.resolve(address).0 == Space::Shared;
            let f = if shared { &self.in_shared } else { &self.f };
            old[lane] = cx.update(self.space, lane, address, self.bytes, self.access, |old| f(old, b, c))?;
        }
        if let Some(register) = self.d {
            cx.write(register, lanes, &old);
            let last = 31 - lanes.leading_zeros();
            return Ok(cx.poll(lanes, self.address.address(bases[last as usize]), register));
        }
        Ok(Step::Next)
    }
}

fn add_half(format: Format, old: u64, b: u64) -> u64 {
    let sum = add_odd(format.decode(old as u32 & 0xFFFF), format.decode(b as u32 & 0xFFFF));
    u64::from(format.encode(sum, Rounding::NearestEven, false))
}

/// `.add.f32`: subnormal numbers are kept in shared memory and flushed in global memory.
fn add_f32(old: u64, b: u64, flushes: bool) -> u64 {
    let [old, b] = [old, b].map(|bits| f32::from_bits(bits as u32)).map(|x| if flushes { flush(x) } else { x });
    let sum = if flushes { flush(old + b) } else { old + b };
    u64::from(if sum.is_nan() { 0x7FFF_FFFF } else { sum.to_bits() })
}

/// What an operation makes of the old value and its operands.
fn function(name: &str, kind: Type) -> Option<fn(u64, u64, u64) -> u64> {
    Some(match (name, kind) {
        ("add", Type::U32 | Type::S32) => |old, b, _| truncate(old.wrapping_add(b), 32),
        ("add", Type::U64 | Type::S64) => |old, b, _| old.wrapping_add(b),
        ("add", Type::F32) => |old, b, _| add_f32(old, b, true),
        ("add", Type::F64) => |old, b, _| (f64::from_bits(old) + f64::from_bits(b)).to_bits(),
        ("add", Type::F16) => |old, b, _| add_half(Format::F16, old, b),
        ("add", Type::Bf16) => |old, b, _| add_half(Format::BF16, old, b),
        ("add", Type::F16x2) => {
            |old, b, _| add_half(Format::F16, old, b) | add_half(Format::F16, old >> 16, b >> 16) << 16
        }
        ("add", Type::Bf16x2) => {
            |old, b, _| add_half(Format::BF16, old, b) | add_half(Format::BF16, old >> 16, b >> 16) << 16
        }
        ("min", Type::U32 | Type::U64) => |old, b, _| old.min(b),
        ("max", Type::U32 | Type::U64) => |old, b, _| old.max(b),
        ("min", Type::S32) => |old, b, _| if sign_extend(b, 32) < sign_extend(old, 32) { b } else { old },
        ("max", Type::S32) => |old, b, _| if sign_extend(b, 32) > sign_extend(old, 32) { b } else { old },
        ("min", Type::S64) => |old, b, _| if (b as i64) < old as i64 { b } else { old },
        ("max", Type::S64) => |old, b, _| if b as i64 > old as i64 { b } else { old },
        ("inc", Type::U32) => |old, b, _| if old >= b { 0 } else { old + 1 },
        ("dec", Type::U32) => |old, b, _| if old == 0 || old > b { b } else { old - 1 },
        ("and", Type::B32 | Type::B64) => |old, b, _| old & b,
        ("or", Type::B32 | Type::B64) => |old, b, _| old | b,
        ("xor", Type::B32 | Type::B64) => |old, b, _| old ^ b,
        ("exch", Type::B32 | Type::B64) => |_, b, _| b,
        ("cas", Type::B16 | Type::B32 | Type::B64) => |old, b, c| if old == b { c } else { old },
        _ => return None,
    })
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    let returns = match s.name {
        "atom" => true,
        "red" if !s.modifiers.has("async") => false,
        _ => return Ok(None),
    };
    let space = space(s);
    let sem = ["relaxed", "acquire", "release", "acq_rel"].into_iter().find(|order| s.modifiers.take(order));
    let access = ordered(sem.unwrap_or("relaxed"), take_scope(s), Access::Write);
    let names = ["add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"].map(|name| (name, name));
    let name = s.modifiers.one_of(&names).ok_or("without an operation")?;
    let kind = s.modifiers.kind()?;
    let f = function(name, kind).ok_or_else(|| format!("operation .{name} of this type"))?;
    if matches!(kind, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2) {
        s.modifiers.need("noftz")?;
    }
    let in_shared = if (name, kind) == ("add", Type::F32) { |old, b, _| add_f32(old, b, false) } else { f };
    let first = usize::from(returns);
    let destination = if returns { d.destinations(s, 0, kind, false)?[0] } else { None };
    let address = d.address(s, first)?;
    let b = d.source(s, first + 1, kind)?;
    let c = if name == "cas" { Some(d.source(s, first + 2, kind)?) } else { None };
    d.note_store(kind.bytes());
    d.note_access(access);
    Ok(Some(Box::new(Atomic { space, address, bytes: kind.bytes(), access, d: destination, b, c, f, in_shared })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions() {
        let f = |name, kind| function(name, kind).unwrap();
        assert_eq!(f("inc", Type::U32)(5, 5, 0), 0);
        assert_eq!(f("inc", Type::U32)(4, 5, 0), 5);
        assert_eq!(f("dec", Type::U32)(0, 5, 0), 5);
        assert_eq!(f("dec", Type::U32)(9, 5, 0), 5);
        assert_eq!(f("dec", Type::U32)(3, 5, 0), 2);
        assert_eq!(f("cas", Type::B32)(3, 3, 8), 8);
        assert_eq!(f("cas", Type::B32)(4, 3, 8), 4);
        assert_eq!(f("min", Type::S32)(1, 0xFFFF_FFFF, 0), 0xFFFF_FFFF);
        assert_eq!(f("max", Type::U32)(1, 0xFFFF_FFFF, 0), 0xFFFF_FFFF);
        assert_eq!(f("add", Type::F16x2)(0x3C00_4000, 0x3C00_3C00, 0), 0x4000_4200);
        assert!(function("min", Type::F32).is_none());
        assert_eq!((add_f32(1, 0x8000_0003, false), add_f32(1, 0x8000_0003, true)), (0x8000_0002, 0));
        assert_eq!(add_f32(0x8000_0001, 0x8000_0001, true), 0x8000_0000);
        assert_eq!(add_f32(0x0080_0000, 0x8080_0001, true), 0x8000_0000);
    }
}
