//! Element types of hidden states and output, and their one rounding.

use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_moe::activation::Activation;

use super::setup::{Batch, Lab, Layer, MODES, OAI, SWIGLU, matches};

const SIZES: [usize; 4] = [320, 176, 5, 3];
const HIDDEN: usize = SIZES[0];

/// f16 hidden states with more bits than bf16 has, subnormals among them.
pub(super) fn f16_hidden(lab: &Lab<'_>) -> Result<()> {
    for activation in [SWIGLU, OAI, Activation::Relu2] {
        for mode in MODES {
            let layer = Layer::new(SIZES, activation, mode);
            let tiny = |i: usize, x: f32| if i / 16 % 5 == 3 { x * 1e-6 } else { x * 1.017 + 0.0003 };
            let batch = Batch::new(&layer.spec.shape, 25, 37).in_f16().map(tiny);
            let got = lab.forward(&layer, &batch)?;
            matches(&layer.expected(&batch.inputs()), &got, &format!("f16, {activation}, {mode:?}"))?;
        }
    }
    Ok(())
}

/// bf16 output is the f32 output rounded once, ties to even; so nearly all elements are the correctly rounded ones of
/// the exact result, and none is more than one step off where no code of h may differ.
pub(super) fn bf16_output(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 60, 38);
        let mut loaded = lab.load(&layer, 60)?;
        let all = loaded.forward_f32(&batch.inputs())?;
        let rounded = loaded.forward_bf16(&batch.inputs())?;
        let expected = layer.expected(&batch.inputs());
        let mut differing = 0;
        for (i, (rounded, exact)) in rounded.iter().zip(&all).enumerate() {
            let once = bf16::from_f32(*exact);
            ensure!(
                rounded.to_bits() == once.to_bits(),
                "{mode:?}: element {i} is {rounded}, but {exact:e} rounds to {once}"
            );
            if expected.undecided[i / HIDDEN] {
                continue;
            }
            let correct = bf16::from_f64(expected.values[i]);
            let steps = i32::from(rounded.to_bits()).abs_diff(i32::from(correct.to_bits()));
            differing += usize::from(steps != 0);
            // Where a sum nearly cancels, an error that is small for the row is many steps of the element.
            let row = &all[i / HIDDEN * HIDDEN..][..HIDDEN];
            let largest = f64::from(row.iter().fold(0f32, |largest, y| largest.max(y.abs())));
            let near = steps <= 1 || (f64::from(*exact) - expected.values[i]).abs() <= 1e-6 * largest;
            ensure!(near, "{mode:?}: element {i} is {rounded}, not {correct}");
        }
        // An f32 error of 1e-6 crosses a rounding boundary of bf16 (8 bits) in about one element of 2,000.
        let allowed = rounded.len() / 500;
        ensure!(differing <= allowed, "{mode:?}: {differing} of {} are not correctly rounded", rounded.len());
    }
    Ok(())
}
