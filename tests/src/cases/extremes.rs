//! The ends of the number formats: largest and smallest scales, blocks that underflow, zeros, large activations.

use anyhow::{Result, ensure};
use nvfp4_moe::io::ScaleMode;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::setup::{Batch, Expert, Lab, Layer, MODES, SWIGLU, exact_zeros, matches};

const SIZES: [usize; 4] = [96, 80, 5, 2];
/// Code 6 with either sign.
const LARGEST_CODE: u8 = 7;
const SCALE_448: u8 = 0x7E;
const SCALE_2_POW_MINUS_9: u8 = 0x01;

/// Checks a layer against the reference, and that every number is finite.
fn finite_and_right(lab: &Lab<'_>, layer: &Layer, batch: &Batch, what: &str) -> Result<()> {
    let got = lab.forward(layer, batch)?;
    ensure!(got.iter().all(|y| y.is_finite()), "{what}: not all are finite");
    matches(&layer.expected(&batch.inputs()), &got, what)
}

fn largest(expert: &mut Expert) {
    let mut rng = StdRng::seed_from_u64(22);
    for matrix in expert.matrices() {
        for byte in &mut matrix.codes {
            *byte = (LARGEST_CODE * 0x11) | (rng.random::<u8>() & 0x88);
        }
        matrix.scales.fill(SCALE_448);
        matrix.weight_scale = 1.0 / (2688.0 * 10.0);
    }
}

/// Every weight is 448 * 6; also with all signs alike, where sums are as large as they can be.
pub(super) fn largest_weights(lab: &Lab<'_>) -> Result<()> {
    for sizes in [SIZES, [320, 512, 3, 2]] {
        for mode in MODES {
            let layer = Layer::new(sizes, SWIGLU, mode).change(largest);
            let batch = Batch::new(&layer.spec.shape, 23, 23);
            finite_and_right(lab, &layer, &batch, &format!("448 * 6, {sizes:?}, {mode:?}"))?;
            let layer = layer.change(|expert| {
                expert.matrices().for_each(|matrix| matrix.codes.fill(LARGEST_CODE * 0x11));
            });
            let batch = batch.map(|_, x| x.abs() + 0.5);
            finite_and_right(lab, &layer, &batch, &format!("448 * 6 of one sign, {sizes:?}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn smallest_scales(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode).change(|expert| {
            for matrix in expert.matrices() {
                matrix.scales.fill(SCALE_2_POW_MINUS_9);
                matrix.weight_scale *= 512.0;
            }
        });
        let batch = Batch::new(&layer.spec.shape, 23, 24);
        finite_and_right(lab, &layer, &batch, &format!("scales of 2^-9, {mode:?}"))?;
    }
    Ok(())
}

/// The smallest and the largest scales side by side in every row, and all 127 of them elsewhere.
pub(super) fn wide_range(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for every_scale in [false, true] {
            let layer = Layer::new(SIZES, SWIGLU, mode).change(|expert| {
                for matrix in expert.matrices() {
                    for (i, scale) in matrix.scales.iter_mut().enumerate() {
                        *scale = match (every_scale, i % 3) {
                            (true, _) => (i * 29 % 127) as u8,
                            (false, 1) => SCALE_448,
                            (false, _) => SCALE_2_POW_MINUS_9,
                        };
                    }
                    matrix.weight_scale /= 100.0;
                }
            });
            let batch = Batch::new(&layer.spec.shape, 23, 25);
            finite_and_right(lab, &layer, &batch, &format!("scales far apart, {mode:?}, all: {every_scale}"))?;
        }
    }
    Ok(())
}

/// Blocks so much smaller than the row's largest element that their scale would be below 2^-9: some keep a code or two,
/// some become zeros; none may become NaN or steal the scale of a neighbour.
pub(super) fn underflowing_block(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for small in [3e-5, 1e-6, 1e-20, 1e-38] {
            let layer = Layer::new(SIZES, SWIGLU, mode);
            let batch = Batch::new(&layer.spec.shape, 23, 26).map(|i, x| if i / 16 % 3 == 1 { x * small } else { x });
            finite_and_right(lab, &layer, &batch, &format!("blocks of {small:e}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn all_zero(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 23, 27);
        let zeros = batch.clone().map(|_, _| 0.0);
        exact_zeros(&lab.forward(&layer, &zeros)?, &format!("all hidden states 0, {mode:?}"))?;

        let rows = batch.clone().map(|i, x| if i / 96 % 2 == 0 { 0.0 } else { x });
        let got = lab.forward(&layer, &rows)?;
        matches(&layer.expected(&rows.inputs()), &got, &format!("every second row 0, {mode:?}"))?;
        for token in (0..23).step_by(2) {
            exact_zeros(&got[token * 96..][..96], &format!("row {token} of zeros, {mode:?}"))?;
        }

        for zero_scales in [false, true] {
            let layer = layer.clone().change(|expert| {
                for matrix in expert.matrices() {
                    if zero_scales { matrix.scales.fill(0) } else { matrix.codes.fill(0) }
                }
            });
            let got = lab.forward(&layer, &batch)?;
            // Zeros of negative codes are -0, and so may sums of them be.
            ensure!(got.iter().all(|y| *y == 0.0), "weights 0, scales 0: {zero_scales}, {mode:?}: not all are 0");
        }
    }
    Ok(())
}

pub(super) fn large_activations(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 23, 28);
        for (what, batch) in [
            ("all about 3e4", batch.clone().map(|_, x| x / 3.6 * 3e4)),
            ("one of 3e4 a row", batch.clone().map(|i, x| if i % 96 == i / 96 { 3e4 } else { x })),
            ("one of 3e4 in all", batch.clone().map(|i, x| if i == 500 { -3e4 } else { x })),
        ] {
            finite_and_right(lab, &layer, &batch, &format!("{what}, {mode:?}"))?;
            let f16 = batch.in_f16();
            finite_and_right(lab, &layer, &f16, &format!("{what}, f16, {mode:?}"))?;
        }
    }
    // The static scale saturates: what does not fit becomes the largest code.
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::Static);
    let batch = Batch::new(&layer.spec.shape, 23, 29).map(|_, x| x * 1e4);
    finite_and_right(lab, &layer, &batch, "static scales, saturated")
}
