//! mbarrier objects (PTX ISA 9.7.13.15).
//!
//! An object lives beside shared memory; its 8 bytes only tell who may use it and keep others away. A phase ends when
//! all arrivals have been made and all bytes that were announced have been written. Bulk copies ([`super::bulk`]) land only when
//! somebody waits, for the second time, for a phase that lacks nothing else: as late as they may.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{Decoder, Operation, Refusal, Statement, unary};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::shared_fault;
use crate::execute::{Context, Execute, Fault, Pred, Reg, Step, each, fault_at};
use crate::memory::clocks::{Knowledge, join};
use crate::memory::shared::{BLOCK_SHIFT, SharedMemory};
use crate::types::Type;

/// Failed tests in a row, without any change to an mbarrier of the block, after which its waiters count as stuck.
const PATIENCE: i32 = 1 << 17;
/// The same while somebody of the cluster waits for another block: lanes of its own warp may keep it from looking for long.
const PATIENCE_WITH_BLOCKS: i32 = 1 << 22;

/// The mbarrier objects of a block.
#[derive(Default)]
pub(crate) struct Mbarriers {
    objects: Vec<Mbarrier>,
    failed_tests: i32,
}

impl Mbarriers {
    /// Somebody of the cluster waits for another block, so those who wait here may have to.
    pub(super) fn allow_waiting(&mut self) {
        self.failed_tests = PATIENCE - PATIENCE_WITH_BLOCKS;
    }
}

struct Mbarrier {
    address: u32,
    /// Arrivals of a phase.
    expected: u32,
    /// Arrivals that the phase still lacks.
    pending: u32,
    /// Bytes that the phase still lacks; negative where copies were faster than their announcement.
    bytes: i64,
    /// Phases that ended.
    phase: u64,
    /// What those pass on who arrived in this phase, and what all earlier phases passed on.
    arriving: Knowledge,
    passed: Knowledge,
    copies: Vec<PendingCopy>,
    /// Arrivals that are made when all copies have landed.
    arrivals_of_copies: u32,
    /// Which warp asked first for a phase that lacks only copies, and which of its instructions that was.
    asked: Option<(u32, u64)>,
}

/// A copy that has not landed.
pub(super) struct PendingCopy {
    pub(super) to: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) thread: u32,
    /// Whether its bytes count as transactions: those of a bulk copy do.
    pub(super) counts_bytes: bool,
    pub(super) landing: Landing,
}

/// The landing of a copy, which each of those that wait for it may be the first to see.
#[derive(Clone, Default)]
pub(super) struct Landing(Option<Arc<AtomicBool>>);

impl Landing {
    /// One more that waits for the same copy.
    pub(super) fn share(&mut self) -> Self {
        Self(Some(Arc::clone(self.0.get_or_insert_default())))
    }

    /// Whether nobody saw it before.
    pub(super) fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|landed| !landed.swap(true, Relaxed))
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(|landed| landed.load(Relaxed))
    }
}

impl Mbarrier {
    fn end_phase_if_complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.expected;
            self.passed.clone_from(&self.arriving);
        }
    }
}

fn misuse(lane: usize, address: u64, detail: impl Into<String>) -> Fault {
    fault_at(FindingKind::Mbarrier, lane as u32, address, detail)
}

