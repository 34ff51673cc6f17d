//! What every engine checks about an expert before it packs it.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::params::ExpertScales;
use thiserror::Error;

use crate::activation::ActivationError;
use crate::checkpoint::{CheckpointError, RawExpert, RawMatrix};
use crate::driver::DriverError;
use crate::io::ScaleMode;
use crate::memory::OutOfMemory;
use crate::shape::ShapeError;
use crate::spec::LayerSpec;
use crate::weights::SourceError;

/// Why a layer could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A size that no layer has, or experts that the layer has not.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An activation parameter without a meaning.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The plan is for a GPU with other kernels, whose weights are packed in another order.
    #[error(
        "the plan is for the kernels of compute capability {}.{}, but this GPU has {}.{}; plan with this GPU's limits",
        .planned.0, .planned.1, .found.0, .found.1
    )]
    OtherKernels {
        /// Compute capability of the plan's limits.
        planned: (u32, u32),
        /// Compute capability of the GPU.
        found: (u32, u32),
    },
    /// The source could not give an expert.
    #[error("expert {expert} could not be read: {source}")]
    Source {
        /// Global id.
        expert: usize,
        /// What the source said.
        source: SourceError,
    },
    /// Bad block scales.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An expert has a gate matrix that the activation does not use, or lacks the one that it needs.
    #[error("expert {expert} {}, but the layer's activation {}; choose the activation that the model was made for", if *found { "has a gate matrix" } else { "has no gate matrix" }, if *found { "uses none" } else { "needs one" })]
    Gate {
        /// Global id.
        expert: usize,
        /// Whether there is one.
        found: bool,
    },
    /// A matrix has another size than the layer.
    #[error("{matrix} of expert {expert} has {got} {axis}, but must have {must}; give experts of the layer's sizes")]
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
    #[error(
        "{name} of {matrix} of expert {expert} is {got:?}, but must be finite and above 0; calibrate and quantize it again"
    )]
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
    /// The experts' input scales for gate and up differ where the plan took them to be equal.
    #[error(
        "the input scale of gate and up of expert {expert} is {got:?}, but that of the rank's first expert is {must:?}; plan with shared_l1_scale = false"
    )]
    UnequalInputScales {
        /// Global id.
        expert: usize,
        /// Its scale.
        got: f32,
        /// The first expert's.
        must: f32,
    },
    /// No thread that copies could be started.
    #[error("the threads that loading needs could not be had: {reason}; raise the limit on processes (ulimit -u)")]
    Threads {
        /// What the system said.
        reason: String,
    },
    /// Not enough host memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Checks everything about one expert and gives its scales; `first` are those of the rank's first expert.
///
/// An input scale that the mode does not need and the checkpoint does not have is 1.
///
/// # Errors
/// [`LoadError`] naming the expert, the matrix, what was found and what it must be.
pub fn check_expert(
    spec: &LayerSpec,
    expert: usize,
    raw: &RawExpert<'_>,
    first: Option<&ExpertScales>,
) -> Result<ExpertScales, LoadError> {
    let scales = check_all_but_block_scales(spec, expert, raw, first)?;
    for matrix in [Some(&raw.up), Some(&raw.down), raw.gate.as_ref()].into_iter().flatten() {
        matrix.check_scales()?;
    }
    Ok(scales)
}

/// [`check_expert`] without the pass over the block scales, for engines that make it while they copy.
pub(crate) fn check_all_but_block_scales(
    spec: &LayerSpec,
    expert: usize,
    raw: &RawExpert<'_>,
    first: Option<&ExpertScales>,
) -> Result<ExpertScales, LoadError> {
    let gated = spec.activation.is_gated();
    if raw.gate.is_some() != gated {
        return Err(LoadError::Gate { expert, found: raw.gate.is_some() });
    }
    let (hidden, intermediate) = (spec.shape.hidden, spec.shape.intermediate);
    check_matrix(expert, "up", &raw.up, intermediate, hidden)?;
    check_matrix(expert, "down", &raw.down, hidden, intermediate)?;
    let gate = raw.gate.as_ref().unwrap_or(&raw.up);
    check_matrix(expert, "gate", gate, intermediate, hidden)?;

    let input_scale = |matrix, raw: &RawMatrix<'_>| match raw.input_scale {
        Some(scale) => Ok(scale),
        None if spec.scales == ScaleMode::Static => Err(LoadError::NoInputScale { expert, matrix }),
        None => Ok(1.0),
    };
    let scales = ExpertScales {
        gate: gate.weight_scale,
        up: raw.up.weight_scale,
        down: raw.down.weight_scale,
        // gate and up read the same input: the larger scale holds for both.
        l1_input: input_scale("gate", gate)?.max(input_scale("up", &raw.up)?),
        l2_input: input_scale("down", &raw.down)?,
    };
    if let Some(first) = first
        && spec.scales == ScaleMode::Static
        && spec.shared_l1_scale
        && first.l1_input != scales.l1_input
    {
        return Err(LoadError::UnequalInputScales { expert, got: scales.l1_input, must: first.l1_input });
    }
    Ok(scales)
}

fn check_matrix(
    expert: usize,
    matrix: &'static str,
    raw: &RawMatrix<'_>,
    rows: usize,
    cols: usize,
) -> Result<(), LoadError> {
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
    Ok(())
}
