//! Finds the experts' tensors by name while the headers are read, and puts them into order.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;

use super::error::CheckpointError;
use super::layers::{ExpertTensors, Layer};
use super::model_config::ModelConfig;
use super::naming::{self, Convention, ExpertPart, Part, Projection, ProjectionNames};
use super::shards::{Shards, TensorEntry, TensorId};

/// Collects expert tensors while the headers are read: one call per tensor, each of constant cost.
#[derive(Debug, Default)]
pub(super) struct LayerBuilder {
    by_module: HashMap<String, usize>,
    layers: Vec<Collected>,
}

#[derive(Debug)]
struct Collected {
    index: usize,
    module: String,
    names: Option<ProjectionNames>,
    experts: BTreeMap<usize, ExpertTensors>,
    decode_scales: usize,
    reciprocal_scales: usize,
    gated: bool,
    unsupported: Option<String>,
    /// Kinds of tensors met, for saying what a layer is that is not NVFP4.
    samples: Vec<(String, Dtype)>,
}

/// Kinds of tensors that are remembered per layer.
const MAX_SAMPLES: usize = 6;

impl LayerBuilder {
    /// Takes note of a tensor, if it is an expert's.
    pub(super) fn add(&mut self, name: &str, id: TensorId, entry: &TensorEntry) {
        let Some(parsed) = naming::parse(name) else {
            return;
        };
        let at = match self.by_module.get(parsed.module) {
            Some(&at) => at,
            None => {
                let at = self.layers.len();
                self.by_module.insert(parsed.module.to_owned(), at);
                self.layers.push(Collected::new(parsed.layer, parsed.module));
                at
            }
        };
        self.layers[at].add(name, parsed.rest, parsed.expert, id, entry);
    }

    /// The layers in ascending order, checked.
    pub(super) fn finish(self, shards: &Shards, config: Option<&ModelConfig>) -> Result<Vec<Layer>, CheckpointError> {
        let mut modules: HashMap<usize, &str> = HashMap::with_capacity(self.layers.len());
        for layer in &self.layers {
            match modules.entry(layer.index) {
                Entry::Vacant(slot) => {
                    slot.insert(&layer.module);
                }
                Entry::Occupied(other) => {
                    return Err(CheckpointError::AmbiguousLayer {
                        layer: layer.index,
                        first: (*other.get()).to_owned(),
                        second: layer.module.clone(),
                    });
                }
            }
        }
        let mut collected = self.layers;
        collected.sort_unstable_by_key(|layer| layer.index);
        let most = collected
            .iter()
            .filter(|layer| layer.convention().is_some())
            .map(|layer| (layer.experts.len(), layer.index))
            .max_by_key(|&(experts, index)| (experts, std::cmp::Reverse(index)));
        let mut layers = Vec::with_capacity(collected.len());
        for layer in collected {
            let mut layer = layer.numbered(config)?;
            layer.check(shards, config)?;
            if let Some((expected, other_layer)) = most
                && layer.convention.is_some()
                && layer.experts.len() < expected
            {
                return Err(CheckpointError::UnevenExperts {
                    layer: layer.index,
                    found: layer.experts.len(),
                    other_layer,
                    expected,
                });
            }
            layers.push(layer);
        }
        Ok(layers)
    }
}

