//! Warpgroups: four consecutive warps, the first of them a multiple of four, that execute some instructions alike (PTX ISA
//! 9.7.15.1), and what they do with registers (9.7.19.5 `setmaxnreg`).
//!
//! Nothing makes the warps of a group meet at such an instruction here; each executes it when it comes to it. That all four
//! execute the same ones, on the same operands, is checked.

use std::collections::VecDeque;

use super::matrix::whole_warp;
use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::{Context, Execute, Fault, Step, fault};

/// Warps of a group.
pub(super) const WARPS: usize = 4;
/// Fewest registers of a thread, and the step in which they are counted.
const FEWEST: u32 = 24;
const STEP: u32 = 8;

/// What the groups of a block have executed.
#[derive(Default)]
pub(crate) struct Warpgroups {
    groups: Vec<Warpgroup>,
}

/// An instruction that all warps of a group must execute alike.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Instruction {
    pc: u32,
    operands: [u64; 3],
    first_warp: u8,
}

#[derive(Default)]
struct Warpgroup {
    /// Instructions that not all warps have executed yet.
    ahead: VecDeque<Instruction>,
    /// Number of the first of them.
    first: u64,
    /// How many each warp has executed.
    executed: [u64; WARPS],
}

impl Warpgroups {
    /// An instruction that only some warps of a group have executed: its place, the warp that did, and one that did not.
    pub(crate) fn incomplete(&self) -> Option<(u32, u32, u32)> {
        self.groups.iter().enumerate().find_map(|(group, state)| {
            let instruction = state.ahead.front()?;
            let missing = state.executed.iter().position(|&executed| executed == state.first)?;
            let warp = |inner: usize| (WARPS * group + inner) as u32;
            Some((instruction.pc, warp(instruction.first_warp.into()), warp(missing)))
        })
    }
}

/// All lanes of the running warp, which is in a whole group, are here; notes the instruction with its operands. False: some
/// lanes are still to come.
pub(super) fn in_warpgroup(cx: &mut Context<'_>, lanes: u32, operands: [u64; 3]) -> Result<bool, Fault> {
    if !whole_warp(cx, lanes)? {
        return Ok(false);
    }
    let (group, inner) = (cx.own_warp() as usize / WARPS, cx.own_warp() as usize % WARPS);
    if (cx.block.threads as usize) < 32 * WARPS * (group + 1) {
        let detail = format!("{} threads are no whole number of warpgroups", cx.block.threads);
        return Err(fault(FindingKind::Divergent, lanes, detail));
    }
    let instruction = Instruction { pc: cx.warp.pc, operands, first_warp: inner as u8 };
    let groups = &mut cx.block.extra.warpgroups.groups;
    if groups.len() <= group {
        groups.resize_with(group + 1, Warpgroup::default);
    }
    let state = &mut groups[group];
    let at = (state.executed[inner] - state.first) as usize;
    state.executed[inner] += 1;
    match state.ahead.get(at) {
        None => state.ahead.push_back(instruction),
        Some(other) if (other.pc, other.operands) == (instruction.pc, instruction.operands) => {}
        Some(other) => {
            let warp = other.first_warp;
            let detail = if other.pc == instruction.pc {
                format!("operands {operands:x?} here, {:x?} in warp {warp} of the warpgroup", other.operands)
            } else {
                let line = cx.launch.kernel.code[other.pc as usize].line;
                format!("warp {warp} of the warpgroup executed line {line} instead")
            };
            return Err(fault(FindingKind::Divergent, lanes, detail));
        }
    }
    while state.executed.iter().all(|&executed| executed > state.first) {
        state.ahead.pop_front();
        state.first += 1;
    }
    Ok(true)
}

/// Registers that the warps of a block own, in registers of a thread.
#[derive(Default)]
pub(crate) struct RegisterPool {
    free: u32,
    /// Of each warp; empty before the first `setmaxnreg`.
    owned: Vec<u32>,
    waiting: VecDeque<Waiter>,
}

