//! The CPU engine on checkpoints that other tools wrote, against values that other tools computed.

use nvfp4_moe::checkpoint::{Checkpoint, HiddenStates, LayerInputs};
use nvfp4_moe::cpu::{MoeLayer, Workspace};
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe_tests::reference;
use safetensors::SafeTensors;

#[test]
fn golden_checkpoints_match() {
    for name in ["qwen3_moe", "deepseek_v3", "deepseek_v4_named", "ragged", "compressed_tensors"] {
        let folder = format!("{}/golden/{name}", env!("CARGO_MANIFEST_DIR"));
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let view = checkpoint.layer(0).unwrap();
        let io = LayerInputs::open(format!("{folder}/io.safetensors")).unwrap();
        let bytes = std::fs::read(format!("{folder}/io.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let inputs = Inputs {
            hidden: match &io.hidden {
                HiddenStates::Bf16(rows) => HiddenRows::Bf16(rows),
                HiddenStates::F16(rows) => HiddenRows::F16(rows),
            },
            topk_ids: &io.topk_ids,
            topk_weights: &io.topk_weights,
            topk: io.topk,
        };
        for (tensor, scales) in [
            ("expected", None),
            ("expected_per_token", Some(ScaleMode::PerToken)),
            ("expected_per_tensor", Some(ScaleMode::PerTensor)),
        ] {
            let all = ExpertRange::all(view.experts());
            let spec = LayerSpec::of_layer(&view, io.topk, all, scales).unwrap();
            assert_eq!(spec.scales, scales.unwrap_or(ScaleMode::Static));
            let layer = MoeLayer::load(&spec, &view, &mut |_, _| {}).unwrap();
            let mut workspace = Workspace::new(&layer, io.tokens).unwrap();
            let mut out = vec![f32::NAN; io.tokens * io.hidden_size];
            layer.forward(&mut workspace, &inputs, OutputRows::F32(&mut out), false).unwrap();
            let expected: Vec<f32> = bytemuck::pod_collect_to_vec(file.tensor(tensor).unwrap().data());
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let errors = reference::row_errors(&out, &expected, io.hidden_size);
            let close = errors.iter().filter(|error| **error <= 1e-6).count();
            let worst = errors.iter().copied().fold(0.0, f64::max);
            println!("{name} {tensor}: {close} of {} rows within 1e-6, worst {worst:.2e}", errors.len());
            reference::assert_rows_close(&out, &expected, io.hidden_size, 2e-3, &format!("{name} {tensor}"));
        }
    }
}
