//! The experts' tensors by layer, expert, projection and part, and the checks that need no tensor data.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;

use super::error::CheckpointError;
use super::model_config::ModelConfig;
use super::naming::{self, Convention, ExpertPart, NamingStyle, Part, Projection, ProjectionNames};
use super::shards::{Shards, TensorEntry, TensorId};
use crate::shape::check_blocks;

/// The tensors of one expert, by projection and part.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ExpertTensors([[Option<TensorId>; Part::ALL.len()]; Projection::ALL.len()]);

impl ExpertTensors {
    pub(super) fn get(&self, projection: Projection, part: Part) -> Option<TensorId> {
        self.0[projection as usize][part as usize]
    }
}

/// The experts of one layer, as far as their names, dtypes and shapes tell.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) index: usize,
    /// The module that holds the experts; their names start with it.
    pub(super) module: String,
    pub(super) names: ProjectionNames,
    /// `None`: not NVFP4; then only `found` is of interest.
    pub(super) convention: Option<Convention>,
    /// What the layer's tensors are, when they are not NVFP4.
    pub(super) found: String,
    pub(super) gated: bool,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) experts: Vec<ExpertTensors>,
    /// First tensor that no code here knows how to apply.
    unsupported: Option<String>,
}

impl Layer {
    pub(super) fn style(&self) -> Option<NamingStyle> {
        Some(match self.convention? {
            Convention::Reciprocal => NamingStyle::CompressedTensors,
            Convention::Decode
                if self.names == ProjectionNames::W && self.module.ends_with(".ffn.experts") =>
            {
                NamingStyle::DeepSeekV4
            }
            Convention::Decode => NamingStyle::ModelOpt,
        })
    }

    pub(super) fn tensor_name(&self, expert: usize, projection: Projection, part: Part) -> String {
        let (module, projection) = (&self.module, self.names.name(projection));
        format!("{module}.{expert}.{projection}.{}", part.name())
    }

    /// The matrices that each expert has.
    pub(super) fn projections(&self) -> &'static [Projection] {
        if self.gated {
            &Projection::ALL
        } else {
            &[Projection::Up, Projection::Down]
        }
    }

    /// Rows and columns (elements along K) of a matrix.
    pub(super) fn matrix_shape(&self, projection: Projection) -> (usize, usize) {
        match projection {
            Projection::Gate | Projection::Up => (self.intermediate, self.hidden),
            Projection::Down => (self.hidden, self.intermediate),
        }
    }

    /// A tensor that would change the result and that is not implemented.
    pub(super) fn check_supported(&self) -> Result<(), CheckpointError> {
        match &self.unsupported {
            None => Ok(()),
            Some(tensor) => Err(CheckpointError::UnsupportedTensor {
                tensor: tensor.clone(),
                why: "expert biases and activation pre-scales are not implemented",
            }),
        }
    }

    fn check(
        &mut self,
        shards: &Shards,
        config: Option<&ModelConfig>,
    ) -> Result<(), CheckpointError> {
        let Some(convention) = self.convention else {
            return Ok(());
        };
        self.derive_sizes(shards, convention)?;
        for (axis, size) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            check_blocks(axis, size).map_err(|source| CheckpointError::Shape {
                layer: self.index,
                source,
            })?;
        }
        for expert in 0..self.experts.len() {
            for &projection in self.projections() {
                self.check_matrix(shards, convention, expert, projection)?;
            }
        }
        config.map_or(Ok(()), |config| {
            config.check_sizes(self.index, self.hidden, self.intermediate)
        })
    }

    /// Takes hidden and intermediate from the first expert. Its tensors vote, so that one of a wrong shape is
    /// reported as that tensor and not as all the others.
    fn derive_sizes(
        &mut self,
        shards: &Shards,
        convention: Convention,
    ) -> Result<(), CheckpointError> {
        let mut votes: Vec<((usize, usize), usize)> = Vec::new();
        for (part, elems) in [(Part::codes(convention), 2), (Part::WeightScale, 16)] {
            for &projection in self.projections() {
                let shape = self.experts[0]
                    .get(projection, part)
                    .map(|id| &*shards.entry(id).shape);
                let Some(&[rows, columns]) = shape else {
                    continue;
                };
                let cols = columns.saturating_mul(elems);
                let sizes = match projection {
                    Projection::Gate | Projection::Up => (cols, rows),
                    Projection::Down => (rows, cols),
                };
                match votes.iter_mut().find(|(voted, _)| *voted == sizes) {
                    Some((_, count)) => *count += 1,
                    None => votes.push((sizes, 1)),
                }
            }
        }
        // Of equal counts the first wins: codes are heard before scales.
        let best = votes.iter().rev().max_by_key(|(_, count)| *count);
        if let Some(&((hidden, intermediate), _)) = best {
            (self.hidden, self.intermediate) = (hidden, intermediate);
            return Ok(());
        }
        // No tensor with two axes: say so of the first one.
        let (projection, part) = (Projection::Up, Part::codes(convention));
        let tensor = self.tensor_name(0, projection, part);
        Err(match self.experts[0].get(projection, part) {
            None => CheckpointError::MissingTensor {
                tensor,
                layer: self.index,
                expert: 0,
            },
            Some(id) => CheckpointError::WrongShape {
                tensor,
                expected: "[N, K/2]".to_owned(),
                meaning: "rows, packed pairs",
                found: shards.entry(id).shape.to_vec(),
            },
        })
    }

    fn check_matrix(
        &self,
        shards: &Shards,
        convention: Convention,
        expert: usize,
        projection: Projection,
    ) -> Result<(), CheckpointError> {
        let (rows, cols) = self.matrix_shape(projection);
        let check = |part: Part, dtype, dtype_name, wanted: Wanted, required: bool| {
            let Some(id) = self.experts[expert].get(projection, part) else {
                return if required {
                    Err(CheckpointError::MissingTensor {
                        tensor: self.tensor_name(expert, projection, part),
                        layer: self.index,
                        expert,
                    })
                } else {
                    Ok(())
                };
            };
            let TensorEntry {
                dtype: found,
                shape,
                ..
            } = shards.entry(id);
            if *found != dtype {
                return Err(CheckpointError::WrongDtype {
                    tensor: self.tensor_name(expert, projection, part),
                    expected: dtype_name,
                    found: *found,
                });
            }
            if !wanted.fits(shape) {
                return Err(CheckpointError::WrongShape {
                    tensor: self.tensor_name(expert, projection, part),
                    expected: wanted.text(),
                    meaning: wanted.meaning(),
                    found: shape.to_vec(),
                });
            }
            Ok(())
        };
        let codes = Wanted::Codes(rows, cols / 2);
        let scales = Wanted::BlockScales(rows, cols / 16);
        let (f8, f32) = (Dtype::F8_E4M3, Dtype::F32);
        check(Part::codes(convention), Dtype::U8, "U8", codes, true)?;
        check(Part::WeightScale, f8, "F8_E4M3", scales, true)?;
        check(
            Part::weight_global(convention),
            f32,
            "F32",
            Wanted::Scalar,
            true,
        )?;
        check(
            Part::input_global(convention),
            f32,
            "F32",
            Wanted::Scalar,
            false,
        )
    }
}

