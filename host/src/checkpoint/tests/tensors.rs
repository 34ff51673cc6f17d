//! Expert tensors that are missing, of another dtype, shape or format.

use safetensors::Dtype;

use super::builder::{Builder, COMPRESSED, DEEPSEEK_V4, HIDDEN, INTERMEDIATE, MODELOPT, NEMOTRON, Stored};
use super::{assert_says, open_error};
use crate::activation::Activation;
use crate::checkpoint::{Checkpoint, CheckpointError, ExpertFormat, NamingStyle};

const UP: &str = "model.layers.0.mlp.experts.1.up_proj";
const DOWN: &str = "model.layers.0.mlp.experts.1.down_proj";

fn error_of(builder: &Builder) -> CheckpointError {
    open_error(builder.write().path())
}

#[test]
fn every_naming_style_gives_the_same_experts() {
    for (style, naming, gated) in [
        (MODELOPT, NamingStyle::ModelOpt, true),
        (COMPRESSED, NamingStyle::CompressedTensors, true),
        (DEEPSEEK_V4, NamingStyle::DeepSeekV4, true),
        (NEMOTRON, NamingStyle::ModelOpt, false),
    ] {
        let (_directory, checkpoint) = Builder::new(style, &[4, 2], 3).open();
        let indices: Vec<_> = checkpoint.layers().iter().map(|info| info.index).collect();
        assert_eq!(indices, [2, 4]);
        let layer = checkpoint.layer(4).unwrap();
        let info = layer.info();
        assert_eq!((info.style, info.gated), (Some(naming), gated));
        assert_eq!((layer.hidden(), layer.intermediate(), layer.experts()), (HIDDEN, INTERMEDIATE, 3));
        let expert = layer.expert(2).unwrap();
        assert_eq!(expert.gate.is_some(), gated);
        assert!(expert.gate.is_none_or(|gate| gate.codes[0] == 6));
        assert_eq!((expert.up.codes[0], expert.down.codes[0]), (7, 8));
        assert_eq!((expert.up.rows, expert.up.cols), (INTERMEDIATE, HIDDEN));
        assert_eq!((expert.down.rows, expert.down.cols), (HIDDEN, INTERMEDIATE));
        assert_eq!((expert.up.weight_scale, expert.up.input_scale), (0.25, Some(0.5)));
        assert_eq!(layer.activation().is_gated(), gated);
        assert_eq!(layer.topk(), None);
        assert!(layer.shape(2).is_ok());
    }
}

#[test]
fn places_of_an_expert_are_where_its_bytes_are() {
    for style in [MODELOPT, COMPRESSED, NEMOTRON] {
        let directory = Builder::new(style, &[0], 3).write_sharded(2);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let layer = checkpoint.layer(0).unwrap();
        let expert = layer.expert(1).unwrap();
        let mut found = Vec::new();
        for (path, range) in layer.places(1) {
            let file = std::fs::read(path).unwrap();
            found.push(file[range.start as usize..range.end as usize].to_vec());
        }
        for matrix in [Some(expert.up), Some(expert.down), expert.gate].into_iter().flatten() {
            assert!(
                found.iter().any(|bytes| bytes == matrix.codes) && found.iter().any(|bytes| bytes == matrix.scales)
            );
        }
        let matrices = if expert.gate.is_some() { 3 } else { 2 };
        assert_eq!(found.len(), matrices * 4);
        assert_eq!(layer.places(3).count(), 0);
        // Hints change nothing.
        (0..5).for_each(|expert| layer.will_need(expert));
        assert_eq!(layer.expert(1).unwrap().up.codes, expert.up.codes);
    }
}

#[test]
fn shared_experts_and_prediction_modules_are_left_out() {
    let mut builder = Builder::new(MODELOPT, &[0], 2);
    let stray = Stored::filled(Dtype::BF16, &[3], 0);
    for name in [
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.gate.weight",
    ] {
        builder.set(name, stray.clone());
    }
    let (_directory, checkpoint) = builder.open();
    assert_eq!(checkpoint.layers().len(), 1);
    assert_eq!(checkpoint.layers()[0].experts, 2);
}

