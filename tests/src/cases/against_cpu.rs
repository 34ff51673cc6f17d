//! Layers too large for the f64 reference, on the GPU against the CPU engine.

use anyhow::{Result, ensure};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::{Comparison, Runner, Target};
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};

use super::setup::{Batch, Lab, OAI, SWIGLU};

/// The whole, in relative L2: both engines compute the same numbers, so only a code of h that f32 sums in different
/// orders round differently is left, in one row of some 2,000.
const WHOLE: f64 = 1e-3;
const CLOSE_ROWS: f64 = 0.98;
/// Rows of a large batch that the CPU computes too.
const SAMPLE: usize = 256;

struct Big {
    sizes: [usize; 4],
    experts: ExpertRange,
    tokens: usize,
    activation: Activation,
    scales: ScaleMode,
    input_scales: RandomInputScales,
}

pub(super) fn layers(lab: &Lab<'_>) -> Result<()> {
    let (shared, each, missing) =
        (RandomInputScales::SharedFirst, RandomInputScales::PerExpert, RandomInputScales::Missing);
    let all = ExpertRange::all;
    let clamped = Activation::SwiGlu { limit: Some(10.0) };
    let big = |sizes, experts, tokens, activation, scales, input_scales| Big {
        sizes,
        experts,
        tokens,
        activation,
        scales,
        input_scales,
    };
    let layers = [
        big([320, 176, 40, 8], all(40), 200, SWIGLU, ScaleMode::PerTensor, missing),
        big([2048, 768, 128, 8], all(128), 256, SWIGLU, ScaleMode::Static, shared),
        big([2048, 768, 128, 8], all(128), 16, SWIGLU, ScaleMode::PerToken, missing),
        big([2048, 768, 128, 8], all(128), 4096, SWIGLU, ScaleMode::Static, each),
        big([7168, 3072, 24, 6], ExpertRange { first: 6, count: 12 }, 1024, clamped, ScaleMode::PerToken, missing),
        big([7168, 2048, 16, 8], ExpertRange { first: 4, count: 8 }, 4096, SWIGLU, ScaleMode::Static, shared),
        big([2880, 2880, 32, 4], all(32), 128, OAI, ScaleMode::PerToken, missing),
        big([2688, 1856, 128, 6], all(128), 128, Activation::Relu2, ScaleMode::Static, each),
    ];
    let cpu = Runner::new(Target::Cpu)?;
    for layer in if lab.is_full() { &layers[..] } else { &layers[..1] } {
        compare(lab, &cpu, layer)?;
    }
    Ok(())
}

fn compare(lab: &Lab<'_>, cpu: &Runner, layer: &Big) -> Result<()> {
    let &Big { sizes: [hidden, intermediate, experts, topk], tokens, activation, scales, .. } = layer;
    let shape = MoeShape::new(hidden, intermediate, experts, topk)?;
    let source = RandomExperts::new(shape, activation.is_gated(), layer.input_scales, 45);
    let shared_l1_scale = layer.input_scales != RandomInputScales::PerExpert;
    let spec = LayerSpec { shape, experts: layer.experts, activation, scales, shared_l1_scale };
    let batch = Batch::new(&shape, tokens, 46);

    let mut loaded = lab.runner.load(&spec, &source, tokens, &mut |_, _| {})?;
    loaded.set_poison(true);
    let got = loaded.forward_f32(&batch.inputs())?;
    drop(loaded);

    // Rows of a batch do not depend on each other, but in the mode PerTensor, where the batch is small.
    let first = (tokens / 2).min(tokens.saturating_sub(SAMPLE));
    let sample = first..tokens.min(first + SAMPLE);
    let inputs = batch.inputs().tokens(sample.clone(), hidden);
    let expected = cpu.load(&spec, &source, sample.len(), &mut |_, _| {})?.forward_f32(&inputs)?;
    let result = Comparison::new(&got[sample.start * hidden..][..expected.len()], &expected, hidden, WHOLE);
    ensure!(
        result.within(WHOLE) && result.rows_close >= CLOSE_ROWS,
        "{spec:?}, {tokens} tokens, rows {sample:?}: {result:?}"
    );
    ensure!(got.iter().all(|y| y.is_finite()), "{spec:?}, {tokens} tokens: not all are finite");
    Ok(())
}
