//! The sixteen barriers of a block (PTX ISA 9.7.13.1).

use super::{Context, Fault, Step, fault};
use crate::error::FindingKind;
use crate::memory::clocks::Knowledge;

/// Barriers of a block.
#[derive(Default)]
pub(crate) struct Barriers {
    barriers: [Barrier; 16],
}

#[derive(Default)]
struct Barrier {
    /// Threads that complete it; 0 while nobody has arrived.
    expected: u32,
    arrived: u32,
    /// Warps with their lanes that wait.
    waiting: Vec<(u32, u32)>,
    knowledge: Knowledge,
}

impl Context<'_> {
    /// The running warp's `lanes` arrive at barrier `id` of `count` threads, and wait if `wait`.
    pub(crate) fn arrive(&mut self, id: u64, count: u32, lanes: u32, wait: bool) -> Result<Step, Fault> {
        let misuse = |detail: String| fault(FindingKind::Barrier, lanes, detail);
        let state = &mut *self.block;
        let Some(barrier) = state.barriers.barriers.get_mut(id as usize) else {
            return Err(misuse(format!("there is no barrier {id}")));
        };
        if count == 0 || !count.is_multiple_of(32) && count != state.threads {
            return Err(misuse(format!("a barrier of {count} threads")));
        }
        if barrier.expected != 0 && barrier.expected != count {
            return Err(misuse(format!("barrier {id} is for {} threads, here for {count}", barrier.expected)));
        }
        barrier.expected = count;
        barrier.arrived += lanes.count_ones();
        if barrier.arrived > count {
            return Err(misuse(format!("{} threads arrive at barrier {id} of {count}", barrier.arrived)));
        }
        let warp = self.warp.index;
        let cluster = &mut *self.cluster;
        cluster.shared.release(warp, lanes, &mut barrier.knowledge);
        if wait {
            barrier.waiting.push((warp, lanes));
        }
        if barrier.arrived < count {
            return Ok(if wait { Step::Sleep(lanes) } else { Step::Next });
        }
        let done = std::mem::take(barrier);
        for &(waiting, waiting_lanes) in &done.waiting {
            cluster.shared.acquire(waiting, waiting_lanes, &done.knowledge);
            if (waiting, waiting_lanes) != (warp, lanes) {
                cluster.wakes.push((waiting, waiting_lanes));
            }
        }
        Ok(Step::Next)
    }

    /// Lanes that execute a convergent instruction together: those that `members` (the same in all `lanes`) names,
    /// once all of them are here; none before.
    ///
    /// With `aligned`, `members` are all lanes that have not ended, and they must come together.
    pub(crate) fn converge(&mut self, lanes: u32, members: u32, aligned: bool) -> Result<Option<u32>, Fault> {
        if lanes & !members != 0 {
            let detail = format!("the lane is not in the mask {members:#010x}");
            return Err(fault(FindingKind::Divergent, lanes & !members, detail));
        }
        // Lanes that have ended are not waited for.
        let members = members & self.warp.live;
        let here = lanes | self.warp.holding();
        if members & !here == 0 {
            self.warp.join(members);
            return Ok(Some(members));
        }
        if aligned && !self.warp.interleaved {
            let detail = format!("lanes {lanes:#010x} of {members:#010x}");
            return Err(fault(FindingKind::Divergent, lanes, detail));
        }
        Ok(None)
    }

    /// [`Self::converge`] for an `.aligned` instruction without a mask.
    pub(crate) fn converge_all(&mut self, lanes: u32) -> Result<Option<u32>, Fault> {
        self.converge(lanes, self.warp.live, true)
    }

    /// The mask operand, which must be the same in all lanes.
    pub(crate) fn mask(&self, register: super::Reg, lanes: u32) -> Result<u32, Fault> {
        self.uniform(register, lanes).map(|mask| mask as u32)
    }

    /// The value of a register that must be the same in all lanes.
    pub(crate) fn uniform(&self, register: super::Reg, lanes: u32) -> Result<u64, Fault> {
        let values = self.read(register, lanes)?;
        let first = values[lanes.trailing_zeros() as usize];
        match super::each(lanes).find(|&lane| values[lane] != first) {
            None => Ok(first),
            Some(lane) => {
                let detail = format!("{first:#x} in one lane, {:#x} in another", values[lane]);
                Err(fault(FindingKind::Operand, 1 << lane, detail))
            }
        }
    }
}
