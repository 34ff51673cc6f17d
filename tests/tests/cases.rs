//! Every row of reported failures on the CPU; the same checks run on a GPU by the binary `cases`.

use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe_tests::cases::{self, Lab, Size};

/// Runs the checks of one row, at least one.
fn run_row(row: &str) {
    let runner = Runner::new(Target::Cpu).expect("the CPU");
    let results = cases::run_all(&runner, Some(&format!("{row}/")));
    assert!(!results.is_empty(), "no check of {row}");
    let mut failures = Vec::new();
    for result in results {
        println!("{} {:.2} s: {:?}", result.name, result.seconds, result.outcome);
        failures.extend(result.outcome.err().map(|message| format!("{}: {message}", result.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

macro_rules! rows {
    ($($row:ident)*) => {
        $(
            #[test]
            fn $row() {
                run_row(stringify!($row));
            }
        )*

        #[test]
        fn no_row_is_left_out() {
            let runner = Runner::new(Target::Cpu).expect("the CPU");
            let rows = [$(concat!(stringify!($row), "/")),*];
            for name in cases::names(&Lab { runner: &runner, size: Size::Full }) {
                assert!(rows.iter().any(|row| name.starts_with(row)), "{name} is in no row");
            }
        }
    };
}

rows! {
    expert_counts
    dimensions
    tokens
    padding
    gate_and_up
    global_scale
    routing
    clamp
    extremes
    empty_experts
    determinism
    memory
    loading
    precision
    devices
}
