//! Rows of a measured batch, computed again by the CPU engine.

use nvfp4_moe::checkpoint::RawExpert;
use nvfp4_moe::harness::{Comparison, Runner, Target};
use nvfp4_moe::io::{HiddenRows, Inputs};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{ExpertSource, SourceError};
use rand::{SeedableRng, rngs::StdRng};

/// Rows that are computed again.
pub(super) const SAMPLE_TOKENS: usize = 4;

/// Some experts of a source, numbered anew.
struct Chosen<'a> {
    source: &'a dyn ExpertSource,
    ids: Vec<usize>,
}

impl ExpertSource for Chosen<'_> {
    fn expert(&self, index: usize) -> Result<RawExpert<'_>, SourceError> {
        self.source.expert(self.ids[index])
    }
}

/// Relative L2 distance between `output`, `[tokens, hidden]`, and the CPU engine's result in a sample of rows. Only the
/// experts of those rows are loaded.
pub(super) fn rel_l2_of_sample(
    spec: &LayerSpec,
    source: &dyn ExpertSource,
    inputs: &Inputs<'_>,
    output: &[f32],
) -> anyhow::Result<f64> {
    let MoeShape { hidden, topk, .. } = spec.shape;
    let tokens = inputs.checked_tokens(hidden, topk)?;
    let mut sample =
        rand::seq::index::sample(&mut StdRng::seed_from_u64(1), tokens, tokens.min(SAMPLE_TOKENS)).into_vec();
    sample.sort_unstable();

    let mut ids: Vec<usize> =
        sample.iter().flat_map(|&token| &inputs.topk_ids[token * topk..][..topk]).map(|&id| id as usize).collect();
    let picks = ids.clone();
    ids.sort_unstable();
    ids.dedup();
    let topk_ids: Vec<i32> = picks.iter().filter_map(|id| ids.binary_search(id).ok()).map(|at| at as i32).collect();
    let chosen_spec = LayerSpec {
        shape: MoeShape { experts: ids.len(), ..spec.shape },
        experts: ExpertRange::all(ids.len()),
        ..*spec
    };
    let rows = |matrix: &[f32], width: usize| -> Vec<f32> {
        sample.iter().flat_map(|&token| &matrix[token * width..][..width]).copied().collect()
    };
    let HiddenRows::Bf16(all_hidden) = inputs.hidden else {
        anyhow::bail!("measured hidden states are bf16");
    };
    let sampled_hidden: Vec<_> =
        sample.iter().flat_map(|&token| &all_hidden[token * hidden..][..hidden]).copied().collect();
    let topk_weights = rows(inputs.topk_weights, topk);
    let sampled =
        Inputs { hidden: HiddenRows::Bf16(&sampled_hidden), topk_ids: &topk_ids, topk_weights: &topk_weights, topk };
    let source = Chosen { source, ids };
    let mut layer = Runner::new(Target::Cpu)?.load(&chosen_spec, &source, sample.len(), &mut |_, _| {})?;
    let expected = layer.forward_f32(&sampled)?;
    Ok(Comparison::new(&rows(output, hidden), &expected, hidden, 0.0).rel_l2)
}
