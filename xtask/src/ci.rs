//! `cargo xtask ci`: what a change must pass.

use std::process::Command;

use anyhow::Result;

use crate::process;
use crate::verify;
use crate::verify::report::{Outcome, Report};

/// Arguments of `ci`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    verify: verify::Arguments,
}

/// One step: the row in the report, and the arguments of cargo.
const STEPS: [(&str, &[&str]); 3] = [
    ("format", &["fmt", "--all", "--check"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"]),
    ("docs", &["doc", "--workspace", "--no-deps", "--document-private-items"]),
];

/// Runs the verb; whether nothing failed. Every step runs, whatever an earlier one found.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let root = process::workspace_root();
    let mut report = Report::default();
    for (name, words) in STEPS {
        let mut command: Command = process::cargo(&root);
        command.args(words).env("RUSTDOCFLAGS", "-Dwarnings");
        report.add(name, Outcome::of(process::run_aloud(&mut command), &format!("cargo {}", words.join(" "))));
    }
    verify::run_into(&arguments.verify, &mut report);
    verify::finish(&arguments.verify, &report)
}
