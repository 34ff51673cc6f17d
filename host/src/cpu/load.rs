//! Packing: raw tensors, expert by expert, into the order of the kernels.

use nvfp4_moe_device::format::packed::{Half, LayerLayout, MatrixLayout, TileOrder, deinterleaved_row};
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::format::{BLOCK, ue4m3};
use nvfp4_moe_device::kernels::activation::ActivationParams;
use rayon::prelude::*;
use thiserror::Error;

use super::{ExpertScales, Isa, LayerSpec, Line, MoeLayer};
use crate::activation::ActivationError;
use crate::checkpoint::{RawExpert, RawMatrix};
use crate::io::ScaleMode;
use crate::shape::ShapeError;
use crate::weights::{ExpertSource, SourceError};

/// Why a layer could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A size that no layer has, or experts that the layer has not.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An activation parameter without a meaning.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The source could not give an expert.
    #[error("expert {expert} could not be read: {source}")]
    Source {
        /// Global id.
        expert: usize,
        /// What the source said.
        source: SourceError,
    },
    /// An expert has a gate matrix that the activation does not use, or lacks the one that it needs.
    #[error("expert {expert} {}, but the layer's activation {}", if *found { "has a gate matrix" } else { "has no gate matrix" }, if *found { "uses none" } else { "needs one" })]
    Gate {
        /// Global id.
        expert: usize,
        /// Whether there is one.
        found: bool,
    },
    /// A matrix has another size than the layer.
    #[error("{matrix} of expert {expert} has {got} {axis}, but must have {must}")]
    MatrixSize {
        /// Global id.
        expert: usize,
        /// `gate`, `up` or `down`.
        matrix: &'static str,
        /// `rows`, `columns`, `bytes of codes` or `bytes of block scales`.
        axis: &'static str,
        /// Found.
        got: usize,
        /// Needed.
        must: usize,
    },
    /// A global scale that is 0, negative, infinite or NaN.
    #[error("{name} of {matrix} of expert {expert} is {got:?}, but must be finite and above 0")]
    GlobalScale {
        /// Global id.
        expert: usize,
        /// `gate`, `up` or `down`.
        matrix: &'static str,
        /// `weight_scale` or `input_scale`.
        name: &'static str,
        /// Found.
        got: f32,
    },
    /// The static scale mode was asked for, but an expert carries no input scale.
    #[error(
        "{matrix} of expert {expert} has no input_scale, which static activation scales need; use per-token scales"
    )]
    NoInputScale {
        /// Global id.
        expert: usize,
        /// `gate`, `up` or `down`.
        matrix: &'static str,
    },
    /// A block scale is NaN.
    #[error("the block scale at row {row}, block {block} of {matrix} of expert {expert} is NaN")]
    BlockScale {
        /// Global id.
        expert: usize,
        /// `gate`, `up` or `down`.
        matrix: &'static str,
        /// Row.
        row: usize,
        /// Block of 16 columns.
        block: usize,
    },
}

/// Input scales of one expert, where it carries them.
struct InputScales {
    first: Result<f32, &'static str>,
    second: Result<f32, &'static str>,
}

impl MoeLayer {
    /// Loads and packs the experts `spec.range` from `source`, one after the other.
    ///
    /// `progress` is called with the number of experts done and of all, after each one.
    ///
    /// # Errors
    /// [`LoadError`] naming the expert and what is wrong with it.
    pub fn load(
        spec: &LayerSpec,
        source: &(impl ExpertSource + ?Sized),
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        spec.shape.validate()?;
        if spec.range.end() > spec.shape.experts {
            let must = "be at most the number of experts of the layer";
            return Err(ShapeError { axis: "experts", got: spec.range.end(), must }.into());
        }
        let activation = spec.activation.validated()?;
        let gated = activation.is_gated();
        let layout = LayerLayout::<CpuTile>::new(spec.shape.hidden, spec.shape.intermediate, spec.range.count, gated);
        let mut weights: Vec<Line> = bytemuck::zeroed_vec(layout.bytes().div_ceil(size_of::<Line>()));
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut weights);
        let mut experts = Vec::with_capacity(spec.range.count);
        let mut missing = None;
        for (local, expert) in spec.range.ids().enumerate() {
            let raw = source.expert(expert).map_err(|source| LoadError::Source { expert, source })?;
            let inputs = check_expert(spec, gated, expert, &raw)?;
            if missing.is_none() {
                let matrix = inputs.first.err().or(inputs.second.err());
                missing = matrix.map(|matrix| LoadError::NoInputScale { expert, matrix });
            }
            if spec.scale_mode == Some(ScaleMode::Static)
                && let Some(error) = missing.take()
            {
                return Err(error);
            }
            pack_l1(&layout, &raw, &mut bytes[layout.l1_offset(local)..][..layout.l1().bytes()]);
            pack_l2(&layout, &raw, &mut bytes[layout.l2_offset(local)..][..layout.l2().bytes()]);
            experts.push(ExpertScales {
                gate_weight: raw.gate.map_or(1.0, |gate| gate.weight_scale),
                up_weight: raw.up.weight_scale,
                down_weight: raw.down.weight_scale,
                first_input: inputs.first.unwrap_or(1.0),
                second_input: inputs.second.unwrap_or(1.0),
            });
            progress(local + 1, spec.range.count);
        }
        let calibrated = if missing.is_none() { ScaleMode::Static } else { ScaleMode::PerToken };
        let scale_mode = spec.scale_mode.unwrap_or(calibrated);
        let shares_input = scale_mode != ScaleMode::Static
            || experts.windows(2).all(|pair| pair[0].first_input == pair[1].first_input);
        Ok(Self {
            shape: spec.shape,
            range: spec.range,
            params: ActivationParams::from(activation),
            scale_mode,
            layout,
            experts,
            shares_input,
            weights,
            isa: Isa::best(),
        })
    }
}

