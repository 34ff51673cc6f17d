//! Checkpoints that other tools wrote.

use std::path::PathBuf;

use crate::activation::Activation;
use crate::checkpoint::{Checkpoint, ExpertFormat, HiddenStates, InputScales, LayerInputs, NamingStyle};
use crate::shape::ExpertRange;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

struct Expected {
    name: &'static str,
    style: NamingStyle,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    topk: usize,
    tokens: usize,
    limit: Option<f32>,
    /// Decode scales of expert 0: up's weight, up's input, down's weight, down's input.
    scales: [f32; 4],
}

const GOLDEN: [Expected; 5] = [
    Expected {
        name: "qwen3_moe",
        style: NamingStyle::ModelOpt,
        hidden: 256,
        intermediate: 128,
        experts: 8,
        topk: 2,
        tokens: 64,
        limit: None,
        scales: [0.000_392_368_85, 0.001_697_358_7, 0.000_161_307_2, 0.004_022_507_5],
    },
    Expected {
        name: "deepseek_v3",
        style: NamingStyle::ModelOpt,
        hidden: 512,
        intermediate: 256,
        experts: 16,
        topk: 4,
        tokens: 64,
        limit: None,
        scales: [0.000_621_977_3, 0.001_883_370_6, 0.000_517_345_6, 0.018_880_209],
    },
    Expected {
        name: "ragged",
        style: NamingStyle::ModelOpt,
        hidden: 320,
        intermediate: 176,
        experts: 5,
        topk: 1,
        tokens: 33,
        limit: None,
        scales: [0.000_383_649_55, 0.001_790_364_6, 0.000_197_637_65, 0.003_580_729_2],
    },
    Expected {
        name: "deepseek_v4_named",
        style: NamingStyle::DeepSeekV4,
        hidden: 512,
        intermediate: 256,
        experts: 16,
        topk: 4,
        tokens: 64,
        limit: Some(10.0),
        scales: [0.000_621_977_3, 0.001_883_370_6, 0.000_517_345_6, 0.018_880_209],
    },
    Expected {
        name: "compressed_tensors",
        style: NamingStyle::CompressedTensors,
        hidden: 256,
        intermediate: 128,
        experts: 8,
        topk: 2,
        tokens: 48,
        limit: None,
        scales: [1.0 / 26880.0, 1.0 / 560.0, 1.0 / 34048.0, 1.0 / 4096.0],
    },
];

#[test]
fn golden_checkpoints_open() {
    for expected in GOLDEN {
        let name = expected.name;
        let checkpoint = Checkpoint::open(golden(name)).unwrap();
        assert_eq!((checkpoint.files(), checkpoint.topk()), (1, Some(expected.topk)), "{name}");
        let [info] = checkpoint.layers() else { panic!("{name}: {:?}", checkpoint.layers()) };
        assert_eq!(info.index, 0);
        assert_eq!((info.style, &info.format), (Some(expected.style), &ExpertFormat::Nvfp4), "{name}");
        assert_eq!(
            (info.hidden, info.intermediate, info.experts, info.gated),
            (expected.hidden, expected.intermediate, expected.experts, true),
            "{name}"
        );
        assert_eq!((info.l1_input_scales, info.l2_input_scales), (InputScales::All, InputScales::All), "{name}");
        let elems = expected.experts * 3 * expected.hidden * expected.intermediate;
        assert_eq!(info.nvfp4_bytes, (elems / 2 + elems / 16) as u64, "{name}");

        let layer = checkpoint.layer(0).unwrap();
        assert_eq!(layer.activation(), Activation::SwiGlu { limit: expected.limit }, "{name}");
        for e in 0..expected.experts {
            let expert = layer.expert(e).unwrap();
            let gate = expert.gate.unwrap();
            for (matrix, rows, cols) in [
                (gate, expected.intermediate, expected.hidden),
                (expert.up, expected.intermediate, expected.hidden),
                (expert.down, expected.hidden, expected.intermediate),
            ] {
                assert_eq!((matrix.rows, matrix.cols), (rows, cols), "{name}");
                assert_eq!(matrix.codes.len(), rows * cols / 2);
                assert_eq!(matrix.scales.len(), rows * cols / 16);
                matrix.check_scales().unwrap();
            }
        }
        let first = layer.expert(0).unwrap();
        let found = [
            first.up.weight_scale,
            first.up.input_scale.unwrap(),
            first.down.weight_scale,
            first.down.input_scale.unwrap(),
        ];
        assert_eq!(found, expected.scales, "{name}");
    }
}

#[test]
fn golden_gate_up_and_down_are_not_mixed_up() {
    // The same experts under two sets of names must give the same bytes for each matrix.
    let v3 = Checkpoint::open(golden("deepseek_v3")).unwrap();
    let v4 = Checkpoint::open(golden("deepseek_v4_named")).unwrap();
    for e in 0..16 {
        let one = v3.layer(0).unwrap().expert(e).unwrap();
        let other = v4.layer(0).unwrap().expert(e).unwrap();
        assert_eq!(one.gate.unwrap().codes, other.gate.unwrap().codes);
        assert_eq!(one.up.codes, other.up.codes);
        assert_eq!(one.down.codes, other.down.codes);
        assert_eq!(one.up.scales, other.up.scales);
        assert_ne!(one.up.codes, one.gate.unwrap().codes);
    }
}

#[test]
fn golden_static_scales() {
    let checkpoint = Checkpoint::open(golden("compressed_tensors")).unwrap();
    let layer = checkpoint.layer(0).unwrap();
    let all = layer.static_input_scales(ExpertRange::all(8)).unwrap();
    assert!(all.l1_all_equal && !all.gate_up_differ);
    assert!(all.l2.iter().any(|&scale| scale != all.l2[0]), "{:?}", all.l2);
    let part = layer.static_input_scales(ExpertRange { first: 3, count: 2 }).unwrap();
    assert_eq!((&part.l1[..], &part.l2[..]), (&all.l1[3..5], &all.l2[3..5]));
    assert!(checkpoint.layers()[0].l1_all_equal);
}

#[test]
fn golden_inputs_open() {
    for expected in GOLDEN {
        let inputs = LayerInputs::open(golden(expected.name).join("io.safetensors")).unwrap();
        assert_eq!((inputs.tokens, inputs.hidden_size, inputs.topk), (expected.tokens, expected.hidden, expected.topk));
        let elems = expected.tokens * expected.hidden;
        let HiddenStates::Bf16(hidden) = &inputs.hidden else { panic!("{:?}", inputs.hidden) };
        assert_eq!(hidden.len(), elems);
        assert_eq!(inputs.topk_ids.len(), expected.tokens * expected.topk);
        let experts = 0..expected.experts as i32;
        assert!(inputs.topk_ids.iter().all(|id| experts.contains(id)));
        assert!(inputs.topk_weights.iter().all(|w| w.is_finite()));
        for tensor in ["expected", "expected_per_token", "hidden"] {
            let values = inputs.expected(tensor).unwrap();
            assert_eq!(values.len(), elems);
            assert!(values.iter().any(|&v| v != 0.0), "{tensor}");
        }
    }
}
