//! Experts without tokens: their weights and whatever memory they would have written must not matter.

use anyhow::Result;

use super::setup::{Batch, Lab, Layer, MODES, SWIGLU, exact_zeros, matches, same_bits};

/// The experts without tokens have weights that would drown everything; nothing changes.
pub(super) fn never_read(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for used in [[7, 7], [0, 129], [64, 1]] {
            let layer = Layer::new([96, 80, 130, 2], SWIGLU, mode);
            let batch = Batch::new(&layer.spec.shape, 3, 31).with_ids(used.into_iter().cycle().take(6));
            let mut loud = layer.clone();
            for (id, expert) in loud.experts.iter_mut().enumerate() {
                if !used.contains(&(id as i32)) {
                    for matrix in expert.matrices() {
                        matrix.codes.fill(0x77);
                        matrix.scales.fill(0x7E);
                        matrix.weight_scale = 3e38;
                    }
                }
            }
            let what = format!("experts {used:?}, {mode:?}");
            let got = lab.forward(&layer, &batch)?;
            matches(&layer.expected(&batch.inputs()), &got, &what)?;
            same_bits(&lab.forward(&loud, &batch)?, &got, &format!("{what}, the others loud"))?;
        }
    }
    Ok(())
}

pub(super) fn none_has_tokens(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new([96, 80, 36, 4], SWIGLU, mode);
        let mut loaded = lab.load(&layer, 50)?;
        let batch = Batch::new(&layer.spec.shape, 50, 32);
        // Once with tokens, so that the workspace holds plausible values, then without.
        matches(&layer.expected(&batch.inputs()), &loaded.forward_f32(&batch.inputs())?, "all experts")?;
        loaded.set_poison(false);
        let nobody = batch.with_ids([-1; 200]);
        exact_zeros(&loaded.forward_f32(&nobody.inputs())?, &format!("no expert has tokens, {mode:?}"))?;
    }
    Ok(())
}
