//! One warp: its registers, and which lanes run together.
//!
//! Every lane has its own place in the code. Those at the lowest place run, in lockstep, until they reach the place of
//! others, which then join. Code is laid out (`decode::order`) so that this makes lanes meet again as early as
//! possible. Lanes that run alone for long while others could run make room, so that a lane may spin for another.

use super::block::BlockState;
use super::cluster::ClusterState;
use super::launch::Launch;
use super::registers::AsyncRegisters;
use super::{Context, Fault, Lanes, Step};
use crate::decode::Kernel;
use crate::instructions::WarpState;

/// Instructions for which a part of a warp may run while another part could.
const PATIENCE: u32 = 1 << 14;

/// State of a warp.
pub(crate) struct Warp {
    /// In its cluster.
    pub(crate) index: u32,
    pub(crate) registers: Vec<Lanes>,
    /// Lanes that wrote each register.
    pub(crate) written: Vec<u32>,
    pub(crate) predicates: Vec<u32>,
    pub(crate) predicates_written: Vec<u32>,
    /// Local memory of each lane, and which bytes were written.
    pub(crate) local: Vec<(Vec<u8>, Vec<bool>)>,
    /// Lanes that exist and have not ended.
    pub(crate) live: u32,
    /// Lanes that run, at `pc`.
    pub(crate) active: u32,
    pub(crate) pc: u32,
    /// Where the lanes are that do not run.
    lane_pc: [u32; 32],
    /// Lanes that wait.
    blocked: u32,
    /// Those of them that are already past the instruction they wait for.
    asleep: u32,
    /// Lowest place of lanes that could run but do not.
    other_pc: u32,
    /// Instructions since the warp was last split.
    split_steps: u32,
    /// Lanes made room for each other since all were together: they may meet later than the code alone would have it.
    pub(crate) interleaved: bool,
    /// Which registers asynchronous matrix products use.
    pub(crate) products: AsyncRegisters,
    /// State that families of instructions keep for a warp.
    pub(crate) state: WarpState,
    /// Instructions executed, for each lane.
    pub(crate) thread_instructions: u64,
    /// Instructions executed.
    pub(crate) instructions: u64,
}

/// Why a warp stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Its turn is over.
    Slice,
    /// No lane can run now; maybe none is left.
    Blocked,
}

impl Warp {
    pub(crate) fn new(kernel: &Kernel, index: u32, lanes: u32, spare: Option<Vec<Lanes>>) -> Self {
        let live = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        Self {
            index,
            registers: spare.unwrap_or_else(|| vec![[0; 32]; kernel.registers.len()]),
            written: vec![0; kernel.registers.len()],
            predicates: vec![0; kernel.predicates.len()],
            predicates_written: vec![0; kernel.predicates.len()],
            local: vec![(vec![0xE2; kernel.local_bytes], vec![false; kernel.local_bytes]); lanes as usize],
            live,
            active: live,
            pc: 0,
            lane_pc: [0; 32],
            blocked: 0,
            asleep: 0,
            other_pc: u32::MAX,
            split_steps: 0,
            interleaved: false,
            products: AsyncRegisters::new(if kernel.has_async_products { kernel.registers.len() } else { 0 }),
            state: WarpState::default(),
            thread_instructions: 0,
            instructions: 0,
        }
    }

    /// Lets the lowest lanes run that can; false when none can.
    fn select(&mut self) -> bool {
        self.park();
        let runnable = self.live & !self.blocked;
        let places = || super::each(runnable).map(|lane| self.lane_pc[lane]);
        let Some(lowest) = places().min() else { return false };
        if self.split_steps > PATIENCE {
            // The next higher ones run until they have had their share, whoever they pass.
            self.split_steps = PATIENCE / 2;
            self.interleaved = true;
            let higher = places().filter(|&pc| pc > self.pc).min().unwrap_or(lowest);
            self.run(higher, runnable);
            self.other_pc = u32::MAX - 1;
            return true;
        }
        self.run(lowest, runnable);
        true
    }

    fn run(&mut self, pc: u32, runnable: u32) {
        self.pc = pc;
        let at =
            |lanes: u32, pc| super::each(lanes).filter(|&lane| self.lane_pc[lane] == pc).fold(0, |m, l| m | 1 << l);
        let active = at(runnable, pc);
        self.other_pc = super::each(runnable & !active).map(|lane| self.lane_pc[lane]).min().unwrap_or(u32::MAX);
        self.active = active;
        if active == self.live {
            self.split_steps = 0;
            self.interleaved = false;
        }
    }

