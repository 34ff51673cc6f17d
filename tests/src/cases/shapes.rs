//! Expert counts, dimensions and token counts that are no multiple of any tile; and what lies in the padding.

use anyhow::{Context, Result, ensure};
use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::HarnessError;
use nvfp4_moe::io::{OutputRows, ScaleMode};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::weights::RandomInputScales;

use super::setup::{Batch, Lab, Layer, MODES, OAI, ROW_MODES, SWIGLU, matches};

pub(super) fn odd_expert_counts(lab: &Lab<'_>) -> Result<()> {
    let counts = [1, 5, 130, 36, 40, 60, 384];
    for &experts in if lab.is_full() { &counts[..] } else { &counts[..3] } {
        let topk = experts.min(6);
        for mode in MODES {
            let layer = Layer::new([96, 80, experts, topk], SWIGLU, mode);
            let batch = Batch::new(&layer.spec.shape, 33, experts as u64);
            lab.check(&layer, &batch, &format!("{experts} experts, {mode:?}"))?;
            if experts > 4 {
                let range = ExpertRange { first: experts / 3, count: experts / 2 };
                let rank = layer.on_rank(range);
                lab.check(&rank, &batch, &format!("{range:?} of {experts} experts, {mode:?}"))?;
            }
        }
    }
    Ok(())
}

