//! config.json: what it decides, and what it must not contradict.

use super::builder::{Builder, MODELOPT, NEMOTRON, Style};
use super::{assert_says, open_error};
use crate::activation::Activation;
use crate::checkpoint::{Checkpoint, CheckpointError};

const SWIGLU: Activation = Activation::SwiGlu { limit: None };

fn oai(limit: f32) -> Activation {
    Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit }
}

fn activation(style: Style, json: &str) -> Result<Activation, CheckpointError> {
    let (_directory, checkpoint) = Builder::new(style, &[0], 2).config(json).open();
    checkpoint.layer(0).map(|layer| layer.activation())
}

#[test]
fn activations_by_name() {
    for (json, expected) in [
        ("{}", SWIGLU),
        (r#"{"hidden_act": "silu"}"#, SWIGLU),
        (r#"{"hidden_act": "swish", "swiglu_limit": null}"#, SWIGLU),
        (r#"{"hidden_act": "silu", "swiglu_limit": 10}"#, Activation::SwiGlu { limit: Some(10.0) }),
        (r#"{"hidden_act": "swigluoai"}"#, oai(7.0)),
        (r#"{"hidden_act": "swigluoai", "swiglu_limit": 8.5}"#, oai(8.5)),
        (r#"{"hidden_act": "silu", "model_type": "gpt_oss", "swiglu_limit": 7.0}"#, oai(7.0)),
        (r#"{"text_config": {"hidden_act": "swigluoai"}, "hidden_act": "gelu"}"#, oai(7.0)),
    ] {
        assert_eq!(activation(MODELOPT, json).unwrap(), expected, "{json}");
    }
    for json in ["{}", r#"{"mlp_hidden_act": "relu2", "hidden_act": "silu"}"#, r#"{"hidden_act": "relu2"}"#] {
        assert_eq!(activation(NEMOTRON, json).unwrap(), Activation::Relu2, "{json}");
    }
}

#[test]
fn unsupported_activations_are_errors_of_the_layer() {
    let error = activation(MODELOPT, r#"{"hidden_act": "gelu"}"#).unwrap_err();
    assert!(matches!(error, CheckpointError::UnsupportedActivation { .. }));
    assert_says(&error, &["hidden_act", "gelu", "silu", "swish", "swigluoai", "relu2"]);
    for limit in ["0", "-1.0", "1e39"] {
        let error = activation(MODELOPT, &format!(r#"{{"swiglu_limit": {limit}}}"#)).unwrap_err();
        assert!(matches!(error, CheckpointError::BadActivation(_)), "{error}");
        assert_says(&error, &["limit", "finite and above 0"]);
    }
}

#[test]
fn activations_that_do_not_go_with_the_tensors_are_refused() {
    let error = activation(MODELOPT, r#"{"hidden_act": "relu2"}"#).unwrap_err();
    assert_says(&error, &["hidden_act = relu2", "with a gate projection"]);
    let error = activation(NEMOTRON, r#"{"hidden_act": "silu"}"#).unwrap_err();
    assert_says(&error, &["hidden_act = silu", "without a gate projection"]);
}

#[test]
fn sizes_are_read_from_every_place() {
    for json in [
        r#"{"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 48, "moe_intermediate_size": 32,
            "intermediate_size": 9999}"#,
        r#"{"n_routed_experts": 2, "num_experts_per_tok": 1, "hidden_size": 48, "intermediate_size": 32}"#,
        r#"{"num_experts": 2, "num_experts_per_tok": [1, 1], "hidden_size": 9999, "moe_latent_size": 48}"#,
        r#"{"hidden_size": 5, "text_config": {"num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 48}}"#,
    ] {
        let (_directory, checkpoint) = Builder::new(MODELOPT, &[0], 2).config(json).open();
        assert_eq!(checkpoint.topk(), Some(1), "{json}");
        let config = checkpoint.config().unwrap();
        assert_eq!((config.experts(), config.hidden()), (Some(2), Some(48)), "{json}");
    }
}

#[test]
fn disagreement_says_both() {
    for (json, key, config, tensors) in [
        (r#"{"hidden_size": 64}"#, "hidden_size", "64", "48"),
        (r#"{"moe_intermediate_size": 48}"#, "moe_intermediate_size", "48", "32"),
        (r#"{"intermediate_size": 80}"#, "intermediate_size", "80", "32"),
        (r#"{"n_routed_experts": 1}"#, "n_routed_experts", "1", "2 experts"),
    ] {
        let error = open_error(Builder::new(MODELOPT, &[0], 2).config(json).write().path());
        assert!(matches!(error, CheckpointError::ConfigMismatch { layer: 0, .. }), "{error}");
        assert_says(&error, &[&format!("{key} = {config}"), "layer 0", &format!("say {tensors}")]);
    }
}

#[test]
fn topk_is_1_to_the_number_of_experts() {
    let config = |topk: usize| format!(r#"{{"num_experts_per_tok": {topk}}}"#);
    for topk in [1, 2] {
        let (_directory, checkpoint) = Builder::new(MODELOPT, &[0], 2).config(&config(topk)).open();
        assert_eq!(checkpoint.topk(), Some(topk));
    }
    for topk in [0, 3, usize::MAX] {
        let error = open_error(Builder::new(MODELOPT, &[0], 2).config(&config(topk)).write().path());
        assert!(matches!(error, CheckpointError::BadTopk { layer: 0, experts: 2, .. }), "{error}");
        assert_says(&error, &[&format!("num_experts_per_tok = {topk}"), "must be 1 to 2", "correct it there"]);
    }
}

#[test]
fn broken_configs_are_named() {
    for json in ["", "{", r#"{"hidden_size": 48"#, "\u{0}"] {
        let error = open_error(Builder::new(MODELOPT, &[0], 2).config(json).write().path());
        assert!(matches!(error, CheckpointError::BadJson { .. }), "{error}");
        assert_says(&error, &["config.json", "not valid JSON"]);
    }
    for (json, key, found) in [
        ("[1]", "the whole file", "[1]"),
        (r#"{"hidden_size": "48"}"#, "hidden_size", "\"48\""),
        (r#"{"num_experts": -1}"#, "num_experts", "-1"),
        (r#"{"num_experts_per_tok": 1.5}"#, "num_experts_per_tok", "1.5"),
        (r#"{"swiglu_limit": "ten"}"#, "swiglu_limit", "ten"),
        (r#"{"hidden_act": 3}"#, "hidden_act", "3"),
    ] {
        let error = open_error(Builder::new(MODELOPT, &[0], 2).config(json).write().path());
        assert!(matches!(error, CheckpointError::BadConfig { .. }), "{error}");
        assert_says(&error, &["config.json", key, found, "must be"]);
    }
}

#[test]
fn a_single_file_uses_the_config_beside_it() {
    let directory =
        Builder::new(MODELOPT, &[0], 2).config(r#"{"num_experts_per_tok": 2, "swiglu_limit": 10.0}"#).write();
    let checkpoint = Checkpoint::open(directory.path().join("model.safetensors")).unwrap();
    assert_eq!(checkpoint.topk(), Some(2));
    let layer = checkpoint.layer(0).unwrap();
    assert_eq!(layer.activation(), Activation::SwiGlu { limit: Some(10.0) });
}
