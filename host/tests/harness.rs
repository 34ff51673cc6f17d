//! The harness, on the CPU: what the program and the other test suites rely on.

use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::{Checkpoint, HiddenStates, LayerInputs};
use nvfp4_moe::cuda::Element;
use nvfp4_moe::harness::{
    Comparison, DeviceChoice, HarnessError, LayerRequest, LoadedLayer, Runner, Target, run_ranks,
};
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};

const SHAPE: MoeShape = MoeShape { hidden: 64, intermediate: 48, experts: 5, topk: 2 };

fn spec() -> LayerSpec {
    LayerSpec {
        shape: SHAPE,
        experts: ExpertRange::all(SHAPE.experts),
        activation: Activation::SwiGlu { limit: None },
        scales: ScaleMode::PerToken,
        shared_l1_scale: true,
    }
}

fn layer(spec: &LayerSpec, max_tokens: usize) -> LoadedLayer {
    let source = RandomExperts::new(SHAPE, true, RandomInputScales::Missing, 7);
    Runner::new(Target::Cpu).unwrap().load(spec, &source, max_tokens, &mut |_, _| {}).unwrap()
}

fn hidden(tokens: usize) -> Vec<bf16> {
    (0..tokens * SHAPE.hidden).map(|i| bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0)).collect()
}

#[test]
fn tokens_without_local_experts_are_zero_or_left_alone() {
    let mut layer = layer(&LayerSpec { experts: ExpertRange { first: 3, count: 2 }, ..spec() }, 2);
    layer.set_poison(true);
    let hidden = hidden(2);
    let inputs =
        Inputs { hidden: HiddenRows::Bf16(&hidden), topk_ids: &[0, -1, 4, 2], topk_weights: &[0.5; 4], topk: 2 };
    let output = layer.forward_f32(&inputs).unwrap();
    assert!(output[..SHAPE.hidden].iter().all(|y| y.to_bits() == 0));
    assert!(output[SHAPE.hidden..].iter().all(|y| y.is_finite() && *y != 0.0));
    let mut sum = vec![1.0; output.len()];
    layer.forward(&inputs, OutputRows::F32(&mut sum), true).unwrap();
    assert!(sum.iter().zip(&output).all(|(sum, y)| *sum == 1.0 + y));
    let rounded = layer.forward_bf16(&inputs).unwrap();
    assert!(rounded.iter().zip(&output).all(|(rounded, y)| *rounded == bf16::from_f32(*y)));
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    let mut layer = layer(&spec(), 1);
    let hidden = hidden(2);
    let inputs = Inputs { hidden: HiddenRows::Bf16(&hidden), topk_ids: &[0; 4], topk_weights: &[0.5; 4], topk: 2 };
    let error = layer.forward_f32(&inputs).unwrap_err();
    assert!(matches!(error, HarnessError::TooManyTokens { got: 2, max: 1 }), "{error}");
    let one = inputs.tokens(0..1, SHAPE.hidden);
    let error = layer.forward(&one, OutputRows::F32(&mut [0.0; 3]), false).unwrap_err();
    assert_eq!(error.to_string(), "output has 3 elements, but must have 64; give buffers of the layer's sizes");
    let error = layer.forward_f32(&Inputs { topk: 1, ..one }).unwrap_err();
    assert_eq!(error.to_string(), "topk has 1 elements, but must have 2; give buffers of the layer's sizes");
    assert!(matches!(layer.set_tile(Some(0)), Err(HarnessError::NeedsGpu { .. })));
    assert!(matches!(layer.forward_graph(Element::Bf16, Element::F32, false), Err(HarnessError::NeedsGpu { .. })));
    assert!(layer.gpu().is_none());
    layer.forward_f32(&one).unwrap();
}

#[test]
fn a_device_is_found_or_said_to_be_missing() {
    let automatic = Runner::choose(DeviceChoice::Auto).unwrap();
    match automatic.target() {
        Target::Cpu => assert!(automatic.reason().starts_with("no usable GPU: "), "{}", automatic.reason()),
        Target::Cuda(_) | Target::Backend(_) => assert!(automatic.engine().is_some()),
    }
    let error = Runner::new(Target::Cuda(4096)).unwrap_err().to_string();
    assert!(error.contains("--device cpu"), "{error}");
}

#[test]
fn ranks_sum_to_the_whole() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/deepseek_v3");
    let checkpoint = Checkpoint::open(golden).unwrap();
    let view = checkpoint.layer(checkpoint.layers()[0].index).unwrap();
    let file = LayerInputs::open(format!("{golden}/io.safetensors")).unwrap();
    let HiddenStates::Bf16(hidden) = &file.hidden else { panic!("the golden hidden states are bf16") };
    let inputs = Inputs {
        hidden: HiddenRows::Bf16(hidden),
        topk_ids: &file.topk_ids,
        topk_weights: &file.topk_weights,
        topk: file.topk,
    };
    let expected = file.expected("expected").unwrap();
    let runner = Runner::new(Target::Cpu).unwrap();
    let request = LayerRequest { topk: file.topk, scales: Some(ScaleMode::Static), activation: None };
    for ranks in [1, 2, 3, 16, 17] {
        let mut told = Vec::new();
        let mut progress = |done, all| told.push((done, all));
        let (sum, forward_ms) = run_ranks(&runner, &view, &request, ranks, &inputs, &mut progress).unwrap();
        let comparison = Comparison::new(&sum, &expected, file.hidden_size, 1e-6);
        assert!(comparison.within(1e-6) && comparison.rows_close >= 0.98, "{ranks} ranks: {comparison:?}");
        assert_eq!(forward_ms.len(), ranks);
        assert_eq!(told, (1..=16).map(|done| (done, 16)).collect::<Vec<_>>());
    }
    assert!(run_ranks(&runner, &view, &request, 0, &inputs, &mut |_, _| {}).is_err());
}