/// Checks everything about one expert and gives its input scales.
fn check_expert(spec: &LayerSpec, gated: bool, expert: usize, raw: &RawExpert<'_>) -> Result<InputScales, LoadError> {
    if raw.gate.is_some() != gated {
        return Err(LoadError::Gate { expert, found: raw.gate.is_some() });
    }
    let (hidden, intermediate) = (spec.shape.hidden, spec.shape.intermediate);
    let check = |matrix, raw: &RawMatrix<'_>, rows, cols| check_matrix(expert, matrix, raw, rows, cols);
    let up = check("up", &raw.up, intermediate, hidden)?;
    let gate = match &raw.gate {
        // gate and up read the same input: the larger scale holds for both.
        Some(gate) => check("gate", gate, intermediate, hidden)?,
        None => up,
    };
    let first = match (gate, up) {
        (Some(gate), Some(up)) => Ok(if gate > up { gate } else { up }),
        (None, _) => Err(if gated { "gate" } else { "up" }),
        (_, None) => Err("up"),
    };
    let second = check("down", &raw.down, hidden, intermediate)?.ok_or("down");
    Ok(InputScales { first, second })
}

/// Checks one matrix and gives its input scale, if there is one.
fn check_matrix(
    expert: usize,
    matrix: &'static str,
    raw: &RawMatrix<'_>,
    rows: usize,
    cols: usize,
) -> Result<Option<f32>, LoadError> {
    for (axis, got, must) in [
        ("rows", raw.rows, rows),
        ("columns", raw.cols, cols),
        ("bytes of codes", raw.codes.len(), rows * cols / 2),
        ("bytes of block scales", raw.scales.len(), rows * cols / BLOCK),
    ] {
        if got != must {
            return Err(LoadError::MatrixSize { expert, matrix, axis, got, must });
        }
    }
    for (name, got) in [("weight_scale", Some(raw.weight_scale)), ("input_scale", raw.input_scale)] {
        if let Some(got) = got
            && !(got.is_finite() && got > 0.0)
        {
            return Err(LoadError::GlobalScale { expert, matrix, name, got });
        }
    }
    if let Some(at) = raw.scales.iter().position(|byte| byte & 0x7F == ue4m3::NAN) {
        let blocks = cols / BLOCK;
        return Err(LoadError::BlockScale { expert, matrix, row: at / blocks, block: at % blocks });
    }
    Ok(raw.input_scale)
}

fn pack_l1(layout: &LayerLayout<CpuTile>, raw: &RawExpert<'_>, packed: &mut [u8]) {
    pack_matrix(layout.l1(), packed, |row| match &raw.gate {
        None => (&raw.up, row),
        Some(gate) => match deinterleaved_row(CpuTile::INTERLEAVE, row) {
            (Half::Gate, j) => (gate, j),
            (Half::Up, j) => (&raw.up, j),
        },
    });
}

fn pack_l2(layout: &LayerLayout<CpuTile>, raw: &RawExpert<'_>, packed: &mut [u8]) {
    pack_matrix(layout.l2(), packed, |row| (&raw.down, row));
}

/// Packs a matrix whose row `i` is the row `source(i)` of a raw one; row tiles in parallel.
fn pack_matrix<'a>(
    layout: MatrixLayout<CpuTile>,
    packed: &mut [u8],
    source: impl Fn(usize) -> (&'a RawMatrix<'a>, usize) + Sync,
) {
    const { assert!(CpuTile::K == BLOCK) };
    packed.par_chunks_mut(layout.tile_offset(1, 0)).enumerate().for_each(|(row_tile, packed)| {
        for row in 0..CpuTile::ROWS {
            let (raw, raw_row) = source(row_tile * CpuTile::ROWS + row);
            let blocks = raw.cols / BLOCK;
            let codes = &raw.codes[raw_row * blocks * (BLOCK / 2)..][..blocks * (BLOCK / 2)];
            let scales = &raw.scales[raw_row * blocks..][..blocks];
            for (k_tile, (codes, scale)) in codes.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(scales).enumerate() {
                let tile = &mut packed[layout.tile_offset(0, k_tile)..][..CpuTile::BYTES];
                let codes = u64::from_le_bytes(*codes);
                for k in 0..BLOCK {
                    let at = CpuTile::code_offset(row, k);
                    tile[at.byte] |= (((codes >> (4 * k)) & 15) as u8) << (4 * at.high as u32);
                }
                tile[CpuTile::CODE_BYTES + CpuTile::scale_offset(row, 0)] = scale & 0x7F;
            }
        }
    });
}
