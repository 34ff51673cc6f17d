//! Runs the program as a user does, on golden checkpoints and on broken copies; shared by the tests of its verbs.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Map, Value};
use tempfile::TempDir;

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_nvfp4-moe"))
}

/// Runs the program on a checkpoint, on the CPU unless `args` say otherwise.
pub(crate) fn run(verb: &str, checkpoint: &Path, args: &[&str]) -> Output {
    let mut command = program();
    command.arg(verb).arg(checkpoint);
    if !args.contains(&"--device") {
        command.args(["--device", "cpu"]);
    }
    command.args(args).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A successful run's JSON.
#[track_caller]
pub(crate) fn report(verb: &str, checkpoint: &Path, args: &[&str]) -> Value {
    let output = run(verb, checkpoint, &[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A run that must be an error: exit code 2, nothing on stdout, no panic, and these parts in its message.
#[track_caller]
pub(crate) fn refused(output: &Output, parts: &[&str]) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{}{text}", stdout(output));
    assert!(!text.contains("panicked"), "{text}");
    assert!(output.stdout.is_empty(), "{}", stdout(output));
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// A copy of a golden checkpoint, to be broken.
pub(crate) fn copy_of(name: &str) -> TempDir {
    let copy = TempDir::new().unwrap();
    for file in fs::read_dir(golden(name)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

/// The header of a safetensors file, and where the data start.
pub(crate) fn header_of(bytes: &[u8]) -> (Map<String, Value>, usize) {
    let start = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..start]).unwrap(), start)
}

/// A copy whose model.safetensors has another header; the data stay.
pub(crate) fn with_header(name: &str, edit: impl FnOnce(&mut Map<String, Value>)) -> TempDir {
    let copy = copy_of(name);
    let path = copy.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let (mut header, start) = header_of(&bytes);
    edit(&mut header);
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_slice(), &bytes[start..]].concat()).unwrap();
    copy
}

pub(crate) fn with_config(name: &str, key: &str, value: Value) -> TempDir {
    let copy = copy_of(name);
    let path = copy.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(&path, config.to_string()).unwrap();
    copy
}

/// Renames tensors; the bytes stay where they are.
pub(crate) fn rename(header: &mut Map<String, Value>, from: &str, to: &str) {
    for name in header.keys().filter(|name| name.contains(from)).cloned().collect::<Vec<_>>() {
        let entry = header.remove(&name).unwrap();
        header.insert(name.replace(from, to), entry);
    }
}

/// Writes one F32 tensor's value.
pub(crate) fn set_scalar(checkpoint: &TempDir, tensor: &str, value: f32) {
    let path = checkpoint.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (header, start) = header_of(&bytes);
    let at = start + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(&path, bytes).unwrap();
}
