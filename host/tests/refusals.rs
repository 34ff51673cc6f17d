//! Numbers, top-k, expert ids and scales that make no sense: refused by every verb that meets them, with what to do.

mod program;

use std::fs;

use program::{copy_of, golden, header_of, program, refused, rename, report, run, set_scalar, stderr, stdout};
use program::{with_config, with_header};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Removes a key of config.json.
fn without_key(copy: &TempDir, key: &str) {
    let path = copy.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove(key).unwrap();
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn numbers_without_a_meaning_are_usage_errors() {
    let ragged = golden("ragged");
    for value in ["NaN", "inf", "-1", "-0.5", "many"] {
        let shown = format!("'{value}'");
        refused(&run("load", &ragged, &["--at-least", value]), &[&shown, "--at-least", "finite number, 0 or more"]);
        refused(
            &run("forward", &ragged, &["--tolerance", value]),
            &[&shown, "--tolerance", "finite number, 0 or more"],
        );
        refused(&run("forward", &ragged, &["--swiglu-limit", value]), &[&shown, "--swiglu-limit", "above 0"]);
    }
    for (verb, flag) in [
        ("forward", "--tokens"),
        ("forward", "--seed"),
        ("forward", "--layer"),
        ("forward", "--ranks"),
        ("load", "--layer"),
        ("inspect", "--max-tokens"),
        ("inspect", "--ranks"),
    ] {
        let output = run(verb, &ragged, &[flag, "-1"]);
        refused(&output, &["'-1'", flag, "a whole number from 0 to"]);
        assert!(!stderr(&output).contains("tip"), "no advice to pass it in another way: {}", stderr(&output));
    }
    for value in ["-1", "0", "4294967295"] {
        refused(&run("load", &ragged, &["--repeats", value]), &[value, "--repeats", "1..=10000"]);
    }
}

#[test]
fn a_plan_for_more_tokens_than_can_be_counted_is_refused() {
    for tokens in ["18446744073709551615", "4294967295"] {
        let output = run("inspect", &golden("ragged"), &["--max-tokens", tokens]);
        refused(&output, &[&format!("{tokens} tokens"), "4294967294 tokens are the most", "split the batch"]);
    }
    assert_eq!(report("inspect", &golden("ragged"), &["--max-tokens", "4294967294"])["plan"]["topk"], 1);
}

#[test]
fn nothing_compared_is_neither_passed_nor_failed() {
    let ragged = golden("ragged");
    assert_eq!(report("forward", &ragged, &["--tokens", "2"])["passed"], Value::Null);
    assert_eq!(report("forward", &ragged, &[])["passed"], true);
    assert_eq!(report("load", &ragged, &["--repeats", "1"])["passed"], Value::Null);
    assert_eq!(report("load", &ragged, &["--repeats", "1", "--at-least", "0"])["passed"], true);
    let text = stdout(&run("load", &ragged, &["--repeats", "1"]));
    assert!(!text.contains("PASSED") && !text.contains("FAILED"), "{text}");
}

#[test]
fn a_topk_that_the_layer_cannot_have_is_refused() {
    for topk in [0, 9, 1000] {
        let copy = with_config("qwen3_moe", "num_experts_per_tok", json!(topk));
        for verb in ["inspect", "forward", "load"] {
            let said = format!("num_experts_per_tok = {topk}");
            refused(
                &run(verb, copy.path(), &[]),
                &[&said, "layer 0 has 8 experts", "must be 1 to 8", "correct it there"],
            );
        }
    }
    // Another one than the inputs' is possible, and is said.
    let copy = with_config("qwen3_moe", "num_experts_per_tok", json!(3));
    let forward = report("forward", copy.path(), &[]);
    assert_eq!((&forward["topk"], &forward["config_topk"]), (&json!(2), &json!(3)));
    let text = stdout(&run("forward", copy.path(), &[]));
    assert!(text.contains("config.json says top-k 3; the inputs' topk_ids are what counts"), "{text}");
}

/// Without its last expert: config.json tells, or else nothing but an id that names it.
#[test]
fn a_missing_last_expert_is_an_error_where_anything_tells() {
    let copy = with_header("qwen3_moe", |header| rename(header, "experts.7.", "expelled.7."));
    for verb in ["inspect", "forward", "load"] {
        let parts = ["expert 7 of layer 0 is missing", "7 experts were found, expected 8", "as config.json says"];
        refused(&run(verb, copy.path(), &[]), &parts);
    }
    without_key(&copy, "num_local_experts");
    let said = |verb: &str, part: &str| {
        let text = stdout(&run(verb, copy.path(), if verb == "forward" { &["--tokens", "1"] } else { &[] }));
        assert!(text.contains(part), "{part:?} is not in: {text}");
    };
    said("forward", "(7 experts, as the tensors say: config.json does not say how many there are)");
    said("inspect", "as many experts as the tensors say: config.json does not say how many there are");
    let parts = ["topk_ids of", "io.safetensors", "has expert 7 at token", "the layer has 7 experts", "-1"];
    refused(&run("forward", copy.path(), &[]), &parts);
    fs::remove_file(copy.path().join("config.json")).unwrap();
    said("inspect", "as many experts as the tensors say: there is no config.json");
    let inspected = report("inspect", copy.path(), &[]);
    assert_eq!((&inspected["experts_from"], &inspected["layers"][0]["experts"]), (&json!("tensors"), &json!(7)));
    let whole = report("inspect", &golden("qwen3_moe"), &[]);
    assert_eq!(whole["experts_from"], "config.json");
    let text = stdout(&run("forward", &golden("qwen3_moe"), &[]));
    assert!(!text.contains("as the tensors say"), "{text}");
}

/// Ids below 0 pick no expert, and are no error.
#[test]
fn negative_ids_are_skipped() {
    let copy = copy_of("qwen3_moe");
    let path = copy.path().join("io.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (header, start) = header_of(&bytes);
    let range = &header["topk_ids"]["data_offsets"];
    let [from, to] = [0, 1].map(|at| start + range[at].as_u64().unwrap() as usize);
    bytes[from..to].fill(0xff);
    fs::write(&path, &bytes).unwrap();
    let out = copy.path().join("out.safetensors");
    let args = ["--out", out.to_str().unwrap(), "--inputs", path.to_str().unwrap()];
    assert_eq!(report("forward", copy.path(), &args)["passed"], Value::Null);
    let written = fs::read(&out).unwrap();
    assert!(written[header_of(&written).1..].iter().all(|&byte| byte == 0));
}

#[test]
fn inspect_refuses_every_scale_that_forward_does() {
    let names: [(&str, &str, [&str; 2]); 3] = [
        ("qwen3_moe", "model.layers.0.mlp.experts.2", ["down_proj.weight_scale_2", "gate_proj.input_scale"]),
        ("deepseek_v4_named", "layers.0.ffn.experts.2", ["w3.weight_scale_2", "w2.input_scale"]),
        (
            "compressed_tensors",
            "model.layers.0.mlp.experts.2",
            ["up_proj.weight_global_scale", "down_proj.input_global_scale"],
        ),
    ];
    for (name, module, parts) in names {
        for part in parts {
            for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (0.0, "0.0"), (-1.0, "-1.0")] {
                let copy = copy_of(name);
                let tensor = format!("{module}.{part}");
                set_scalar(&copy, &tensor, value);
                let forward = run("forward", copy.path(), &["--scales", "per-token", "--tokens", "1"]);
                refused(&forward, &[&tensor, shown, "finite and above 0"]);
                let inspect = run("inspect", copy.path(), &[]);
                assert_eq!(inspect.status.code(), Some(2), "{tensor} = {value}: {}", stdout(&inspect));
                // The layers are listed all the same.
                for text in [stdout(&inspect), stderr(&inspect)] {
                    for part in [&tensor, shown, "finite and above 0"] {
                        assert!(text.contains(part), "{part:?} is not in: {text}");
                    }
                }
                assert!(stdout(&inspect).contains("cannot be used: "), "{}", stdout(&inspect));
                let json = run("inspect", copy.path(), &["--json"]);
                assert_eq!(json.status.code(), Some(2));
                let json: Value = serde_json::from_slice(&json.stdout).unwrap();
                assert!(json["layers"][0]["error"].as_str().unwrap().contains(&tensor), "{json}");
                assert_eq!(json["plan"], Value::Null);
            }
        }
        assert_eq!(report("inspect", &golden(name), &[])["layers"][0]["error"], Value::Null);
    }
}

/// A layer that cannot be used hides neither the others nor their plan.
#[test]
fn inspect_lists_good_layers_beside_bad_ones() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("model");
    let args = ["--shape", "32x32x2x1", "--layers", "3"];
    assert!(program().arg("generate").arg(&path).args(args).status().unwrap().success());
    let file = path.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (header, start) = header_of(&bytes);
    for layer in [0, 2] {
        let tensor = format!("model.layers.{layer}.mlp.experts.1.up_proj.weight_scale_2");
        let at = start + header[&tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    fs::write(&file, &bytes).unwrap();
    let output = run("inspect", &path, &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("plan of layer 1 "), "{}", stdout(&output));
    assert!(stderr(&output).contains("layers.0.mlp.experts.1.up_proj.weight_scale_2 is NaN"), "{}", stderr(&output));
    assert!(stderr(&output).contains("1 more layer(s) cannot be used"), "{}", stderr(&output));
}
