//! Global scales and block scales: good, odd, bad and missing ones.

use super::assert_says;
use super::builder::{Builder, COMPRESSED, HIDDEN, INPUT_SCALE, MODELOPT, Stored};
use crate::checkpoint::{CheckpointError, InputScales, Origin, RawMatrix};
use crate::shape::ExpertRange;

fn expert_name(rest: &str) -> String {
    format!("model.layers.0.mlp.experts.1.{rest}")
}

#[test]
fn unusual_global_scales_are_taken_as_they_are() {
    for value in [2400.0, 1e-6, f32::MIN_POSITIVE, 1e-40, f32::MAX] {
        let mut builder = Builder::new(MODELOPT, &[0], 2);
        builder.set(&expert_name("up_proj.weight_scale_2"), Stored::scalar(value));
        builder.set(&expert_name("up_proj.input_scale"), Stored::scalar(value));
        let (_directory, checkpoint) = builder.open();
        let up = checkpoint.layer(0).unwrap().expert(1).unwrap().up;
        assert_eq!((up.weight_scale, up.input_scale), (value, Some(value)));
        checkpoint.layer(0).unwrap().check_global_scales().unwrap();
    }
}

#[test]
fn bad_global_scales_are_named() {
    let bad = [0.0, -0.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for part in ["weight_scale_2", "input_scale"] {
        for value in bad {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                let name = expert_name(&format!("{projection}.{part}"));
                let mut builder = Builder::new(MODELOPT, &[0], 2);
                builder.set(&name, Stored::scalar(value));
                let (_directory, checkpoint) = builder.open();
                let layer = checkpoint.layer(0).unwrap();
                assert!(layer.expert(0).is_ok());
                let error = layer.expert(1).unwrap_err();
                assert!(matches!(&error, CheckpointError::BadScale { tensor, .. } if *tensor == name), "{error}");
                assert_says(&error, &[&name, &format!("{value:?}"), "finite and above 0"]);
                let of_all = layer.check_global_scales().unwrap_err();
                assert_eq!(of_all.to_string(), error.to_string());
                if part == "input_scale" {
                    let error = layer.static_input_scales(ExpertRange::all(2)).unwrap_err();
                    assert!(matches!(&error, CheckpointError::BadScale { tensor, .. } if *tensor == name));
                }
            }
        }
    }
}

#[test]
fn reciprocal_scales_are_inverted_and_checked() {
    let name = "model.language_model.layers.0.mlp.experts.1.up_proj.weight_global_scale";
    let mut builder = Builder::new(COMPRESSED, &[0], 2);
    builder.set(name, Stored::scalar(26880.0));
    let (_directory, checkpoint) = builder.open();
    let up = checkpoint.layer(0).unwrap().expert(1).unwrap().up;
    assert_eq!(up.weight_scale, 1.0 / 26880.0);
    // 1/1e-40 is beyond f32.
    for value in [0.0, -2.0, f32::INFINITY, f32::NAN, 1e-40] {
        builder.set(name, Stored::scalar(value));
        let (_directory, checkpoint) = builder.open();
        let error = checkpoint.layer(0).unwrap().expert(1).unwrap_err();
        assert!(matches!(&error, CheckpointError::BadScale { tensor, .. } if tensor == name), "{error}");
        assert_says(&error, &[name, "reciprocal"]);
    }
}

#[test]
fn missing_input_scales_are_none_and_named_when_wanted() {
    let missing = expert_name("down_proj.input_scale");
    let mut builder = Builder::new(MODELOPT, &[0], 3);
    builder.remove(&missing);
    let (_directory, checkpoint) = builder.open();
    let layer = checkpoint.layer(0).unwrap();
    let info = layer.info();
    assert_eq!((info.l1_input_scales, info.l2_input_scales), (InputScales::All, InputScales::Some));
    assert!(info.l1_all_equal);
    assert_eq!(layer.expert(1).unwrap().down.input_scale, None);
    assert_eq!(layer.expert(0).unwrap().down.input_scale, Some(INPUT_SCALE));
    let error = layer.static_input_scales(ExpertRange::all(3)).unwrap_err();
    assert!(matches!(&error, CheckpointError::StaticScalesMissing { tensor } if *tensor == missing));
    assert_says(&error, &[&missing, "per-token"]);
    // A rank that does not hold the expert can have static scales.
    assert!(layer.static_input_scales(ExpertRange { first: 2, count: 1 }).is_ok());

    builder.remove_all("input_scale");
    let (_directory, checkpoint) = builder.open();
    let info = &checkpoint.layers()[0];
    assert_eq!((info.l1_input_scales, info.l2_input_scales), (InputScales::None, InputScales::None));
    assert!(!info.l1_all_equal);
}

