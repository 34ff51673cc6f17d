//! What instructions must do, as data: kernels of one instruction (`tables/*.txt`) and short programs for those that need
//! memory, a warp or a block, each with values derived by hand from the PTX ISA document.
//!
//! The emulator's own test runs all of it; `nvfp4-moe-tests` runs the same checks on a GPU, with [`Check::wide_inputs`] on
//! top, and compares.

mod inputs;
mod kernel;
mod programs;
mod table;

pub use inputs::Kind;

/// How far results may be from each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// The same bits; of NaNs the payload is left open by the document, so any two are the same.
    Bits,
    /// Floating-point results: an absolute or a relative error, whichever is larger. Special values must be the same.
    Error {
        /// Absolute.
        absolute: f64,
        /// Relative.
        relative: f64,
    },
}

/// One instruction, or a program about a few that belong together.
#[derive(Debug, Clone)]
pub struct Check {
    /// The instruction with its modifiers.
    pub name: String,
    /// What it is about.
    pub family: &'static str,
    /// The oldest architecture that has it, such as 80.
    pub architecture: u32,
    /// It needs what only this architecture has (`sm_90a`), and no newer one.
    pub is_specific: bool,
    /// A module with one kernel `k`, whose parameter is 24 bytes: address of the inputs, address of the outputs, and how
    /// many cases there are.
    pub ptx: String,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks; 0 for as many as give each case a thread.
    pub blocks: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// What a case's outputs are, one 8-byte word each.
    pub outputs: Vec<Kind>,
    /// What a case's inputs are, one 8-byte word each.
    pub inputs: Vec<Kind>,
    /// Inputs and outputs derived by hand, case by case.
    pub derived: Vec<(Vec<u64>, Vec<u64>)>,
    /// Which inputs the document leaves open.
    pub defined: fn(&[u64]) -> bool,
    /// How results are compared.
    pub tolerance: Tolerance,
}

impl Check {
    /// All checks.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut checks = table::checks();
        checks.extend(programs::checks());
        checks
    }

    /// The target of its module.
    #[must_use]
    pub fn target(&self) -> String {
        format!("sm_{}{}", self.architecture, if self.is_specific { "a" } else { "" })
    }

    /// Whether a GPU of a compute capability can run it.
    #[must_use]
    pub const fn runs_on(&self, (major, minor): (u32, u32)) -> bool {
        let architecture = 10 * major + minor;
        if self.is_specific { architecture == self.architecture } else { architecture >= self.architecture }
    }

    /// Number of blocks for so many cases.
    #[must_use]
    pub fn grid(&self, cases: usize) -> u32 {
        if self.blocks == 0 { (cases as u32).div_ceil(self.threads) } else { self.blocks }
    }

    /// The kernel's parameter.
    #[must_use]
    pub fn parameter(inputs: u64, outputs: u64, cases: usize) -> [u64; 3] {
        [inputs, outputs, cases as u64]
    }

    /// Inputs beyond the derived ones: every special value of each operand with every one of the others, every pattern
    /// where there are few, random ones. Empty for programs, whose inputs are part of them.
    #[must_use]
    pub fn wide_inputs(&self) -> Vec<Vec<u64>> {
        if self.blocks != 0 {
            return Vec::new();
        }
        let mut cases = inputs::wide(&self.inputs);
        cases.retain(|case| (self.defined)(case));
        cases
    }

    /// Whether two results of one case are the same, but for the payload of NaNs.
    #[must_use]
    pub fn same(&self, first: &[u64], second: &[u64]) -> bool {
        self.outputs.iter().zip(first.iter().zip(second)).all(|(kind, (&a, &b))| kind.canonical(a) == kind.canonical(b))
    }

    /// Whether two results of one case are as near to each other as they must be.
    #[must_use]
    pub fn agree(&self, first: &[u64], second: &[u64]) -> bool {
        let Tolerance::Error { absolute, relative } = self.tolerance else { return self.same(first, second) };
        self.outputs.iter().zip(first.iter().zip(second)).all(|(kind, (&a, &b))| {
            let (a, b) = (kind.canonical(a), kind.canonical(b));
            let (first, second) = (kind.values(a), kind.values(b));
            let near = || first.iter().zip(&second).all(|(a, b)| near(*a, *b, absolute, relative));
            a == b || !first.is_empty() && near()
        })
    }
}

fn near(a: f64, b: f64, absolute: f64, relative: f64) -> bool {
    if !a.is_finite() || !b.is_finite() {
        // As canonical bits have it: all NaNs are one.
        return a == b || a.is_nan() && b.is_nan();
    }
    (a - b).abs() <= absolute.max(relative * a.abs().max(b.abs()))
}
