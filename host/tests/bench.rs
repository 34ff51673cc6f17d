//! `nvfp4-moe bench` as a user meets it: its text, its JSON and its refusals, on the CPU.

use std::fs;
use std::process::{Command, Output};

use nvfp4_moe::measurement::Measurement;
use tempfile::TempDir;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4-moe")).args(["bench", "--device", "cpu"]).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A successful run's JSON, read as `cargo xtask` reads it.
#[track_caller]
fn measured(args: &[&str]) -> Measurement {
    let output = bench(&[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("bench.json");
    fs::write(&path, &output.stdout).unwrap();
    Measurement::read(&path).unwrap()
}

#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let output = bench(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty(), "{}", stdout(&output));
    assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} are not in: {text}");
}

#[test]
fn the_json_has_every_number() {
    let shapes = ["--shape", "320x176x5x2", "--shape", "64x32x4x2", "--shape", "320x176x5x2"];
    let others = ["--tokens", "1,7", "--iterations", "3", "--matmul-tflops", "0.001", "--commit", "abc"];
    let measured = measured(&[&shapes[..], &others].concat());
    assert_eq!((measured.checkout.commit.as_deref(), measured.machine.device.as_str()), (Some("abc"), "cpu"));
    assert_eq!((&measured.machine.gpu, &measured.machine.driver), (&None, &None));
    assert_eq!(measured.ceilings.matmul_tflop_per_s, Some(0.001));
    let names: Vec<_> = measured.shapes.iter().map(|shape| shape.shape.as_str()).collect();
    assert_eq!(names, ["320x176x5x2", "64x32x4x2"], "once each");
    let rows = &measured.shapes[0].rows;
    assert_eq!(rows.iter().map(|row| row.tokens).collect::<Vec<_>>(), [1, 7]);
    assert_eq!(rows[0].touched_bytes, f64::from(2 * 3 * 320 * 176 * 9 / 16));
    assert_eq!(rows[1].flops, f64::from(6 * 320 * 176 * 7 * 2));
    for row in rows {
        assert_eq!((row.check_passed, row.samples, &row.variant), (Some(true), 3, &None));
        let [fastest, slowest] = row.layer_us_range;
        assert!(fastest <= row.layer_us && row.layer_us <= slowest);
        assert_eq!(row.floors.us(), row.flops / 1e3, "0.001 TFLOP/s are 1,000 FLOPs a microsecond");
        assert!((row.of_read() - row.gb_per_s() / measured.ceilings.read_gb_per_s).abs() < 1e-9);
    }
}

#[test]
fn the_text_says_what_is_missing() {
    let text = stdout(&bench(&["--shape", "64x32x4x2", "--tokens", "2", "--iterations", "1", "--no-check"]));
    for part in ["read ceiling", "copy ceiling", "not given (--matmul-tflops)", "64x32x4x2", "not checked: --no-check"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("peers.json");
    let peers = r#"{"format": "nvfp4-moe peers 1", "gpu": "A", "matmul_tflop_per_s": RATE, "peers": []}"#;
    let arguments = ["--shape", "64x32x4x2", "--tokens", "2", "--iterations", "1", "--peers", path.to_str().unwrap()];
    fs::write(&path, peers.replace("RATE", r#"{"best": 799.0, "median": 751.0}"#)).unwrap();
    let text = stdout(&bench(&arguments));
    assert!(text.contains("799 TFLOP/s, given"), "{text}");
    fs::write(&path, peers.replace("RATE", "null")).unwrap();
    refused(&arguments, &["peers.json has no matmul_tflop_per_s", "--matmul-tflops"]);
}

#[test]
fn bad_requests_are_named() {
    let shape = ["--shape", "64x32x4x2"];
    refused(&["--tokens", "1"], &["--shape"]);
    refused(&["--shape", "gpt"], &["must be all, one of", "qwen3-30b"]);
    refused(&["--shape", "24x16x1x1"], &["hidden is 24", "multiple of 16"]);
    refused(&[&shape[..], &["--tokens", "0"]].concat(), &["--tokens"]);
    for rate in ["0", "-1", "NaN", "inf"] {
        refused(
            &[&shape[..], &["--matmul-tflops", rate]].concat(),
            &[&format!("'{rate}'"), "--matmul-tflops", "above 0"],
        );
    }
    refused(&[&shape[..], &["--tokens", "1,-1"]].concat(), &["'-1'", "--tokens", "whole number"]);
    refused(&[&shape[..], &["--iterations", "4294967295"]].concat(), &["--iterations", "1..=10000"]);
    // Before anything is measured: nothing is printed either.
    let limit = ["a workspace for 5000000000 tokens", "4294967294 tokens are the most", "split the batch"];
    refused(&["--shape", "16x16x1x1", "--tokens", "1,5000000000"], &limit);
    refused(&["--shape", "1048576x16x1x1", "--tokens", "1,4000000000"], &["random hidden states would take"]);
    refused(&[&shape[..], &["--peers", "/no/such/file"]].concat(), &["cannot read /no/such/file"]);
    for (shape, part) in [
        ("0x0x0x0", "hidden is 0"),
        ("18446744073709551600x16x1x1", "hidden is 18446744073709551600"),
        ("16x4294967296x1x1", "intermediate is 4294967296"),
        ("16x16x1152921504606846976x1", "experts is 1152921504606846976"),
    ] {
        refused(&["--shape", shape, "--tokens", "1"], &[part]);
    }
}

#[test]
fn a_layer_beyond_all_memory_is_an_error() {
    let output = bench(&["--shape", "1048576x1048576x1048576x1", "--tokens", "1"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("would take"), "{text}");
}