/// A warp that waits for registers.
struct Waiter {
    warp: u32,
    wanted: u32,
}

impl RegisterPool {
    /// The first warp that waits, and why.
    pub(crate) fn waits(&self) -> Option<(u32, String)> {
        let waiter = self.waiting.front()?;
        let missing = waiter.wanted - self.owned[waiter.warp as usize];
        let detail = format!("waits for {missing} registers a thread, {} are free for a warp", self.free);
        Some((waiter.warp, detail))
    }

    /// Gives registers to those who wait, in order.
    fn serve(&mut self, first_warp: u32, wakes: &mut Vec<(u32, u32)>) {
        while let Some(waiter) = self.waiting.front() {
            let owned = &mut self.owned[waiter.warp as usize];
            let missing = waiter.wanted - *owned;
            if missing > self.free {
                return;
            }
            self.free -= missing;
            *owned = waiter.wanted;
            wakes.push((first_warp + waiter.warp, u32::MAX));
            self.waiting.pop_front();
        }
    }
}

/// `setmaxnreg` (9.7.19.5).
struct SetRegisters {
    more: bool,
    count: u32,
}

impl SetRegisters {
    fn set(&self, cx: &mut Context<'_>, at_launch: u32) -> Result<Step, String> {
        let (warp, index) = (cx.own_warp(), cx.warp.index);
        let (block, wakes) = (&mut *cx.block, &mut cx.cluster.wakes);
        let pool = &mut block.extra.registers;
        let warps = block.threads.div_ceil(32);
        pool.owned.resize(warps as usize, at_launch);
        let owned = pool.owned[warp as usize];
        if !self.more {
            if owned < self.count {
                return Err(format!("fewer registers, but the warp has {owned} a thread"));
            }
            pool.owned[warp as usize] = self.count;
            pool.free += owned - self.count;
            pool.serve(block.first_warp, wakes);
            return Ok(Step::Next);
        }
        if owned > self.count {
            return Err(format!("more registers, but the warp has {owned} a thread"));
        }
        // The other warps of the block keep the fewest at least, those of the warpgroup want as many.
        let (all, group) = (at_launch * warps, WARPS as u32);
        if self.count * group + FEWEST * (warps - group) > all {
            let needed = self.count * group;
            return Err(format!("waits for ever: a warpgroup needs {needed} registers of the {all} of {warps} warps"));
        }
        pool.waiting.push_back(Waiter { warp, wanted: self.count });
        pool.serve(block.first_warp, wakes);
        if wakes.last() == Some(&(index, u32::MAX)) {
            wakes.pop();
            return Ok(Step::Next);
        }
        Ok(Step::Sleep(u32::MAX))
    }
}

impl Execute for SetRegisters {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !in_warpgroup(cx, lanes, [0; 3])? {
            return Ok(Step::Hold);
        }
        let misuse = |detail: &str| fault(FindingKind::RegisterPool, lanes, detail);
        let Some(at_launch) = cx.launch.kernel.launch_registers else {
            return Err(misuse("no effect: no .maxnreg, .maxntid or .reqntid says how many registers there are"));
        };
        self.set(cx, at_launch).map_err(|detail| misuse(&detail))
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "setmaxnreg" {
        return Ok(None);
    }
    let more = s.modifiers.one_of(&[("inc", true), ("dec", false)]).ok_or("without .inc or .dec")?;
    for name in ["sync", "aligned", "u32"] {
        s.modifiers.need(name)?;
    }
    let count = d.integer(s, 0)?;
    if !(u64::from(FEWEST)..=256).contains(&count) || !count.is_multiple_of(u64::from(STEP)) {
        return Err(format!("{count} registers: 24 to 256 in steps of 8").into());
    }
    Ok(Some(Box::new(SetRegisters { more, count: count as u32 })))
}
