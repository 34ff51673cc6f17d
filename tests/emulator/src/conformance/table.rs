//! The tables of `tables/*.txt`: one instruction a line.
//!
//! `instruction | output kinds : input kinds | derived values | options`. `<a b>` in an instruction stands for two lines; more
//! than one instruction has a name in front, `name: text`.
//! Derived values are `inputs = outputs`, separated by commas: hexadecimal, or a number behind `f:` (f32), `d:` (f64), `h:`
//! (f16), `b:` (bf16), `i:` (decimal); two packed ones as `high/low`. Options: `sm_N`, the oldest architecture;
//! `nonzero`, the second input is not zero; `normal`, nor subnormal; `angle`, the input is small; `relative X`, `absolute X`, of which
//! the larger counts. Lines with `#` name the section of the PTX ISA document.

use super::inputs::Kind;
use super::{Check, Tolerance, kernel};
use crate::types::truncate;

/// Families, and what is in them.
const TABLES: [(&str, &str); 8] = [
    ("integers", include_str!("tables/integer.txt")),
    ("bits", include_str!("tables/bits.txt")),
    ("f32, f64", include_str!("tables/float.txt")),
    ("f16, bf16", include_str!("tables/half.txt")),
    ("conversions", include_str!("tables/convert.txt")),
    ("comparison", include_str!("tables/compare.txt")),
    ("movement", include_str!("tables/movement.txt")),
    ("memory, control", include_str!("tables/memory.txt")),
];

const THREADS: u32 = 128;

pub(super) fn checks() -> Vec<Check> {
    let lines = TABLES.iter().flat_map(|(family, table)| table.lines().map(|line| (*family, line)));
    let rows = lines.filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    rows.flat_map(|(family, line)| alternatives(line).into_iter().map(move |row| check(family, &row))).collect()
}

/// All lines that a line with `<a b>` stands for. Where it says the same twice, both have the same choice.
fn alternatives(line: &str) -> Vec<String> {
    let Some((_, rest)) = line.split_once('<') else { return vec![line.to_owned()] };
    let (names, _) = rest.split_once('>').unwrap_or_else(|| panic!("no `>` in {line}"));
    let group = format!("<{names}>");
    names.split(' ').flat_map(|name| alternatives(&line.replace(&group, name))).collect()
}

fn check(family: &'static str, row: &str) -> Check {
    let mut columns = row.split(" | ").map(str::trim);
    let instruction = columns.next().unwrap_or_default();
    let kinds = columns.next().unwrap_or_else(|| panic!("no kinds in {row}"));
    let values = columns.next().unwrap_or_default();
    let options = columns.next().unwrap_or_default();
    let (outputs, inputs) = kinds.split_once(':').unwrap_or_else(|| panic!("no `:` in {row}"));
    let list = |text: &str| text.split_whitespace().map(Kind::named).collect::<Vec<_>>();
    let (outputs, inputs) = (list(outputs), list(inputs));
    let derived = values.split(',').map(str::trim).filter(|case| !case.is_empty());
    let derived = derived.map(|case| {
        let (given, expected) = case.split_once('=').unwrap_or_else(|| panic!("no `=` in {case}"));
        (numbers(given, &inputs), numbers(expected, &outputs))
    });
    let derived = derived.collect();
    let mut architecture = 80;
    let [mut absolute, mut relative] = [None; 2];
    let mut defined: fn(&[u64]) -> bool = |_| true;
    let mut words = options.split_whitespace();
    while let Some(word) = words.next() {
        let mut number =
            || words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no bound in {row}"));
        match word {
            "nonzero" => defined = |case| case[1] != 0,
            "normal" => defined = |case| !f32::from_bits(case[1] as u32).is_subnormal(),
            "angle" => defined = |case| f32::from_bits(case[0] as u32).abs() < 314.0,
            "relative" => relative = Some(number()),
            "absolute" => absolute = Some(number()),
            _ => {
                let number = word.strip_prefix("sm_").and_then(|number| number.parse().ok());
                architecture = number.unwrap_or_else(|| panic!("there is no option {word}"));
            }
        }
    }
    let tolerance = match (absolute, relative) {
        (None, None) => Tolerance::Bits,
        // Below the smallest normal number no relative error is promised.
        (None, Some(relative)) => Tolerance::Error { absolute: f32::MIN_POSITIVE.into(), relative },
        (Some(absolute), relative) => Tolerance::Error { absolute, relative: relative.unwrap_or(0.0) },
    };
    // `name: text` where the text is more than the instruction.
    let (name, text) = instruction.split_once(": ").unwrap_or((instruction, instruction));
    let text = if text.ends_with("; }") { text.to_owned() } else { format!("{text};") };
    Check {
        name: name.split(' ').next().unwrap_or_default().to_owned(),
        family,
        architecture,
        is_specific: false,
        ptx: kernel::module(architecture, &text, &outputs, &inputs),
        threads: THREADS,
        blocks: 0,
        shared_bytes: 0,
        outputs,
        inputs,
        derived,
        defined,
        tolerance,
    }
}

fn numbers(text: &str, kinds: &[Kind]) -> Vec<u64> {
    let numbers: Vec<u64> = text.split_whitespace().zip(kinds).map(|(word, kind)| number(word, *kind)).collect();
    assert_eq!(text.split_whitespace().count(), kinds.len(), "as many numbers as operands: {text}");
    numbers
}

fn number(word: &str, kind: Kind) -> u64 {
    let Some((form, text)) = word.split_once(':') else {
        return u64::from_str_radix(word, 16).unwrap_or_else(|_| panic!("{word} is no hexadecimal number"));
    };
    let one = |text: &str| -> u64 {
        let real = || text.parse::<f64>().unwrap_or_else(|_| panic!("{word} is no number"));
        match form {
            "f" => u64::from((real() as f32).to_bits()),
            "d" => real().to_bits(),
            "h" => u64::from(half::f16::from_f64(real()).to_bits()),
            "b" => u64::from(half::bf16::from_f64(real()).to_bits()),
            "i" => truncate(text.parse::<i128>().unwrap_or_else(|_| panic!("{word} is no number")) as u64, kind.bits()),
            _ => panic!("{word} has no known form"),
        }
    };
    match text.split_once('/') {
        Some((high, low)) => one(high) << if form == "f" { 32 } else { 16 } | one(low),
        None => one(text),
    }
}
