//! Every instruction against the values that were derived by hand from the PTX ISA document, and refusals of what is not one.

use std::collections::{BTreeMap, BTreeSet};

use nvfp4_moe_emulator::conformance::Check;
use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Module};

/// The shipped modules.
const SHIPPED: [&str; 3] = [
    include_str!("../../../host/ptx/sm_80.ptx"),
    include_str!("../../../host/ptx/sm_90a.ptx"),
    include_str!("../../../host/ptx/sm_120f.ptx"),
];

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

/// Opcodes with modifiers of the instructions in a module's text.
fn opcodes(ptx: &str) -> BTreeSet<String> {
    let statements = ptx.split([';', '{', '}', '\n']).map(str::trim);
    let statements = statements.map(|text| text.split_once(": ").map_or(text, |(_, behind_label)| behind_label));
    let behind_guard = |text: &str| match text.strip_prefix('@') {
        Some(rest) => rest.split_once(' ').map_or(String::new(), |(_, rest)| rest.trim().to_owned()),
        None => text.to_owned(),
    };
    statements
        .map(behind_guard)
        .map(|text| text.split_whitespace().next().unwrap_or_default().to_owned())
        .filter(|word| {
            word.starts_with(|c: char| c.is_ascii_lowercase()) && !word.contains([':', ',']) || word.contains("::")
        })
        .collect()
}

#[test]
fn every_opcode_of_the_shipped_modules_is_checked() {
    let checked: BTreeSet<String> = Check::all().iter().flat_map(|check| opcodes(&check.ptx)).collect();
    let missing: Vec<_> =
        SHIPPED.iter().flat_map(|ptx| opcodes(ptx)).filter(|opcode| !checked.contains(opcode)).collect();
    assert!(missing.is_empty(), "without a check: {missing:?}");
}

#[test]
fn the_shipped_modules_decode() {
    for ptx in SHIPPED {
        let module = Module::parse(ptx).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(module.kernels().count(), ptx.matches(".visible .entry ").count());
    }
}

#[test]
fn an_unknown_modifier_is_named_with_its_line() {
    let opcodes: BTreeMap<String, String> = Check::all()
        .into_iter()
        .flat_map(|check| opcodes(&check.ptx).into_iter().map(move |opcode| (opcode, check.ptx.clone())))
        .collect();
    // Calls and what they return from are expanded before they are decoded.
    for (opcode, ptx) in opcodes.iter().filter(|(opcode, _)| !opcode.starts_with("call") && !opcode.starts_with("ret"))
    {
        for wrong in [format!("{opcode}.bogus"), opcode.replacen('.', ".bogus.", 1)] {
            if wrong == *opcode {
                continue;
            }
            let Some(line) =
                ptx.lines().position(|line| line.split_whitespace().any(|word| word.trim_end_matches(';') == opcode))
            else {
                continue;
            };
            let text: Vec<_> = ptx
                .lines()
                .enumerate()
                .map(|(at, text)| if at == line { text.replacen(opcode, &wrong, 1) } else { text.to_owned() })
                .collect();
            match Module::parse(&text.join("\n")) {
                Err(EmulatorError::UnknownInstruction { line: found, text, reason, .. }) => {
                    assert_eq!(found as usize, line + 1, "{wrong}");
                    assert!(text.contains("bogus"), "{wrong}: {text}");
                    assert!(!reason.is_empty());
                }
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }
}
