//! `generate`: writes a checkpoint of random experts, to load and to measure with.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use nvfp4_moe::checkpoint::{RawExpert, RawMatrix};
use nvfp4_moe::memory;
use nvfp4_moe::shape::MoeShape;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::shape::NamedShape;
use super::{Verdict, emit, human_bytes, numbers};

const MODEL_FILE: &str = "model.safetensors";
const CONFIG_FILE: &str = "config.json";
/// The model while it is written: a name that no one else gives a file, so that what a killed run has left can be
/// replaced.
const PARTIAL_FILE: &str = "nvfp4-moe-generate.partial";

/// Experts of all layers: their tensors' names, shapes and places take some 1,700 bytes an expert, and readers of
/// safetensors files allow 100 MB for all of them.
const MOST_EXPERTS: usize = 40_000;

#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    /// Directory to write model.safetensors and config.json into: it must be empty, and is made if it is not there
    ///
    /// A run that fails leaves nothing. A run that is killed leaves nvfp4-moe-generate.partial in the directory, which
    /// the next run replaces.
    directory: PathBuf,
    /// deepseek-v4-pro-ep8, deepseek-v3-ep8, kimi-k2-ep8, qwen3-30b, qwen3-235b, glm-4.7-ep8, or
    /// HIDDENxINTERMEDIATExEXPERTSxTOPK
    #[arg(long)]
    shape: NamedShape,
    /// Layers, each with its own experts
    #[arg(long, default_value_t = 1, value_name = "N", allow_negative_numbers = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=MOST_EXPERTS as i64))]
    layers: u32,
    /// Seed of the experts
    #[arg(long, default_value_t = 0, value_name = "S")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<u64>)]
    seed: u64,
}

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<Verdict> {
    let directory = &args.directory;
    // Everything that can be wrong with the request is known before anything is made.
    check_empty(directory)?;
    let layers = random_layers(args)?;
    let missing = missing_directories(directory);
    let made = fs::create_dir_all(directory).map_err(|error| {
        anyhow::anyhow!("cannot make the directory {}: {error}; choose another place", directory.display())
    });
    if let Err(error) = made.and_then(|()| write_model(args, &layers)) {
        // Those that hold something else by now stay.
        for directory in missing {
            let _ = fs::remove_dir(directory);
        }
        return Err(error);
    }
    let file = directory.join(MODEL_FILE);
    let bytes = fs::metadata(&file)?.len();
    emit(&format!("{}: {}, {} layers of {}\n", file.display(), human_bytes(bytes), args.layers, args.shape.name))?;
    Ok(Verdict::Passed)
}

/// The experts of each layer.
fn random_layers(args: &GenerateArgs) -> anyhow::Result<Vec<RandomExperts>> {
    let (shape, layers) = (args.shape.shape, args.layers as usize);
    let experts = shape.experts * layers;
    if experts > MOST_EXPERTS {
        anyhow::bail!(
            "{layers} layers of {} experts are {experts} experts, but one safetensors file names at most {MOST_EXPERTS}; \
             ask for fewer layers, or a shape with fewer experts",
            shape.experts
        );
    }
    // Asked for at once: memory that the system gives bit by bit may not be there when it is written to.
    let all_bytes = layers.saturating_mul(RandomExperts::bytes(&shape));
    drop(memory::room::<u8>("random experts", all_bytes)?);
    let seeds = (0..u64::from(args.layers)).map(|layer| args.seed.wrapping_add(layer));
    Ok(seeds
        .map(|seed| RandomExperts::try_new(shape, true, RandomInputScales::SharedFirst, seed))
        .collect::<Result<_, _>>()?)
}

/// Checks that there is no directory yet, or one that holds nothing but what a killed run has left.
fn check_empty(directory: &Path) -> anyhow::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => anyhow::bail!("cannot look into {}: {error}; choose another directory", directory.display()),
        Ok(entries) => entries,
    };
    for entry in entries {
        let name = entry?.file_name();
        if name != PARTIAL_FILE {
            anyhow::bail!(
                "{} holds {} already, but a checkpoint is written into an empty directory only; choose another, or one \
                 that is not there yet",
                directory.display(),
                Path::new(&name).display()
            );
        }
    }
    Ok(())
}

/// The directories that have to be made so that this one is there: itself first.
fn missing_directories(directory: &Path) -> Vec<&Path> {
    let named = directory.ancestors().filter(|ancestor| !ancestor.as_os_str().is_empty());
    named.take_while(|ancestor| fs::symlink_metadata(ancestor).is_err()).collect()
}

/// Writes both files or neither; a model.safetensors that is there is a whole one with its config.json.
fn write_model(args: &GenerateArgs, layers: &[RandomExperts]) -> anyhow::Result<()> {
    let [file, config, partial] = [MODEL_FILE, CONFIG_FILE, PARTIAL_FILE].map(|name| args.directory.join(name));
    let mut config_is_ours = false;
    let mut write = || -> anyhow::Result<()> {
        write_tensors(&partial, &args.shape.shape, layers)?;
        let mut opened = fs::File::create_new(&config)?;
        config_is_ours = true;
        opened.write_all(config_of(&args.shape).as_bytes())?;
        Ok(fs::rename(&partial, &file)?)
    };
    write().map_err(|error| {
        // Perhaps it was never made.
        let _ = fs::remove_file(&partial);
        if config_is_ours {
            let _ = fs::remove_file(&config);
        }
        anyhow::anyhow!(
            "cannot write {}: {error}; check the room and the permissions there, or choose another directory",
            file.display()
        )
    })
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
    }

    /// The bound on the number of experts is right: all their names are as long as they can be.
    #[test]
    fn the_most_experts_have_room_in_a_header() {
        let name = format!("model.layers.{0}.mlp.experts.{0}.down_proj", MOST_EXPERTS);
        let (sizes, offset) = ([1 << 20; 2], u64::MAX / 1000);
        let entries = ["weight", "weight_scale", "weight_scale_2", "input_scale"].map(|part| {
            let entry = json!({"dtype": "F8_E4M3", "shape": sizes, "data_offsets": [offset, offset]});
            format!("\"{name}.{part}\":{entry},").len()
        });
        assert!(entries.iter().sum::<usize>() * 3 * MOST_EXPERTS <= 100_000_000, "{entries:?}");
    }
}
