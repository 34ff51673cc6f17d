//! What was measured, and on what.

use std::fs;

use nvfp4_moe::harness::Runner;
use nvfp4_moe::measurement::{Checkout, Machine};

/// The given commit, or that of the checkout that this program is in.
pub(super) fn checkout(commit: Option<&str>) -> Checkout {
    if let Some(commit) = commit {
        return Checkout { commit: Some(commit.to_owned()), changed: false };
    }
    let program = std::env::current_exe().ok();
    program.as_deref().and_then(|program| program.parent()).map_or_else(Checkout::default, Checkout::of)
}

/// The device that was chosen.
pub(super) fn machine(runner: &Runner) -> Machine {
    let device = runner.engine().map(|engine| engine.device());
    let limits = device.map(|device| device.limits());
    let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    Machine {
        device: runner.target().to_string(),
        name: runner.device_name().to_owned(),
        reason: runner.reason().to_owned(),
        gpu: device.map(|device| device.name().to_owned()),
        // Only Linux has it in a file.
        driver: device.and_then(|_| fs::read_to_string("/proc/driver/nvidia/version").ok()?.lines().find_map(version)),
        driver_cuda: device.map(|device| dotted(device.driver_version())),
        compute_capability: limits.map(|limits| dotted(limits.compute_capability)),
        multiprocessors: limits.map(|limits| limits.multiprocessors),
        kernels: runner.engine().map(|engine| engine.kernels().description().to_owned()),
    }
}

/// The first word of the module's line that is digits and points.
fn version(line: &str) -> Option<String> {
    let words = line.strip_prefix("NVRM version:")?.split_whitespace();
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c == '.' || c.is_ascii_digit());
    words.into_iter().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_tells_its_version() {
        for (line, found) in [
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Fri Oct 3 2025", Some("580.159")),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build", Some("575.57.08")),
            ("GCC version:  gcc version 12.3.0", None),
            ("NVRM version: none", None),
        ] {
            assert_eq!(version(line).as_deref(), found, "{line}");
        }
    }
}
