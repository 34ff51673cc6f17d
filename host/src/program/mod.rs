//! Command line, exit codes and output of the program; one file a verb.

mod bench;
mod choices;
mod forward;
mod forward_report;
mod generate;
mod inspect;
mod load;
mod numbers;
mod plain_read;
mod progress;
mod random_inputs;
mod shape;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  nvfp4-moe inspect path/to/model --max-tokens 4096
  nvfp4-moe forward tests/golden/qwen3_moe
  nvfp4-moe forward path/to/model --layer 3 --tokens 64 --device cuda:0 --scales per-token
  nvfp4-moe forward path/to/model --inputs io.safetensors --expect expected --json
  nvfp4-moe bench --shape qwen3-30b --tokens 1,16,256 --device cuda
  nvfp4-moe generate /tmp/random --shape deepseek-v4-pro-ep8
  nvfp4-moe load /tmp/random --device cuda --at-least 0.5

Exit codes: 0 success, 1 a result beyond its bound, 2 an error.";

/// The Mixture-of-Experts expert block of NVFP4 checkpoints, on an NVIDIA GPU or the CPU.
#[derive(Debug, Parser)]
#[command(name = "nvfp4-moe", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the MoE layers of a checkpoint, and what one needs on a device
    Inspect(inspect::InspectArgs),
    /// Run a layer on given or random inputs, and compare with expected outputs
    Forward(forward::ForwardArgs),
    /// Measure a layer with random weights
    Bench(bench::BenchArgs),
    /// Measure how fast a layer is loaded, beside plain reading of its file and uploading
    Load(load::LoadArgs),
    /// Write a checkpoint of random experts
    Generate(generate::GenerateArgs),
}

/// How a command ended that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Everything is as it should be.
    Passed,
    /// A result is beyond its bound.
    Failed,
}

const EXIT_FAILED: u8 = 1;
const EXIT_ERROR: u8 = 2;

/// Parses the command line and runs the command.
pub(crate) fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Forward(args) => forward::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Generate(args) => generate::run(&args),
    };
    match outcome {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(EXIT_FAILED),
        // Whoever read the output has seen enough: no reason to complain.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // The messages name their causes themselves. If stderr is gone too, the exit code has to do.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::from(EXIT_ERROR)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes to standard output; an error instead of a panic when nobody reads it any more.
fn emit(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            anyhow::bail!("cannot write to standard output: {error}; check where it goes")
        }
        written => Ok(written?),
    }
}

/// As [`emit`], where a verdict follows: that nobody reads the report any more does not change it.
fn emit_report(text: &str) -> anyhow::Result<()> {
    emit(text).or_else(|error| if is_broken_pipe(&error) { Ok(()) } else { Err(error) })
}

/// Bytes for people.
fn human_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.into_iter().find(|&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// Milliseconds for people.
fn human_ms(ms: f64) -> String {
    if ms < 1.0 {
        format!("{:.1} us", ms * 1e3)
    } else if ms < 1e4 {
        format!("{ms:.3} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_and_times_are_readable() {
        assert_eq!(human_bytes(1000), "1000 bytes");
        assert_eq!(human_bytes(3 << 29), "1.5 GiB");
        assert_eq!(human_ms(0.0125), "12.5 us");
        assert_eq!(human_ms(12.5), "12.500 ms");
        assert_eq!(human_ms(12_500.0), "12.5 s");
    }
}
