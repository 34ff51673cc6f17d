//! What one rank computes of one layer: all that an engine must know besides the weights.

use crate::activation::Activation;
use crate::checkpoint::{CheckpointError, InputScales, LayerView};
use crate::io::ScaleMode;
use crate::shape::{ExpertRange, MoeShape, ShapeError};

/// What one rank computes of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    /// Sizes of the layer, all ranks together.
    pub shape: MoeShape,
    /// The experts of this rank.
    pub experts: ExpertRange,
    /// What happens between the two GEMMs.
    pub activation: Activation,
    /// Where the activations' scales come from.
    pub scales: ScaleMode,
    /// Whether all experts of the rank have the same input scale for gate and up: then (and in the modes without
    /// static scales) a token is quantized once, otherwise once for each of its slots.
    pub shared_l1_scale: bool,
}

impl LayerSpec {
    /// What `experts` of a checkpoint's layer compute, with `topk` experts a token.
    ///
    /// `scales: None` means static scales where every expert of the rank carries its input scales, per token otherwise.
    ///
    /// # Errors
    /// [`CheckpointError`]: static scales asked for but missing, or a bad scale; a size that is not allowed.
    pub fn of_layer(
        layer: &LayerView<'_>,
        topk: usize,
        experts: ExpertRange,
        scales: Option<ScaleMode>,
    ) -> Result<Self, CheckpointError> {
        let info = layer.info();
        let in_layer = |source: ShapeError| CheckpointError::Shape { layer: info.index, source };
        let shape = layer.shape(topk).map_err(in_layer)?;
        let complete = info.l1_input_scales == InputScales::All && info.l2_input_scales == InputScales::All;
        let scales = scales.unwrap_or(if complete { ScaleMode::Static } else { ScaleMode::PerToken });
        let shared_l1_scale = scales != ScaleMode::Static || layer.static_input_scales(experts)?.l1_all_equal;
        Ok(Self { shape, experts, activation: layer.activation(), scales, shared_l1_scale })
    }

    /// Whether the first GEMM's activations have a row a token (gathered by the GEMM) rather than a row a slot.
    #[must_use]
    pub fn quantizes_tokens(&self) -> bool {
        self.scales != ScaleMode::Static || self.shared_l1_scale
    }
}