impl Context<'_> {
    /// Where an object is whose shared or generic address is given.
    fn place_of_mbarrier(&self, address: u64, lane: usize) -> Result<u32, Fault> {
        let at = self.shared_or_generic(address, lane)?;
        if !at.is_multiple_of(8) {
            return Err(fault_at(FindingKind::Misaligned, lane as u32, address, "8 bytes"));
        }
        Ok(at)
    }

    /// As [`Self::place_of_mbarrier`], in the own block.
    fn own_mbarrier(&self, address: u64, lane: usize, what: &str) -> Result<u32, Fault> {
        let at = self.place_of_mbarrier(address, lane)?;
        if at >> BLOCK_SHIFT != self.block.rank {
            return Err(misuse(lane, address, format!("{what} in another block of the cluster")));
        }
        Ok(at)
    }

    /// The object at an address, which this thread may use.
    fn mbarrier(&mut self, lane: usize, address: u64) -> Result<&mut Mbarrier, Fault> {
        let at = self.place_of_mbarrier(address, lane)?;
        self.mbarrier_at(lane, address, at)
    }

    /// The object at a place, for which there is an address.
    fn mbarrier_at(&mut self, lane: usize, address: u64, at: u32) -> Result<&mut Mbarrier, Fault> {
        let thread = self.thread(lane);
        let seen = self.cluster.shared.use_object(at, thread);
        seen.map_err(|fault| shared_fault(fault, lane, address))?;
        let objects = &mut self.cluster.mbarriers.objects;
        objects
            .iter_mut()
            .find(|object| object.address == at)
            .ok_or_else(|| misuse(lane, address, "there is no mbarrier here"))
    }

    /// A copy that the phase of the object at a place waits for.
    pub(super) fn attach_copy(&mut self, lane: usize, address: u64, at: u32, copy: PendingCopy) -> Result<(), Fault> {
        if !at.is_multiple_of(8) {
            return Err(fault_at(FindingKind::Misaligned, lane as u32, address, "8 bytes"));
        }
        if self.cluster.shared.is_generic(at, 8) {
            let detail = "the mbarrier was initialized without a fence after it";
            return Err(fault_at(FindingKind::ProxyFence, lane as u32, address, detail));
        }
        self.mbarrier_at(lane, address, at)?.copies.push(copy);
        self.cluster.mbarriers.failed_tests = 0;
        Ok(())
    }

    /// An arrival that is made when these copies of a thread have landed; `increments` counts it as one more.
    pub(super) fn arrive_after_copies(
        &mut self,
        lane: usize,
        address: u64,
        increments: bool,
        copies: Vec<PendingCopy>,
    ) -> Result<(), Fault> {
        let object = self.mbarrier(lane, address)?;
        object.pending += u32::from(increments);
        if object.arrivals_of_copies >= object.pending {
            let detail = format!("an arrival after copies where the phase lacks {}", object.pending);
            return Err(misuse(lane, address, detail));
        }
        object.arrivals_of_copies += 1;
        object.copies.extend(copies);
        self.cluster.mbarriers.failed_tests = 0;
        Ok(())
    }

    /// Lands the copies of an object whose phase lacks nothing but them.
    fn land(&mut self, lane: usize, address: u64) -> Result<(), Fault> {
        let asks = (self.warp.index, self.warp.instructions);
        let object = self.mbarrier(lane, address)?;
        let nothing_lands = object.copies.is_empty() && object.arrivals_of_copies == 0;
        if object.pending != object.arrivals_of_copies || nothing_lands {
            return Ok(());
        }
        if *object.asked.get_or_insert(asks) == asks {
            return Ok(());
        }
        object.asked = None;
        let at = object.address;
        let copies = std::mem::take(&mut object.copies);
        let mut bytes = 0;
        let mut knowledge = Knowledge::new();
        for copy in &copies {
            let shared = &mut self.cluster.shared;
            if copy.landing.is_first() {
                // Of bulk copies bytes are counted.
                let end = if copy.counts_bytes { SharedMemory::end_async_copy } else { SharedMemory::end_copy };
                end(shared, copy.to, &copy.bytes, copy.thread);
            }
            shared.release(copy.thread / 32, 1 << (copy.thread % 32), &mut knowledge);
            if copy.counts_bytes {
                bytes += copy.bytes.len() as i64;
            }
        }
        let object = self.mbarrier_at(lane, address, at)?;
        object.bytes -= bytes;
        object.pending -= std::mem::take(&mut object.arrivals_of_copies);
        join(&mut object.arriving, &knowledge);
        object.end_phase_if_complete();
        Ok(())
    }
}

/// What an instruction does to an object.
#[derive(Clone, Copy)]
enum Change {
    Arrive { drop: bool },
    Expect,
    ArriveExpect { drop: bool },
    Complete,
}

/// `mbarrier.init` (9.7.13.15.9) and `mbarrier.inval` (9.7.13.15.10).
struct Lifetime {
    address: Source,
    /// None invalidates.
    count: Option<Reg>,
}

impl Execute for Lifetime {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let bases = cx.read(self.address.base, lanes)?;
        let counts = self.count.map(|count| cx.read(count, lanes)).transpose()?;
        for lane in each(lanes) {
            let address = self.address.address(bases[lane]);
            let at = cx.own_mbarrier(address, lane, "its life begins and ends")?;
            let thread = cx.thread(lane);
            let exists = cx.cluster.mbarriers.objects.iter().any(|object| object.address == at);
            let Some(counts) = counts else {
                cx.mbarrier(lane, address)?;
                cx.cluster.shared.end_object(at);
                cx.cluster.mbarriers.objects.retain(|object| object.address != at);
                continue;
            };
            let count = counts[lane] as u32;
            if exists {
                return Err(misuse(lane, address, "initialized while it is in use"));
            }
            if count == 0 || count >= 1 << 20 {
                return Err(misuse(lane, address, format!("a count of {count}")));
            }
            cx.cluster.shared.begin_object(at, thread).map_err(|fault| shared_fault(fault, lane, address))?;
            cx.cluster.mbarriers.objects.push(Mbarrier {
                address: at,
                expected: count,
                pending: count,
                bytes: 0,
                phase: 0,
                arriving: Knowledge::new(),
                passed: Knowledge::new(),
                copies: Vec::new(),
                arrivals_of_copies: 0,
                asked: None,
            });
        }
        Ok(Step::Next)
    }
}

