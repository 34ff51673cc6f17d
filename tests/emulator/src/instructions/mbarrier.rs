//! mbarrier objects (PTX ISA 9.7.13.15).
//!
//! An object lives beside shared memory; its 8 bytes only tell who may use it and keep others away. A phase ends when
//! all arrivals have been made and all bytes that were announced have been written. Bulk copies ([`super::bulk`]) land only when
//! somebody waits, for the second time, for a phase that lacks nothing else: as late as they may.

use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::shared_fault;
use crate::execute::{Context, Execute, Fault, Pred, Reg, Step, each, fault_at};
use crate::memory::SHARED_WINDOW;
use crate::memory::clocks::{Knowledge, join};
use crate::types::Type;

/// Failed tests in a row, without any change to an mbarrier of the block, after which its waiters count as stuck.
const PATIENCE: u32 = 1 << 17;

/// The mbarrier objects of a block.
#[derive(Default)]
pub(crate) struct Mbarriers {
    objects: Vec<Mbarrier>,
    failed_tests: u32,
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

/// The shared-window address of an object, from a shared or generic one.
fn window_address(address: u64, lane: usize) -> Result<u32, Fault> {
    let inner = if address >= SHARED_WINDOW { address - SHARED_WINDOW } else { address };
    let inner = u32::try_from(inner).map_err(|_| misuse(lane, address, "not in shared memory"))?;
    if inner % 8 != 0 {
        return Err(fault_at(FindingKind::Misaligned, lane as u32, address, "8 bytes"));
    }
    Ok(inner)
}

impl Context<'_> {
    /// The object at an address, which this thread may use.
    fn mbarrier(&mut self, lane: usize, address: u64) -> Result<&mut Mbarrier, Fault> {
        let at = window_address(address, lane)?;
        let thread = self.thread(lane);
        let seen = self.block.shared.use_object(at, thread);
        seen.map_err(|fault| shared_fault(fault, lane, address))?;
        let objects = &mut self.block.extra.mbarriers.objects;
        objects
            .iter_mut()
            .find(|object| object.address == at)
            .ok_or_else(|| misuse(lane, address, "there is no mbarrier here"))
    }

