//! Global scales: far from 1, missing, and without a meaning.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::checkpoint::CheckpointError;
use nvfp4_moe::harness::{HarnessError, LoadedLayer};
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::load::LoadError;
use nvfp4_moe::weights::RandomInputScales;

use super::setup::{Batch, Expert, Lab, Layer, MODES, Matrix, SWIGLU};

const SIZES: [usize; 4] = [96, 80, 5, 2];

/// A matrix of an expert, by its name in errors.
fn matrix_mut<'a>(expert: &'a mut Expert, name: &str) -> &'a mut Matrix {
    match name {
        "gate" => expert.gate(),
        "up" => &mut expert.up,
        _ => &mut expert.down,
    }
}

pub(super) fn large_and_small(lab: &Lab<'_>) -> Result<()> {
    for value in [2400.0, 1e-6] {
        for mode in MODES {
            for name in ["gate", "up", "down"] {
                let layer = Layer::new(SIZES, SWIGLU, mode).change(|expert| {
                    matrix_mut(expert, name).weight_scale = value;
                });
                let batch = Batch::new(&layer.spec.shape, 13, 9);
                lab.check(&layer, &batch, &format!("weight scale {value} of {name}, {mode:?}"))?;
            }
        }
        for name in ["gate", "down"] {
            let layer = Layer::new(SIZES, SWIGLU, ScaleMode::Static).change(|expert| {
                matrix_mut(expert, name).input_scale = Some(value);
            });
            let batch = Batch::new(&layer.spec.shape, 13, 9);
            lab.check(&layer, &batch, &format!("input scale {value} of {name}"))?;
        }
    }
    Ok(())
}

/// What loading was refused with.
fn refusal(loaded: Result<LoadedLayer>, what: &str) -> Result<LoadError> {
    let error = loaded.err().with_context(|| format!("{what}: loaded"))?;
    match error.downcast::<HarnessError>()? {
        HarnessError::Load(error) => Ok(error),
        other => Err(other.into()),
    }
}

pub(super) fn missing_input_scale(lab: &Lab<'_>) -> Result<()> {
    for mode in [ScaleMode::PerToken, ScaleMode::PerTensor] {
        let layer = Layer::with_input_scales(SIZES, SWIGLU, mode, RandomInputScales::Missing);
        lab.check(&layer, &Batch::new(&layer.spec.shape, 13, 10), &format!("no input scale, {mode:?}"))?;
    }
    for name in ["gate", "up", "down"] {
        let mut layer = Layer::new(SIZES, SWIGLU, ScaleMode::Static);
        matrix_mut(&mut layer.experts[3], name).input_scale = None;
        let error = refusal(lab.load(&layer, 4), name)?;
        let LoadError::NoInputScale { expert, matrix } = error else { anyhow::bail!("{name}: {error}") };
        ensure!((expert, matrix) == (3, name), "{name}: {error}");
        ensure!(error.to_string().contains("per-token"), "{error}");
    }
    Ok(())
}

pub(super) fn bad_value(lab: &Lab<'_>) -> Result<()> {
    for value in [0.0, -0.0, -1.0, f32::INFINITY, f32::NAN] {
        for matrix in ["gate", "up", "down"] {
            for scale in ["weight_scale", "input_scale"] {
                for mode in MODES {
                    let mut layer = Layer::new(SIZES, SWIGLU, mode);
                    let changed = matrix_mut(&mut layer.experts[2], matrix);
                    if scale == "weight_scale" {
                        changed.weight_scale = value;
                    } else {
                        changed.input_scale = Some(value);
                    }
                    let what = format!("{scale} {value} of {matrix}, {mode:?}");
                    match refusal(lab.load(&layer, 4), &what)? {
                        LoadError::GlobalScale { expert: 2, matrix: of, name, got } => {
                            ensure!(of == matrix && name == scale, "{what}: {of} {name} is named");
                            ensure!(got.to_bits() == value.to_bits(), "{what}: {got} is named");
                        }
                        other => anyhow::bail!("{what}: {other}"),
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn bad_block_scale(lab: &Lab<'_>) -> Result<()> {
    for bad in [0x7F, 0x80, 0xFF] {
        let mut layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
        layer.experts[4].up.scales[6 * 7 + 5] = bad;
        match refusal(lab.load(&layer, 4), "a bad block scale")? {
            LoadError::Checkpoint(CheckpointError::BadScaleByte { row: 7, block: 5, byte, .. }) => {
                ensure!(byte == bad, "{byte:#x} is named instead of {bad:#x}");
            }
            other => anyhow::bail!("{bad:#x}: {other}"),
        }
    }
    Ok(())
}
