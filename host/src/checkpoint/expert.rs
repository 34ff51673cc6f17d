//! A layer and its experts as they lie in the file, with global scales converted to decode scales.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use super::Checkpoint;
use super::error::CheckpointError;
use super::inspect::LayerInfo;
use super::layers::{ExpertTensors, Layer};
use super::naming::{Convention, Part, Projection};
use super::shards::TensorId;
use crate::activation::Activation;
use crate::shape::{ExpertRange, MoeShape, ShapeError};

/// One NVFP4 layer of an open checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct LayerView<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) layer: &'a Layer,
    pub(super) info: &'a LayerInfo,
    pub(super) convention: Convention,
    pub(super) activation: Activation,
}

/// One expert's matrices, borrowed from the memory map.
#[derive(Debug, Clone, Copy)]
pub struct RawExpert<'a> {
    /// `[intermediate, hidden]`; `None` when experts have no gate.
    pub gate: Option<RawMatrix<'a>>,
    /// `[intermediate, hidden]`.
    pub up: RawMatrix<'a>,
    /// `[hidden, intermediate]`.
    pub down: RawMatrix<'a>,
}

/// One NVFP4 matrix as stored: `value = code * block scale * weight_scale`.
#[derive(Debug, Clone, Copy)]
pub struct RawMatrix<'a> {
    /// Rows: outputs of the matrix product.
    pub rows: usize,
    /// Elements along K, in each row.
    pub cols: usize,
    /// E2M1 codes, two a byte, even element in the low nibble: `rows * cols / 2` bytes, row by row.
    pub codes: &'a [u8],
    /// UE4M3 block scales: `rows * cols / 16` bytes, row by row.
    pub scales: &'a [u8],
    /// Global decode scale of the weights: finite and above 0.
    pub weight_scale: f32,
    /// Global decode scale of the input, where the checkpoint has one: finite and above 0.
    pub input_scale: Option<f32>,
    /// Where the matrix comes from, for messages.
    pub origin: Origin<'a>,
}

/// Names a matrix in messages; the default is for matrices that come from no checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origin<'a> {
    /// Module that holds the experts; empty for none.
    pub module: &'a str,
    /// The expert's number.
    pub expert: usize,
    /// The matrix' name in the checkpoint, such as `up_proj` or `w3`.
    pub projection: &'a str,
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.module.is_empty() {
            return f.write_str("(unnamed matrix)");
        }
        let Self { module, expert, projection } = self;
        write!(f, "{module}.{expert}.{projection}")
    }
}

impl RawMatrix<'_> {
    /// Checks every block-scale byte, in one pass over them: 0x00 to 0x7e are allowed.
    ///
    /// # Errors
    /// [`CheckpointError::BadScaleByte`] for the first byte that is negative (bit 7) or NaN (0x7f).
    pub fn check_scales(&self) -> Result<(), CheckpointError> {
        self.check_scale_bytes(self.scales, 0)
    }

    /// [`Self::check_scales`] of some of them, or of a copy: those from byte `first` on.
    pub(crate) fn check_scale_bytes(&self, scales: &[u8], first: usize) -> Result<(), CheckpointError> {
        const LARGEST: u8 = 0x7e;
        const CHUNK: usize = 4096;
        // A maximum over a chunk is one instruction a vector; the search for the culprit comes after.
        for (chunk, scales) in scales.chunks(CHUNK).enumerate() {
            if scales.iter().fold(0, |max, &byte| byte.max(max)) <= LARGEST {
                continue;
            }
            let Some(within) = scales.iter().position(|&byte| byte > LARGEST) else {
                continue;
            };
            let at = first + chunk * CHUNK + within;
            let blocks = (self.cols / 16).max(1);
            return Err(CheckpointError::BadScaleByte {
                tensor: format!("{}.{}", self.origin, Part::WeightScale.name()),
                row: at / blocks,
                block: at % blocks,
                byte: scales[within],
            });
        }
        Ok(())
    }
}

