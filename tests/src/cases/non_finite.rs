//! NaN and infinity in a token: NaN in that token's whole row, and not one bit changed anywhere else.

use anyhow::{Result, ensure};
use half::f16;
use nvfp4_moe::activation::Activation;

use super::setup::{Batch, Lab, Layer, MODES, OAI, SWIGLU, exact_zeros, matches, same_bits};

const SIZES: [usize; 4] = [96, 80, 5, 2];
const HIDDEN: usize = SIZES[0];
const TOKENS: usize = 21;
/// Tokens, the columns where something is not finite, and what.
const POISON: [(usize, usize, f32); 6] = [
    (0, 0, f32::NAN),
    (4, 95, f32::INFINITY),
    (9, 40, f32::NEG_INFINITY),
    (10, 16, f32::NAN),
    (10, 90, f32::INFINITY),
    (20, 15, f32::NAN),
];

fn is_poisoned(token: usize) -> bool {
    POISON.iter().any(|(poisoned, ..)| *poisoned == token)
}

/// The batch without and with what is not finite. In both, the rows concerned are so small that neither they nor their
/// h are ever the largest of the batch: so the scale of the mode `PerTensor` is the same too.
fn clean_and_poisoned(layer: &Layer) -> (Batch, Batch) {
    let batch = Batch::new(&layer.spec.shape, TOKENS, 30);
    // Every token has an expert here.
    let ids: Vec<_> = batch.ids.iter().map(|id| if *id < 0 { 1 } else { *id }).collect();
    let clean = batch.with_ids(ids).map(|i, x| if is_poisoned(i / HIDDEN) { x * 1e-3 } else { x });
    let at = |i: usize| POISON.iter().find(|(token, column, _)| token * HIDDEN + column == i);
    let poisoned = clean.clone().map(|i, x| at(i).map_or(x, |(.., value)| *value));
    (clean, poisoned)
}

pub(super) fn one_row(lab: &Lab<'_>) -> Result<()> {
    let clamped = Activation::SwiGlu { limit: Some(7.0) };
    for activation in [SWIGLU, clamped, OAI, Activation::Relu2] {
        for mode in MODES {
            let layer = Layer::new(SIZES, activation, mode);
            let (clean, poisoned) = clean_and_poisoned(&layer);
            for (element, clean, poisoned) in
                [("bf16", clean.clone(), poisoned.clone()), ("f16", clean.in_f16(), poisoned.in_f16())]
            {
                let what = format!("{activation}, {mode:?}, {element}");
                let mut loaded = lab.load(&layer, TOKENS)?;
                let expected = loaded.forward_f32(&clean.inputs())?;
                matches(&layer.expected(&clean.inputs()), &expected, &format!("{what}, all finite"))?;
                let got = loaded.forward_f32(&poisoned.inputs())?;
                for (token, (got, expected)) in got.chunks(HIDDEN).zip(expected.chunks(HIDDEN)).enumerate() {
                    if is_poisoned(token) {
                        ensure!(got.iter().all(|y| y.is_nan()), "{what}: token {token} is not NaN everywhere");
                    } else {
                        same_bits(got, expected, &format!("{what}: token {token}"))?;
                    }
                }
                matches(&layer.expected(&poisoned.inputs()), &got, &format!("{what}, against the reference"))?;
            }
        }
    }
    Ok(())
}

/// A token that is not finite, but nobody's here: zeros as for any other, or what the output held.
pub(super) fn without_experts(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let (clean, poisoned) = clean_and_poisoned(&layer);
        let nobodys = |entry: usize, id: i32| if is_poisoned(entry / 2) { -1 } else { id };
        let ids: Vec<_> = clean.ids.iter().enumerate().map(|(entry, id)| nobodys(entry, *id)).collect();
        let (clean, poisoned) = (clean.with_ids(ids.clone()), poisoned.with_ids(ids));
        let got = lab.forward(&layer, &poisoned)?;
        same_bits(&got, &lab.forward(&layer, &clean)?, &format!("{mode:?}"))?;
        for (token, ..) in POISON {
            exact_zeros(&got[token * HIDDEN..][..HIDDEN], &format!("token {token}, {mode:?}"))?;
        }
    }
    Ok(())
}

/// NaN survives the rounding to bf16, and an f16 infinity that came from a number too large does the same as any.
pub(super) fn in_bf16(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let (_, poisoned) = clean_and_poisoned(&layer);
        let overflowed = poisoned.map(|_, x| if x.is_finite() { x } else { 1e6 }).in_f16();
        let found = overflowed.inputs().hidden.slice(4 * HIDDEN + 80..5 * HIDDEN).block(0)[15];
        ensure!(found == f16::INFINITY.to_f32(), "1e6 is {found} in f16");
        let got = lab.load(&layer, TOKENS)?.forward_bf16(&overflowed.inputs())?;
        for (token, row) in got.chunks(HIDDEN).enumerate() {
            let right =
                if is_poisoned(token) { row.iter().all(|y| y.is_nan()) } else { row.iter().all(|y| y.is_finite()) };
            ensure!(right, "{mode:?}: token {token} is wrong: {:?}", &row[..4]);
        }
    }
    Ok(())
}
