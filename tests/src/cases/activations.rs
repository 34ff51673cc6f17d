//! Clamps and activations: after alpha, gate bounded from above only, and those without a gate.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::HarnessError;
use nvfp4_moe::io::ScaleMode;

use super::setup::{Batch, Expert, Lab, Layer, MODES, OAI, SWIGLU, differs, matches};
use crate::reference::Expected;

const SIZES: [usize; 4] = [96, 80, 5, 2];

/// Weights so large that gate and up leave any limit on both sides.
fn strong(expert: &mut Expert) {
    for matrix in expert.matrices() {
        matrix.weight_scale *= 12.0;
    }
}

fn expected_of(layer: &Layer, batch: &Batch, activation: Activation) -> Expected {
    let mut other = layer.clone();
    other.spec.activation = activation;
    other.expected(&batch.inputs())
}

/// Alpha is far from 1 in every layer here (about 1e-5), so a limit that came before it would never bite.
pub(super) fn limits(lab: &Lab<'_>) -> Result<()> {
    for limit in [7.0, 10.0] {
        for mode in MODES {
            let clamped = Activation::SwiGlu { limit: Some(limit) };
            let layer = Layer::new(SIZES, clamped, mode).change(strong);
            let batch = Batch::new(&layer.spec.shape, 23, 18);
            let got = lab.forward(&layer, &batch)?;
            let what = format!("limit {limit}, {mode:?}");
            matches(&layer.expected(&batch.inputs()), &got, &what)?;
            differs(&expected_of(&layer, &batch, SWIGLU), &got, &format!("no limit, {mode:?}"))?;
            let other = Activation::SwiGlu { limit: Some(17.0 - limit) };
            differs(&expected_of(&layer, &batch, other), &got, &format!("another limit, {mode:?}"))?;
        }
    }
    Ok(())
}

/// All gates lie far below -limit, where silu is almost 0: clamped from below, it would be ten times as much.
pub(super) fn gate_far_below(lab: &Lab<'_>) -> Result<()> {
    const LIMIT: f32 = 7.0;
    for activation in [Activation::SwiGlu { limit: Some(LIMIT) }, OAI] {
        // Static scales: a per-token scale would carry the relative rounding error of exp(10) into every element.
        let layer = Layer::new(SIZES, activation, ScaleMode::Static).change(|expert| {
            let gate = expert.gate();
            // 2 * 1 * scale for each of 96 elements of -1 is about -10.
            gate.codes.fill(0x44);
            gate.scales.fill(0x38);
            gate.weight_scale = 10.0 / (2.0 * 96.0);
            expert.down.input_scale = Some(2e-3 / 2688.0);
            expert.down.weight_scale *= 1e3;
        });
        let batch = Batch::new(&layer.spec.shape, 23, 19).map(|_, x| -1.0 - x.abs() * 0.01);
        let got = lab.forward(&layer, &batch)?;
        matches(&layer.expected(&batch.inputs()), &got, &format!("gate far below, {activation}"))?;
        // What a lower bound would do: the gate that is exactly -limit everywhere.
        let bounded = layer.clone().change(|expert| expert.gate().weight_scale *= LIMIT / 10.0);
        differs(&bounded.expected(&batch.inputs()), &got, "a gate clamped from below")?;
    }
    Ok(())
}

pub(super) fn swigluoai(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, OAI, mode).change(strong);
        let batch = Batch::new(&layer.spec.shape, 23, 20);
        let got = lab.forward(&layer, &batch)?;
        matches(&layer.expected(&batch.inputs()), &got, &format!("swigluoai, {mode:?}"))?;
        for (what, alpha, beta, limit) in
            [("alpha", 1.0, 1.0, 7.0), ("beta", 1.702, 0.0, 7.0), ("limit", 1.702, 1.0, 70.0)]
        {
            let other = Activation::SwiGluOai { alpha, beta, limit };
            differs(&expected_of(&layer, &batch, other), &got, &format!("another {what}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn relu2(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for sizes in [SIZES, [80, 176, 3, 2], [320, 352, 4, 1]] {
            let layer = Layer::new(sizes, Activation::Relu2, mode);
            ensure!(layer.experts.iter().all(|expert| expert.gate.is_none()), "relu2 has no gate");
            let batch = Batch::new(&layer.spec.shape, 23, 21);
            lab.check(&layer, &batch, &format!("relu2, {sizes:?}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn bad_limit(lab: &Lab<'_>) -> Result<()> {
    let nan = f32::NAN;
    for (activation, parameter) in [
        (Activation::SwiGlu { limit: Some(0.0) }, "limit"),
        (Activation::SwiGlu { limit: Some(nan) }, "limit"),
        (Activation::SwiGluOai { alpha: nan, beta: 1.0, limit: 7.0 }, "alpha"),
        (Activation::SwiGluOai { alpha: 1.0, beta: f32::INFINITY, limit: 7.0 }, "beta"),
    ] {
        let mut layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
        layer.spec.activation = activation;
        let error = lab.load(&layer, 4).err().with_context(|| format!("{activation}: loaded"))?;
        match error.downcast::<HarnessError>()? {
            HarnessError::Activation(error) => ensure!(error.parameter == parameter, "{activation}: {error}"),
            other => anyhow::bail!("{activation}: {other}"),
        }
    }
    Ok(())
}