pub(super) fn dimension_pairs(lab: &Lab<'_>) -> Result<()> {
    let small = [(320, 160), (320, 176), (320, 352), (80, 512), (96, 704), (320, 80), (16, 16)];
    let big = [(2048, 768), (2048, 704), (2688, 1856), (2880, 2880), (7168, 512), (320, 2688), (7168, 2688)];
    let pairs = small.iter().chain(if lab.is_full() { &big[..] } else { &big[..1] });
    for (i, &(hidden, intermediate)) in pairs.enumerate() {
        let wide = hidden * intermediate > 1 << 21;
        let activation = if i % 3 == 2 { Activation::Relu2 } else { SWIGLU };
        // Two tokens that share an expert, and one expert without tokens.
        let modes = if wide { &ROW_MODES[i % 2..][..1] } else { &MODES };
        for &mode in modes {
            let layer = Layer::new([hidden, intermediate, 3, 2], activation, mode);
            let batch = Batch::new(&layer.spec.shape, if wide { 2 } else { 9 }, 1);
            lab.check(&layer, &batch, &format!("hidden {hidden}, intermediate {intermediate}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn every_tail(lab: &Lab<'_>) -> Result<()> {
    for sixteenths in (1..=17).step_by(if lab.is_full() { 1 } else { 4 }) {
        let (hidden, intermediate) = (16 * sixteenths, 16 * (18 - sixteenths));
        let mode = MODES[sixteenths % 3];
        let activation = if sixteenths % 4 == 0 { Activation::Relu2 } else { OAI };
        let layer = Layer::new([hidden, intermediate, 4, 2], activation, mode);
        let batch = Batch::new(&layer.spec.shape, 11, 2);
        lab.check(&layer, &batch, &format!("hidden {hidden}, intermediate {intermediate}, {mode:?}"))?;
    }
    Ok(())
}

pub(super) fn not_a_multiple_of_16(lab: &Lab<'_>) -> Result<()> {
    let good = Layer::new([96, 80, 3, 2], SWIGLU, ScaleMode::PerToken);
    for (hidden, intermediate, named) in
        [(40, 80, "hidden is 40"), (96, 72, "intermediate is 72"), (0, 16, "hidden is 0"), (96, 8, "intermediate is 8")]
    {
        let error = MoeShape::new(hidden, intermediate, 3, 2).err().context("a bad size was accepted")?;
        ensure!(error.to_string().starts_with(named), "{error}");
        // Also where nobody called the checked constructor.
        let mut layer = good.clone();
        layer.spec.shape = MoeShape { hidden, intermediate, experts: 3, topk: 2 };
        let error = lab.load(&layer, 4).err().with_context(|| format!("{named}: loaded"))?;
        ensure!(error.to_string().contains(named) && error.to_string().contains("multiple of 16"), "{error}");
    }
    Ok(())
}

pub(super) fn few_tokens(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new([96, 80, 8, 2], SWIGLU, mode);
        let mut roomy = lab.load(&layer, 129)?;
        let counts = [1, 129, 33, 2, 3, 16, 118, 127, 128];
        for &tokens in if lab.is_full() { &counts[..] } else { &counts[..3] } {
            let batch = Batch::new(&layer.spec.shape, tokens, tokens as u64);
            let expected = layer.expected(&batch.inputs());
            let what = format!("{tokens} tokens, {mode:?}");
            matches(&expected, &roomy.forward_f32(&batch.inputs())?, &what)?;
            let exact = lab.load(&layer, tokens)?.forward_f32(&batch.inputs())?;
            matches(&expected, &exact, &format!("{what}, planned for as many"))?;
        }
    }
    Ok(())
}

pub(super) fn no_tokens(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new([96, 80, 8, 2], SWIGLU, mode);
        let none = Batch::new(&layer.spec.shape, 0, 0);
        for max_tokens in [0, 7] {
            let mut loaded = lab.load(&layer, max_tokens)?;
            ensure!(loaded.forward_f32(&none.inputs())?.is_empty(), "something came out");
            ensure!(loaded.forward_bf16(&none.inputs())?.is_empty(), "something came out");
            loaded.forward(&none.inputs(), OutputRows::F32(&mut []), true)?;
            let one = Batch::new(&layer.spec.shape, max_tokens.min(1), 0);
            let got = loaded.forward_f32(&one.inputs())?;
            matches(&layer.expected(&one.inputs()), &got, &format!("after no tokens, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn many_tokens(lab: &Lab<'_>) -> Result<()> {
    let tokens = if lab.is_full() { 300_000 } else { 5_000 };
    for (mode, input_scales) in [
        (ScaleMode::PerToken, RandomInputScales::Missing),
        (ScaleMode::Static, RandomInputScales::SharedFirst),
        (ScaleMode::Static, RandomInputScales::PerExpert),
    ] {
        let layer = Layer::with_input_scales([32, 16, 5, 2], SWIGLU, mode, input_scales);
        let batch = Batch::new(&layer.spec.shape, tokens, 3);
        let got = lab.forward(&layer, &batch)?;
        ensure!(got.iter().all(|y| y.is_finite()), "{tokens} tokens, {mode:?}: not all are numbers");
        let last = tokens - 257;
        for first in [0, tokens / 3, tokens / 2, last] {
            let part = batch.inputs().tokens(first..first + 257, 32);
            let rows = &got[first * 32..][..257 * 32];
            matches(&layer.expected(&part), rows, &format!("{tokens} tokens from {first}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn more_tokens_than_planned(lab: &Lab<'_>) -> Result<()> {
    let layer = Layer::new([96, 80, 8, 2], SWIGLU, ScaleMode::PerToken);
    let mut loaded = lab.load(&layer, 4)?;
    let batch = Batch::new(&layer.spec.shape, 5, 0);
    let mut out = vec![bf16::ONE; 5 * 96];
    let result = loaded.forward(&batch.inputs(), OutputRows::Bf16(&mut out), false);
    ensure!(matches!(result, Err(HarnessError::TooManyTokens { got: 5, max: 4 })), "{result:?}");
    ensure!(out.iter().all(|y| *y == bf16::ONE), "something was written");
    Ok(())
}

/// Every size here leaves padding in weight tiles, in the activations' rows and behind the last slot; the workspace and
/// the output are full of NaN before each call, and hold the last call's values in the second round.
pub(super) fn poisoned_padding(lab: &Lab<'_>) -> Result<()> {
    for (hidden, intermediate) in [(80, 176), (16, 16), (48, 80), (80, 16), (320, 176)] {
        for activation in [SWIGLU, Activation::Relu2] {
            for mode in MODES {
                let what = format!("hidden {hidden}, intermediate {intermediate}, {activation}, {mode:?}");
                let layer = Layer::new([hidden, intermediate, 5, 3], activation, mode);
                let batch = Batch::new(&layer.spec.shape, 21, 4);
                let expected = layer.expected(&batch.inputs());
                let mut loaded = lab.load(&layer, 40)?;
                for poison in [true, false] {
                    loaded.set_poison(poison);
                    let got = loaded.forward_f32(&batch.inputs())?;
                    ensure!(got.iter().all(|y| y.is_finite()), "{what}: NaN came out");
                    matches(&expected, &got, &what)?;
                }
            }
        }
    }
    Ok(())
}
