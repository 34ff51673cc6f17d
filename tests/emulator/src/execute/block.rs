//! The blocks of a cluster, mostly one: their warps take turns.

use std::sync::PoisonError;

use super::barrier::Barriers;
use super::cluster::ClusterState;
use super::launch::Launch;
use super::warp::{Stop, Warp};
use super::{Fault, fault, fault_at};
use crate::decode::{Initial, Special};
use crate::error::{Finding, FindingKind};
use crate::instructions::BlockExtra;
use crate::memory::block_clocks::BlockClock;
use crate::memory::shared::SharedMemory;

/// Instructions of a warp's turn.
const TURN: u32 = 2048;
/// Instructions of a warp's turn up to which it may have done nothing but look for what it waits for.
const WAIT: u64 = 64;

/// How a slice of a cluster ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slice {
    /// All blocks have ended.
    Ended,
    /// The slice is over.
    Over,
    /// All its warps wait, one of them at least for another block to write global memory.
    Waiting,
}

/// What the warps of a block share, and those of other blocks of its cluster do not.
pub(crate) struct BlockState {
    /// Index in the grid.
    pub(crate) index: [u32; 3],
    /// Number in its cluster.
    pub(crate) rank: u32,
    pub(crate) threads: u32,
    /// Index of its first warp in the cluster.
    pub(crate) first_warp: u32,
    pub(crate) barriers: Barriers,
    /// What it knows of other blocks.
    pub(crate) clock: BlockClock,
    /// It wrote global memory in this turn.
    pub(crate) stored: bool,
    /// State that families of instructions keep for a block.
    pub(crate) extra: BlockExtra,
}

/// A cluster under way.
pub(crate) struct Cluster {
    blocks: Vec<BlockState>,
    state: ClusterState,
    warps: Vec<Warp>,
    /// A time of the launch, and slices since then in which it waited.
    pub(super) waited: (u64, u32),
}

impl Cluster {
    pub(crate) fn new(launch: &Launch<'_>, number: u32) -> Self {
        let [width, height, _] = launch.grid;
        let threads = launch.block.iter().product::<u32>();
        let (size, warps_of_block) = (launch.cluster, threads.div_ceil(32));
        // Clusters are along x.
        let first = number * size;
        let blocks: Vec<_> = (first..first + size)
            .map(|number| BlockState {
                index: [number % width, number / width % height, number / width / height],
                rank: number - first,
                threads,
                first_warp: (number - first) * warps_of_block,
                barriers: Barriers::default(),
                clock: BlockClock::new(number),
                stored: false,
                extra: BlockExtra::default(),
            })
            .collect();
        let warps: Vec<_> =
            blocks.iter().flat_map(|block| (0..warps_of_block).map(|warp| Self::warp(launch, block, warp))).collect();
        let shared = SharedMemory::new(launch.shared_end, size, warps.len(), launch.kernel.narrow_stores);
        let state = ClusterState::new(size, shared, warps.iter().map(|warp| warp.live).collect());
        Self { blocks, state, warps, waited: (0, 0) }
    }

    /// A warp by its index in the block.
    fn warp(launch: &Launch<'_>, block: &BlockState, index: u32) -> Warp {
        // Registers of a warp that ended still hold the constants; nobody reads the others before they are written.
        let spare = launch.spare_registers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let is_fresh = spare.is_none();
        let lanes = (block.threads - index * 32).min(32);
        let mut warp = Warp::new(launch.kernel, block.first_warp + index, lanes, spare);
        for (slot, register) in launch.kernel.registers.iter().enumerate() {
            let values = match register.initial {
                Initial::None => continue,
                Initial::Special(special) => {
                    Some(std::array::from_fn(|lane| launch.special(special, block.index, index * 32 + lane as u32)))
                }
                Initial::Constant(value) => is_fresh.then_some([value; 32]),
                Initial::Variable { index, offset } => {
                    is_fresh.then(|| [launch.variables[index].wrapping_add(offset as u64); 32])
                }
            };
            if let Some(values) = values {
                warp.registers[slot] = values;
            }
            warp.written[slot] = u32::MAX;
        }
        for (slot, predicate) in launch.kernel.predicates.iter().enumerate() {
            if let Some(value) = predicate.constant {
                warp.predicates[slot] = if value { u32::MAX } else { 0 };
                warp.predicates_written[slot] = u32::MAX;
            }
        }
        warp
    }