/// Static activation scales of a range of experts: decode scales, finite and above 0.
#[derive(Debug, Clone, PartialEq)]
pub struct StaticScales {
    /// Scale of the hidden states for each expert of the range: the larger of gate's and up's.
    pub l1: Vec<f32>,
    /// Scale of the activation's result for each expert of the range.
    pub l2: Vec<f32>,
    /// Whether gate's and up's scales differ in some expert of the range.
    pub gate_up_differ: bool,
    /// Whether all of `l1` are equal, so that a token is quantized once; true for an empty range.
    pub l1_all_equal: bool,
}

impl<'a> LayerView<'a> {
    /// What the layer holds.
    #[must_use]
    pub fn info(&self) -> &'a LayerInfo {
        self.info
    }

    /// The layer's number in the model.
    #[must_use]
    pub fn index(&self) -> usize {
        self.layer.index
    }

    /// Experts of the layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.layer.experts.len()
    }

    /// Elements of a token's hidden state.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.layer.hidden
    }

    /// Elements between the two matrix products.
    #[must_use]
    pub fn intermediate(&self) -> usize {
        self.layer.intermediate
    }

    /// The activation, as config.json says; without one SwiGLU with a gate and ReLU^2 without.
    #[must_use]
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Experts per token, as config.json says.
    #[must_use]
    pub fn topk(&self) -> Option<usize> {
        self.checkpoint.topk()
    }

    /// The layer's sizes with `topk` experts per token.
    ///
    /// # Errors
    /// [`ShapeError`] when `topk` is not allowed.
    pub fn shape(&self, topk: usize) -> Result<MoeShape, ShapeError> {
        MoeShape::new(self.hidden(), self.intermediate(), self.experts(), topk)
    }

    /// One expert's matrices: slices of the memory map, nothing is copied. Block-scale bytes are not looked at;
    /// [`RawMatrix::check_scales`] does that.
    ///
    /// # Errors
    /// [`CheckpointError::ExpertNotFound`], or [`CheckpointError::BadScale`] for a global scale that is not finite
    /// and above 0.
    pub fn expert(&self, expert: usize) -> Result<RawExpert<'a>, CheckpointError> {
        self.check_expert(expert)?;
        let gate = if self.layer.gated { Some(self.matrix(expert, Projection::Gate)?) } else { None };
        Ok(RawExpert { gate, up: self.matrix(expert, Projection::Up)?, down: self.matrix(expert, Projection::Down)? })
    }

    /// Checks the global scales of every expert, as [`Self::expert`] does those of one.
    ///
    /// # Errors
    /// [`CheckpointError::BadScale`] for the first that is not finite and above 0.
    pub fn check_global_scales(&self) -> Result<(), CheckpointError> {
        (0..self.experts()).try_for_each(|expert| self.expert(expert).map(drop))
    }

    /// Says that an expert's tensors will be read soon: the system begins to read what is not in memory. Nothing happens
    /// for an expert that is not there.
    pub fn will_need(&self, expert: usize) {
        let tensors = self.layer.experts.get(expert);
        tensors.into_iter().flat_map(ExpertTensors::ids).for_each(|id| self.checkpoint.shards.will_need(id));
    }

    /// Files and places in them of an expert's tensors, for those who want to read them otherwise; none for an expert that
    /// is not there.
    pub fn places(&self, expert: usize) -> impl Iterator<Item = (&'a Path, Range<u64>)> + use<'a> {
        let (layer, shards) = (self.layer, &self.checkpoint.shards);
        layer.experts.get(expert).into_iter().flat_map(ExpertTensors::ids).map(|id| shards.place(id))
    }

    /// The activation scales of a range of experts, for static quantization.
    ///
    /// # Errors
    /// [`CheckpointError::ExpertNotFound`] for a range beyond the layer, [`CheckpointError::StaticScalesMissing`]
    /// when an expert has none, [`CheckpointError::BadScale`] when one is not finite and above 0.
    pub fn static_input_scales(&self, range: ExpertRange) -> Result<StaticScales, CheckpointError> {
        if !range.is_empty() {
            self.check_expert(range.first.saturating_add(range.count - 1))?;
        }
        let mut scales = StaticScales {
            l1: Vec::with_capacity(range.count),
            l2: Vec::with_capacity(range.count),
            gate_up_differ: false,
            l1_all_equal: true,
        };
        for expert in range.ids() {
            let required = |projection| {
                self.input_scale(expert, projection)?.ok_or_else(|| CheckpointError::StaticScalesMissing {
                    tensor: self.input_scale_name(expert, projection),
                })
            };
            let up = required(Projection::Up)?;
            let l1 = if self.layer.gated {
                let gate = required(Projection::Gate)?;
                scales.gate_up_differ |= gate != up;
                gate.max(up)
            } else {
                up
            };
            scales.l1.push(l1);
            scales.l2.push(required(Projection::Down)?);
        }
        scales.l1_all_equal = scales.l1.windows(2).all(|pair| pair[0] == pair[1]);
        Ok(scales)
    }

    fn check_expert(&self, expert: usize) -> Result<(), CheckpointError> {
        if expert < self.experts() {
            return Ok(());
        }
        Err(CheckpointError::ExpertNotFound { layer: self.layer.index, expert, have: self.experts() })
    }

    fn matrix(&self, expert: usize, projection: Projection) -> Result<RawMatrix<'a>, CheckpointError> {
        let (rows, cols) = self.layer.matrix_shape(projection);
        let shards = &self.checkpoint.shards;
        let global = Part::weight_global(self.convention);
        let stored = shards.scalar(self.tensor(expert, projection, global)?);
        let weight_scale =
            decode_scale(self.convention, stored, || self.layer.tensor_name(expert, projection, global))?;
        let codes = self.tensor(expert, projection, Part::codes(self.convention))?;
        let scales = self.tensor(expert, projection, Part::WeightScale)?;
        Ok(RawMatrix {
            rows,
            cols,
            codes: shards.bytes(codes),
            scales: shards.bytes(scales),
            weight_scale,
            input_scale: self.input_scale(expert, projection)?,
            origin: Origin { module: &self.layer.module, expert, projection: self.layer.names.name(projection) },
        })
    }

    fn tensor(&self, expert: usize, projection: Projection, part: Part) -> Result<TensorId, CheckpointError> {
        self.layer.experts[expert].get(projection, part).ok_or_else(|| CheckpointError::MissingTensor {
            tensor: self.layer.tensor_name(expert, projection, part),
            layer: self.layer.index,
            expert,
        })
    }

    fn input_scale(&self, expert: usize, projection: Projection) -> Result<Option<f32>, CheckpointError> {
        let part = Part::input_global(self.convention);
        let Some(id) = self.layer.experts[expert].get(projection, part) else {
            return Ok(None);
        };
        let stored = self.checkpoint.shards.scalar(id);
        decode_scale(self.convention, stored, || self.input_scale_name(expert, projection)).map(Some)
    }

    fn input_scale_name(&self, expert: usize, projection: Projection) -> String {
        self.layer.tensor_name(expert, projection, Part::input_global(self.convention))
    }
}

/// The decode scale of a stored global scale: the one place where reciprocals are inverted.
fn decode_scale(convention: Convention, stored: f32, tensor: impl FnOnce() -> String) -> Result<f32, CheckpointError> {
    let usable = |value: f32| value.is_finite() && value > 0.0;
    let (decode, must) = match convention {
        Convention::Decode => (stored, "finite and above 0"),
        Convention::Reciprocal => (1.0 / stored, "finite and above 0, as must be its reciprocal, the decode scale"),
    };
    if usable(stored) && usable(decode) {
        return Ok(decode);
    }
    Err(CheckpointError::BadScale { tensor: tensor(), value: stored, must })
}
