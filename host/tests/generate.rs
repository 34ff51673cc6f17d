//! `nvfp4-moe generate` as a user meets it: it replaces nothing, and leaves all of a checkpoint or nothing.

mod program;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use program::{program, refused, report, stderr};
use tempfile::TempDir;

const PARTIAL: &str = "nvfp4-moe-generate.partial";

fn generate(directory: &Path, args: &[&str]) -> Output {
    program().arg("generate").arg(directory).args(args).output().unwrap()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_empty_or_new_directory_gets_a_checkpoint() {
    let directory = TempDir::new().unwrap();
    for path in [directory.path().join("a/new/one"), directory.path().join("empty")] {
        if path.ends_with("empty") {
            fs::create_dir(&path).unwrap();
            // What a killed run has left is replaced.
            fs::write(path.join(PARTIAL), vec![7; 100_000]).unwrap();
        }
        let output = generate(&path, &["--shape", "32x48x3x2", "--layers", "2"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(names(&path), ["config.json", "model.safetensors"]);
        let inspected = report("inspect", &path, &[]);
        assert_eq!((inspected["layers"].as_array().unwrap().len(), &inspected["topk"]), (2, &2.into()));
    }
}

/// A model's directory has other files too, and may lack a model.safetensors: shards.
#[test]
fn a_directory_with_anything_in_it_is_refused() {
    for name in ["model.safetensors", "config.json", "model.safetensors.index.json", "notes", "config.json.partial"] {
        let directory = TempDir::new().unwrap();
        fs::write(directory.path().join(name), "mine").unwrap();
        refused(&generate(directory.path(), &["--shape", "16x16x1x1"]), &[name, "empty directory", "choose another"]);
        assert_eq!(names(directory.path()), [name]);
        assert_eq!(fs::read(directory.path().join(name)).unwrap(), b"mine");
    }
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "mine").unwrap();
    for path in [&file, &file.join("below")] {
        refused(&generate(path, &["--shape", "16x16x1x1"]), &["cannot look into", "choose another directory"]);
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn what_cannot_be_made_is_refused_before_a_directory_is() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("a/b");
    let cases: [(&[&str], &[&str]); 7] = [
        (&["--shape", "1048576x1048576x32x1"], &["random experts would take", "smaller layer"]),
        (&["--shape", "1048576x65536x1x1", "--layers", "40000"], &["random experts would take", "smaller layer"]),
        (&["--shape", "16x16x1048576x1"], &["1048576 experts", "at most 40000", "fewer"]),
        (&["--shape", "16x16x2x1", "--layers", "20001"], &["40002 experts", "at most 40000", "fewer layers"]),
        (&["--shape", "16x16x2x1", "--layers", "4294967295"], &["--layers", "1..=40000"]),
        (&["--shape", "16x16x2x1", "--layers", "-1"], &["'-1'", "--layers", "1..=40000"]),
        (&["--shape", "all"], &["it must be one of deepseek-v4-pro-ep8"]),
    ];
    for (args, parts) in cases {
        refused(&generate(&path, args), parts);
        assert!(names(directory.path()).is_empty(), "{args:?}");
    }
    let largest_seed = ["--shape", "16x16x1x1", "--layers", "2", "--seed", "18446744073709551615"];
    assert_eq!(generate(&path, &largest_seed).status.code(), Some(0), "seeds wrap around");
}

/// A file may have 64 KiB: as on a full disk, the write fails half way.
#[cfg(unix)]
#[test]
fn a_write_that_fails_leaves_nothing() {
    let directory = TempDir::new().unwrap();
    let limited = |path: &Path| {
        let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
        let program = env!("CARGO_BIN_EXE_nvfp4-moe");
        let arguments = ["-c", script, "sh", program, "generate", path.to_str().unwrap(), "--shape", "512x512x2x1"];
        Command::new("sh").args(arguments).output().unwrap()
    };
    refused(&limited(&directory.path().join("a/b")), &["cannot write", "b/model.safetensors", "check the room"]);
    assert!(names(directory.path()).is_empty(), "what was made for it is gone too");
    let empty = directory.path().join("empty");
    fs::create_dir(&empty).unwrap();
    refused(&limited(&empty), &["cannot write", "too large"]);
    assert!(empty.is_dir() && names(&empty).is_empty(), "a directory that was there stays");
}
