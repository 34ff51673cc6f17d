//! `cargo xtask verify`: everything that shows that a checkout works on this machine, and one table of it.

mod closeness;
mod devices;
mod golden;
pub(crate) mod report;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::build_ptx::{self, Checked, Depth};
use crate::process;
use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe_tests::cases::{self, Lab, Size};
use report::{Outcome, Report};

/// Arguments of `verify`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Arguments {
    /// Run the golden cases and suites on this device only: cpu, cuda, cuda:N, emulator:sm_80, emulator:sm_90a or
    /// emulator:sm_120a; may be given more than once. Without it: the CPU, every GPU that the driver sees, and all emulated
    /// ones.
    #[arg(long = "device", value_name = "DEVICE", value_parser = devices::parse)]
    devices: Vec<devices::Machine>,
    /// A further case: a directory with model.safetensors, io.safetensors and config.json; may be given more than once.
    #[arg(long = "case", value_name = "DIR")]
    cases: Vec<PathBuf>,
    /// Print one JSON object instead of the table; everything else goes to stderr.
    #[arg(long)]
    json: bool,
    /// Leave out the slow parts: `cargo test`, the big sizes on GPUs, and compiling the PTX again.
    #[arg(long)]
    quick: bool,
    /// For a machine without cargo, to which this program was brought: only what runs on devices.
    #[arg(long)]
    prebuilt: bool,
}

/// Runs the verb; whether nothing failed.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let mut report = Report::default();
    run_into(arguments, &mut report);
    finish(arguments, &report)
}

/// Prints the report; whether nothing failed.
pub(crate) fn finish(arguments: &Arguments, report: &Report) -> Result<bool> {
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&report.to_json())?);
    } else {
        print!("{report}");
    }
    Ok(report.failed() == 0)
}

/// Adds the outcome of every step to the report.
pub(crate) fn run_into(arguments: &Arguments, report: &mut Report) {
    let root = process::workspace_root();
    // Opened first: a GPU that was asked for and is not there should not be found out after minutes of building.
    let before = report.failed();
    let runners = devices::open(&arguments.devices, report);
    if report.failed() > before && !arguments.devices.is_empty() {
        return;
    }
    if !arguments.prebuilt && !build_and_test(arguments, &root, report) {
        return;
    }

    let golden_cases = golden::find_cases(&root.join("tests/golden"), &arguments.cases, report);
    let mut first_outputs = golden::Outputs::default();
    for runner in &runners {
        eprintln!("Golden cases on {}", runner.device_name());
        for case in &golden_cases {
            golden::run_case(runner, case, &mut first_outputs, report);
        }
        run_suite(runner, arguments.quick, report);
    }

    if arguments.prebuilt {
        report.add("build, tests, PTX", Outcome::NotRun("left out by --prebuilt".to_owned()));
        return;
    }
    let depth = if arguments.quick { Depth::HashesOnly } else { Depth::Rebuild };
    report.add(
        "PTX",
        match build_ptx::check(&root, depth) {
            Ok(checked) => Outcome::passed(match &checked {
                // Said as what it is: less than a rebuild.
                Checked::Hashes(_) => format!("hashes only: {}", checked.sentence()),
                Checked::Rebuilt => checked.sentence(),
            }),
            Err(error) => Outcome::Failed(format!("{error:#}")),
        },
    );
}

/// Builds and tests the workspace; whether it could be built.
fn build_and_test(arguments: &Arguments, root: &Path, report: &mut Report) -> bool {
    let build = process::run_aloud(process::cargo(root).args(["build", "--release", "--workspace"]));
    let built = build.is_ok();
    report.add("build", Outcome::of(build, "cargo build --release --workspace"));
    if !built {
        return false;
    }
    let tests = if arguments.quick {
        Outcome::NotRun("left out by --quick".to_owned())
    } else {
        let tests = process::run_aloud(process::cargo(root).args(["test", "--workspace"]));
        Outcome::of(tests, "cargo test --workspace")
    };
    report.add("tests", tests);
    true
}

/// What users of such systems have reported, a row each. `cargo test` runs it on the CPU, so here only GPUs do.
fn run_suite(runner: &Runner, quick: bool, report: &mut Report) {
    if runner.engine().is_none() {
        return;
    }
    let device = runner.target().to_string();
    // The big sizes are for real GPUs: emulated, they would take hours.
    let small = quick || matches!(runner.target(), Target::Backend(_));
    let lab = Lab { runner, size: if small { Size::Small } else { Size::Full } };
    cases::run(&lab, None, &mut |case| {
        let outcome = match case.outcome {
            Ok(()) => Outcome::passed(format!("{:.1} s", case.seconds)),
            Err(reason) => Outcome::Failed(reason),
        };
        report.add_on(case.name, device.as_str(), outcome);
    });
}
