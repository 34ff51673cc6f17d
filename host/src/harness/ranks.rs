//! The ranks of an expert-parallel group, one after the other on one device.

use super::{HarnessError, Runner};
use crate::activation::Activation;
use crate::checkpoint::LayerView;
use crate::io::{Inputs, ScaleMode};
use crate::memory;
use crate::shape::ExpertRange;
use crate::spec::LayerSpec;

/// What to compute of a checkpoint's layer: what a caller says beside what the checkpoint says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerRequest {
    /// Experts a token.
    pub topk: usize,
    /// Scales of the activations; `None` means static where the checkpoint has them, else per token.
    pub scales: Option<ScaleMode>,
    /// Instead of the checkpoint's activation.
    pub activation: Option<Activation>,
}

impl LayerRequest {
    /// The part of the layer that `experts` compute.
    ///
    /// # Errors
    /// [`HarnessError::Checkpoint`] as [`LayerSpec::of_layer`], [`HarnessError::Activation`].
    pub fn spec(&self, layer: &LayerView<'_>, experts: ExpertRange) -> Result<LayerSpec, HarnessError> {
        let mut spec = LayerSpec::of_layer(layer, self.topk, experts, self.scales)?;
        if let Some(activation) = self.activation {
            spec.activation = activation.validated()?;
        }
        Ok(spec)
    }
}

/// Runs every rank of a group of `ranks` in turn, each with f32 output, and sums them in f32 in the order of the ranks.
/// Returns the sum and the milliseconds of each rank's forward.
///
/// `progress` is told (experts done, experts of the layer).
///
/// # Errors
/// [`HarnessError`] as loading and running one rank.
pub fn run_ranks(
    runner: &Runner,
    layer: &LayerView<'_>,
    request: &LayerRequest,
    ranks: usize,
    inputs: &Inputs<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Vec<f32>, Vec<f64>), HarnessError> {
    let experts = layer.experts();
    // Also finds out that there are no ranks, or too many.
    ExpertRange::of_rank(experts, ranks, 0)?;
    let mut sum: Vec<f32> = memory::zeros("the sum over ranks", inputs.hidden.len())?;
    let mut forward_ms = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let range = ExpertRange::of_rank(experts, ranks, rank)?;
        let spec = request.spec(layer, range)?;
        let tokens = inputs.checked_tokens(spec.shape.hidden, spec.shape.topk)?;
        let mut loaded = runner.load(&spec, layer, tokens, &mut |done, _| progress(range.first + done, experts))?;
        let part = loaded.forward_f32(inputs)?;
        forward_ms.push(loaded.forward_ms());
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    Ok((sum, forward_ms))
}