    /// Leaves the registers to blocks that begin.
    pub(crate) fn recycle(self, launch: &Launch<'_>) {
        let mut spare = launch.spare_registers.lock().unwrap_or_else(PoisonError::into_inner);
        spare.extend(self.warps.into_iter().map(|warp| warp.registers));
    }

    /// Runs until all blocks have ended, all wait, or each warp had its turn `turns` times.
    pub(crate) fn run(&mut self, launch: &Launch<'_>, turns: u32) -> Result<Slice, Box<Finding>> {
        let warps_of_block = self.warps_of_block();
        for _ in 0..turns {
            let (mut progress, mut waits, mut polls) = (false, true, false);
            for warp in 0..self.warps.len() {
                if self.warps[warp].live == 0 {
                    continue;
                }
                let before = self.warps[warp].instructions;
                let block = &mut self.blocks[warp / warps_of_block];
                let stop = self.warps[warp]
                    .run_slice(block, &mut self.state, launch, TURN)
                    .map_err(|fault| self.finding(launch, warp, self.warps[warp].pc, &fault))?;
                let instructions = self.warps[warp].instructions - before;
                progress |= stop == Stop::Slice || instructions != 0;
                waits &= instructions <= WAIT;
                polls |= std::mem::take(&mut self.warps[warp].state.poll.repeated);
                for (warp, lanes) in self.state.wakes.drain(..) {
                    self.warps[warp as usize].wake(lanes);
                }
            }
            if !progress {
                return if self.warps.iter().all(|warp| warp.live == 0) {
                    self.leftover(launch).map_or(Ok(Slice::Ended), Err)
                } else {
                    Err(self.deadlock(launch))
                };
            }
            let limit = launch.config.max_instructions;
            if let Some(warp) = self.warps.iter().position(|warp| warp.live != 0 && warp.instructions > limit) {
                let fault = fault(FindingKind::InstructionLimit, self.warps[warp].live, "");
                return Err(self.finding(launch, warp, self.warps[warp].pc, &fault));
            }
            if launch.stopped() {
                return Ok(Slice::Ended);
            }
            for block in &mut self.blocks {
                waits &= !std::mem::take(&mut block.stored);
            }
            if waits && polls {
                return Ok(Slice::Waiting);
            }
        }
        Ok(Slice::Over)
    }

    /// Instructions executed by all threads.
    pub(crate) fn thread_instructions(&self) -> u64 {
        self.warps.iter().map(|warp| warp.thread_instructions).sum()
    }

    fn warps_of_block(&self) -> usize {
        self.warps.len() / self.blocks.len()
    }

    /// What was left undone when all threads have ended.
    fn leftover(&self, launch: &Launch<'_>) -> Option<Box<Finding>> {
        self.blocks.iter().find_map(|block| {
            let (pc, warp, missing) = block.extra.warpgroups.incomplete()?;
            let detail = format!("warp {missing} of the block, in the same warpgroup, never executed it");
            let warp = (block.first_warp + warp) as usize;
            Some(self.finding(launch, warp, pc, &fault(FindingKind::Divergent, u32::MAX, detail)))
        })
    }

