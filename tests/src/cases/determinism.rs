//! The same bits: for a token alone, in a batch and elsewhere in it, in every run and with every GEMM variant.

use anyhow::Result;
use nvfp4_moe::io::{HiddenRows, Inputs};
use nvfp4_moe::weights::RandomInputScales;

use super::setup::{Batch, Hidden, Lab, Layer, MODES, ROW_MODES, SWIGLU, gpu, same_bits};

/// Few experts and many tokens, so that a batch uses other tiles than a token alone.
const SIZES: [usize; 4] = [320, 176, 4, 2];
const HIDDEN: usize = SIZES[0];

fn reversed(batch: &Batch) -> Batch {
    let rows = |tokens: usize| (0..tokens).rev();
    let tokens = batch.tokens();
    let Hidden::Bf16(hidden) = &batch.hidden else { unreachable!("batches begin in bf16") };
    let topk = batch.topk;
    Batch {
        hidden: Hidden::Bf16(rows(tokens).flat_map(|t| hidden[t * HIDDEN..][..HIDDEN].to_vec()).collect()),
        ids: rows(tokens).flat_map(|t| batch.ids[t * topk..][..topk].to_vec()).collect(),
        weights: rows(tokens).flat_map(|t| batch.weights[t * topk..][..topk].to_vec()).collect(),
        ..*batch
    }
}

pub(super) fn alone_and_elsewhere(lab: &Lab<'_>) -> Result<()> {
    let tokens = lab.scaled(1500, 300);
    for mode in ROW_MODES {
        for input_scales in [RandomInputScales::PerExpert, RandomInputScales::SharedFirst] {
            let layer = Layer::with_input_scales(SIZES, SWIGLU, mode, input_scales);
            let batch = Batch::new(&layer.spec.shape, tokens, 33);
            let mut loaded = lab.load(&layer, tokens)?;
            let whole = loaded.forward_f32(&batch.inputs())?;
            let row = |token: usize| &whole[token * HIDDEN..][..HIDDEN];
            for token in [0, 1, 7, 8, 63, 64, 127, 128, 200, tokens - 1] {
                let alone = loaded.forward_f32(&batch.token(token))?;
                same_bits(&alone, row(token), &format!("token {token} alone, {mode:?}, {input_scales:?}"))?;
            }
            for (first, count) in [(0, 2), (5, 3), (30, 16), (100, 33), (17, 128), (128, 129)] {
                let part = batch.inputs().tokens(first..first + count, HIDDEN);
                let got = loaded.forward_f32(&part)?;
                let what = format!("{count} tokens from {first}, {mode:?}, {input_scales:?}");
                same_bits(&got, &whole[first * HIDDEN..][..count * HIDDEN], &what)?;
            }
            let backwards = loaded.forward_f32(&reversed(&batch).inputs())?;
            for token in 0..tokens {
                let got = &backwards[(tokens - 1 - token) * HIDDEN..][..HIDDEN];
                same_bits(got, row(token), &format!("token {token} in reverse order, {mode:?}, {input_scales:?}"))?;
            }
        }
    }
    Ok(())
}

pub(super) fn two_runs(lab: &Lab<'_>) -> Result<()> {
    let tokens = lab.scaled(1000, 150);
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, tokens, 34);
        let mut loaded = lab.load(&layer, tokens)?;
        let first = loaded.forward_f32(&batch.inputs())?;
        loaded.set_poison(false);
        same_bits(&loaded.forward_f32(&batch.inputs())?, &first, &format!("the second run, {mode:?}"))?;
        let again = lab.load(&layer, tokens + 77)?.forward_f32(&batch.inputs())?;
        same_bits(&again, &first, &format!("loaded again for more tokens, {mode:?}"))?;
    }
    Ok(())
}

/// Every tile of the grouped GEMM sums along K in the same order.
pub(super) fn gemm_variants(lab: &Lab<'_>) -> Result<()> {
    let sizes = [SIZES, [80, 176, 5, 3], [16, 16, 1, 1], [1040, 272, 3, 2]];
    let tokens = [140, 9, 1, 70, 700];
    let (sizes, tokens) = if lab.is_full() { (&sizes[..], &tokens[..]) } else { (&sizes[1..3], &tokens[..2]) };
    for &sizes in sizes {
        for mode in MODES {
            let layer = Layer::new(sizes, SWIGLU, mode);
            for &tokens in tokens {
                let batch = Batch::new(&layer.spec.shape, tokens, 35);
                let mut loaded = lab.load(&layer, tokens)?;
                let planned = loaded.forward_f32(&batch.inputs())?;
                for (tile, variant) in gpu(&mut loaded)?.plan().kernels().variants().iter().enumerate() {
                    loaded.set_tile(Some(tile))?;
                    let got = loaded.forward_f32(&batch.inputs())?;
                    let what = format!("{}, {sizes:?}, {tokens} tokens, {mode:?}", variant.kernel);
                    same_bits(&got, &planned, &what)?;
                }
            }
        }
    }
    Ok(())
}

/// The inputs of no token, for a batch of this kind.
pub(super) fn nothing_of<'a>(inputs: &Inputs<'a>) -> Inputs<'a> {
    let hidden = match inputs.hidden {
        HiddenRows::Bf16(_) => HiddenRows::Bf16(&[]),
        HiddenRows::F16(_) => HiddenRows::F16(&[]),
    };
    Inputs { hidden, topk_ids: &[], topk_weights: &[], topk: inputs.topk }
}