/// `mbarrier.expect_tx` (9.7.13.15.11), `.complete_tx` (9.7.13.15.12), `.arrive` (9.7.13.15.13) and `.arrive_drop`
/// (9.7.13.15.14).
struct Signal {
    change: Change,
    address: Source,
    state: Option<Reg>,
    /// Arrivals or bytes.
    amount: Reg,
    /// Orders memory: what was written before is seen by those who wait.
    releases: bool,
    /// The phase must not end here.
    no_complete: bool,
    /// The object may be in another block of the cluster.
    remote: bool,
}

impl Execute for Signal {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (bases, amounts) = (cx.read(self.address.base, lanes)?, cx.read(self.amount, lanes)?);
        let mut states = [0; 32];
        cx.cluster.mbarriers.failed_tests = 0;
        for lane in each(lanes) {
            let address = self.address.address(bases[lane]);
            let amount = amounts[lane] as u32;
            let mut knowledge = Knowledge::new();
            if self.releases {
                let warp = cx.warp.index;
                cx.cluster.shared.release(warp, 1 << lane, &mut knowledge);
            }
            if self.state.is_some() || !self.remote {
                cx.own_mbarrier(address, lane, "used by an instruction for the own block only")?;
            }
            let object = cx.mbarrier(lane, address)?;
            let (arrivals, bytes, drop) = match self.change {
                Change::Arrive { drop } => (amount, 0, drop),
                Change::Expect => (0, i64::from(amount), false),
                Change::ArriveExpect { drop } => (1, i64::from(amount), drop),
                Change::Complete => (0, -i64::from(amount), false),
            };
            states[lane] = object.phase << 32 | u64::from(object.pending);
            object.bytes += bytes;
            if object.bytes.abs() >= 1 << 20 {
                let detail = format!("{} bytes are pending, more than 2^20 - 1", object.bytes);
                return Err(misuse(lane, address, detail));
            }
            if arrivals + object.arrivals_of_copies > object.pending {
                let detail = format!("{arrivals} arrivals where the phase lacks {}", object.pending);
                return Err(misuse(lane, address, detail));
            }
            if arrivals == 0 && matches!(self.change, Change::Arrive { .. }) {
                return Err(misuse(lane, address, "an arrival with a count of 0"));
            }
            object.pending -= arrivals;
            if self.no_complete && object.pending == 0 && object.bytes == 0 {
                return Err(misuse(lane, address, "the phase ends with a .noComplete arrival"));
            }
            if drop {
                object.expected -= arrivals;
            }
            if arrivals > 0 {
                join(&mut object.arriving, &knowledge);
            }
            object.end_phase_if_complete();
        }
        if let Some(register) = self.state {
            cx.write(register, lanes, &states);
        }
        Ok(Step::Next)
    }
}

/// `mbarrier.test_wait` and `mbarrier.try_wait` (9.7.13.15.16), of a state or a parity.
struct Test {
    p: Pred,
    address: Source,
    phase: Reg,
    parity: bool,
    /// Orders memory: what those wrote who arrived is seen afterwards.
    acquires: bool,
}

impl Test {
    /// Whether the phase that is waited for has ended.
    fn has_ended(&self, cx: &mut Context<'_>, lane: usize, address: u64, waited: u64) -> Result<bool, Fault> {
        cx.own_mbarrier(address, lane, "waited for")?;
        let object = cx.mbarrier(lane, address)?;
        if self.parity {
            if waited > 1 {
                return Err(misuse(lane, address, format!("{waited} is no parity")));
            }
            // The current phase has not ended, the one before it has.
            return Ok(object.phase % 2 != waited);
        }
        let phase = waited >> 32;
        if phase > object.phase || phase + 1 < object.phase {
            let detail = format!("the state is of phase {phase}, the object in phase {}", object.phase);
            return Err(misuse(lane, address, detail));
        }
        Ok(phase < object.phase)
    }
}

