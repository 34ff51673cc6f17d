//! `forward`: runs a layer of a checkpoint on given or random inputs, and compares.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::{
    Checkpoint, ExpertFormat, HiddenStates, LayerInputs, LayerView, OutputData, check_output, write_output,
};
use nvfp4_moe::harness::{Comparison, DeviceChoice, LayerRequest, LoadedLayer, Runner, run_ranks};
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::memory;
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use safetensors::Dtype;

use super::choices::{ActivationKind, OutDtype, Scales};
use super::forward_report::{Expectation, Report, Source};
use super::random_inputs::RandomInputs;
use super::{Verdict, emit_report, numbers, progress};

/// Inputs beside a checkpoint, used where none are named.
const INPUTS_FILE: &str = "io.safetensors";

/// Name of the tensor in the file of `--out`.
const OUTPUT_TENSOR: &str = "output";

/// Share of rows within relative L2 1e-6 that an f32 output must reach.
const ROWS_CLOSE: f64 = 0.98;

/// gpt-oss' activation; no config.json states its parameters.
const OAI: (f32, f32, f32) = (1.702, 1.0, 7.0);

const DEFAULT_TOKENS: usize = 16;

/// Forwards of a layer that takes this long are not repeated for their time.
const REPEATED_MS: f64 = 500.0;
const REPEATS: usize = 5;

#[derive(Debug, Args)]
pub(super) struct ForwardArgs {
    /// Directory of a model, or one safetensors file
    checkpoint: PathBuf,
    /// Layer of the model [default: the first with NVFP4 experts]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    layer: Option<usize>,
    /// safetensors file with hidden, topk_ids (negative ones are skipped), topk_weights [default: io.safetensors beside
    /// the checkpoint if it is there and neither --tokens nor --seed is given, else random inputs]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "seed"])]
    inputs: Option<PathBuf>,
    /// Random tokens [default: 16]
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    tokens: Option<usize>,
    /// Seed of random inputs [default: 0]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = numbers::whole::<u64>)]
    seed: Option<u64>,
    /// Device: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Spread the experts over R ranks; each runs in turn, and the results are summed
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    ranks: Option<usize>,
    /// Run only this rank of R, counted from 0
    #[arg(long, value_name = "r", requires = "ranks")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    rank: Option<usize>,
    /// Scales of the quantized activations
    #[arg(long, value_enum, default_value_t = Scales::Auto)]
    scales: Scales,
    /// Activation instead of what config.json says
    #[arg(long, value_enum)]
    activation: Option<ActivationKind>,
    /// Clamp before the activation instead of what config.json says
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = numbers::above_0::<f32>)]
    swiglu_limit: Option<f32>,
    /// Element type of the output [default: bf16; f32 when compared with an f32 tensor]
    #[arg(long, value_enum)]
    out_dtype: Option<OutDtype>,
    /// Tensor of the inputs' file to compare with [default: for io.safetensors the `expected` of the scale mode]
    #[arg(long, value_name = "TENSOR")]
    expect: Option<String>,
    /// Largest relative L2 distance from the expected output
    #[arg(long, value_name = "X", default_value_t = 2e-3)]
    #[arg(allow_negative_numbers = true, value_parser = numbers::not_negative)]
    tolerance: f64,
    /// Write the output to this safetensors file, as the tensor `output`
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Inputs, wherever they come from.
enum Given {
    File { path: PathBuf, found: bool, inputs: Box<LayerInputs> },
    Random { seed: u64, inputs: RandomInputs },
}

impl Given {
    fn inputs(&self) -> Inputs<'_> {
        match self {
            Self::Random { inputs, .. } => inputs.inputs(),
            Self::File { inputs, .. } => Inputs {
                hidden: match &inputs.hidden {
                    HiddenStates::Bf16(rows) => HiddenRows::Bf16(rows),
                    HiddenStates::F16(rows) => HiddenRows::F16(rows),
                },
                topk_ids: &inputs.topk_ids,
                topk_weights: &inputs.topk_weights,
                topk: inputs.topk,
            },
        }
    }
}

/// A result and how long it took.
struct Outcome {
    output: Vec<f32>,
    load_ms: f64,
    forward_ms: f64,
    /// Forwards that gave the same bits.
    runs: usize,
}

