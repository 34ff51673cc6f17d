//! Routing: ids that are nobody's or another rank's, repeated experts, experts that get everything, ranks that get
//! nothing; and what happens to the output there.

use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_moe::io::{OutputRows, ScaleMode};
use nvfp4_moe::shape::ExpertRange;

use super::setup::{Batch, Lab, Layer, MODES, SWIGLU, exact_zeros, matches, same_bits};
use crate::reference;

const SIZES: [usize; 4] = [96, 80, 8, 3];
const HIDDEN: usize = SIZES[0];

fn local(id: i32, range: ExpertRange) -> bool {
    usize::try_from(id).is_ok_and(|id| range.contains(id))
}

/// Tokens without an expert of the range.
fn without_experts(batch: &Batch, range: ExpertRange) -> Vec<usize> {
    let nobody = |token: &usize| batch.ids[token * batch.topk..][..batch.topk].iter().all(|&id| !local(id, range));
    (0..batch.tokens()).filter(nobody).collect()
}

/// Ids just outside the rank's range, outside the layer, and at both ends of i32.
fn odd_ids(tokens: usize) -> Vec<i32> {
    let odd = [-1, 1, 2, 5, 4, 8, 0, 7, 3, i32::MIN, i32::MAX, 2, -2, 384, 1, 5, i32::MAX - 1, 9, 3, 3, 4, -1, 8, 384];
    odd.iter().copied().cycle().take(tokens * SIZES[3]).collect()
}

pub(super) fn outside(lab: &Lab<'_>) -> Result<()> {
    for range in [ExpertRange { first: 2, count: 3 }, ExpertRange { first: 0, count: 2 }, ExpertRange::all(8)] {
        for mode in MODES {
            let layer = Layer::new(SIZES, SWIGLU, mode).on_rank(range);
            let batch = Batch::new(&layer.spec.shape, 22, 11).with_ids(odd_ids(22));
            let got = lab.forward(&layer, &batch)?;
            matches(&layer.expected(&batch.inputs()), &got, &format!("{range:?}, {mode:?}"))?;
            let nobody = without_experts(&batch, range);
            ensure!(!nobody.is_empty(), "the ids of this check leave no token without experts of {range:?}");
            for token in nobody {
                exact_zeros(&got[token * HIDDEN..][..HIDDEN], &format!("token {token}, {range:?}, {mode:?}"))?;
            }
        }
    }
    Ok(())
}

pub(super) fn repeated_expert(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 4, 12).with_ids([3, 3, 3, 1, 6, 1, 2, 2, 5, -1, 7, 7]);
        lab.check(&layer, &batch, &format!("repeated experts, {mode:?}"))?;
    }
    Ok(())
}

