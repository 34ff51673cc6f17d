//! Every instruction against the values that were derived by hand from the PTX ISA document, and refusals of what is not one.

use nvfp4_moe_emulator::conformance::Check;
use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Module};

/// What a check's kernel makes of cases.
fn outputs(check: &Check, cases: &[&[u64]]) -> Result<Vec<Vec<u64>>, EmulatorError> {
    let module = Module::parse(&check.ptx)?;
    let mut emulator = Emulator::new(Config::default());
    let words: Vec<u64> = cases.concat();
    let count = cases.len() * check.outputs.len();
    let inputs = emulator.memory_mut().alloc(8 * words.len().max(1));
    emulator.memory_mut().write(inputs, bytemuck::cast_slice(&words))?;
    let results = emulator.memory_mut().alloc(8 * count);
    emulator.memory_mut().fill(results, 0, 8 * count)?;
    let parameter = Check::parameter(inputs, results, cases.len());
    let (grid, block) = ([check.grid(cases.len()), 1, 1], [check.threads, 1, 1]);
    emulator.launch(&module, "k", grid, block, check.shared_bytes, bytemuck::cast_slice(&parameter))?;
    let results: Vec<u64> = bytemuck::pod_collect_to_vec(&emulator.memory().read(results, 8 * count)?);
    Ok(results.chunks_exact(check.outputs.len()).map(<[u64]>::to_vec).collect())
}

#[test]
fn derived_values() {
    let mut wrong = Vec::new();
    let checks = Check::all();
    for check in &checks {
        assert!(!check.derived.is_empty(), "{} has no derived values", check.name);
        let cases: Vec<&[u64]> = check.derived.iter().map(|(inputs, _)| inputs.as_slice()).collect();
        match outputs(check, &cases) {
            Err(error) => wrong.push(format!("{}: {error}", check.name)),
            Ok(results) => {
                for ((inputs, expected), result) in check.derived.iter().zip(&results) {
                    if !check.agree(result, expected) {
                        wrong.push(format!("{} of {inputs:x?}: {result:x?}, not {expected:x?}", check.name));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} checks:\n{}", wrong.len(), checks.len(), wrong.join("\n"));
}

#[test]
fn wide_inputs_run() {
    for check in Check::all() {
        let cases = check.wide_inputs();
        let cases: Vec<&[u64]> = cases.iter().map(Vec::as_slice).collect();
        if !cases.is_empty() {
            outputs(&check, &cases).unwrap_or_else(|error| panic!("{}: {error}", check.name));
        }
    }
}
