//! What a layer holds, for people and for choosing an activation scale mode.

use std::fmt;

use super::layers::Layer;
use super::naming::{Convention, NamingStyle, Part, Projection};
use super::shards::Shards;

/// Element format of a layer's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertFormat {
    /// E2M1 codes with UE4M3 block scales of 16 and an f32 global scale.
    Nvfp4,
    /// Anything else, in words; such a layer is listed, but cannot be used.
    Other(String),
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nvfp4 => f.write_str("NVFP4"),
            Self::Other(found) => f.write_str(found),
        }
    }
}

/// How many of the matrices that share a kind of input carry an activation scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InputScales {
    /// Every one.
    All,
    /// At least one, and at least one without.
    Some,
    /// Not one.
    None,
}

impl fmt::Display for InputScales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Some => "some",
            Self::None => "none",
        })
    }
}

/// One Mixture-of-Experts layer of a checkpoint. The numbers of a layer that is not NVFP4 are 0.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerInfo {
    /// The layer's number in the model.
    pub index: usize,
    /// The module that holds the experts, such as `model.layers.0.mlp.experts`.
    pub module: String,
    /// How the tensors are named; `None` when they are not NVFP4.
    pub style: Option<NamingStyle>,
    /// Element format.
    pub format: ExpertFormat,
    /// Experts.
    pub experts: usize,
    /// Elements of a token's hidden state.
    pub hidden: usize,
    /// Elements between the two matrix products.
    pub intermediate: usize,
    /// Whether experts have a gate projection.
    pub gated: bool,
    /// Activation scales of the gate and up projections.
    pub l1_input_scales: InputScales,
    /// Activation scales of the down projections.
    pub l2_input_scales: InputScales,
    /// Whether the activation scales of gate and up differ in some expert; the larger one is used.
    pub gate_up_differ: bool,
    /// Whether every expert has the same L1 activation scale (the larger of gate and up), so that a token is
    /// quantized once. False when one is missing.
    pub l1_all_equal: bool,
    /// Bytes of codes and block scales.
    pub nvfp4_bytes: u64,
}

impl LayerInfo {
    pub(super) fn of(layer: &Layer, shards: &Shards) -> Self {
        let Some(convention) = layer.convention else {
            return Self {
                index: layer.index,
                module: layer.module.clone(),
                style: None,
                format: ExpertFormat::Other(layer.found.clone()),
                experts: layer.experts.len(),
                hidden: 0,
                intermediate: 0,
                gated: layer.gated,
                l1_input_scales: InputScales::None,
                l2_input_scales: InputScales::None,
                gate_up_differ: false,
                l1_all_equal: false,
                nvfp4_bytes: 0,
            };
        };
        let mut l1 = Presence::default();
        let mut l2 = Presence::default();
        let mut gate_up_differ = false;
        let mut l1_all_equal = true;
        let mut l1_first = None;
        for expert in 0..layer.experts.len() {
            let scale = |projection| stored_input_scale(layer, shards, convention, expert, projection);
            let up = scale(Projection::Up);
            l1.count(up);
            let shared = if layer.gated {
                let gate = scale(Projection::Gate);
                l1.count(gate);
                gate_up_differ |= gate.zip(up).is_some_and(|(gate, up)| gate != up);
                gate.zip(up).map(|(gate, up)| larger_decode(convention, gate, up))
            } else {
                up
            };
            l1_all_equal &= shared.is_some() && *l1_first.get_or_insert(shared) == shared;
            l2.count(scale(Projection::Down));
        }
        let elems = layer.hidden as u64 * layer.intermediate as u64;
        let matrices = (layer.experts.len() * layer.projections().len()) as u64;
        Self {
            index: layer.index,
            module: layer.module.clone(),
            style: layer.style(),
            format: ExpertFormat::Nvfp4,
            experts: layer.experts.len(),
            hidden: layer.hidden,
            intermediate: layer.intermediate,
            gated: layer.gated,
            l1_input_scales: l1.summary(),
            l2_input_scales: l2.summary(),
            gate_up_differ,
            l1_all_equal,
            nvfp4_bytes: matrices * (elems / 2 + elems / 16),
        }
    }
}

/// The activation scale as it is stored; it is checked where it is used.
fn stored_input_scale(
    layer: &Layer,
    shards: &Shards,
    convention: Convention,
    expert: usize,
    projection: Projection,
) -> Option<f32> {
    let id = layer.experts[expert].get(projection, Part::input_global(convention))?;
    Some(shards.scalar(id))
}

/// The stored value of the larger decode scale.
fn larger_decode(convention: Convention, gate: f32, up: f32) -> f32 {
    match convention {
        Convention::Decode => gate.max(up),
        Convention::Reciprocal => gate.min(up),
    }
}

#[derive(Default)]
struct Presence {
    there: usize,
    missing: usize,
}

impl Presence {
    fn count(&mut self, scale: Option<f32>) {
        match scale {
            Some(_) => self.there += 1,
            None => self.missing += 1,
        }
    }

    fn summary(&self) -> InputScales {
        match (self.there, self.missing) {
            (0, _) => InputScales::None,
            (_, 0) => InputScales::All,
            _ => InputScales::Some,
        }
    }
}