#[test]
fn the_larger_of_gate_and_up_is_used() {
    for (style, prefix, part, stored) in [
        (MODELOPT, "model.layers.0", "input_scale", INPUT_SCALE * 1.25),
        (COMPRESSED, "model.language_model.layers.0", "input_global_scale", 1.0 / (INPUT_SCALE * 1.25)),
    ] {
        for projection in ["gate_proj", "up_proj"] {
            let mut builder = Builder::new(style, &[0], 2);
            builder.set(&format!("{prefix}.mlp.experts.1.{projection}.{part}"), Stored::scalar(stored));
            let (_directory, checkpoint) = builder.open();
            let info = &checkpoint.layers()[0];
            assert!(info.gate_up_differ && !info.l1_all_equal);
            let layer = checkpoint.layer(0).unwrap();
            let scales = layer.static_input_scales(ExpertRange::all(2)).unwrap();
            assert_eq!(scales.l1, [INPUT_SCALE, INPUT_SCALE * 1.25]);
            assert_eq!(scales.l2, [INPUT_SCALE; 2]);
            assert!(scales.gate_up_differ && !scales.l1_all_equal);
            let first = layer.static_input_scales(ExpertRange { first: 0, count: 1 }).unwrap();
            assert!(!first.gate_up_differ && first.l1_all_equal);
        }
    }
}

#[test]
fn ranges_beyond_the_layer_are_refused() {
    let (_directory, checkpoint) = Builder::new(MODELOPT, &[0], 2).open();
    let layer = checkpoint.layer(0).unwrap();
    let error = layer.static_input_scales(ExpertRange { first: 1, count: 2 }).unwrap_err();
    assert!(matches!(error, CheckpointError::ExpertNotFound { expert: 2, have: 2, .. }));
    let none = layer.static_input_scales(ExpertRange { first: 2, count: 0 }).unwrap();
    assert!(none.l1.is_empty() && none.l1_all_equal);
}

#[test]
fn bad_block_scales_are_found_wherever_they_are() {
    let blocks = HIDDEN / 16;
    for (byte, row, block) in [(0x7f, 0, 0), (0x80, 31, 2), (0xff, 17, 1)] {
        let name = expert_name("up_proj.weight_scale");
        let mut builder = Builder::new(MODELOPT, &[0], 2);
        builder.alter(&name, |stored| stored.data[row * blocks + block] = byte);
        let (_directory, checkpoint) = builder.open();
        let expert = checkpoint.layer(0).unwrap().expert(1).unwrap();
        expert.gate.unwrap().check_scales().unwrap();
        let error = expert.up.check_scales().unwrap_err();
        assert!(
            matches!(&error, CheckpointError::BadScaleByte { tensor, row: r, block: b, byte: x }
                if *tensor == name && (*r, *b, *x) == (row, block, byte)),
            "{error}"
        );
        assert_says(&error, &[&name, &format!("{byte:#04x}"), &format!("row {row}, block {block}")]);
    }
}

#[test]
fn every_allowed_block_scale_passes_and_every_other_fails() {
    let (rows, cols) = (300, 16 * 41);
    for at in [0, 4095, 4096, 12_299] {
        for byte in 0..=255u8 {
            let mut scales = vec![0x7e; rows * cols / 16];
            scales[at] = byte;
            let matrix = RawMatrix {
                rows,
                cols,
                codes: &[],
                scales: &scales,
                weight_scale: 1.0,
                input_scale: None,
                origin: Origin::default(),
            };
            match matrix.check_scales() {
                Ok(()) => assert!(byte <= 0x7e),
                Err(CheckpointError::BadScaleByte { row, block, byte: found, .. }) => {
                    assert_eq!((row * 41 + block, found), (at, byte));
                    assert!(byte > 0x7e);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