/// The shape that a tensor must have.
#[derive(Clone, Copy)]
enum Wanted {
    Codes(usize, usize),
    BlockScales(usize, usize),
    Scalar,
}

impl Wanted {
    fn fits(self, shape: &[usize]) -> bool {
        match self {
            Self::Codes(rows, columns) | Self::BlockScales(rows, columns) => {
                shape == [rows, columns]
            }
            Self::Scalar => matches!(shape, [] | [1]),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Codes(rows, columns) | Self::BlockScales(rows, columns) => {
                format!("[{rows}, {columns}]")
            }
            Self::Scalar => "[] or [1]".to_owned(),
        }
    }

    const fn meaning(self) -> &'static str {
        match self {
            Self::Codes(..) => "rows, bytes of two codes",
            Self::BlockScales(..) => "rows, blocks of 16 elements",
            Self::Scalar => "one number for the whole matrix",
        }
    }
}

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
                self.layers
                    .push(Collected::new(parsed.layer, parsed.module));
                at
            }
        };
        self.layers[at].add(name, parsed.rest, parsed.expert, id, entry);
    }

    /// The layers in ascending order, checked.
    pub(super) fn finish(
        self,
        shards: &Shards,
        config: Option<&ModelConfig>,
    ) -> Result<Vec<Layer>, CheckpointError> {
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

    fn add(
        &mut self,
        name: &str,
        rest: &str,
        expert: Option<ExpertPart>,
        id: TensorId,
        entry: &TensorEntry,
    ) {
        let sample = match expert {
            Some(_) => rest.splitn(3, '.').last().unwrap_or(rest),
            None => rest,
        };
        if self.samples.len() < MAX_SAMPLES
            && !self.samples.iter().any(|(known, _)| known == sample)
        {
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
            tensors.0[found.projection as usize][part as usize] = Some(id);
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
                self.experts
                    .last_key_value()
                    .map_or(0, |(last, _)| last.saturating_add(1)),
                "as the highest expert number says",
            ),
        };
        let gap = self
            .experts
            .keys()
            .zip(0..)
            .find(|&(&number, at)| number != at);
        let missing = match gap {
            Some((_, at)) => Some(at),
            None => (have < expected).then_some(have),
        };
        if let Some(expert) = missing {
            let first = if self.gated {
                Projection::Gate
            } else {
                Projection::Up
            };
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
    } else if samples
        .iter()
        .any(|(name, _)| name.ends_with("weight_scale_inv"))
    {
        "FP8 experts with F32 block scales"
    } else if has("weight", Dtype::F8_E4M3) {
        "FP8 experts"
    } else if has("weight", Dtype::BF16) || has("weight", Dtype::F16) || has("weight", Dtype::F32) {
        "unquantized experts"
    } else if has("weight_packed", Dtype::I32) || samples.iter().any(|(name, _)| name == "qweight")
    {
        "experts quantized to integers"
    } else if samples
        .iter()
        .any(|(name, _)| name.starts_with("gate_up_proj"))
    {
        "all experts fused into one tensor"
    } else {
        "experts in another format"
    };
    let list: Vec<_> = samples
        .iter()
        .map(|(name, dtype)| format!("{name} {dtype}"))
        .collect();
    format!("{kind} ({})", list.join(", "))
}