pub(super) fn all_on_one(lab: &Lab<'_>) -> Result<()> {
    let tokens = lab.scaled(4096, 300);
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        for expert in [0, 5, 7] {
            let batch = Batch::new(&layer.spec.shape, tokens, 13);
            let ids = (0..batch.ids.len()).map(|entry| if entry % 3 == 1 { expert } else { -1 });
            let batch = batch.with_ids(ids);
            lab.check(&layer, &batch, &format!("{tokens} tokens on expert {expert}, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn rank_with_nothing(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for range in
            [ExpertRange { first: 5, count: 3 }, ExpertRange { first: 3, count: 0 }, ExpertRange { first: 8, count: 0 }]
        {
            let layer = Layer::new(SIZES, SWIGLU, mode).on_rank(range);
            let batch = Batch::new(&layer.spec.shape, 17, 14);
            let ids: Vec<_> = batch.ids.iter().map(|id| id % 5).collect();
            let batch = batch.with_ids(ids);
            let what = format!("{range:?}, {mode:?}");
            let mut loaded = lab.load(&layer, 17)?;
            exact_zeros(&loaded.forward_f32(&batch.inputs())?, &what)?;
            ensure!(loaded.forward_bf16(&batch.inputs())?.iter().all(|y| y.to_bits() == 0), "{what}: not zero in bf16");
            let before: Vec<f32> = (0..17 * HIDDEN).map(|i| i as f32 * 0.5 - 3.0).collect();
            let mut kept = before.clone();
            loaded.forward(&batch.inputs(), OutputRows::F32(&mut kept), true)?;
            same_bits(&kept, &before, &format!("{what}, accumulating"))?;
        }
    }
    Ok(())
}

pub(super) fn one_expert_a_token(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for tokens in [1, 37] {
            let layer = Layer::new([96, 80, 8, 1], SWIGLU, mode);
            let batch = Batch::new(&layer.spec.shape, tokens, 15);
            // As many slots as tokens.
            let ids: Vec<_> = (0..tokens as i32).map(|token| token * 3 % 8).collect();
            lab.check(&layer, &batch.with_ids(ids), &format!("topk 1, {tokens} tokens, {mode:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn sum_over_ranks(lab: &Lab<'_>) -> Result<()> {
    for mode in [ScaleMode::Static, ScaleMode::PerToken] {
        let layer = Layer::new([96, 80, 13, 4], SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 41, 16);
        let whole: Vec<f64> = lab.forward(&layer, &batch)?.into_iter().map(f64::from).collect();
        for ranks in [2, 3, 5, 13, 16] {
            let mut sum = vec![0f32; whole.len()];
            for rank in 0..ranks {
                let range = ExpertRange::of_rank(13, ranks, rank)?;
                let part = lab.forward(&layer.clone().on_rank(range), &batch)?;
                sum.iter_mut().zip(part).for_each(|(sum, y)| *sum += y);
            }
            // The same products, added in another order: f32 rounding only, no code can differ.
            let worst = reference::row_errors(&sum, &whole, HIDDEN).into_iter().fold(0.0, f64::max);
            ensure!(worst <= reference::CLOSE, "{ranks} ranks, {mode:?}: a row is off by {worst:e}");
        }
    }
    Ok(())
}

/// Adding to the output: one rounding of (held + result), and tokens without local experts keep their bits, NaN too.
pub(super) fn accumulate(lab: &Lab<'_>) -> Result<()> {
    let range = ExpertRange { first: 2, count: 3 };
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode).on_rank(range);
        let batch = Batch::new(&layer.spec.shape, 22, 17).with_ids(odd_ids(22));
        let nobody = without_experts(&batch, range);
        let mut loaded = lab.load(&layer, 30)?;
        let fresh = loaded.forward_f32(&batch.inputs())?;
        let held = |i: usize| if nobody.contains(&(i / HIDDEN)) { f32::NAN } else { i as f32 * 0.01 - 7.0 };

        let before: Vec<f32> = (0..fresh.len()).map(held).collect();
        let mut out = before.clone();
        loaded.forward(&batch.inputs(), OutputRows::F32(&mut out), true)?;
        let expected: Vec<f32> = before
            .iter()
            .zip(&fresh)
            .enumerate()
            .map(|(i, (held, y))| if nobody.contains(&(i / HIDDEN)) { *held } else { held + y })
            .collect();
        same_bits(&out, &expected, &format!("accumulating in f32, {mode:?}"))?;

        let before: Vec<bf16> = (0..fresh.len()).map(|i| bf16::from_f32(held(i))).collect();
        let mut out = before.clone();
        loaded.forward(&batch.inputs(), OutputRows::Bf16(&mut out), true)?;
        for (i, (out, (before, y))) in out.iter().zip(before.iter().zip(&fresh)).enumerate() {
            let kept = nobody.contains(&(i / HIDDEN));
            let expected = if kept { *before } else { bf16::from_f32(before.to_f32() + y) };
            ensure!(
                out.to_bits() == expected.to_bits(),
                "accumulating in bf16, {mode:?}: element {i} is {out}, but {expected} was expected"
            );
        }
    }
    Ok(())
}