    /// A copy that the object's phase waits for.
    pub(super) fn attach_copy(&mut self, lane: usize, address: u64, copy: PendingCopy) -> Result<(), Fault> {
        let at = window_address(address, lane)?;
        if self.block.shared.is_generic(at, 8) {
            let detail = "the mbarrier was initialized without a fence after it";
            return Err(fault_at(FindingKind::ProxyFence, lane as u32, address, detail));
        }
        self.mbarrier(lane, address)?.copies.push(copy);
        self.block.extra.mbarriers.failed_tests = 0;
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
        self.block.extra.mbarriers.failed_tests = 0;
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
            let shared = &mut self.block.shared;
            shared.end_copy(copy.to, &copy.bytes, copy.thread);
            shared.release(copy.thread / 32, 1 << (copy.thread % 32), &mut knowledge);
            if copy.counts_bytes {
                bytes += copy.bytes.len() as i64;
            }
        }
        let object = self.mbarrier(lane, u64::from(at))?;
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

/// `mbarrier.init` and `mbarrier.inval`.
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
            let at = window_address(address, lane)?;
            let thread = cx.thread(lane);
            let exists = cx.block.extra.mbarriers.objects.iter().any(|object| object.address == at);
            let Some(counts) = counts else {
                cx.mbarrier(lane, address)?;
                cx.block.shared.end_object(at);
                cx.block.extra.mbarriers.objects.retain(|object| object.address != at);
                continue;
            };
            let count = counts[lane] as u32;
            if exists {
                return Err(misuse(lane, address, "initialized while it is in use"));
            }
            if count == 0 || count >= 1 << 20 {
                return Err(misuse(lane, address, format!("a count of {count}")));
            }
            cx.block.shared.begin_object(at, thread).map_err(|fault| shared_fault(fault, lane, address))?;
            cx.block.extra.mbarriers.objects.push(Mbarrier {
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

/// `mbarrier.arrive`, `.arrive_drop`, `.expect_tx`, `.complete_tx`.
struct Signal {
    change: Change,
    address: Source,
    state: Option<Reg>,
    /// Arrivals or bytes.
    amount: Reg,
}

impl Execute for Signal {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (bases, amounts) = (cx.read(self.address.base, lanes)?, cx.read(self.amount, lanes)?);
        let mut states = [0; 32];
        cx.block.extra.mbarriers.failed_tests = 0;
        for lane in each(lanes) {
            let address = self.address.address(bases[lane]);
            let amount = amounts[lane] as u32;
            let mut knowledge = Knowledge::new();
            let warp = cx.warp.index;
            cx.block.shared.release(warp, 1 << lane, &mut knowledge);
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
            object.pending -= arrivals;
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

/// `mbarrier.test_wait` and `mbarrier.try_wait`, of a state or a parity.
struct Test {
    p: Pred,
    address: Source,
    phase: Reg,
    parity: bool,
}

impl Test {
    /// Whether the phase that is waited for has ended.
    fn has_ended(&self, cx: &mut Context<'_>, lane: usize, address: u64, waited: u64) -> Result<bool, Fault> {
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
                let passed = cx.mbarrier(lane, address)?.passed.clone();
                let warp = cx.warp.index;
                cx.block.shared.acquire(warp, 1 << lane, &passed);
                ended |= 1 << lane;
            }
        }
        cx.write_predicate(self.p, lanes, ended);
        if ended == lanes {
            cx.block.extra.mbarriers.failed_tests = 0;
            return Ok(Step::Next);
        }
        cx.block.extra.mbarriers.failed_tests += 1;
        if cx.block.extra.mbarriers.failed_tests > PATIENCE {
            let lane = (lanes & !ended).trailing_zeros() as usize;
            let address = self.address.address(bases[lane]);
            let object = cx.mbarrier(lane, address)?;
            let detail = format!(
                "phase {} never ends: it lacks {} arrivals and {} bytes",
                object.phase, object.pending, object.bytes
            );
            return Err(fault_at(FindingKind::Deadlock, lane as u32, address, detail));
        }
        Ok(Step::Yield)
    }
}

fn take_order(s: &mut Statement<'_>) {
    ["relaxed", "acquire", "release"].into_iter().any(|order| s.modifiers.take(order));
    super::memory::take_scope(s);
    ["shared", "shared::cta", "shared::cluster"].into_iter().any(|space| s.modifiers.take(space));
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "mbarrier" {
        return Ok(None);
    }
    s.modifiers.need("b64")?;
    let name = s.modifiers.next().ok_or("without an operation")?;
    Ok(Some(match name {
        "init" | "inval" => {
            take_order(s);
            let count = if name == "init" { Some(d.source(s, 1, Type::U32)?) } else { None };
            Box::new(Lifetime { address: d.address(s, 0)?, count })
        }
        "expect_tx" | "complete_tx" => {
            take_order(s);
            let change = if name == "expect_tx" { Change::Expect } else { Change::Complete };
            Box::new(Signal { change, address: d.address(s, 0)?, state: None, amount: d.source(s, 1, Type::U32)? })
        }
        "arrive" | "arrive_drop" => {
            let drop = name == "arrive_drop";
            let expect = s.modifiers.take("expect_tx");
            take_order(s);
            let state = d.destinations(s, 0, Type::B64, false)?[0];
            let address = d.address(s, 1)?;
            let amount = if s.count() > 2 { d.source(s, 2, Type::U32)? } else { d.constant(1) };
            if expect && s.count() <= 2 {
                return Err("without a number of bytes".into());
            }
            let change = if expect { Change::ArriveExpect { drop } } else { Change::Arrive { drop } };
            Box::new(Signal { change, address, state, amount })
        }
        "test_wait" | "try_wait" => {
            let parity = s.modifiers.take("parity");
            take_order(s);
            let p = d.predicate_destination(s, 0)?.ok_or("operand form")?;
            let address = d.address(s, 1)?;
            let phase = d.source(s, 2, if parity { Type::U32 } else { Type::B64 })?;
            if name == "try_wait" && s.count() > 3 {
                // How long it may take: it never does.
                d.source(s, 3, Type::U32)?;
            }
            Box::new(Test { p, address, phase, parity })
        }
        _ => return Err(format!("operation .{name}").into()),
    }))
}