    fn deadlock(&self, launch: &Launch<'_>) -> Box<Finding> {
        for block in &self.blocks {
            if let Some((warp, detail)) = block.extra.registers.waits() {
                let warp = (block.first_warp + warp) as usize;
                let pc = self.warps[warp].first_blocked().map_or(0, |(_, pc)| pc);
                return self.finding(launch, warp, pc, &fault(FindingKind::RegisterPool, u32::MAX, detail));
            }
        }
        let waiting = self.warps.iter().enumerate().find_map(|(index, warp)| Some((index, warp.first_blocked()?)));
        let (warp, (lane, pc)) = waiting.unwrap_or((0, (0, 0)));
        let live: u32 = self.warps.iter().map(|warp| warp.live.count_ones()).sum();
        let threads: u32 = self.blocks.iter().map(|block| block.threads).sum();
        let detail = format!("all of the {live} threads left wait ({} ended)", threads - live);
        let instruction = &launch.kernel.code[pc as usize];
        // Lanes of a warp that wait for lanes which took another way are divergence rather than deadlock.
        let kind = if instruction.operation.waits_for_warp() { FindingKind::Divergent } else { FindingKind::Deadlock };
        self.finding(launch, warp, pc, &fault(kind, 1 << lane, detail))
    }

    /// That the blocks wait for what nobody will write, because `others` have not begun.
    pub(crate) fn starved(&self, launch: &Launch<'_>, others: u32) -> Box<Finding> {
        let polls = |warp: &Warp| warp.live != 0 && warp.state.poll.address != 0;
        let warp = self.warps.iter().position(polls).unwrap_or(0);
        let poll = &self.warps[warp].state.poll;
        let what = if launch.cluster == 1 { "blocks" } else { "clusters" };
        let resident = launch.config.resident_blocks;
        let detail = format!("all of {resident} resident {what} wait, and {others} begin only when these end");
        self.finding(launch, warp, poll.pc, &fault_at(FindingKind::Deadlock, poll.lane, poll.address, detail))
    }

    fn finding(&self, launch: &Launch<'_>, warp: usize, pc: u32, fault: &Fault) -> Box<Finding> {
        let line = launch.kernel.code.get(pc as usize).map_or(0, |instruction| instruction.line);
        let block = &self.blocks[warp / self.warps_of_block()];
        Box::new(Finding {
            kind: fault.kind,
            kernel: launch.kernel.name.clone(),
            ptx_line: line,
            text: launch.text(line),
            block: block.index,
            thread: (warp as u32 - block.first_warp) * 32 + fault.lane,
            address: fault.address,
            detail: fault.detail.clone(),
        })
    }
}

impl Launch<'_> {
    /// Blocks of a cluster along an axis.
    fn cluster_along(&self, axis: usize) -> u32 {
        if axis == 0 { self.cluster } else { 1 }
    }

    /// Value of a special register (PTX ISA 10) for a thread of a block.
    fn special(&self, special: Special, block: [u32; 3], thread: u32) -> u64 {
        let [width, height, depth] = self.block;
        let threads = width * height * depth;
        let lane = thread % 32;
        let value = match special {
            Special::Tid(axis) => [thread % width, thread / width % height, thread / width / height][axis],
            Special::Ntid(axis) => self.block[axis],
            Special::Ctaid(axis) => block[axis],
            Special::Nctaid(axis) => self.grid[axis],
            Special::ClusterId(axis) => block[axis] / self.cluster_along(axis),
            Special::NumberOfClusters(axis) => self.grid[axis] / self.cluster_along(axis),
            Special::ClusterCtaid(axis) => block[axis] % self.cluster_along(axis),
            Special::ClusterNctaid(axis) => self.cluster_along(axis),
            Special::ClusterCtaRank => block[0] % self.cluster,
            Special::ClusterNctaRank => self.cluster,
            Special::LaneId => lane,
            Special::WarpId => thread / 32,
            Special::NumberOfWarps => threads.div_ceil(32),
            Special::LanemaskEq => 1 << lane,
            Special::LanemaskLt => (1 << lane) - 1,
            Special::LanemaskLe => u32::MAX >> (31 - lane),
            Special::LanemaskGt => !(u32::MAX >> (31 - lane)),
            Special::LanemaskGe => !((1 << lane) - 1),
            Special::DynamicSharedBytes => self.dynamic_shared_bytes,
        };
        u64::from(value)
    }
}
