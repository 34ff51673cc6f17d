//! Non-bulk asynchronous copies (PTX ISA 9.7.9.25.3: `cp.async`).
//!
//! A copy reads its source at once and lands when its thread waits for it, as late as it may. Until then its destination
//! must not be touched. An mbarrier may wait for it too, whichever of the two comes first.

use super::mbarrier::{Landing, PendingCopy};
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::shared_fault;
use crate::execute::{Condition, Context, Execute, Fault, Reg, Step, each, fault, fault_at};
use crate::memory::global_races::Access;
use crate::types::Type;

/// Copies of a warp that have not landed.
#[derive(Default)]
pub(crate) struct Copies {
    pending: Vec<Copy>,
    /// Groups that each lane committed.
    committed: [u32; 32],
}

struct Copy {
    lane: u8,
    size: u8,
    to: u32,
    /// Number of the group, or [`OPEN`].
    group: u32,
    bytes: [u8; 16],
    landing: Landing,
}

const OPEN: u32 = u32::MAX;

/// `cp.async` (9.7.9.25.3.1).
struct CopyAsync {
    to: Source,
    from: Source,
    size: usize,
    source_size: Option<Reg>,
    ignore: Option<Condition>,
}

impl Execute for CopyAsync {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (to, from) = (cx.read(self.to.base, lanes)?, cx.read(self.from.base, lanes)?);
        let sizes = self.source_size.map(|register| cx.read(register, lanes)).transpose()?;
        let ignored = self.ignore.map_or(Ok(0), |condition| cx.holds(condition, lanes))?;
        for lane in each(lanes) {
            let (to, from) = (self.to.address(to[lane]), self.from.address(from[lane]));
            let given = sizes.map_or(self.size as u64, |sizes| sizes[lane]);
            if given > self.size as u64 {
                let detail = format!("{given} of {} bytes", self.size);
                return Err(fault(FindingKind::Operand, 1 << lane, detail));
            }
            let given = if ignored >> lane & 1 == 1 { 0 } else { given as usize };
            for (address, space) in [(to, "destination"), (from, "source")] {
                if address % self.size as u64 != 0 {
                    return Err(fault_at(FindingKind::Misaligned, lane as u32, address, space));
                }
            }
            let mut bytes = [0; 16];
            if given == self.size {
                cx.load_global(lane, from, &mut bytes[..given], Access::Read)?;
            } else {
                for (i, byte) in bytes[..given].iter_mut().enumerate() {
                    cx.load_global(lane, from + i as u64, std::slice::from_mut(byte), Access::Read)?;
                }
            }
            let thread = cx.thread(lane);
            let at = cx.shared_place(to, lane, to)?;
            let begun = cx.cluster.shared.begin_copy(at, self.size, thread);
            begun.map_err(|fault| shared_fault(fault, lane, to))?;
            let (size, landing) = (self.size as u8, Landing::default());
            let copy = Copy { lane: lane as u8, size, to: at, group: OPEN, bytes, landing };
            cx.warp.state.copies.pending.push(copy);
        }
        Ok(Step::Next)
    }
}

/// `cp.async.commit_group` (9.7.9.25.3.2).
struct Commit;

impl Execute for Commit {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let copies = &mut cx.warp.state.copies;
        for copy in &mut copies.pending {
            if copy.group == OPEN && lanes >> copy.lane & 1 == 1 {
                copy.group = copies.committed[copy.lane as usize];
            }
        }
        each(lanes).for_each(|lane| copies.committed[lane] += 1);
        Ok(Step::Next)
    }
}

/// `cp.async.wait_group` of so many, or `cp.async.wait_all` (9.7.9.25.3.3).
struct Wait {
    pending: Option<u32>,
}

impl Execute for Wait {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let index = cx.warp.index;
        let copies = &mut cx.warp.state.copies;
        let (committed, shared) = (copies.committed, &mut cx.cluster.shared);
        copies.pending.retain(|copy| {
            let lands = lanes >> copy.lane & 1 == 1
                && match self.pending {
                    None => true,
                    Some(pending) => copy.group != OPEN && copy.group + pending < committed[copy.lane as usize],
                };
            if lands && copy.landing.is_first() {
                shared.end_copy(copy.to, &copy.bytes[..copy.size as usize], index * 32 + u32::from(copy.lane));
            }
            !lands
        });
        Ok(Step::Next)
    }
}

/// `cp.async.mbarrier.arrive` (9.7.13.15.15): an arrival when the thread's copies so far have landed.
struct ArriveAfterCopies {
    barrier: Source,
    increments: bool,
}

impl Execute for ArriveAfterCopies {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let bases = cx.read(self.barrier.base, lanes)?;
        cx.warp.state.copies.pending.retain(|copy| !copy.landing.is_over());
        for lane in each(lanes) {
            let thread = cx.thread(lane);
            // They stay in the thread's groups, which may be waited for as well.
            let pending = cx.warp.state.copies.pending.iter_mut();
            let of_lane = pending.filter(|copy| usize::from(copy.lane) == lane);
            let copies: Vec<_> = of_lane
                .map(|copy| PendingCopy {
                    to: copy.to,
                    bytes: copy.bytes[..copy.size as usize].to_vec(),
                    thread,
                    counts_bytes: false,
                    landing: copy.landing.share(),
                })
                .collect();
            cx.arrive_after_copies(lane, self.barrier.address(bases[lane]), self.increments, copies)?;
        }
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "cp" || !s.modifiers.has("async") || s.modifiers.has("bulk") {
        return Ok(None);
    }
    s.modifiers.need("async")?;
    if s.modifiers.take("mbarrier") {
        for name in ["arrive", "b64"] {
            s.modifiers.need(name)?;
        }
        let increments = !s.modifiers.take("noinc");
        s.modifiers.one_of(&[("shared", ()), ("shared::cta", ())]);
        return Ok(Some(Box::new(ArriveAfterCopies { barrier: d.address(s, 0)?, increments })));
    }
    if s.modifiers.take("commit_group") {
        return Ok(Some(Box::new(Commit)));
    }
    if s.modifiers.take("wait_all") {
        return Ok(Some(Box::new(Wait { pending: None })));
    }
    if s.modifiers.take("wait_group") {
        let pending = u32::try_from(d.integer(s, 0)?).map_err(|_| "the number of groups")?;
        return Ok(Some(Box::new(Wait { pending: Some(pending) })));
    }
    let cache = s.modifiers.one_of(&[("ca", true), ("cg", false)]).ok_or("without .ca or .cg")?;
    s.modifiers.one_of(&[("shared", ()), ("shared::cta", ())]).ok_or("without .shared")?;
    s.modifiers.need("global")?;
    s.modifiers.one_of(&[("L2::64B", ()), ("L2::128B", ()), ("L2::256B", ())]);
    let size = d.integer(s, 2)? as usize;
    if !(size == 16 || cache && matches!(size, 4 | 8)) {
        return Err(format!("a copy of {size} bytes").into());
    }
    let (mut source_size, mut ignore) = (None, None);
    if s.count() > 3 {
        match d.predicate_source(s, 3) {
            Ok(condition) if !matches!(s.operand(3)?, crate::parse::ast::Operand::Integer(_)) => {
                ignore = Some(condition);
            }
            _ => source_size = Some(d.source(s, 3, Type::U32)?),
        }
    }
    Ok(Some(Box::new(CopyAsync { to: d.address(s, 0)?, from: d.address(s, 1)?, size, source_size, ignore })))
}
