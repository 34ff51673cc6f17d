//! What can go wrong: with the text of a module, with a request, or inside a kernel.

use std::fmt;

/// Errors of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmulatorError {
    /// The text is not PTX, or PTX that this crate does not read.
    #[error("line {line}: expected {expected}, found {found}")]
    Syntax {
        /// Line of the module, from 1.
        line: u32,
        /// What would have been right.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// An opcode, modifier, type or operand that this crate does not execute.
    #[error("kernel {kernel}, line {line}: `{text}` is not known: {reason}")]
    UnknownInstruction {
        /// Entry point.
        kernel: String,
        /// Line of the module, from 1.
        line: u32,
        /// The source line.
        text: String,
        /// Which part is not known.
        reason: String,
    },
    /// The module has no such entry point.
    #[error("the module has no kernel {kernel}")]
    NoKernel {
        /// Name asked for.
        kernel: String,
    },
    /// A launch whose shape is not possible.
    #[error("kernel {kernel} cannot be launched: {reason}")]
    Launch {
        /// Entry point.
        kernel: String,
        /// Why.
        reason: String,
    },
    /// The host named memory that is not allocated.
    #[error("{bytes} bytes at {address:#x} are not inside an allocation")]
    Address {
        /// First byte.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// A kernel did what it must not.
    #[error("{}", list(findings))]
    Findings {
        /// The first ones, in no particular order between blocks; never empty.
        findings: Vec<Finding>,
    },
}

fn list(findings: &[Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Kinds of [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FindingKind {
    /// An access outside of every allocation, or outside of the block's shared memory.
    OutOfBounds,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A read of bytes of memory that nobody wrote.
    UnwrittenMemory,
    /// A read of a register that the thread did not write.
    UnwrittenRegister,
    /// Two threads of a block, one of them writing, without a barrier in between.
    SharedRace,
    /// Two blocks of a launch, one of them writing, without atomics.
    GlobalRace,
    /// A convergent instruction that not all lanes it needs execute together.
    Divergent,
    /// Threads that wait at a barrier which the others never reach.
    Deadlock,
    /// A barrier used against its rules: number, count, or more arrivals than expected.
    Barrier,
    /// Shared memory used while an asynchronous copy to it is under way.
    InFlight,
    /// Shared memory written by ordinary stores and used by the async proxy without a proxy fence.
    ProxyFence,
    /// An mbarrier used against its rules.
    Mbarrier,
    /// A register used while an asynchronous matrix product uses it.
    RegisterInFlight,
    /// Registers touched by the program and then used by an asynchronous matrix product without `wgmma.fence`.
    RegisterFence,
    /// `setmaxnreg` against its rules, or for registers that never become free.
    RegisterPool,
    /// A malformed operand: a value outside of what the instruction allows.
    Operand,
    /// The kernel executed `trap`.
    Trap,
    /// The kernel ran longer than the configured limit.
    InstructionLimit,
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfBounds => "out of bounds",
            Self::Misaligned => "misaligned access",
            Self::UnwrittenMemory => "read of unwritten memory",
            Self::UnwrittenRegister => "read of an unwritten register",
            Self::SharedRace => "data race in shared memory",
            Self::GlobalRace => "data race in global memory",
            Self::Divergent => "convergent instruction in divergent code",
            Self::Deadlock => "deadlock",
            Self::Barrier => "misuse of a barrier",
            Self::InFlight => "use of memory that an asynchronous copy is writing",
            Self::ProxyFence => "missing proxy fence",
            Self::Mbarrier => "misuse of an mbarrier",
            Self::RegisterInFlight => "use of a register of a matrix product that is under way",
            Self::RegisterFence => "missing wgmma.fence",
            Self::RegisterPool => "misuse of setmaxnreg",
            Self::Operand => "operand out of range",
            Self::Trap => "trap",
            Self::InstructionLimit => "instruction limit reached",
        })
    }
}

/// Something that a kernel must not do, and where it did it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub kind: FindingKind,
    /// Entry point.
    pub kernel: String,
    /// Line of the module, from 1.
    pub ptx_line: u32,
    /// The source line.
    pub text: String,
    /// Block index.
    pub block: [u32; 3],
    /// Thread index in the block, flattened.
    pub thread: u32,
    /// Address, where one is involved.
    pub address: Option<u64>,
    /// The rest of the story.
    pub detail: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "{}: kernel {}, line {} `{}`", self.kind, self.kernel, self.ptx_line, self.text)?;
        write!(f, ", block ({x}, {y}, {z}), thread {}", self.thread)?;
        if let Some(address) = self.address {
            write!(f, ", address {address:#x}")?;
        }
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}
