//! What the blocks of a cluster share: shared memory, mbarriers, and the cluster's barrier (PTX ISA 9.7.13.3).
//!
//! Threads and warps are numbered through the cluster, block after block. An address of shared memory is one of the own block,
//! or from `mapa` with the number of a block above its low 24 bits, from 1.

use super::{Context, Fault, Step, fault, fault_at};
use crate::error::FindingKind;
use crate::instructions::Mbarriers;
use crate::memory::SHARED_WINDOW;
use crate::memory::clocks::Knowledge;
use crate::memory::shared::{BLOCK_SHIFT, SharedMemory};

/// State of a cluster.
pub(crate) struct ClusterState {
    /// Blocks.
    pub(crate) size: u32,
    pub(crate) shared: SharedMemory,
    pub(crate) mbarriers: Mbarriers,
    /// Lanes of warps that may go on.
    pub(crate) wakes: Vec<(u32, u32)>,
    warps_of_block: u32,
    /// Lanes of each warp that have not ended.
    live: Vec<u32>,
    barrier: ClusterBarrier,
}

#[derive(Default)]
struct ClusterBarrier {
    /// Lanes of each warp that arrived in this phase, and those that arrived and did not wait yet.
    arrived: Vec<u32>,
    pending: Vec<u32>,
    waiting: Vec<(u32, u32)>,
    arriving: Knowledge,
    passed: Knowledge,
}

impl ClusterState {
    /// `live` are the lanes of each warp, those of a block after the other's.
    pub(crate) fn new(size: u32, shared: SharedMemory, live: Vec<u32>) -> Self {
        let none = vec![0; live.len()];
        let barrier = ClusterBarrier { arrived: none.clone(), pending: none, ..ClusterBarrier::default() };
        let warps_of_block = live.len() as u32 / size;
        Self { size, shared, mbarriers: Mbarriers::default(), wakes: Vec::new(), warps_of_block, live, barrier }
    }

    /// Lanes of a warp end.
    pub(super) fn end(&mut self, warp: u32, lanes: u32) {
        self.live[warp as usize] &= !lanes;
        if self.size > 1 {
            self.complete_barrier();
        }
    }

    fn has_ended(&self, block: u32) -> bool {
        let first = (block * self.warps_of_block) as usize;
        self.live[first..first + self.warps_of_block as usize].iter().all(|&live| live == 0)
    }

    /// Ends the barrier's phase if all live lanes have arrived.
    fn complete_barrier(&mut self) {
        let barrier = &mut self.barrier;
        let nobody = barrier.arrived.iter().all(|&arrived| arrived == 0);
        if nobody || self.live.iter().zip(&barrier.arrived).any(|(live, arrived)| live & !arrived != 0) {
            return;
        }
        barrier.arrived.fill(0);
        barrier.passed = std::mem::take(&mut barrier.arriving);
        for (warp, lanes) in barrier.waiting.drain(..) {
            barrier.pending[warp as usize] &= !lanes;
            self.shared.acquire(warp, lanes, &barrier.passed);
            self.wakes.push((warp, lanes));
        }
    }
}

impl Context<'_> {
    /// Index of the running warp in its block.
    pub(crate) fn own_warp(&self) -> u32 {
        self.warp.index - self.block.first_warp
    }

    /// Where shared memory has the address `inner` of its window: in the block that it names, or else in the own one.
    #[inline(always)]
    pub(crate) fn shared_place(&self, inner: u64, lane: usize, address: u64) -> Result<u32, Fault> {
        let outside = |detail: String| fault_at(FindingKind::OutOfBounds, lane as u32, address, detail);
        let inner = u32::try_from(inner).map_err(|_| outside("outside of shared memory".into()))?;
        if inner >> BLOCK_SHIFT == 0 {
            return Ok(inner | self.block.rank << BLOCK_SHIFT);
        }
        let place = inner - (1 << BLOCK_SHIFT);
        let block = place >> BLOCK_SHIFT;
        if block >= self.cluster.size {
            return Err(outside(format!("in block {block} of a cluster of {}", self.cluster.size)));
        }
        if self.cluster.has_ended(block) {
            return Err(outside(format!("in block {block} of the cluster, which has ended")));
        }
        Ok(place)
    }

    /// As [`Self::shared_place`], of an address of the shared window or a generic one.
    pub(crate) fn shared_or_generic(&self, address: u64, lane: usize) -> Result<u32, Fault> {
        let inner = if address >= SHARED_WINDOW { address - SHARED_WINDOW } else { address };
        self.shared_place(inner, lane, address)
    }

    /// `barrier.cluster.arrive`; some of the lanes pass on what they did.
    pub(crate) fn arrive_at_cluster(&mut self, lanes: u32, releasing: u32) -> Result<(), Fault> {
        let (warp, cluster) = (self.warp.index, &mut *self.cluster);
        let arrived = &mut cluster.barrier.arrived[warp as usize];
        if *arrived & lanes != 0 {
            let twice = *arrived & lanes;
            return Err(fault(FindingKind::Barrier, twice, "arrives twice before the cluster's barrier completes"));
        }
        *arrived |= lanes;
        cluster.barrier.pending[warp as usize] |= lanes;
        if releasing != 0 {
            cluster.shared.release(warp, releasing, &mut cluster.barrier.arriving);
        }
        cluster.complete_barrier();
        Ok(())
    }

    /// `barrier.cluster.wait`
    pub(crate) fn wait_at_cluster(&mut self, lanes: u32) -> Result<Step, Fault> {
        let (warp, cluster) = (self.warp.index, &mut *self.cluster);
        let barrier = &mut cluster.barrier;
        let missing = lanes & !barrier.pending[warp as usize];
        if missing != 0 {
            return Err(fault(FindingKind::Barrier, missing, "waits for the cluster's barrier without having arrived"));
        }
        if barrier.arrived[warp as usize] & lanes != 0 {
            barrier.waiting.push((warp, lanes));
            return Ok(Step::Sleep(lanes));
        }
        barrier.pending[warp as usize] &= !lanes;
        cluster.shared.acquire(warp, lanes, &barrier.passed);
        Ok(Step::Next)
    }
}
