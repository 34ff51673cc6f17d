//! The program `nvfp4-moe`: inspects checkpoints, runs layers, measures them.

mod program;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
