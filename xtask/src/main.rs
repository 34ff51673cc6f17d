//! The chores of this workspace, as `cargo xtask VERB`: one file a verb.

mod bench_report;
mod build_ptx;
mod ci;
mod hardware_report;
mod mutate;
mod process;
mod ptx;
mod ptxas;
mod roofline;
mod tidy;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Chores of the nvfp4-moe workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Compile the device crate to PTX and write host/ptx, or compare with what is there.
    BuildPtx(build_ptx::Arguments),
    /// Build, run the tests, the golden cases on every device of this machine, and the PTX check.
    Verify(verify::Arguments),
    /// Formatting, clippy, documentation, then everything that `verify` does.
    Ci(ci::Arguments),
    /// Break the shipped kernels one instruction at a time, and count what the checks of `verify` notice.
    Mutate(mutate::Arguments),
    /// Assemble the committed PTX with NVIDIA's ptxas: registers, spills, and what the main loops consist of.
    Ptxas(ptxas::Arguments),
    /// Measure and check this machine's GPUs, and write a file to attach to an issue.
    HardwareReport(hardware_report::Arguments),
    /// Make tables and pictures of what `nvfp4-moe bench --json` measured: for docs/performance.md and README.md.
    BenchReport(bench_report::Arguments),
    /// Predict the layer's time on GPUs with FP4 tensor cores: the tables of docs/performance.md.
    Roofline,
    /// Check the rules that no compiler checks; also an ordinary test of this crate.
    Tidy,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().verb {
        Verb::BuildPtx(arguments) => build_ptx::run(&arguments).map(|()| true),
        Verb::Verify(arguments) => verify::run(&arguments),
        Verb::Ci(arguments) => ci::run(&arguments),
        Verb::Mutate(arguments) => mutate::run(&arguments),
        Verb::Ptxas(arguments) => ptxas::run(&arguments),
        Verb::HardwareReport(arguments) => hardware_report::run(&arguments),
        Verb::BenchReport(arguments) => bench_report::run(&arguments).map(|()| true),
        Verb::Roofline => roofline::run().map(|()| true),
        Verb::Tidy => tidy::run(),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            // As of the program: 1 is a check that failed.
            ExitCode::from(2)
        }
    }
}
