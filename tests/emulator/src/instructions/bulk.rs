//! Bulk copies (PTX ISA 9.7.9.25.4.1: `cp.async.bulk`) from global to shared memory, which an mbarrier waits for, and from
//! shared to global memory, in groups that their thread waits for.
//!
//! The async proxy reads and writes: shared memory that ordinary stores wrote needs a proxy fence in between. Copies to
//! global memory are done at once; that their source is used again before it was read is not found.

use super::mbarrier::{Landing, PendingCopy};
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::{Space, shared_fault};
use crate::execute::{Context, Execute, Fault, Reg, Step, each, fault, fault_at};
use crate::memory::SHARED_WINDOW;
use crate::memory::global_races::Access;
use crate::types::Type;

/// `cp.async.bulk` (9.7.9.25.4.1) from global to shared memory.
struct CopyBulk {
    to: Source,
    from: Source,
    size: Reg,
    barrier: Source,
}

impl Execute for CopyBulk {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (to, from) = (cx.read(self.to.base, lanes)?, cx.read(self.from.base, lanes)?);
        let (sizes, barriers) = (cx.read(self.size, lanes)?, cx.read(self.barrier.base, lanes)?);
        for lane in each(lanes) {
            let (to, from) = (self.to.address(to[lane]), self.from.address(from[lane]));
            let size = checked_size(lane, sizes[lane], to, from)?;
            let mut bytes = vec![0; size];
            for (i, chunk) in bytes.chunks_exact_mut(16).enumerate() {
                cx.load_global(lane, from + 16 * i as u64, chunk, Access::Read)?;
            }
            let inner = if to >= SHARED_WINDOW { to - SHARED_WINDOW } else { to };
            let at = u32::try_from(inner).unwrap_or(u32::MAX);
            let thread = cx.thread(lane);
            let begun = cx.block.shared.begin_async_copy(at, size, thread);
            begun.map_err(|fault| shared_fault(fault, lane, to))?;
            let barrier = self.barrier.address(barriers[lane]);
            let landing = Landing::default();
            cx.attach_copy(lane, barrier, PendingCopy { to: at, bytes, thread, counts_bytes: true, landing })?;
        }
        Ok(Step::Next)
    }
}

/// `cp.async.bulk.prefetch.L2` (9.7.9.25.4.3): there is no cache, but what is to be fetched must be there.
struct Prefetch {
    from: Source,
    size: Reg,
}

impl Execute for Prefetch {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (from, sizes) = (cx.read(self.from.base, lanes)?, cx.read(self.size, lanes)?);
        for lane in each(lanes) {
            let from = self.from.address(from[lane]);
            let size = checked_size(lane, sizes[lane], from, from)?;
            let place = cx.launch.memory.place(from, size);
            place.map_err(|fault| fault_at(fault.kind, lane as u32, from, fault.detail))?;
        }
        Ok(Step::Next)
    }
}

/// From shared to global memory.
struct StoreBulk {
    to: Source,
    from: Source,
    size: Reg,
}

impl Execute for StoreBulk {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (to, from) = (cx.read(self.to.base, lanes)?, cx.read(self.from.base, lanes)?);
        let sizes = cx.read(self.size, lanes)?;
        for lane in each(lanes) {
            let (to, from) = (self.to.address(to[lane]), self.from.address(from[lane]));
            let mut bytes = vec![0; checked_size(lane, sizes[lane], to, from)?];
            let inner = if from >= SHARED_WINDOW { from - SHARED_WINDOW } else { from };
            let at = u32::try_from(inner).unwrap_or(u32::MAX);
            let thread = cx.thread(lane);
            let read = cx.block.shared.load_async(at, &mut bytes, thread);
            read.map_err(|fault| shared_fault(fault, lane, from))?;
            for (i, chunk) in bytes.chunks_exact(16).enumerate() {
                cx.store(Space::Global, lane, to + 16 * i as u64, chunk, Access::Write)?;
            }
        }
        Ok(Step::Next)
    }
}

/// `cp.async.bulk.commit_group` and `cp.async.bulk.wait_group`: there is nothing to wait for.
struct Group;

impl Execute for Group {
    fn execute(&self, _: &mut Context<'_>, _: u32) -> Result<Step, Fault> {
        Ok(Step::Next)
    }
}

/// The size of a copy, which must fit the instruction, as must the addresses.
fn checked_size(lane: usize, size: u64, to: u64, from: u64) -> Result<usize, Fault> {
    if size == 0 || !size.is_multiple_of(16) || size >= 1 << 20 {
        return Err(fault(FindingKind::Operand, 1 << lane, format!("a bulk copy of {size} bytes")));
    }
    for (address, what) in [(to, "destination"), (from, "source")] {
        if address % 16 != 0 {
            return Err(fault_at(FindingKind::Misaligned, lane as u32, address, what));
        }
    }
    Ok(size as usize)
}

fn decode_store(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    s.modifiers.need("global")?;
    let spaces = [("shared::cta", ()), ("shared", ())];
    s.modifiers.one_of(&spaces).ok_or("a source other than shared memory")?;
    if s.modifiers.take("L2::cache_hint") {
        d.source(s, 3, Type::B64)?;
    }
    Ok(Box::new(StoreBulk { to: d.address(s, 0)?, from: d.address(s, 1)?, size: d.source(s, 2, Type::U32)? }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "cp" || !s.modifiers.has("bulk") {
        return Ok(None);
    }
    for name in ["async", "bulk"] {
        s.modifiers.need(name)?;
    }
    if s.modifiers.take("commit_group") {
        return Ok(Some(Box::new(Group)));
    }
    if s.modifiers.take("wait_group") {
        s.modifiers.take("read");
        d.integer(s, 0)?;
        return Ok(Some(Box::new(Group)));
    }
    if s.modifiers.take("prefetch") {
        for name in ["L2", "global"] {
            s.modifiers.need(name)?;
        }
        if s.modifiers.take("L2::cache_hint") {
            d.source(s, 2, Type::B64)?;
        }
        return Ok(Some(Box::new(Prefetch { from: d.address(s, 0)?, size: d.source(s, 1, Type::U32)? })));
    }
    if s.modifiers.take("bulk_group") {
        return decode_store(d, s).map(Some);
    }
    for name in ["global", "mbarrier::complete_tx::bytes"] {
        s.modifiers.need(name)?;
    }
    let spaces = [("shared::cluster", ()), ("shared::cta", ())];
    s.modifiers.one_of(&spaces).ok_or("a destination other than shared memory")?;
    if s.modifiers.take("L2::cache_hint") {
        d.source(s, 4, Type::B64)?;
    }
    Ok(Some(Box::new(CopyBulk {
        to: d.address(s, 0)?,
        from: d.address(s, 1)?,
        size: d.source(s, 2, Type::U32)?,
        barrier: d.address(s, 3)?,
    })))
}
