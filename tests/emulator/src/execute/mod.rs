//! Running decoded kernels: lanes of a warp, warps of a block, blocks of a launch.

pub(crate) mod access;
pub(crate) mod barrier;
pub(crate) mod block;
pub(crate) mod cluster;
pub(crate) mod lanes;
pub(crate) mod launch;
pub(crate) mod registers;
pub(crate) mod warp;

use crate::error::FindingKind;
use block::BlockState;
use cluster::ClusterState;
use launch::Launch;
use warp::Warp;

/// A general register of the kernel: 64 bits for each lane, whatever its declared width; bits above that are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reg(pub(crate) u32);

/// A predicate register of the kernel: one bit for each lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pred(pub(crate) u32);

/// A predicate operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) register: Pred,
    pub(crate) negated: bool,
}

/// Values of one register in all lanes.
pub(crate) type Lanes = [u64; 32];

/// One decoded instruction.
pub(crate) trait Execute: Send + Sync {
    /// Runs for `lanes`, never empty: those of the warp that are here and whose guard holds.
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault>;

    /// Whether [`Step::Hold`] here is for other lanes of the warp.
    fn waits_for_warp(&self) -> bool {
        false
    }
}

/// Where a warp goes after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// To the next instruction.
    Next,
    /// To the next instruction, after other warps had their turn.
    Yield,
    /// These lanes jump, the others go to the next instruction.
    Jump { taken: u32, target: u32 },
    /// These lanes end.
    Exit(u32),
    /// The lanes wait here, and execute this instruction again with those that come.
    Hold,
    /// The lanes wait until somebody calls [`Warp::wake`], then go to the next instruction.
    Sleep(u32),
}

/// Something that the kernel must not do.
#[derive(Debug)]
pub(crate) struct FaultData {
    pub(crate) kind: FindingKind,
    pub(crate) lane: u32,
    pub(crate) address: Option<u64>,
    pub(crate) detail: String,
}

pub(crate) type Fault = Box<FaultData>;

/// A fault of the first of `lanes`.
pub(crate) fn fault(kind: FindingKind, lanes: u32, detail: impl Into<String>) -> Fault {
    Box::new(FaultData { kind, lane: lanes.trailing_zeros() & 31, address: None, detail: detail.into() })
}

/// A fault of one lane at an address.
pub(crate) fn fault_at(kind: FindingKind, lane: u32, address: u64, detail: impl Into<String>) -> Fault {
    Box::new(FaultData { kind, lane, address: Some(address), detail: detail.into() })
}

/// What an instruction works on.
pub(crate) struct Context<'a> {
    pub(crate) warp: &'a mut Warp,
    pub(crate) block: &'a mut BlockState,
    pub(crate) cluster: &'a mut ClusterState,
    pub(crate) launch: &'a Launch<'a>,
}

/// The lanes in a mask, ascending.
pub(crate) fn each(mut lanes: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = lanes.trailing_zeros();
        lanes &= lanes.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

impl Context<'_> {
    /// Values of a register; every one of `lanes` must have written it.
    #[inline(always)]
    pub(crate) fn read(&self, register: Reg, lanes: u32) -> Result<Lanes, Fault> {
        let index = register.0 as usize;
        let missing = lanes & !self.warp.written[index];
        if missing != 0 {
            return Err(self.unwritten(self.launch.kernel.register_name(register), missing));
        }
        if !self.warp.products.touch(register) {
            return Err(self.register_in_flight(register, lanes));
        }
        Ok(self.warp.registers[index])
    }

    #[cold]
    fn unwritten(&self, name: &str, lanes: u32) -> Fault {
        fault(FindingKind::UnwrittenRegister, lanes, format!("register {name}"))
    }

    /// Values of a register in all lanes, as a matrix product reads them.
    pub(crate) fn read_for_product(&self, register: Reg) -> Result<&Lanes, Fault> {
        let index = register.0 as usize;
        match !self.warp.written[index] {
            0 => Ok(&self.warp.registers[index]),
            missing => Err(self.unwritten(self.launch.kernel.register_name(register), missing)),
        }
    }

    /// Sets a register in all lanes, as a matrix product does.
    pub(crate) fn write_of_product(&mut self, register: Reg, values: &Lanes) {
        self.warp.registers[register.0 as usize] = *values;
        self.warp.written[register.0 as usize] = u32::MAX;
    }

    /// Sets a register in `lanes`.
    #[inline(always)]
    pub(crate) fn write(&mut self, register: Reg, lanes: u32, values: &Lanes) {
        let index = register.0 as usize;
        let old = &mut self.warp.registers[index];
        if lanes == u32::MAX {
            *old = *values;
        } else {
            for lane in 0..32 {
                old[lane] = if lanes >> lane & 1 == 1 { values[lane] } else { old[lane] };
            }
        }
        self.warp.written[index] |= lanes;
        self.warp.products.touch_to_write(register, lanes);
    }

    /// Lanes in which a predicate operand holds; every one of `lanes` must have written it.
    #[inline(always)]
    pub(crate) fn holds(&self, condition: Condition, lanes: u32) -> Result<u32, Fault> {
        let index = condition.register.0 as usize;
        let missing = lanes & !self.warp.predicates_written[index];
        if missing != 0 {
            return Err(self.unwritten(self.launch.kernel.predicate_name(condition.register), missing));
        }
        let bits = self.warp.predicates[index];
        Ok(lanes & if condition.negated { !bits } else { bits })
    }

    /// Sets a predicate in `lanes` to the bits of `values`.
    #[inline(always)]
    pub(crate) fn write_predicate(&mut self, register: Pred, lanes: u32, values: u32) {
        let index = register.0 as usize;
        let old = &mut self.warp.predicates[index];
        *old = *old & !lanes | values & lanes;
        self.warp.predicates_written[index] |= lanes;
    }

    /// Index in the cluster of a lane's thread.
    pub(crate) fn thread(&self, lane: usize) -> u32 {
        self.warp.index * 32 + lane as u32
    }
}