pub(super) fn run(args: &ForwardArgs) -> anyhow::Result<Verdict> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let index = args.layer.unwrap_or_else(|| first_layer(&checkpoint));
    let layer = layer_view(&checkpoint, index, args)?;
    let given = open_inputs(args, &checkpoint, &layer)?;
    let inputs = given.inputs();
    let request = LayerRequest { topk: inputs.topk, scales: args.scales.mode(), activation: None };
    let ranks = args.ranks.unwrap_or(1);
    let range = match args.rank {
        Some(rank) => ExpertRange::of_rank(layer.experts(), ranks, rank)?,
        None => ExpertRange::all(layer.experts()),
    };
    let spec = request.spec(&layer, range)?;
    let tokens = inputs.checked_tokens(spec.shape.hidden, spec.shape.topk)?;
    let (expectation, expected) = expectation(args, &checkpoint, &given, &spec)?;
    let out_dtype = args.out_dtype.unwrap_or(match &expectation {
        Expectation::Tensor { dtype: Dtype::F32, .. } => OutDtype::F32,
        _ => OutDtype::Bf16,
    });
    check_out(args, &checkpoint, &given)?;
    // Everything that can be wrong with the request is known before a device is touched.
    let runner = Runner::choose(args.device)?;
    let outcome = if args.rank.is_none() && ranks != 1 {
        run_all_ranks(&runner, &layer, &request, ranks, &inputs, out_dtype)?
    } else {
        run_one(&runner, &layer, &spec, tokens, &inputs, out_dtype)?
    };
    if let Some(path) = &args.out {
        write(path, &outcome.output, [tokens, spec.shape.hidden], out_dtype)?;
    }
    let comparison =
        expected.map(|expected| Comparison::new(&outcome.output, &expected, spec.shape.hidden, args.tolerance));
    let passed = comparison.as_ref().map(|comparison| {
        comparison.within(args.tolerance) && (out_dtype == OutDtype::Bf16 || comparison.rows_close >= ROWS_CLOSE)
    });
    let report = Report {
        checkpoint: &args.checkpoint,
        layer: index,
        runner: &runner,
        spec: &spec,
        tokens,
        config_topk: checkpoint.topk(),
        experts_unsaid: experts_unsaid(&checkpoint),
        source: match &given {
            Given::File { path, found, .. } => Source::File { path, found: *found },
            Given::Random { seed, .. } => Source::Random { seed: *seed },
        },
        ranks: args.ranks,
        rank: args.rank,
        out_dtype,
        out: args.out.as_deref(),
        expectation: &expectation,
        comparison: comparison.as_ref(),
        tolerance: args.tolerance,
        output_nan_count: outcome.output.iter().filter(|y| y.is_nan()).count(),
        load_ms: outcome.load_ms,
        forward_ms: outcome.forward_ms,
        runs: outcome.runs,
        passed,
    };
    let text = if args.json { format!("{}\n", report.json()) } else { report.text() };
    emit_report(&text)?;
    Ok(if passed == Some(false) { Verdict::Failed } else { Verdict::Passed })
}

/// Why nothing beside the tensors says how many experts a layer has, so that missing last ones go unnoticed; `None` where
/// config.json does.
pub(super) fn experts_unsaid(checkpoint: &Checkpoint) -> Option<&'static str> {
    match checkpoint.config() {
        None => Some("there is no config.json"),
        Some(config) if config.experts().is_none() => Some("config.json does not say how many there are"),
        Some(_) => None,
    }
}

/// The first layer that can run, else the first one, whose error says why it cannot.
pub(super) fn first_layer(checkpoint: &Checkpoint) -> usize {
    let layers = checkpoint.layers();
    layers.iter().find(|info| info.format == ExpertFormat::Nvfp4).unwrap_or(&layers[0]).index
}

