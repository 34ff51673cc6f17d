//! Bulk copies (PTX ISA 9.7.9.25.4.1: `cp.async.bulk`) to shared memory, which an mbarrier waits for, and from shared to
//! global memory, in groups that their thread waits for.
//!
//! The async proxy reads and writes: shared memory that ordinary stores wrote needs a proxy fence in between. Copies to
//! global memory are done at once; that their source is used again before it was read is not found.

use super::mbarrier::{Landing, PendingCopy};
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::{Space, shared_fault};
use crate::execute::{Context, Execute, Fault, Reg, Step, each, fault, fault_at};
use crate::memory::global_races::Access;
use crate::memory::shared::BLOCK_SHIFT;
use crate::types::Type;

/// `cp.async.bulk` (9.7.9.25.4.1) to shared memory, in one block of the cluster or several.
struct CopyBulk {
    to: Source,
    from: Source,
    size: Reg,
    barrier: Source,
    /// From the own block's shared memory to another block's; otherwise from global memory.
    from_shared: bool,
    /// A bit for each block of the cluster, which get the bytes at the same place.
    blocks: Option<Reg>,
    /// The destination must be in the own block.
    own_only: bool,
}

impl CopyBulk {
    fn read(&self, cx: &mut Context<'_>, lane: usize, from: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        if self.from_shared {
            let (at, thread) = (cx.shared_or_generic(from, lane)?, cx.thread(lane));
            let read = cx.cluster.shared.load_async(at, bytes, thread);
            return read.map_err(|fault| shared_fault(fault, lane, from));
        }
        for (i, chunk) in bytes.chunks_exact_mut(16).enumerate() {
            cx.load_global(lane, from + 16 * i as u64, chunk, Access::Read)?;
        }
        Ok(())
    }

    /// Places of destination and mbarrier, in each block that is meant.
    fn places(
        &self,
        cx: &Context<'_>,
        lane: usize,
        [to, barrier]: [u64; 2],
        mask: u64,
    ) -> Result<Vec<[u32; 2]>, Fault> {
        let places = [cx.shared_or_generic(to, lane)?, cx.shared_or_generic(barrier, lane)?];
        let [block, block_of_barrier] = places.map(|place| place >> BLOCK_SHIFT);
        if self.blocks.is_none() {
            let misplaced = |detail| Err(fault_at(FindingKind::Mbarrier, lane as u32, barrier, detail));
            // From the own shared memory there are copies to other blocks only.
            if self.own_only && block != cx.block.rank || self.from_shared && block == cx.block.rank {
                let detail = format!("in block {block} of the cluster, the own one is {}", cx.block.rank);
                return Err(fault_at(FindingKind::OutOfBounds, lane as u32, to, detail));
            }
            return if block == block_of_barrier {
                Ok(vec![places])
            } else {
                misplaced("not in the block of the bytes")
            };
        }
        if mask == 0 || mask >= 1 << cx.cluster.size {
            let detail = format!("the blocks {mask:#06x} of a cluster of {}", cx.cluster.size);
            return Err(fault(FindingKind::Operand, 1 << lane, detail));
        }
        let inner = places.map(|place| u64::from(place & ((1 << BLOCK_SHIFT) - 1)));
        each(mask as u32)
            .map(|block| {
                let place =
                    |inner: u64, address| cx.shared_place(inner | (block as u64 + 1) << BLOCK_SHIFT, lane, address);
                Ok([place(inner[0], to)?, place(inner[1], barrier)?])
            })
            .collect()
    }
}

impl Execute for CopyBulk {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        let (to, from) = (cx.read(self.to.base, lanes)?, cx.read(self.from.base, lanes)?);
        let (sizes, barriers) = (cx.read(self.size, lanes)?, cx.read(self.barrier.base, lanes)?);
        let masks = self.blocks.map_or(Ok([0; 32]), |blocks| cx.read(blocks, lanes))?;
        for lane in each(lanes) {
            let (to, from) = (self.to.address(to[lane]), self.from.address(from[lane]));
            let mut bytes = vec![0; checked_size(lane, sizes[lane], to, from)?];
            self.read(cx, lane, from, &mut bytes)?;
            let (barrier, thread) = (self.barrier.address(barriers[lane]), cx.thread(lane));
            for [at, barrier_at] in self.places(cx, lane, [to, barrier], masks[lane] & 0xFFFF)? {
                let begun = cx.cluster.shared.begin_async_copy(at, bytes.len(), thread);
                begun.map_err(|fault| shared_fault(fault, lane, to))?;
                let landing = Landing::default();
                let copy = PendingCopy { to: at, bytes: bytes.clone(), thread, counts_bytes: true, landing };
                cx.attach_copy(lane, barrier, barrier_at, copy)?;
            }
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
            let (at, thread) = (cx.shared_or_generic(from, lane)?, cx.thread(lane));
            let read = cx.cluster.shared.load_async(at, &mut bytes, thread);
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
    s.modifiers.need("mbarrier::complete_tx::bytes")?;
    let from_global = s.modifiers.take("global");
    let spaces = [("shared::cluster", false), ("shared::cta", true)];
    let own_only = s.modifiers.one_of(&spaces).ok_or("a destination other than shared memory")?;
    if !from_global {
        s.modifiers.need("shared::cta")?;
    }
    let multicast = from_global && !own_only && s.modifiers.take("multicast::cluster");
    let blocks = if multicast { Some(d.source(s, 4, Type::U16)?) } else { None };
    if from_global && s.modifiers.take("L2::cache_hint") {
        d.source(s, if multicast { 5 } else { 4 }, Type::B64)?;
    }
    Ok(Some(Box::new(CopyBulk {
        to: d.address(s, 0)?,
        from: d.address(s, 1)?,
        size: d.source(s, 2, Type::U32)?,
        barrier: d.address(s, 3)?,
        from_shared: !from_global,
        blocks,
        own_only,
    })))
}