#[test]
fn a_missing_expert_is_named() {
    let mut builder = Builder::new(MODELOPT, &[0], 4);
    builder.remove_all("experts.1.");
    let error = error_of(&builder);
    assert!(matches!(error, CheckpointError::MissingExpert { layer: 0, expert: 1, have: 3, expected: 4, .. }));
    let tensor = "model.layers.0.mlp.experts.1.gate_proj.weight";
    assert_says(&error, &["expert 1 of layer 0", tensor, "3 experts", "expected 4"]);

    let mut builder = Builder::new(DEEPSEEK_V4, &[0], 3);
    builder.config(r#"{"n_routed_experts": 4}"#);
    let error = error_of(&builder);
    assert!(matches!(error, CheckpointError::MissingExpert { expert: 3, have: 3, expected: 4, .. }));
    assert_says(&error, &["layers.0.ffn.experts.3.w1.weight", "config.json"]);
}

#[test]
fn layers_without_config_must_have_as_many_experts() {
    let mut builder = Builder::new(MODELOPT, &[0, 1], 3);
    builder.remove_all("layers.1.mlp.experts.2.");
    let error = error_of(&builder);
    assert!(
        matches!(error, CheckpointError::UnevenExperts { layer: 1, found: 2, other_layer: 0, expected: 3 }),
        "{error}"
    );
}

#[test]
fn every_missing_tensor_is_named() {
    for (style, tensors) in [
        (MODELOPT, ["weight", "weight_scale", "weight_scale_2"]),
        (COMPRESSED, ["weight_packed", "weight_scale", "weight_global_scale"]),
    ] {
        for projection in style.projections {
            for part in tensors {
                let name = format!("{}0{}1.{projection}.{part}", style.before, style.after);
                let mut builder = Builder::new(style, &[0], 3);
                builder.remove(&name);
                let error = error_of(&builder);
                assert!(
                    matches!(&error, CheckpointError::MissingTensor { tensor, layer: 0, expert: 1 } if *tensor == name),
                    "{name}: {error}"
                );
                assert_says(&error, &[&name, "expert 1 of layer 0"]);
            }
        }
    }
}

#[test]
fn wrong_dtypes_say_both() {
    for (part, shape, dtype, expected) in [
        ("weight", vec![INTERMEDIATE, HIDDEN / 2], Dtype::I8, "U8"),
        ("weight_scale", vec![INTERMEDIATE, HIDDEN / 16], Dtype::U8, "F8_E4M3"),
        ("weight_scale_2", vec![], Dtype::BF16, "F32"),
        ("input_scale", vec![], Dtype::F64, "F32"),
    ] {
        let mut builder = Builder::new(MODELOPT, &[0], 3);
        let name = format!("{UP}.{part}");
        builder.set(&name, Stored::filled(dtype, &shape, 0));
        let error = error_of(&builder);
        assert!(
            matches!(&error, CheckpointError::WrongDtype { tensor, found, .. } if *tensor == name && *found == dtype)
        );
        assert_says(&error, &[&name, expected, &dtype.to_string()]);
    }
}

#[test]
fn wrong_shapes_say_both_and_blame_the_right_tensor() {
    for e in 0..3 {
        for (part, dtype, found, expected) in [
            ("up_proj.weight", Dtype::U8, vec![INTERMEDIATE, HIDDEN], "[32, 24]"),
            ("up_proj.weight", Dtype::U8, vec![HIDDEN, INTERMEDIATE / 2], "[32, 24]"),
            ("up_proj.weight", Dtype::U8, vec![INTERMEDIATE * HIDDEN / 2], "[32, 24]"),
            ("gate_proj.weight_scale", Dtype::F8_E4M3, vec![INTERMEDIATE, HIDDEN / 32], "[32, 3]"),
            ("down_proj.weight", Dtype::U8, vec![HIDDEN + 16, INTERMEDIATE / 2], "[48, 16]"),
            ("down_proj.weight_scale", Dtype::F8_E4M3, vec![1, HIDDEN, 2], "[48, 2]"),
            ("down_proj.weight_scale_2", Dtype::F32, vec![2], "[] or [1]"),
            ("down_proj.input_scale", Dtype::F32, vec![1, 1], "[] or [1]"),
        ] {
            let mut builder = Builder::new(MODELOPT, &[0], 3);
            let name = format!("model.layers.0.mlp.experts.{e}.{part}");
            builder.set(&name, Stored::filled(dtype, &found, 0));
            let error = error_of(&builder);
            assert!(matches!(&error, CheckpointError::WrongShape { tensor, .. } if *tensor == name), "{name}: {error}");
            assert_says(&error, &[&name, expected, &format!("{found:?}")]);
        }
    }
}

#[test]
fn sizes_that_are_no_multiple_of_16_are_named() {
    for (hidden, intermediate, axis, size) in
        [(24, 32, "hidden", "24"), (48, 40, "intermediate", "40"), (40, 32, "hidden", "40")]
    {
        for style in [MODELOPT, NEMOTRON, COMPRESSED] {
            let error = error_of(&Builder::sized(style, &[7], 2, hidden, intermediate));
            assert!(matches!(&error, CheckpointError::Shape { layer: 7, source } if source.axis == axis), "{error}");
            assert_says(&error, &["layer 7", axis, size, "multiple of 16"]);
        }
    }
}

#[test]
fn other_formats_are_listed_and_refused() {
    let weight = |dtype| Stored::filled(dtype, &[32, 32], 0);
    for (tensors, says) in [
        (vec![("0.up_proj.weight", weight(Dtype::BF16))], vec!["unquantized", "weight BF16"]),
        (
            vec![("0.up_proj.weight", weight(Dtype::F8_E4M3)), ("0.up_proj.weight_scale_inv", weight(Dtype::F32))],
            vec!["FP8", "weight F8_E4M3", "weight_scale_inv F32"],
        ),
        (
            vec![("0.w1.weight", weight(Dtype::I8)), ("0.w1.scale", weight(Dtype::F8_E8M0))],
            vec!["MXFP4", "scale F8_E8M0"],
        ),
        (
            vec![("gate_up_proj_blocks", weight(Dtype::U8)), ("gate_up_proj_scales", weight(Dtype::U8))],
            vec!["MXFP4", "gate_up_proj_blocks U8"],
        ),
        (vec![("gate_up_proj", weight(Dtype::BF16))], vec!["fused", "gate_up_proj BF16"]),
    ] {
        let mut builder = Builder::new(MODELOPT, &[0], 1);
        for (rest, stored) in tensors {
            builder.set(&format!("model.layers.1.mlp.experts.{rest}"), stored);
        }
        let (_directory, checkpoint) = builder.open();
        assert!(checkpoint.layer(0).is_ok());
        let [_, info] = checkpoint.layers() else { panic!() };
        assert!(matches!(info.format, ExpertFormat::Other(_)) && info.style.is_none());
        let error = checkpoint.layer(1).unwrap_err();
        assert!(matches!(error, CheckpointError::NotNvfp4 { layer: 1, .. }));
        assert_says(&error, &says);
    }
}

#[test]
fn tensors_that_would_change_the_result_are_refused() {
    for part in ["bias", "pre_quant_scale"] {
        let mut builder = Builder::new(MODELOPT, &[0], 2);
        let name = format!("{DOWN}.{part}");
        builder.set(&name, Stored::filled(Dtype::BF16, &[HIDDEN], 0));
        let (_directory, checkpoint) = builder.open();
        assert_says(&checkpoint.layer(0).unwrap_err(), &[&name, "wrong results"]);
    }
}

#[test]
fn layers_and_experts_that_are_not_there_are_named() {
    let (_directory, checkpoint) = Builder::new(MODELOPT, &[1, 3, 4, 5], 2).open();
    let error = checkpoint.layer(0).unwrap_err();
    assert_says(&error, &["layer 0", "1, 3..=5"]);
    let error = checkpoint.layer(3).unwrap().expert(2).unwrap_err();
    assert!(matches!(error, CheckpointError::ExpertNotFound { layer: 3, expert: 2, have: 2 }));
}

#[test]
fn two_modules_for_one_layer_are_refused() {
    let mut builder = Builder::new(MODELOPT, &[0], 1);
    builder.tensors.extend(Builder::new(DEEPSEEK_V4, &[0], 1).tensors);
    let error = error_of(&builder);
    assert!(matches!(error, CheckpointError::AmbiguousLayer { layer: 0, .. }), "{error}");
    assert_says(&error, &["model.layers.0.mlp.experts", "layers.0.ffn.experts"]);
}

#[test]
fn a_model_without_experts_is_refused() {
    let mut builder = Builder::default();
    builder.set("model.layers.0.mlp.up_proj.weight", Stored::filled(Dtype::BF16, &[4], 0));
    let error = error_of(&builder);
    assert!(matches!(error, CheckpointError::NoMoeLayers { tensors: 1, .. }), "{error}");
    let empty = Builder::default().write();
    assert!(matches!(Checkpoint::open(empty.path()), Err(CheckpointError::NoMoeLayers { tensors: 0, .. })));
}

#[test]
fn without_config_the_tensors_choose_the_activation() {
    let (_directory, checkpoint) = Builder::new(NEMOTRON, &[0], 1).open();
    assert_eq!(checkpoint.layer(0).unwrap().activation(), Activation::Relu2);
}
