//! `generate`: writes a checkpoint of random experts, to load and to measure with.

use std::path::{Path, PathBuf};

use clap::Args;
use nvfp4_moe::checkpoint::{RawExpert, RawMatrix};
use nvfp4_moe::shape::MoeShape;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::shape::NamedShape;
use super::{Verdict, emit, human_bytes};

#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    /// Directory to write model.safetensors and config.json into; it is made if it is not there
    directory: PathBuf,
    /// deepseek-v4-pro-ep8, deepseek-v3-ep8, kimi-k2-ep8, qwen3-30b, qwen3-235b, glm-4.7-ep8, or
    /// HIDDENxINTERMEDIATExEXPERTSxTOPK
    #[arg(long)]
    shape: NamedShape,
    /// Layers, each with its own experts
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// Seed of the experts
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
}

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<Verdict> {
    let directory = &args.directory;
    let file = directory.join("model.safetensors");
    if file.exists() {
        anyhow::bail!("{} is there already; choose another directory", file.display());
    }
    std::fs::create_dir_all(directory)
        .map_err(|error| anyhow::anyhow!("cannot make the directory {}: {error}", directory.display()))?;
    let layers = (0..args.layers)
        .map(|layer| {
            RandomExperts::try_new(args.shape.shape, true, RandomInputScales::SharedFirst, args.seed + u64::from(layer))
        })
        .collect::<Result<Vec<_>, _>>()?;
    // A file of this name is a whole one.
    let partial = directory.join("model.safetensors.partial");
    let written = write_tensors(&partial, &args.shape.shape, &layers);
    if let Err(error) = written.and_then(|()| Ok(std::fs::rename(&partial, &file)?)) {
        // Perhaps it was never made.
        let _ = std::fs::remove_file(&partial);
        anyhow::bail!("cannot write {}: {error}; is there enough room?", file.display());
    }
    let config = directory.join("config.json");
    std::fs::write(&config, config_of(&args.shape))
        .map_err(|error| anyhow::anyhow!("cannot write {}: {error}", config.display()))?;
    let bytes = std::fs::metadata(&file)?.len();
    emit(&format!("{}: {}, {} layers of {}\n", file.display(), human_bytes(bytes), args.layers, args.shape.name))?;
    Ok(Verdict::Passed)
}

fn config_of(shape: &NamedShape) -> String {
    let MoeShape { hidden, intermediate, experts, topk } = shape.shape;
    let mut config = json!({
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "hidden_act": "silu",
    });
    if let Some(limit) = shape.limit {
        config["swiglu_limit"] = limit.into();
    }
    format!("{config:#}\n")
}

/// Bytes of the numbers of one matrix that are tensors of their own.
struct Globals {
    weight_scale: [u8; 4],
    input_scale: Option<[u8; 4]>,
}

impl Globals {
    fn of(matrix: &RawMatrix<'_>) -> Self {
        let input_scale = matrix.input_scale.map(f32::to_le_bytes);
        Self { weight_scale: matrix.weight_scale.to_le_bytes(), input_scale }
    }
}

fn matrices<'a>(expert: &RawExpert<'a>) -> impl Iterator<Item = (&'static str, RawMatrix<'a>)> + use<'a> {
    let gate = expert.gate.map(|gate| ("gate_proj", gate));
    [("up_proj", expert.up), ("down_proj", expert.down)].into_iter().chain(gate)
}

/// Writes the layers with ModelOpt's names. Experts are slices of a pool, so this takes the memory of a few matrices.
fn write_tensors(file: &Path, shape: &MoeShape, layers: &[RandomExperts]) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for (layer, source) in layers.iter().enumerate() {
        for expert in 0..shape.experts {
            let raw = source.expert(expert).map_err(anyhow::Error::from_boxed)?;
            for (projection, matrix) in matrices(&raw) {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{projection}");
                all.push((name, matrix, Globals::of(&matrix)));
            }
        }
    }
    let mut tensors = Vec::new();
    for (name, matrix, globals) in &all {
        let (rows, cols) = (matrix.rows, matrix.cols);
        let mut add = |part: &str, dtype, shape: &[usize], bytes| -> anyhow::Result<()> {
            tensors.push((format!("{name}.{part}"), TensorView::new(dtype, shape.to_vec(), bytes)?));
            Ok(())
        };
        add("weight", Dtype::U8, &[rows, cols / 2], matrix.codes)?;
        add("weight_scale", Dtype::F8_E4M3, &[rows, cols / 16], matrix.scales)?;
        add("weight_scale_2", Dtype::F32, &[], &globals.weight_scale)?;
        if let Some(scale) = &globals.input_scale {
            add("input_scale", Dtype::F32, &[], scale)?;
        }
    }
    Ok(safetensors::serialize_to_file(tensors, None, file)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_moe::checkpoint::Checkpoint;

    #[test]
    fn what_is_written_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let shape: NamedShape = "96x80x3x2".parse().unwrap();
        let layers = [5, 6].map(|seed| RandomExperts::new(shape.shape, true, RandomInputScales::SharedFirst, seed));
        let args = GenerateArgs { directory: directory.path().join("new"), shape, layers: 2, seed: 5 };
        assert_eq!(run(&args).unwrap(), Verdict::Passed);
        assert_eq!(std::fs::read_dir(&args.directory).unwrap().count(), 2);
        let checkpoint = Checkpoint::open(&args.directory).unwrap();
        assert_eq!((checkpoint.layers().len(), checkpoint.topk()), (2, Some(2)));
        for (index, source) in layers.iter().enumerate() {
            let layer = checkpoint.layer(index).unwrap();
            for expert in 0..3 {
                let (got, expected) = (layer.expert(expert).unwrap(), source.expert(expert).unwrap());
                for ((_, got), (name, expected)) in matrices(&got).zip(matrices(&expected)) {
                    assert_eq!((got.rows, got.cols), (expected.rows, expected.cols), "{name}");
                    assert!(got.codes == expected.codes && got.scales == expected.scales, "{name} of {expert}");
                    assert_eq!(got.weight_scale, expected.weight_scale);
                    assert_eq!(got.input_scale, expected.input_scale);
                }
            }
        }
        let again = run(&args).unwrap_err().to_string();
        assert!(again.contains("is there already"), "{again}");
    }
}
