//! Bulk copies from global to shared memory that an mbarrier waits for (PTX ISA 9.7.9.25.4.1: `cp.async.bulk`).
//!
//! The async proxy writes: destinations that ordinary stores wrote need a proxy fence in between.

use super::mbarrier::PendingCopy;
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::error::FindingKind;
use crate::execute::access::shared_fault;
use crate::execute::{Context, Execute, Fault, Reg, Step, each, fault, fault_at};
use crate::memory::SHARED_WINDOW;
use crate::memory::global_races::Access;
use crate::types::Type;

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
            let size = sizes[lane] as usize;
            if size == 0 || size % 16 != 0 || size >= 1 << 20 {
                return Err(fault(FindingKind::Operand, 1 << lane, format!("a bulk copy of {size} bytes")));
            }
            for (address, what) in [(to, "destination"), (from, "source")] {
                if address % 16 != 0 {
                    return Err(fault_at(FindingKind::Misaligned, lane as u32, address, what));
                }
            }
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
            cx.attach_copy(lane, barrier, PendingCopy { to: at, bytes, thread, counts_bytes: true })?;
        }
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "cp" || !s.modifiers.has("bulk") {
        return Ok(None);
    }
    for name in ["async", "bulk", "global", "mbarrier::complete_tx::bytes"] {
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