impl Execute for Test {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (bases, phases) = (cx.read(self.address.base, lanes)?, cx.read(self.phase, lanes)?);
        let mut ended = 0;
        for lane in each(lanes) {
            let address = self.address.address(bases[lane]);
            if !self.has_ended(cx, lane, address, phases[lane])? {
                cx.land(lane, address)?;
            }
            let waited = self.has_ended(cx, lane, address, phases[lane])?;
            if waited {
                if self.acquires {
                    let passed = cx.mbarrier(lane, address)?.passed.clone();
                    let warp = cx.warp.index;
                    cx.cluster.shared.acquire(warp, 1 << lane, &passed);
                }
                ended |= 1 << lane;
            }
        }
        cx.write_predicate(self.p, lanes, ended);
        if ended == lanes {
            cx.cluster.mbarriers.failed_tests = 0;
            return Ok(Step::Next);
        }
        cx.cluster.mbarriers.failed_tests += 1;
        if cx.cluster.mbarriers.failed_tests > PATIENCE {
            let lane = (lanes & !ended).trailing_zeros() as usize;
            let address = self.address.address(bases[lane]);
            let object = cx.mbarrier(lane, address)?;
            let mut detail = format!(
                "phase {} never ends: it lacks {} arrivals and {} bytes",
                object.phase, object.pending, object.bytes
            );
            if let Some((warp, why)) = cx.block.extra.registers.waits() {
                detail += &format!("; warp {warp} {why}");
            }
            return Err(fault_at(FindingKind::Deadlock, lane as u32, address, detail));
        }
        Ok(Step::Yield)
    }
}

/// Whether the address may be one of another block: that of a space which holds it, or a generic one.
fn may_be_remote(s: &Statement<'_>) -> bool {
    !s.modifiers.has("shared") && !s.modifiers.has("shared::cta")
}

/// Takes order, scope and state space; whether the access orders memory. `.sem` and `.scope` come together.
fn take_order(s: &mut Statement<'_>, order: &str) -> Result<bool, Refusal> {
    let relaxed = s.modifiers.take("relaxed");
    let ordered = relaxed | s.modifiers.take(order);
    let scoped = ["cta", "cluster"].into_iter().any(|scope| s.modifiers.take(scope));
    if ordered != scoped {
        return Err("an order without a scope, or a scope without an order".into());
    }
    ["shared", "shared::cta", "shared::cluster"].into_iter().any(|space| s.modifiers.take(space));
    Ok(!relaxed)
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "mbarrier" {
        return Ok(None);
    }
    s.modifiers.need("b64")?;
    let name = s.modifiers.next().ok_or("without an operation")?;
    Ok(Some(match name {
        "init" | "inval" => {
            ["shared", "shared::cta"].into_iter().any(|space| s.modifiers.take(space));
            let count = if name == "init" { Some(d.source(s, 1, Type::U32)?) } else { None };
            Box::new(Lifetime { address: d.address(s, 0)?, count })
        }
        "expect_tx" | "complete_tx" => {
            let remote = may_be_remote(s);
            take_order(s, "relaxed")?;
            let change = if name == "expect_tx" { Change::Expect } else { Change::Complete };
            let (address, amount) = (d.address(s, 0)?, d.source(s, 1, Type::U32)?);
            Box::new(Signal { change, address, state: None, amount, releases: false, no_complete: false, remote })
        }
        "arrive" | "arrive_drop" => arrive(d, s, name == "arrive_drop")?,
        "test_wait" | "try_wait" => {
            let parity = s.modifiers.take("parity");
            let acquires = take_order(s, "acquire")?;
            let p = d.predicate_destination(s, 0)?.ok_or("operand form")?;
            let address = d.address(s, 1)?;
            let phase = d.source(s, 2, if parity { Type::U32 } else { Type::B64 })?;
            if name == "try_wait" && s.count() > 3 {
                // How long it may take: it never does.
                d.source(s, 3, Type::U32)?;
            }
            Box::new(Test { p, address, phase, parity, acquires })
        }
        // 9.7.13.15.17: the low half of a state, see `Signal`.
        "pending_count" => {
            let (count, state) = (d.destination(s, 0, Type::U32)?, d.source(s, 1, Type::B64)?);
            unary(count, state, |state| state & 0xFFFF_FFFF)
        }
        _ => return Err(format!("operation .{name}").into()),
    }))
}

fn arrive(d: &mut Decoder, s: &mut Statement<'_>, drop: bool) -> Result<Operation, Refusal> {
    let expect = s.modifiers.take("expect_tx");
    let no_complete = s.modifiers.take("noComplete");
    let remote = may_be_remote(s);
    let releases = take_order(s, "release")?;
    let state = d.destinations(s, 0, Type::B64, false)?[0];
    let address = d.address(s, 1)?;
    let amount = if s.count() > 2 { d.source(s, 2, Type::U32)? } else { d.constant(1) };
    if (expect || no_complete) && s.count() <= 2 {
        return Err("without a count".into());
    }
    if expect && no_complete {
        return Err("modifier .noComplete".into());
    }
    let change = if expect { Change::ArriveExpect { drop } } else { Change::Arrive { drop } };
    Ok(Box::new(Signal { change, address, state, amount, releases, no_complete, remote }))
}
