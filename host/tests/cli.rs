//! The program as a user meets it: exit codes, messages and reports, on the golden checkpoints and on broken copies.

mod program;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use program::{
    copy_of, golden, header_of, program, refused, rename, report, run, set_scalar, stderr, stdout, with_config,
    with_header,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const GOLDEN: [&str; 5] = ["qwen3_moe", "deepseek_v3", "ragged", "deepseek_v4_named", "compressed_tensors"];

#[test]
fn every_golden_checkpoint_is_met_in_every_scale_mode() {
    for name in GOLDEN {
        for scales in ["auto", "static", "per-token", "per-tensor"] {
            let report = report("forward", &golden(name), &["--scales", scales]);
            assert_eq!(report["out_dtype"], "f32");
            assert_eq!(report["passed"], true, "{report}");
            assert!(report["rel_l2"].as_f64().unwrap() < 1e-6, "{report}");
            assert_eq!(report["nan_count"], 0);
        }
    }
}

#[test]
fn ranks_give_the_same_sum_and_one_alone_a_part() {
    for name in GOLDEN {
        for ranks in ["1", "2", "4", "5", "20"] {
            let report = report("forward", &golden(name), &["--ranks", ranks]);
            assert_eq!(report["passed"], true, "{name} on {ranks} ranks: {report}");
        }
    }
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("part.safetensors");
    let args = ["--ranks", "20", "--rank", "19", "--out-dtype", "f32", "--out", out.to_str().unwrap()];
    let part = report("forward", &golden("ragged"), &args);
    assert_eq!((&part["rel_l2"], &part["expect"]), (&Value::Null, &Value::Null));
    let written = fs::read(&out).unwrap();
    let (_, start) = header_of(&written);
    assert_eq!(written.len() - start, 33 * 320 * 4);
    assert!(written[start..].iter().all(|&byte| byte == 0), "rank 19 of 20 holds none of 5 experts");
}

#[test]
fn beyond_the_tolerance_is_exit_code_1() {
    let qwen = golden("qwen3_moe");
    let far = run("forward", &qwen, &["--expect", "routed_out"]);
    assert_eq!(far.status.code(), Some(1));
    assert!(stdout(&far).contains("FAILED") && stdout(&far).contains("first difference"), "{}", stdout(&far));
    let near = run("forward", &qwen, &["--expect", "routed_out", "--tolerance", "6e-2"]);
    assert_eq!(near.status.code(), Some(0), "{}", stdout(&near));
    let rows = run("forward", &qwen, &["--expect", "routed_out", "--tolerance", "6e-2", "--out-dtype", "f32"]);
    assert_eq!(rows.status.code(), Some(1), "f32 rows must be close one by one");
    let other = run("forward", &qwen, &["--activation", "swigluoai", "--expect", "expected"]);
    assert_eq!(other.status.code(), Some(1), "another activation is another result");
}

#[test]
fn random_inputs_are_seeded() {
    let directory = TempDir::new().unwrap();
    let output_of = |run: &str, seed: &str| {
        let path = directory.path().join(run);
        let args = ["--tokens", "3", "--seed", seed, "--out", path.to_str().unwrap()];
        let report = report("forward", &golden("ragged"), &args);
        assert_eq!((&report["tokens"], &report["out_dtype"]), (&json!(3), &json!("bf16")));
        fs::read(path).unwrap()
    };
    let first = output_of("first", "1");
    assert!(first == output_of("again", "1"));
    assert!(first != output_of("other", "2"));
    let none = report("forward", &golden("ragged"), &["--tokens", "0"]);
    assert_eq!((&none["tokens"], &none["forward_ms"]), (&json!(0), &Value::Null), "nothing took no time");
    let text = stdout(&run("forward", &golden("ragged"), &["--tokens", "0"]));
    assert!(text.contains("time        - (no tokens), ") && !text.contains("median"), "{text}");
}

#[test]
fn flags_override_the_config() {
    let qwen = golden("qwen3_moe");
    let copy = with_config("qwen3_moe", "hidden_act", json!("gelu"));
    refused(&run("forward", copy.path(), &[]), &["hidden_act", "gelu", "not supported", "--activation"]);
    assert_eq!(report("forward", copy.path(), &["--activation", "swiglu"])["activation"], "SwiGLU");
    assert_eq!(report("forward", &qwen, &["--swiglu-limit", "7"])["activation"], "SwiGLU with limit 7");
    refused(&run("forward", &qwen, &["--activation", "relu2"]), &["expert 0 has a gate matrix"]);
    refused(&run("forward", &qwen, &["--swiglu-limit", "0"]), &["--swiglu-limit", "above 0"]);
    refused(&run("forward", &qwen, &["--activation", "relu2", "--swiglu-limit", "7"]), &["relu2 has none"]);
    let copy = with_config("qwen3_moe", "num_experts_per_tok", Value::Null);
    assert_eq!(report("forward", copy.path(), &[])["topk"], 2, "the inputs say it");
    refused(&run("forward", copy.path(), &["--tokens", "1"]), &["num_experts_per_tok", "--inputs"]);
}

#[test]
fn inspect_shows_layers_and_plan() {
    let output = run("inspect", &golden("compressed_tensors"), &["--max-tokens", "128", "--ranks", "3"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0));
    for part in ["compressed-tensors", "NVFP4", "L1 all, L2 all", "quantized once", "128 tokens", "3 of 8", "workspace"]
    {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    let report = report("inspect", &golden("deepseek_v4_named"), &[]);
    assert_eq!(report["layers"][0]["names"], "DeepSeek-V4");
    assert_eq!(report["layers"][0]["activation"], "SwiGLU with limit 10");
    let plan = &report["plan"];
    let regions: u64 = plan["workspace"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(plan["workspace_bytes"], regions);
    assert!(plan["weights_bytes"].as_u64() >= report["layers"][0]["nvfp4_bytes"].as_u64());

    let copy = copy_of("qwen3_moe");
    set_scalar(&copy, "model.layers.0.mlp.experts.1.up_proj.input_scale", 1.0);
    let text = stdout(&run("inspect", copy.path(), &[]));
    assert!(text.contains("gate and up differ: the larger is used") && text.contains("once a slot"), "{text}");
}

#[test]
fn bad_files_are_named() {
    let of = |name: &str| format!("model.layers.0.mlp.{name}");
    let truncated = copy_of("qwen3_moe");
    let path = truncated.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let whole = bytes.len().to_string();
    let dtype = with_header("qwen3_moe", |header| {
        header[&of("experts.3.up_proj.weight_scale")]["dtype"] = json!("F8_E5M2");
    });
    let shape = with_header("qwen3_moe", |header| header[&of("experts.3.up_proj.weight")]["shape"] = json!([64, 256]));
    let missing = with_header("qwen3_moe", |header| rename(header, "experts.3.", "expelled.3."));
    let tensor = with_header("qwen3_moe", |header| rename(header, "experts.3.up_proj.weight_scale_2", "other"));
    let index = copy_of("qwen3_moe");
    let map = json!({"weight_map": {of("experts.3.up_proj.weight"): "model-00002-of-00002.safetensors"}});
    fs::write(index.path().join("model.safetensors.index.json"), map.to_string()).unwrap();
    let empty = TempDir::new().unwrap();
    let cases: [(&Path, &[&str]); 8] = [
        (truncated.path(), &["model.safetensors is truncated", &whole]),
        (dtype.path(), &["experts.3.up_proj.weight_scale must be", "F8_E4M3", "F8_E5M2"]),
        (shape.path(), &["experts.3.up_proj.weight must have the shape", "[128, 128]", "[64, 256]"]),
        (missing.path(), &["expert 3 of layer 0 is missing", "7 experts were found, expected 8"]),
        (tensor.path(), &["experts.3.up_proj.weight_scale_2 is missing"]),
        (index.path(), &["model.safetensors.index.json names the shard model-00002-of-00002.safetensors"]),
        (empty.path(), &["holds no .safetensors file"]),
        (Path::new("/no/such/model"), &["cannot open /no/such/model", "check the path"]),
    ];
    for (path, parts) in cases {
        for verb in ["inspect", "forward"] {
            refused(&run(verb, path, &[]), parts);
        }
    }
}

#[test]
fn bad_scales_are_named() {
    let input_scale = "model.layers.0.mlp.experts.2.down_proj.input_scale";
    for (value, shown) in [(0.0, "0.0"), (f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
        let copy = copy_of("qwen3_moe");
        set_scalar(&copy, input_scale, value);
        refused(&run("forward", copy.path(), &[]), &[input_scale, shown, "finite and above 0"]);
    }
    for value in [2400.0, 1e-6] {
        let copy = copy_of("qwen3_moe");
        set_scalar(&copy, "model.layers.0.mlp.experts.2.down_proj.weight_scale_2", value);
        let output = run("forward", copy.path(), &[]);
        assert_eq!(output.status.code(), Some(1), "another weight scale is another result, and no error");
        assert!(stdout(&output).contains("unexpected NaN     0"), "{}", stdout(&output));
    }
    let without = with_header("qwen3_moe", |header| rename(header, "experts.2.down_proj.input_scale", "other"));
    refused(&run("forward", without.path(), &["--scales", "static"]), &[input_scale, "missing", "per-token"]);
    let automatic = report("forward", without.path(), &[]);
    assert_eq!((&automatic["scales"], &automatic["passed"]), (&json!("per-token"), &json!(true)));
}

#[test]
fn bad_requests_are_named() {
    let qwen = golden("qwen3_moe");
    let elsewhere = golden("deepseek_v3").join("io.safetensors");
    let elsewhere = elsewhere.to_str().unwrap();
    let formats = golden("formats.safetensors");
    let cases: [(&[&str], &[&str]); 13] = [
        (&["--layer", "7"], &["layer 7 has no experts", "0"]),
        (&["--ranks", "0"], &["ranks is 0", "at least 1"]),
        (&["--ranks", "5", "--rank", "5"], &["rank is 5", "below", "choose a lower one"]),
        (&["--rank", "1"], &["--ranks"]),
        (&["--expect", "nothing"], &["no tensor nothing", "expected"]),
        (&["--tokens", "2", "--expect", "expected"], &["--inputs"]),
        (&["--inputs", elsewhere], &["512 columns", "256"]),
        (&["--inputs", formats.to_str().unwrap()], &["no tensor hidden"]),
        (&["--inputs", "/no/such/file"], &["/no/such/file"]),
        (&["--inputs", elsewhere, "--tokens", "1"], &["cannot be used with"]),
        (&["--tolerance", "NaN"], &["'NaN'", "--tolerance", "0 or more"]),
        (&["--device", "tpu"], &["no device \"tpu\"", "cuda:N"]),
        (&["--device", "cuda:4096"], &["--device cpu"]),
    ];
    for (args, parts) in cases {
        refused(&run("forward", &qwen, args), parts);
    }
}

#[test]
fn sizes_beyond_all_bounds_are_named() {
    let qwen = golden("qwen3_moe");
    let huge = usize::MAX.to_string();
    for verb in ["inspect", "forward"] {
        refused(&run(verb, &qwen, &["--ranks", &huge]), &["ranks is", "at most 1048576"]);
    }
    for tokens in [&huge, "1000000000000000"] {
        refused(&run("forward", &qwen, &["--tokens", tokens]), &["hidden states would take", "fewer tokens"]);
    }
    let copy = with_config("qwen3_moe", "num_experts_per_tok", json!(1u64 << 63));
    refused(&run("inspect", copy.path(), &[]), &["num_experts_per_tok = 9223372036854775808", "must be 1 to 8"]);
}

#[test]
fn an_output_that_cannot_be_written_leaves_nothing_behind() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("no/such/directory/out.safetensors");
    let output = run("forward", &golden("qwen3_moe"), &["--out", out.to_str().unwrap()]);
    refused(&output, &["cannot write", "out.safetensors"]);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn an_output_replaces_nothing_that_matters() {
    let copy = copy_of("qwen3_moe");
    let before = fs::read(copy.path().join("model.safetensors")).unwrap();
    for name in ["model.safetensors", "io.safetensors"] {
        let out = copy.path().join(name);
        refused(&run("forward", copy.path(), &["--out", out.to_str().unwrap()]), &[name, "made from"]);
    }
    assert!(before == fs::read(copy.path().join("model.safetensors")).unwrap());

    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let to = |out: &str| run("forward", copy.path(), &["--tokens", "1", "--out", out]);
    fs::create_dir(at("directory")).unwrap();
    fs::write(at("read-only"), "mine").unwrap();
    let mut permissions = fs::metadata(at("read-only")).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(at("read-only"), permissions).unwrap();
    refused(&to(&at("directory")), &["cannot write", "not a regular file"]);
    refused(&to(&at("directory/")), &["cannot write", "directory"]);
    refused(&to(&at("read-only")), &["cannot write", "read-only"]);
    assert_eq!(fs::read(at("read-only")).unwrap(), b"mine");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);

    #[cfg(unix)]
    {
        refused(&to("/dev/../dev/zero"), &["cannot write", "not a regular file"]);
        fs::write(at("target"), "old").unwrap();
        std::os::unix::fs::symlink("target", at("link")).unwrap();
        assert_eq!(to(&at("link")).status.code(), Some(0));
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert!(header_of(&fs::read(at("target")).unwrap()).0.contains_key("output"));
    }
}

/// Links to files that are not there (a half-fetched model), devices, and names that are not UTF-8.
#[cfg(unix)]
#[test]
fn unusual_files_are_named_or_work() {
    use std::os::unix::{ffi::OsStrExt, fs::symlink};
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        let copy = copy_of("qwen3_moe");
        let file = copy.path().join(name);
        let _ = fs::remove_file(&file);
        symlink("/no/such/blob", &file).unwrap();
        refused(&run("inspect", copy.path(), &[]), &[name, "No such file"]);
    }
    refused(&run("inspect", Path::new("/dev/null"), &[]), &["/dev/null", "not a regular file"]);

    let copy = copy_of("qwen3_moe");
    let odd = copy.path().join(std::ffi::OsStr::from_bytes(b"\xffmodel"));
    fs::create_dir(&odd).unwrap();
    for name in ["config.json", "model.safetensors", "io.safetensors"] {
        symlink(copy.path().join(name), odd.join(name)).unwrap();
    }
    for verb in ["inspect", "forward", "load"] {
        assert!(report(verb, &odd, &[])["checkpoint"].as_str().unwrap().ends_with("\u{fffd}model"));
    }
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = program().arg("inspect").arg(&odd).stdout(full).output().unwrap();
    refused(&output, &["standard output", "No space left"]);
}

/// The exit code is what it would be with a reader.
#[test]
fn a_reader_that_leaves_is_no_error() {
    let bad = copy_of("qwen3_moe");
    set_scalar(&bad, "model.layers.0.mlp.experts.1.up_proj.weight_scale_2", f32::NAN);
    let good = golden("qwen3_moe");
    let cases: [(&str, &Path, &[&str], i32, &str); 6] = [
        ("inspect", &good, &[], 0, ""),
        ("forward", &good, &[], 0, ""),
        ("load", &good, &["--repeats", "1"], 0, ""),
        ("inspect", bad.path(), &[], 2, "weight_scale_2 is NaN"),
        ("forward", &good, &["--expect", "routed_out"], 1, ""),
        ("load", &good, &["--repeats", "1", "--at-least", "1e9"], 1, ""),
    ];
    for (verb, checkpoint, args, code, said) in cases {
        let mut child = program()
            .args([verb, checkpoint.to_str().unwrap(), "--device", "cpu"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{verb} {args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(said) && stderr(&output).is_empty() == said.is_empty(), "{}", stderr(&output));
    }
}

#[test]
fn help_and_version_are_there() {
    let cases =
        [(&["--help"][..], "Examples:"), (&["-V"], env!("CARGO_PKG_VERSION")), (&["forward", "-h"], "--swiglu-limit")];
    for (args, part) in cases {
        let output = program().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains(part), "{}", stdout(&output));
    }
    assert_eq!(program().output().unwrap().status.code(), Some(2));
}
