//! The checks of `verify` that a mutation of a kernel must fail, most sensitive and fastest first.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use nvfp4_moe_emulator::{Config, Module};
use nvfp4_moe_tests::cases::{self, Lab, Size};
use nvfp4_moe_tests::emulated::Architecture;

/// Instructions of a warp after which a kernel hangs; the checks of unchanged kernels need far fewer.
const MAX_INSTRUCTIONS: u64 = 1 << 20;

/// Whole layers, for what the stage of a kernel does not show.
const WHOLE_LAYERS: [&str; 8] = [
    "dimensions/every_tail",
    "gate_and_up/zero_half",
    "routing/ids_outside_the_range",
    "routing/accumulate",
    "clamp/limits",
    "extremes/not_finite_in_bf16",
    "extremes/not_finite_without_experts",
    "tokens/none",
];

/// How a mutation fared.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// A check failed.
    Caught {
        /// Its name.
        check: &'static str,
        /// What it said.
        message: String,
    },
    /// All checks passed.
    Survived,
    /// The emulator does not read the module: no mutation, really.
    Rejected(String),
}

/// Names of the checks for a kernel, or parts of several names.
fn checks_of(kernel: &str) -> Vec<&'static str> {
    const STAGES: [(&str, &[&str]); 12] = [
        ("route", &["stages/route"]),
        ("amax", &["stages/quantize"]),
        ("quantize", &["stages/quantize"]),
        ("combine", &["stages/combine"]),
        ("pack", &["stages/pack"]),
        ("read_all", &["stages/read_all"]),
        ("grouped_gemm_n8", &["stages/grouped_gemm_n8"]),
        ("grouped_gemm_n16", &["stages/grouped_gemm_n16"]),
        ("grouped_gemm_n32", &["stages/grouped_gemm_n32"]),
        ("grouped_gemm_n64", &["stages/grouped_gemm_n64"]),
        ("grouped_gemm_n128", &["stages/grouped_gemm_n128"]),
        ("grouped_gemm_fp4", &["stages/grouped_gemm_fp4", "fp4/grouped_gemm"]),
    ];
    let stage = STAGES.into_iter().find(|(name, _)| kernel == *name || kernel.starts_with(&format!("{name}_")));
    // A kernel that has no line here is checked by all stages.
    let checks = stage.map_or(&["stages/"][..], |(_, checks)| checks);
    checks.iter().copied().chain(WHOLE_LAYERS).collect()
}

/// The first of the checks that fails, and what it says; none if all pass.
fn first_failure(
    architecture: Architecture,
    module: Module,
    checks: &[&'static str],
) -> Result<Option<(&'static str, String)>> {
    let config = Config { threads: 1, max_instructions: MAX_INSTRUCTIONS, ..Config::default() };
    let runner = architecture.runner_of(module, config)?;
    let lab = Lab { runner: &runner, size: Size::Small };
    for check in checks {
        let mut results = Vec::new();
        cases::run(&lab, Some(check), &mut |result| results.push(result));
        if results.is_empty() {
            bail!("there is no check {check}");
        }
        if let Some(failed) = results.into_iter().find_map(|result| Some((result.name, result.outcome.err()?))) {
            return Ok(Some(failed));
        }
    }
    Ok(None)
}

/// Runs the checks of a kernel on a module.
pub(super) fn judge(architecture: Architecture, ptx: &str, kernel: &str) -> Verdict {
    let module = match Module::parse(ptx) {
        Ok(module) => module,
        Err(error) => return Verdict::Rejected(error.to_string()),
    };
    match first_failure(architecture, module, &checks_of(kernel)) {
        Ok(Some((check, message))) => Verdict::Caught { check, message },
        Ok(None) => Verdict::Survived,
        Err(error) => Verdict::Rejected(format!("{error:#}")),
    }
}

/// The checks must pass on what is shipped, or they notice nothing.
pub(super) fn unchanged_passes<'a>(
    architecture: Architecture,
    ptx: &str,
    kernels: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let checks: BTreeSet<_> = kernels.flat_map(checks_of).collect();
    let checks: Vec<_> = checks.into_iter().collect();
    match first_failure(architecture, Module::parse(ptx)?, &checks)? {
        Some((check, message)) => bail!("{check} fails on the shipped kernels: {message}"),
        None => Ok(()),
    }
}