impl Collected {
    fn new(index: usize, module: &str) -> Self {
        Self {
            index,
            module: module.to_owned(),
            names: None,
            experts: BTreeMap::new(),
            decode_scales: 0,
            reciprocal_scales: 0,
            gated: false,
            unsupported: None,
            samples: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, rest: &str, expert: Option<ExpertPart>, id: TensorId, entry: &TensorEntry) {
        let sample = match expert {
            Some(_) => rest.splitn(3, '.').last().unwrap_or(rest),
            None => rest,
        };
        if self.samples.len() < MAX_SAMPLES && !self.samples.iter().any(|(known, _)| known == sample) {
            self.samples.push((sample.to_owned(), entry.dtype));
        }
        let Some(found) = expert else { return };
        if *self.names.get_or_insert(found.names) != found.names {
            return;
        }
        let tensors = self.experts.entry(found.expert).or_default();
        self.gated |= found.projection == Projection::Gate;
        match found.part {
            None => return,
            Some(Part::WeightScale2) => self.decode_scales += 1,
            Some(Part::WeightGlobalScale) => self.reciprocal_scales += 1,
            Some(Part::Bias | Part::PreQuantScale) if self.unsupported.is_none() => {
                self.unsupported = Some(name.to_owned());
            }
            Some(_) => {}
        }
        if let Some(part) = found.part {
            tensors.set(found.projection, part, id);
        }
    }

    fn convention(&self) -> Option<Convention> {
        match (self.decode_scales, self.reciprocal_scales) {
            (0, 0) => None,
            (decode, reciprocal) if decode >= reciprocal => Some(Convention::Decode),
            _ => Some(Convention::Reciprocal),
        }
    }

    /// Turns expert numbers into positions, once they are known to be 0, 1, 2, ….
    fn numbered(self, config: Option<&ModelConfig>) -> Result<Layer, CheckpointError> {
        let convention = self.convention();
        let mut layer = Layer {
            index: self.index,
            names: self.names.unwrap_or(ProjectionNames::Proj),
            convention,
            found: describe(&self.samples),
            gated: self.gated,
            hidden: 0,
            intermediate: 0,
            experts: Vec::with_capacity(self.experts.len()),
            unsupported: self.unsupported,
            module: self.module,
        };
        let Some(convention) = convention else {
            layer.experts = self.experts.into_values().collect();
            return Ok(layer);
        };
        let have = self.experts.len();
        let (expected, because) = match config.and_then(ModelConfig::experts) {
            Some(experts) => (experts, "as config.json says"),
            None => (
                self.experts.last_key_value().map_or(0, |(last, _)| last.saturating_add(1)),
                "as the highest expert number says",
            ),
        };
        let gap = self.experts.keys().zip(0..).find(|&(&number, at)| number != at);
        let missing = match gap {
            Some((_, at)) => Some(at),
            None => (have < expected).then_some(have),
        };
        if let Some(expert) = missing {
            let first = if self.gated { Projection::Gate } else { Projection::Up };
            return Err(CheckpointError::MissingExpert {
                layer: self.index,
                expert,
                tensor: layer.tensor_name(expert, first, Part::codes(convention)),
                have,
                expected,
                because,
            });
        }
        if have > expected {
            return Err(CheckpointError::ConfigMismatch {
                layer: self.index,
                key: config.map_or("num_experts", ModelConfig::experts_key),
                config: expected.to_string(),
                tensors: format!("{have} experts"),
            });
        }
        layer.experts = self.experts.into_values().collect();
        Ok(layer)
    }
}

/// A phrase for tensors that are not NVFP4.
fn describe(samples: &[(String, Dtype)]) -> String {
    let has = |name: &str, dtype: Dtype| samples.iter().any(|(n, d)| n == name && *d == dtype);
    let mx_scales = samples.iter().any(|(_, dtype)| *dtype == Dtype::F8_E8M0)
        || samples.iter().any(|(name, _)| name.ends_with("_blocks"));
    let kind = if mx_scales {
        "MXFP4 or MXFP8 experts"
    } else if samples.iter().any(|(name, _)| name.ends_with("weight_scale_inv")) {
        "FP8 experts with F32 block scales"
    } else if has("weight", Dtype::F8_E4M3) {
        "FP8 experts"
    } else if has("weight", Dtype::BF16) || has("weight", Dtype::F16) || has("weight", Dtype::F32) {
        "unquantized experts"
    } else if has("weight_packed", Dtype::I32) || samples.iter().any(|(name, _)| name == "qweight") {
        "experts quantized to integers"
    } else if samples.iter().any(|(name, _)| name.starts_with("gate_up_proj")) {
        "all experts fused into one tensor"
    } else {
        "experts in another format"
    };
    let list: Vec<_> = samples.iter().map(|(name, dtype)| format!("{name} {dtype}")).collect();
    format!("{kind} ({})", list.join(", "))
}
