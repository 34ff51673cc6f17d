//! Instructions among the lanes of a warp (PTX ISA 9.7.9.6 `shfl.sync`, 9.7.13.9 to 9.7.13.14 `vote`, `match`,
//! `activemask`, `redux`, `elect`). They order no memory.

use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::{Condition, Context, Execute, Fault, Lanes, Pred, Reg, Step, each, fault};
use crate::types::{Type, sign_extend};

/// Runs `then` once all lanes of the mask are here.
fn together(
    cx: &mut Context<'_>,
    lanes: u32,
    members: Reg,
    then: impl FnOnce(&mut Context<'_>, u32) -> Result<(), Fault>,
) -> Result<Step, Fault> {
    let members = cx.mask(members, lanes)?;
    match cx.converge(lanes, members, false)? {
        Some(lanes) => then(cx, lanes).map(|()| Step::Next),
        None => Ok(Step::Hold),
    }
}

#[derive(Clone, Copy)]
enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Source lane, and whether it is in range.
fn shuffle_source(mode: Shuffle, lane: u32, b: u64, c: u64) -> (u32, bool) {
    let (b, clamp, segment) = (b as u32 & 31, c as u32 & 31, c as u32 >> 8 & 31);
    let highest = lane & segment | clamp & !segment;
    let (source, valid) = match mode {
        Shuffle::Up => (lane.wrapping_sub(b), lane as i32 - b as i32 >= highest as i32),
        Shuffle::Down => (lane + b, lane + b <= highest),
        Shuffle::Butterfly => (lane ^ b, lane ^ b <= highest),
        Shuffle::Index => {
            let source = lane & segment | b & !segment;
            (source, source <= highest)
        }
    };
    if valid { (source, true) } else { (lane, false) }
}

/// `shfl.sync` (9.7.9.6).
struct ShuffleSync {
    mode: Shuffle,
    d: Option<Reg>,
    p: Option<Pred>,
    a: Reg,
    b: Reg,
    c: Reg,
    members: Reg,
}

impl Execute for ShuffleSync {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        together(cx, lanes, self.members, |cx, lanes| {
            let (a, b, c) = (cx.read(self.a, lanes)?, cx.read(self.b, lanes)?, cx.read(self.c, lanes)?);
            let (mut values, mut in_range): (Lanes, u32) = ([0; 32], 0);
            for lane in each(lanes) {
                let (source, valid) = shuffle_source(self.mode, lane as u32, b[lane], c[lane]);
                if lanes >> source & 1 == 0 {
                    let detail = format!("lane {lane} takes a value from lane {source}, which does not take part");
                    return Err(fault(FindingKind::Divergent, 1 << lane, detail));
                }
                values[lane] = a[source as usize];
                in_range |= u32::from(valid) << lane;
            }
            if let Some(register) = self.d {
                cx.write(register, lanes, &values);
            }
            if let Some(register) = self.p {
                cx.write_predicate(register, lanes, in_range);
            }
            Ok(())
        })
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `match.any.sync`, `match.all.sync` (9.7.13.10).
struct Match {
    all: bool,
    d: Option<Reg>,
    p: Option<Pred>,
    a: Reg,
    members: Reg,
}

impl Execute for Match {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        together(cx, lanes, self.members, |cx, lanes| {
            let a = cx.read(self.a, lanes)?;
            let mut values = [0; 32];
            for lane in each(lanes) {
                let same = each(lanes).filter(|&other| a[other] == a[lane]).fold(0u32, |mask, other| mask | 1 << other);
                values[lane] = u64::from(if self.all && same != lanes { 0 } else { same });
            }
            if let Some(register) = self.d {
                cx.write(register, lanes, &values);
            }
            if let Some(register) = self.p {
                let all = if values[lanes.trailing_zeros() as usize] == u64::from(lanes) { lanes } else { 0 };
                cx.write_predicate(register, lanes, all);
            }
            Ok(())
        })
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `redux.sync` (9.7.13.12) of integers.
struct Redux {
    combine: fn(u64, u64) -> u64,
    d: Reg,
    a: Reg,
    members: Reg,
}

impl Execute for Redux {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        together(cx, lanes, self.members, |cx, lanes| {
            let a = cx.read(self.a, lanes)?;
            let value = each(lanes).map(|lane| a[lane]).reduce(self.combine).unwrap_or(0);
            cx.write(self.d, lanes, &[value; 32]);
            Ok(())
        })
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

#[derive(Clone, Copy)]
enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// `vote.sync` (9.7.13.9).
struct VoteSync {
    vote: Vote,
    d: Option<Reg>,
    p: Option<Pred>,
    condition: Condition,
    members: Reg,
}

impl Execute for VoteSync {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        together(cx, lanes, self.members, |cx, lanes| {
            let votes = cx.holds(self.condition, lanes)?;
            let result = match self.vote {
                Vote::All => votes == lanes,
                Vote::Any => votes != 0,
                Vote::Uniform => votes == lanes || votes == 0,
                Vote::Ballot => false,
            };
            if let Some(register) = self.d {
                cx.write(register, lanes, &[u64::from(votes); 32]);
            }
            if let Some(register) = self.p {
                cx.write_predicate(register, lanes, if result { lanes } else { 0 });
            }
            Ok(())
        })
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `elect.sync` (9.7.13.14): the lowest lane of the mask leads.
struct Elect {
    d: Option<Reg>,
    p: Option<Pred>,
    members: Reg,
}

impl Execute for Elect {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        together(cx, lanes, self.members, |cx, lanes| {
            let leader = lanes.trailing_zeros();
            if let Some(register) = self.d {
                cx.write(register, lanes, &[u64::from(leader); 32]);
            }
            if let Some(register) = self.p {
                cx.write_predicate(register, lanes, 1 << leader);
            }
            Ok(())
        })
    }

    fn waits_for_warp(&self) -> bool {
        true
    }
}

/// `activemask` (9.7.13.11).
struct ActiveMask {
    d: Reg,
}

impl Execute for ActiveMask {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        cx.write(self.d, lanes, &[u64::from(lanes); 32]);
        Ok(Step::Next)
    }
}

fn redux(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.need("sync")?;
    let name = s.modifiers.next().ok_or("without an operation")?;
    let kind = s.modifiers.kind()?;
    let combine: fn(u64, u64) -> u64 = match (name, kind) {
        ("add", Type::U32 | Type::S32) => |a, b| (a + b) & 0xFFFF_FFFF,
        ("min", Type::U32) => u64::min,
        ("max", Type::U32) => u64::max,
        ("min", Type::S32) => |a, b| if sign_extend(a, 32) < sign_extend(b, 32) { a } else { b },
        ("max", Type::S32) => |a, b| if sign_extend(a, 32) > sign_extend(b, 32) { a } else { b },
        ("and", Type::B32) => |a, b| a & b,
        ("or", Type::B32) => |a, b| a | b,
        ("xor", Type::B32) => |a, b| a ^ b,
        _ => return Err(format!("operation .{name} of this type").into()),
    };
    let (destination, a) = (d.destination(s, 0, kind)?, d.source(s, 1, kind)?);
    Ok(Box::new(Redux { combine, d: destination, a, members: d.source(s, 2, Type::B32)? }))
}

fn vote(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.need("sync")?;
    let votes = [("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)];
    let vote = s.modifiers.one_of(&votes).ok_or("without a mode")?;
    let ballot = matches!(vote, Vote::Ballot);
    s.modifiers.need(if ballot { "b32" } else { "pred" })?;
    let (register, predicate) =
        if ballot { (Some(d.destination(s, 0, Type::B32)?), None) } else { (None, d.predicate_destination(s, 0)?) };
    let condition = d.predicate_source(s, 1)?;
    Ok(Box::new(VoteSync { vote, d: register, p: predicate, condition, members: d.source(s, 2, Type::B32)? }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    Ok(Some(match s.name {
        "shfl" => {
            s.modifiers.need("sync")?;
            let modes =
                [("up", Shuffle::Up), ("down", Shuffle::Down), ("bfly", Shuffle::Butterfly), ("idx", Shuffle::Index)];
            let mode = s.modifiers.one_of(&modes).ok_or("without a mode")?;
            s.modifiers.need("b32")?;
            let (register, p) = d.register_and_predicate(s, 0, Type::B32)?;
            let (a, b) = (d.source(s, 1, Type::B32)?, d.source(s, 2, Type::B32)?);
            let (c, members) = (d.source(s, 3, Type::B32)?, d.source(s, 4, Type::B32)?);
            Box::new(ShuffleSync { mode, d: register, p, a, b, c, members })
        }
        "match" => {
            let all = s.modifiers.one_of(&[("any", false), ("all", true)]).ok_or("without .any or .all")?;
            s.modifiers.need("sync")?;
            let kind = s.modifiers.kind()?;
            let (register, p) = d.register_and_predicate(s, 0, Type::B32)?;
            if p.is_some() && !all || !matches!(kind, Type::B32 | Type::B64) {
                return Err("operand form".into());
            }
            Box::new(Match { all, d: register, p, a: d.source(s, 1, kind)?, members: d.source(s, 2, Type::B32)? })
        }
        "redux" => redux(d, s)?,
        "vote" => vote(d, s)?,
        "elect" => {
            s.modifiers.need("sync")?;
            let (register, p) = d.register_and_predicate(s, 0, Type::B32)?;
            Box::new(Elect { d: register, p, members: d.source(s, 1, Type::B32)? })
        }
        "activemask" => {
            s.modifiers.need("b32")?;
            Box::new(ActiveMask { d: d.destination(s, 0, Type::B32)? })
        }
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_lanes() {
        assert_eq!(shuffle_source(Shuffle::Up, 5, 2, 0), (3, true));
        assert_eq!(shuffle_source(Shuffle::Up, 1, 2, 0), (1, false));
        assert_eq!(shuffle_source(Shuffle::Down, 30, 2, 31), (30, false));
        assert_eq!(shuffle_source(Shuffle::Down, 29, 2, 31), (31, true));
        assert_eq!(shuffle_source(Shuffle::Butterfly, 5, 16, 31), (21, true));
        // Segments of 8 lanes: the clamp is 0x1807 (mask 24, clamp 7).
        assert_eq!(shuffle_source(Shuffle::Index, 13, 2, 0x1807), (10, true));
        assert_eq!(shuffle_source(Shuffle::Down, 15, 1, 0x1807), (15, false));
        assert_eq!(shuffle_source(Shuffle::Up, 8, 1, 0x1800), (8, false));
    }
}