fn layer_view<'a>(checkpoint: &'a Checkpoint, index: usize, args: &ForwardArgs) -> anyhow::Result<LayerView<'a>> {
    let Some(kind) = args.activation else {
        let layer = checkpoint.layer(index)?;
        let Some(limit) = args.swiglu_limit else {
            return Ok(layer);
        };
        let activation = match layer.activation() {
            Activation::SwiGlu { .. } => Activation::SwiGlu { limit: Some(limit) },
            Activation::SwiGluOai { alpha, beta, .. } => Activation::SwiGluOai { alpha, beta, limit },
            Activation::Relu2 => {
                anyhow::bail!("--swiglu-limit is {limit}, but layer {index} uses ReLU^2, which has none")
            }
        };
        return Ok(checkpoint.layer_with_activation(index, activation)?);
    };
    let limit = args.swiglu_limit.or_else(|| checkpoint.config()?.swiglu_limit());
    let activation = match kind {
        ActivationKind::Swiglu => Activation::SwiGlu { limit },
        ActivationKind::Swigluoai => {
            let (alpha, beta, default_limit) = OAI;
            Activation::SwiGluOai { alpha, beta, limit: limit.unwrap_or(default_limit) }
        }
        ActivationKind::Relu2 => {
            if let Some(limit) = args.swiglu_limit {
                anyhow::bail!("--swiglu-limit is {limit}, but the activation relu2 has none; leave one of them out");
            }
            Activation::Relu2
        }
    };
    Ok(checkpoint.layer_with_activation(index, activation)?)
}

fn open_inputs(args: &ForwardArgs, checkpoint: &Checkpoint, layer: &LayerView<'_>) -> anyhow::Result<Given> {
    let beside = || {
        let directory = if args.checkpoint.is_dir() { &args.checkpoint } else { args.checkpoint.parent()? };
        let path = directory.join(INPUTS_FILE);
        let wanted = args.tokens.is_none() && args.seed.is_none();
        (wanted && path.is_file()).then_some(path)
    };
    let found = args.inputs.is_none();
    if let Some(path) = args.inputs.clone().or_else(beside) {
        let inputs = LayerInputs::open(&path)?;
        if inputs.hidden_size != layer.hidden() {
            anyhow::bail!(
                "hidden of {} has {} columns, but layer {} of the checkpoint has {}; give inputs made for this layer, or \
                 --tokens for random ones",
                path.display(),
                inputs.hidden_size,
                layer.index(),
                layer.hidden()
            );
        }
        inputs.check_experts(layer.experts())?;
        return Ok(Given::File { path, found, inputs: Box::new(inputs) });
    }
    let Some(topk) = checkpoint.topk() else {
        anyhow::bail!(
            "config.json does not say how many experts a token has (num_experts_per_tok), and there are no inputs that \
             do; add it there, or give --inputs"
        );
    };
    let seed = args.seed.unwrap_or(0);
    let shape = MoeShape::new(layer.hidden(), layer.intermediate(), layer.experts(), topk)?;
    Ok(Given::Random { seed, inputs: RandomInputs::new(&shape, args.tokens.unwrap_or(DEFAULT_TOKENS), seed)? })
}

/// Checks that the output can be written, and replaces nothing that it is made from.
fn check_out(args: &ForwardArgs, checkpoint: &Checkpoint, given: &Given) -> anyhow::Result<()> {
    let Some(out) = &args.out else {
        return Ok(());
    };
    check_output(out)?;
    let inputs = match given {
        Given::File { path, .. } => Some(path.as_path()),
        Given::Random { .. } => None,
    };
    let is_out = |read: &Path| out.canonicalize().is_ok_and(|out| read.canonicalize().is_ok_and(|read| read == out));
    if checkpoint.paths().chain(inputs).any(is_out) {
        anyhow::bail!("--out {} is a file that the output is made from; choose another name", out.display());
    }
    Ok(())
}