    fn park(&mut self) {
        for lane in super::each(self.active) {
            self.lane_pc[lane] = self.pc;
        }
        self.active = 0;
    }

    /// Lanes that wait at the running lanes' instruction.
    pub(crate) fn holding(&self) -> u32 {
        super::each(self.live & self.blocked & !self.asleep)
            .filter(|&lane| self.lane_pc[lane] == self.pc)
            .fold(0, |lanes, lane| lanes | 1 << lane)
    }

    /// Waiting lanes join the running ones.
    pub(crate) fn join(&mut self, lanes: u32) {
        self.blocked &= !lanes;
        self.active |= lanes;
    }

    /// Waiting lanes may go on.
    pub(crate) fn wake(&mut self, lanes: u32) {
        self.blocked &= !lanes;
        // Whoever runs must look again for whom to join.
        self.other_pc = 0;
    }

    /// First waiting lane and the place of the instruction it waits for.
    pub(crate) fn first_blocked(&self) -> Option<(u32, u32)> {
        let lane = super::each(self.live & self.blocked).next()?;
        Some((lane as u32, self.lane_pc[lane] - (self.asleep >> lane & 1)))
    }

    /// Runs up to `budget` instructions.
    ///
    /// # Errors
    /// What the kernel must not do; the instruction is the one at `pc`.
    pub(crate) fn run_slice(
        &mut self,
        block: &mut BlockState,
        cluster: &mut ClusterState,
        launch: &Launch<'_>,
        budget: u32,
    ) -> Result<Stop, Fault> {
        let kernel = launch.kernel;
        for _ in 0..budget {
            if (self.active == 0 || self.pc >= self.other_pc || self.split_steps > PATIENCE) && !self.select() {
                return Ok(Stop::Blocked);
            }
            let instruction = &kernel.code[self.pc as usize];
            self.instructions += 1;
            if self.other_pc != u32::MAX {
                self.split_steps += 1;
            }
            let mut cx = Context { warp: self, block, cluster, launch };
            let mut lanes = cx.warp.active;
            if instruction.counted {
                cx.warp.thread_instructions += u64::from(lanes.count_ones());
            }
            if let Some(guard) = instruction.guard {
                lanes = cx.holds(guard, lanes)?;
                if lanes == 0 {
                    self.pc += 1;
                    continue;
                }
            }
            let step = instruction.operation.execute(&mut cx, lanes)?;
            if let Some((register, lanes)) = cx.warp.products.violation() {
                return Err(cx.register_in_flight(register, lanes));
            }
            match step {
                Step::Next => self.pc += 1,
                Step::Jump { taken, target } => {
                    if taken == self.active {
                        self.pc = target;
                    } else {
                        self.pc += 1;
                        self.park();
                        super::each(taken).for_each(|lane| self.lane_pc[lane] = target);
                    }
                }
                Step::Exit(lanes) => {
                    self.pc += 1;
                    self.live &= !lanes;
                    self.active &= !lanes;
                    cluster.end(self.index, lanes);
                    if self.blocked != 0 {
                        // Who waits for the lanes that ended must look again.
                        self.wake(self.blocked & !self.asleep);
                    }
                    if self.live == 0 {
                        return Ok(Stop::Blocked);
                    }
                }
                Step::Hold => self.block_lanes(lanes, false),
                Step::Sleep(lanes) => {
                    self.pc += 1;
                    self.block_lanes(lanes, true);
                }
                Step::Yield => {
                    self.pc += 1;
                    return Ok(Stop::Slice);
                }
            }
        }
        Ok(Stop::Slice)
    }

    /// The running `lanes` wait at `pc`; the other running ones are past it.
    fn block_lanes(&mut self, lanes: u32, asleep: bool) {
        let after = self.pc + u32::from(!asleep);
        let others = self.active & !lanes;
        self.park();
        super::each(others).for_each(|lane| self.lane_pc[lane] = after);
        self.blocked |= lanes;
        self.asleep = self.asleep & !lanes | if asleep { lanes } else { 0 };
    }
}
