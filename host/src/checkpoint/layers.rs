//! The experts of a layer by projection and part, and the checks that need no tensor data.

use safetensors::Dtype;

use super::error::CheckpointError;
use super::model_config::ModelConfig;
use super::naming::{Convention, NamingStyle, Part, Projection, ProjectionNames};
use super::shards::{Shards, TensorEntry, TensorId};
use crate::shape::check_blocks;

/// The tensors of one expert, by projection and part.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ExpertTensors([[Option<TensorId>; Part::ALL.len()]; Projection::ALL.len()]);

impl ExpertTensors {
    pub(super) fn get(&self, projection: Projection, part: Part) -> Option<TensorId> {
        self.0[projection as usize][part as usize]
    }

    /// All there are.
    pub(super) fn ids(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.0.iter().flatten().copied().flatten()
    }

    pub(super) fn set(&mut self, projection: Projection, part: Part, tensor: TensorId) {
        self.0[projection as usize][part as usize] = Some(tensor);
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
    pub(super) unsupported: Option<String>,
}

impl Layer {
    pub(super) fn style(&self) -> Option<NamingStyle> {
        Some(match self.convention? {
            Convention::Reciprocal => NamingStyle::CompressedTensors,
            Convention::Decode if self.names == ProjectionNames::W && self.module.ends_with(".ffn.experts") => {
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
        if self.gated { &Projection::ALL } else { &[Projection::Up, Projection::Down] }
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

    pub(super) fn check(&mut self, shards: &Shards, config: Option<&ModelConfig>) -> Result<(), CheckpointError> {
        let Some(convention) = self.convention else {
            return Ok(());
        };
        self.derive_sizes(shards, convention)?;
        for (axis, size) in [("hidden", self.hidden), ("intermediate", self.intermediate)] {
            check_blocks(axis, size).map_err(|source| CheckpointError::Shape { layer: self.index, source })?;
        }
        for expert in 0..self.experts.len() {
            for &projection in self.projections() {
                self.check_matrix(shards, convention, expert, projection)?;
            }
        }
        let Some(config) = config else {
            return Ok(());
        };
        config.check_sizes(self.index, self.hidden, self.intermediate)?;
        config.check_topk(self.index, self.experts.len())
    }

    /// Takes hidden and intermediate from the first expert. Its tensors vote, so that one of a wrong shape is
    /// reported as that tensor and not as all the others.
    fn derive_sizes(&mut self, shards: &Shards, convention: Convention) -> Result<(), CheckpointError> {
        let mut votes: Vec<((usize, usize), usize)> = Vec::new();
        for (part, elems) in [(Part::codes(convention), 2), (Part::WeightScale, 16)] {
            for &projection in self.projections() {
                let shape = self.experts[0].get(projection, part).map(|id| &*shards.entry(id).shape);
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
            None => CheckpointError::MissingTensor { tensor, layer: self.index, expert: 0 },
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
            let TensorEntry { dtype: found, shape, .. } = shards.entry(id);
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
        check(Part::weight_global(convention), f32, "F32", Wanted::Scalar, true)?;
        check(Part::input_global(convention), f32, "F32", Wanted::Scalar, false)
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
            Self::Codes(rows, columns) | Self::BlockScales(rows, columns) => shape == [rows, columns],
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