/// What the output is compared with, and if nothing, why.
fn expectation(
    args: &ForwardArgs,
    checkpoint: &Checkpoint,
    given: &Given,
    spec: &LayerSpec,
) -> anyhow::Result<(Expectation, Option<Vec<f32>>)> {
    let Given::File { inputs, found, .. } = given else {
        if let Some(tensor) = &args.expect {
            anyhow::bail!("--expect {tensor} needs a file that has that tensor; give --inputs");
        }
        return Ok((Expectation::None("the inputs are random"), None));
    };
    let name = match &args.expect {
        Some(name) => name.as_str(),
        None if !found => return Ok((Expectation::None("--expect names no tensor"), None)),
        None => {
            let name = match spec.scales {
                ScaleMode::Static => "expected",
                ScaleMode::PerToken => "expected_per_token",
                ScaleMode::PerTensor => "expected_per_tensor",
            };
            let split = args.ranks.unwrap_or(1) > 1;
            let not_meant = if args.activation.is_some() || args.swiglu_limit.is_some() {
                Some("the activation is not the checkpoint's")
            } else if args.rank.is_some() && split {
                Some("one rank alone gives a part of it")
            } else if split && spec.scales == ScaleMode::PerTensor {
                Some("each rank has per-tensor scales of its own, so their sum is another result than one rank's")
            } else if checkpoint.layers().len() > 1 {
                Some("io.safetensors does not say which of the layers it belongs to; use --expect")
            } else if inputs.dtype(name).is_none() {
                Some("io.safetensors has no expected output for this scale mode")
            } else {
                None
            };
            if let Some(why) = not_meant {
                return Ok((Expectation::None(why), None));
            }
            name
        }
    };
    let expected = inputs.expected(name)?;
    // `expected` has read it, so it is there.
    let dtype = inputs.dtype(name).unwrap_or(Dtype::F32);
    Ok((Expectation::Tensor { name: name.to_owned(), dtype }, Some(expected)))
}

fn run_all_ranks(
    runner: &Runner,
    layer: &LayerView<'_>,
    request: &LayerRequest,
    ranks: usize,
    inputs: &Inputs<'_>,
    out_dtype: OutDtype,
) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let (mut output, forward_ms) = run_ranks(runner, layer, request, ranks, inputs, &mut progress::bar())?;
    let forward_ms: f64 = forward_ms.iter().sum();
    let load_ms = start.elapsed().as_secs_f64() * 1e3 - forward_ms;
    if out_dtype == OutDtype::Bf16 {
        output.iter_mut().for_each(|y| *y = bf16::from_f32(*y).to_f32());
    }
    Ok(Outcome { output, load_ms, forward_ms, runs: 1 })
}

fn run_one(
    runner: &Runner,
    layer: &LayerView<'_>,
    spec: &LayerSpec,
    tokens: usize,
    inputs: &Inputs<'_>,
    out_dtype: OutDtype,
) -> anyhow::Result<Outcome> {
    let start = Instant::now();
    let mut loaded = runner.load(spec, layer, tokens, &mut progress::bar())?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let output = forward(&mut loaded, inputs, out_dtype)?;
    let mut times = vec![loaded.forward_ms()];
    // The first forward pays for what is only done once; where others are cheap, they say how long it takes.
    while times[0] < REPEATED_MS && times.len() < REPEATS {
        let again = forward(&mut loaded, inputs, out_dtype)?;
        if let Some(at) = output.iter().zip(&again).position(|(a, b)| a.to_bits() != b.to_bits()) {
            let (row, column) = (at / spec.shape.hidden, at % spec.shape.hidden);
            anyhow::bail!(
                "two forwards of the same inputs differ at row {row}, column {column}: {} and {}; this is a bug, report it",
                output[at],
                again[at]
            );
        }
        times.push(loaded.forward_ms());
    }
    let runs = times.len();
    times.sort_by(f64::total_cmp);
    Ok(Outcome { output, load_ms, forward_ms: times[runs / 2], runs })
}

/// One forward, widened to f32 (exactly).
fn forward(loaded: &mut LoadedLayer, inputs: &Inputs<'_>, out_dtype: OutDtype) -> anyhow::Result<Vec<f32>> {
    let mut output = memory::zeros("the output", inputs.hidden.len())?;
    match out_dtype {
        OutDtype::F32 => loaded.forward(inputs, OutputRows::F32(&mut output), false)?,
        OutDtype::Bf16 => {
            let rounded = loaded.forward_bf16(inputs)?;
            output.iter_mut().zip(rounded).for_each(|(wide, y)| *wide = y.to_f32());
        }
    }
    Ok(output)
}

fn write(path: &Path, output: &[f32], shape: [usize; 2], out_dtype: OutDtype) -> anyhow::Result<()> {
    match out_dtype {
        OutDtype::F32 => write_output(path, OUTPUT_TENSOR, &shape, OutputData::F32(output))?,
        OutDtype::Bf16 => {
            // They were rounded to bf16 already: narrowing is exact.
            let rounded: Vec<bf16> = output.iter().map(|&y| bf16::from_f32(y)).collect();
            write_output(path, OUTPUT_TENSOR, &shape, OutputData::Bf16(&rounded))?;
        }
    }
    Ok(())
}
