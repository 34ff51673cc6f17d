//! Gate and up: two halves of one matrix in memory, which must not be exchanged, scaled alike or dropped.

use anyhow::{Result, ensure};
use nvfp4_moe::io::ScaleMode;

use super::setup::{Batch, Lab, Layer, MODES, OAI, SWIGLU, differs, exact_zeros, matches};

const SIZES: [usize; 4] = [96, 80, 5, 2];

pub(super) fn zero_half(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for (half, zero_gate) in [("gate", true), ("up", false)] {
            let zeroed = |layer: Layer| {
                layer.change(|expert| {
                    let matrix = if zero_gate { expert.gate() } else { &mut expert.up };
                    matrix.codes.fill(0);
                })
            };
            let what = format!("{half} = 0, {mode:?}");
            let layer = zeroed(Layer::new(SIZES, SWIGLU, mode));
            let batch = Batch::new(&layer.spec.shape, 19, 5);
            exact_zeros(&lab.forward(&layer, &batch)?, &what)?;
            // With beta added, up = 0 leaves the gate's own part.
            let layer = zeroed(Layer::new(SIZES, OAI, mode));
            lab.check(&layer, &batch, &format!("{what}, swigluoai"))?;
        }
    }
    Ok(())
}

/// Gate and up with weight scales of ratio 1.25: right, and an engine that took the one for the other would be seen.
pub(super) fn different_scales(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode).change(|expert| {
            let up = expert.up.weight_scale;
            expert.gate().weight_scale = 1.25 * up;
        });
        let batch = Batch::new(&layer.spec.shape, 19, 6);
        let inputs = batch.inputs();
        let got = lab.forward(&layer, &batch)?;
        matches(&layer.expected(&inputs), &got, &format!("ratio 1.25, {mode:?}"))?;

        let wrong = layer.clone().change(|expert| {
            let up = expert.up.weight_scale;
            expert.gate().weight_scale = up;
        });
        differs(&wrong.expected(&inputs), &got, "up's scale used for gate")?;
        let wrong = layer.clone().change(|expert| expert.up.weight_scale *= 1.25);
        differs(&wrong.expected(&inputs), &got, "up off by 1.25")?;
        let wrong = layer.clone().change(|expert| expert.down.weight_scale *= 1.25);
        differs(&wrong.expected(&inputs), &got, "down off by 1.25")?;
        // In the mode PerTensor a token alone is another batch.
        let alone = if mode == ScaleMode::PerTensor { 0 } else { batch.tokens() };
        for token in 0..alone {
            let row: Vec<f32> = got[token * 96..][..96].iter().map(|y| y * 1.25).collect();
            if row.iter().any(|y| *y != 0.0) {
                differs(&layer.expected(&batch.token(token)), &row, "one row off by 1.25")?;
            }
        }
    }
    Ok(())
}

pub(super) fn swapped(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let swapped = layer.clone().change(|expert| {
            let gate = expert.gate().clone();
            expert.gate = Some(std::mem::replace(&mut expert.up, gate));
        });
        let batch = Batch::new(&layer.spec.shape, 19, 7);
        let got = lab.forward(&swapped, &batch)?;
        matches(&swapped.expected(&batch.inputs()), &got, &format!("swapped on purpose, {mode:?}"))?;
        differs(&layer.expected(&batch.inputs()), &got, &format!("gate and up swapped, {mode:?}"))?;
    }
    Ok(())
}

/// Gate and up read one quantized input: the larger of the two scales counts.
pub(super) fn different_input_scales(lab: &Lab<'_>) -> Result<()> {
    for larger_gate in [true, false] {
        let layer = Layer::new(SIZES, SWIGLU, ScaleMode::Static).change(|expert| {
            expert.gate().input_scale = Some(if larger_gate { 5.0 } else { 2.0 } / 2688.0);
            expert.up.input_scale = Some(if larger_gate { 2.0 } else { 5.0 } / 2688.0);
        });
        let batch = Batch::new(&layer.spec.shape, 19, 8);
        let got = lab.forward(&layer, &batch)?;
        matches(&layer.expected(&batch.inputs()), &got, "the larger input scale")?;
        // All experts have the same larger scale: then a token may be quantized once.
        let mut shared = layer.clone();
        shared.spec.shared_l1_scale = true;
        let once = lab.forward(&shared, &batch)?;
        ensure!(once == got, "quantizing a token once or for each slot makes a difference");
        let smaller = layer.change(|expert| {
            expert.gate().input_scale = Some(2.0 / 2688.0);
            expert.up.input_scale = Some(2.0 / 2688.0);
        });
        differs(&smaller.expected(&batch.inputs()), &got, "the smaller input scale")?;
    }
    Ok(())
}
