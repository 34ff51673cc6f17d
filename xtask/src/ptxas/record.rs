//! `xtask/sass.json`: what the assembler made of the committed PTX when that was last looked at.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::resources::Resources;
use super::sass::{Code, Loop};

/// Where the record is, from the workspace's root.
pub(super) const FILE: &str = "xtask/sass.json";

/// One kernel for one architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kernel {
    pub(super) registers: u32,
    pub(super) shared_bytes: u32,
    pub(super) spill_store_bytes: u32,
    pub(super) spill_load_bytes: u32,
    pub(super) stack_bytes: u32,
    pub(super) barriers: u32,
    pub(super) serialized: bool,
    pub(super) instructions: usize,
    pub(super) outside_calls: usize,
    pub(super) loops: Vec<Loop>,
}

impl Kernel {
    pub(super) fn new(resources: Resources, code: Code) -> Self {
        let Resources {
            registers,
            shared_bytes,
            stack_bytes,
            spill_store_bytes,
            spill_load_bytes,
            barriers,
            serialized,
        } = resources;
        let Code { instructions, outside_calls, loops } = code;
        Self {
            registers,
            shared_bytes,
            spill_store_bytes,
            spill_load_bytes,
            stack_bytes,
            barriers,
            serialized,
            instructions,
            outside_calls,
            loops,
        }
    }
}

/// Kernels by name.
pub(super) type Kernels = BTreeMap<String, Kernel>;

/// The record, or what has just been assembled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// The assembler's version.
    pub(super) ptxas: String,
    /// Kernels by architecture. The module that an architecture runs follows from it.
    pub(super) architectures: BTreeMap<String, Kernels>,
}

impl Record {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let text = fs::read_to_string(root.join(FILE))
            .with_context(|| format!("cannot read {FILE}; `cargo xtask ptxas --record` writes it"))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{FILE} is no such record; `cargo xtask ptxas --record` writes it anew"))
    }

    pub(super) fn write(&self, root: &Path) -> Result<()> {
        fs::write(root.join(FILE), self.to_text()?).with_context(|| format!("cannot write {FILE}"))
    }

    /// JSON with a line a kernel, so that a difference between commits names the kernels that changed.
    fn to_text(&self) -> Result<String> {
        let mut text = format!("{{\n\"ptxas\": {},\n\"architectures\": {{\n", serde_json::to_string(&self.ptxas)?);
        for (at, (architecture, kernels)) in self.architectures.iter().enumerate() {
            let _ = writeln!(text, "{}\"{architecture}\": {{", if at == 0 { "" } else { ",\n" });
            let lines =
                kernels.iter().map(|(name, kernel)| Ok(format!("\"{name}\": {}", serde_json::to_string(kernel)?)));
            text += &lines.collect::<Result<Vec<_>>>()?.join(",\n");
            text += "\n}";
        }
        text += "\n}\n}\n";
        Ok(text)
    }

    /// What `now` has otherwise than the record, a sentence each; architectures that `now` lacks were not asked for.
    pub(super) fn differences(&self, now: &Self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for (architecture, kernels) in &now.architectures {
            let Some(recorded) = self.architectures.get(architecture) else {
                found.push(format!("{architecture} is not in {FILE}"));
                continue;
            };
            for name in recorded.keys().filter(|name| !kernels.contains_key(*name)) {
                found.push(format!("{architecture}, {name}: the kernel is gone"));
            }
            for (name, kernel) in kernels {
                let Some(recorded) = recorded.get(name) else {
                    found.push(format!("{architecture}, {name}: the kernel is new"));
                    continue;
                };
                let mut changes = Vec::new();
                compare("", &serde_json::to_value(recorded)?, &serde_json::to_value(kernel)?, &mut changes);
                if !changes.is_empty() {
                    found.push(format!("{architecture}, {name}: {}", changes.join(", ")));
                }
            }
        }
        Ok(found)
    }
}

/// Adds `path old -> new` for every leaf that differs.
fn compare(path: &str, old: &Value, new: &Value, changes: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let keys = old.keys().chain(new.keys().filter(|key| !old.contains_key(*key)));
            for key in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path} {key}") };
                // A category that a loop has nothing of is missing.
                let of = |side: &serde_json::Map<String, Value>| side.get(key).cloned().unwrap_or_else(|| 0.into());
                compare(&path, &of(old), &of(new), changes);
            }
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => {
            for (at, (old, new)) in old.iter().zip(new).enumerate() {
                compare(&format!("{path}[{at}]"), old, new, changes);
            }
        }
        (Value::Array(old), Value::Array(new)) => changes.push(format!("{path}: {} -> {}", old.len(), new.len())),
        _ if old != new => changes.push(format!("{path} {old} -> {new}")),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::category::Category;
    use super::*;

    fn kernel() -> Kernel {
        Kernel {
            registers: 40,
            shared_bytes: 0,
            spill_store_bytes: 0,
            spill_load_bytes: 0,
            stack_bytes: 0,
            barriers: 1,
            serialized: false,
            instructions: 100,
            outside_calls: 0,
            loops: vec![Loop {
                matrix: vec!["HMMA.16816.F32".to_owned()],
                instructions: 20,
                mix: BTreeMap::from([(Category::Matrix, 8), (Category::Integer, 12)]),
            }],
        }
    }

    fn record(kernels: Kernels) -> Record {
        Record {
            ptxas: "1.2.3".to_owned(),
            architectures: BTreeMap::from([("sm_80".to_owned(), kernels.clone()), ("sm_90".to_owned(), kernels)]),
        }
    }

    #[test]
    fn the_text_is_json_with_a_line_a_kernel() {
        let record = record(BTreeMap::from([("a".to_owned(), kernel()), ("b".to_owned(), kernel())]));
        let text = record.to_text().unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record, "{text}");
        assert_eq!(text.lines().filter(|line| line.contains("registers")).count(), 4, "{text}");
    }

    #[test]
    fn a_change_says_which_kernel_changed_how() {
        let old = record(BTreeMap::from([("a".to_owned(), kernel()), ("gone".to_owned(), kernel())]));
        let mut changed = kernel();
        changed.registers = 44;
        changed.loops[0].mix.remove(&Category::Integer);
        changed.loops[0].mix.insert(Category::Sync, 2);
        let mut new = record(BTreeMap::from([("a".to_owned(), changed), ("new".to_owned(), kernel())]));
        new.architectures.remove("sm_90");
        let found = old.differences(&new).unwrap();
        assert_eq!(
            found,
            [
                "sm_80, gone: the kernel is gone",
                "sm_80, a: loops[0] mix integer 12 -> 0, loops[0] mix sync 0 -> 2, registers 40 -> 44",
                "sm_80, new: the kernel is new"
            ]
        );
        assert!(old.differences(&old).unwrap().is_empty());
        new.architectures.insert("sm_100".to_owned(), Kernels::new());
        assert!(old.differences(&new).unwrap()[0].contains("sm_100 is not in"));
        let mut loopless = kernel();
        loopless.loops.clear();
        let loopless = record(BTreeMap::from([("a".to_owned(), loopless), ("gone".to_owned(), kernel())]));
        assert_eq!(old.differences(&loopless).unwrap()[0], "sm_80, a: loops: 1 -> 0");
    }
}
