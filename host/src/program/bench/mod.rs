//! `bench`: times layers with random weights, beside what the device could do at best.

mod check;
mod cpu;
mod gpu;
mod machine;
mod report;

use std::path::{Path, PathBuf};

use clap::Args;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::cpu::{MoeLayer, Workspace};
use nvfp4_moe::harness::{DeviceChoice, Runner};
use nvfp4_moe::io::{Inputs, ScaleMode};
use nvfp4_moe::measurement::{BENCH_FORMAT, Ceilings, Floors, Measurement, Peers, Row, ShapeTimes, StageTime};
use nvfp4_moe::memory;
use nvfp4_moe::plan::Plan;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};

use super::choices::{Scales, scales_label};
use super::numbers;
use super::random_inputs::RandomInputs;
use super::shape::{NamedShape, NamedShapes};
use super::{Verdict, emit};

/// How many different batches take turns.
const LEAST_BATCHES: usize = 2;
const MOST_BATCHES: usize = 32;

/// How often the L2 (or last-level cache) must be filled before a batch's experts are read again.
const CACHE_FILLS: f64 = 4.0;

/// Largest relative L2 distance from the CPU engine in the sample of rows.
const TOLERANCE: f64 = 1e-3;

/// What is measured where nobody says anything else.
const TOKENS: [usize; 13] = [1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
/// The same on the CPU, which takes minutes for thousands.
const MOST_CPU_TOKENS: usize = 64;

#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// deepseek-v4-pro-ep8, deepseek-v3-ep8, kimi-k2-ep8, qwen3-30b, qwen3-235b, glm-4.7-ep8, all of these (all), or
    /// HIDDENxINTERMEDIATExEXPERTSxTOPK with the experts of one rank; several times for several
    #[arg(long, required = true)]
    shape: Vec<NamedShapes>,
    /// Numbers of tokens, separated by commas [default: 1,4,16,64,128,256,512,1024,2048,4096,8192,16384,32768; up to 64
    /// on the CPU]
    #[arg(long, value_delimiter = ',', value_name = "T,..")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    tokens: Vec<usize>,
    /// Device: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Scales of the quantized activations; auto is static
    #[arg(long, value_enum, default_value_t = Scales::Static)]
    scales: Scales,
    /// Timed replays on a GPU; the most forwards on the CPU, where large batches take fewer
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    #[arg(allow_negative_numbers = true)]
    iterations: u32,
    /// Rate of a large dense bf16 matrix product on this device, in TFLOP/s: the second ceiling
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = numbers::above_0::<f64>)]
    matmul_tflops: Option<f64>,
    /// Take that rate from what tests/peers/peers.py wrote on this device
    #[arg(long, value_name = "FILE", conflicts_with = "matmul_tflops")]
    peers: Option<PathBuf>,
    /// Commit of the measured code, where the program is not in its git checkout
    #[arg(long, value_name = "HASH")]
    commit: Option<String>,
    /// Do not compare rows with the CPU engine
    #[arg(long)]
    no_check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Of one number of tokens.
#[derive(Debug, Default)]
struct Timing {
    /// Samples.
    layer_ms: Vec<f64>,
    /// Medians; empty where only the whole was timed.
    stages: Vec<StageMs>,
    /// The grouped GEMM that ran.
    variant: Option<String>,
    /// Copies of the packed weights that took turns.
    copies: usize,
}

/// Of one stage.
#[derive(Debug)]
struct StageMs {
    label: &'static str,
    ms: f64,
    /// What it must read and write, where that bounds it.
    moved_bytes: Option<u64>,
}

/// A device with the layer loaded.
trait Bench {
    /// Times the layer on these batches, which take turns.
    fn time(&mut self, batches: &[Inputs<'_>], iterations: usize) -> anyhow::Result<Timing>;

    /// One forward with f32 output.
    fn forward(&mut self, inputs: &Inputs<'_>) -> anyhow::Result<Vec<f32>>;
}

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<Verdict> {
    if args.tokens.contains(&0) {
        anyhow::bail!("--tokens has a 0, but nothing can be measured without tokens; leave it out");
    }
    let matmul_tflop_per_s = match &args.peers {
        Some(path) => Some(peers_rate(path)?),
        None => args.matmul_tflops,
    };
    let mut shapes: Vec<&NamedShape> = Vec::new();
    for shape in args.shape.iter().flat_map(|shapes| &shapes.0) {
        if shapes.iter().all(|other| other.name != shape.name) {
            shapes.push(shape);
        }
    }
    let runner = Runner::choose(args.device)?;
    let requests =
        shapes.into_iter().map(|shape| Request::new(args, shape, &runner)).collect::<anyhow::Result<Vec<_>>>()?;
    let (read_gb_per_s, copy_gb_per_s) = match runner.engine() {
        Some(engine) => gpu::memory_rates(engine)?,
        None => cpu::memory_rates(),
    };
    let mut measured = Measurement {
        format: BENCH_FORMAT.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        checkout: machine::checkout(args.commit.as_deref()),
        machine: machine::machine(&runner),
        ceilings: Ceilings { read_gb_per_s, copy_gb_per_s, matmul_tflop_per_s },
        scales: scales_label(args.scales.mode().unwrap_or(ScaleMode::Static)).to_owned(),
        shapes: Vec::new(),
    };
    if !args.json {
        emit(&report::head(&measured))?;
    }
    for request in &requests {
        let times = measure_shape(args, request, &runner, &measured.ceilings)?;
        measured.shapes.push(times);
    }
    if args.json {
        emit(&format!("{}\n", serde_json::to_string_pretty(&measured)?))?;
    } else {
        emit(report::FOOT)?;
    }
    let mut rows = measured.shapes.iter().flat_map(|shape| &shape.rows);
    Ok(if rows.all(|row| row.check_passed != Some(false)) { Verdict::Passed } else { Verdict::Failed })
}

/// The dense rate that the peers' measurement found.
fn peers_rate(path: &Path) -> anyhow::Result<f64> {
    match Peers::read(path)?.matmul_tflop_per_s {
        Some(rate) => Ok(rate.best),
        None => anyhow::bail!(
            "{} has no matmul_tflop_per_s, since that was not measured; give the rate with --matmul-tflops",
            path.display()
        ),
    }
}

/// A layer to measure, with these numbers of tokens.
struct Request<'a> {
    name: &'a str,
    spec: LayerSpec,
    tokens: Vec<usize>,
}

impl<'a> Request<'a> {
    /// Checks what can be known before anything is measured: hours of others' measurements would be lost later.
    fn new(args: &BenchArgs, bench_shape: &'a NamedShape, runner: &Runner) -> anyhow::Result<Self> {
        let shape = bench_shape.shape;
        let spec = LayerSpec {
            shape,
            experts: ExpertRange::all(shape.experts),
            activation: Activation::SwiGlu { limit: bench_shape.limit },
            scales: args.scales.mode().unwrap_or(ScaleMode::Static),
            shared_l1_scale: true,
        };
        let tokens: Vec<usize> = match (&*args.tokens, runner.engine()) {
            ([], Some(_)) => TOKENS.to_vec(),
            ([], None) => TOKENS.into_iter().filter(|&tokens| tokens <= MOST_CPU_TOKENS).collect(),
            (given, _) => given.to_vec(),
        };
        let request = Self { name: &bench_shape.name, spec, tokens };
        match runner.engine() {
            Some(engine) => {
                Plan::new(spec, &engine.device().limits(), request.most_tokens())?;
            }
            None => {
                Workspace::check_tokens(&spec, request.most_tokens())?;
                drop(memory::room::<u8>("the packed weights", MoeLayer::planned_weight_bytes(&spec))?);
            }
        }
        RandomInputs::check_room(&shape, request.most_tokens().saturating_mul(LEAST_BATCHES))?;
        Ok(request)
    }

    fn most_tokens(&self) -> usize {
        self.tokens.iter().copied().max().unwrap_or(1)
    }
}

fn measure_shape(
    args: &BenchArgs,
    request: &Request<'_>,
    runner: &Runner,
    ceilings: &Ceilings,
) -> anyhow::Result<ShapeTimes> {
    let Request { name, spec, tokens } = request;
    let shape = spec.shape;
    let source = RandomExperts::try_new(shape, true, RandomInputScales::SharedFirst, 0)?;
    let least_touched = tokens.iter().map(|&tokens| expected_touched_bytes(spec, tokens)).fold(f64::MAX, f64::min);
    let cache_bytes = runner.engine().map_or(cpu::CACHE_BYTES, |engine| u64::from(engine.device().limits().l2_bytes));
    let mut bench: Box<dyn Bench> = match runner.engine() {
        Some(engine) => {
            let copies = batches_of(cache_bytes, least_touched);
            Box::new(gpu::GpuBench::load(engine, *spec, &source, request.most_tokens(), copies)?)
        }
        None => Box::new(cpu::CpuBench::load(spec, &source, request.most_tokens())?),
    };
    let mut times = ShapeTimes {
        shape: (*name).to_owned(),
        hidden: shape.hidden,
        intermediate: shape.intermediate,
        experts: shape.experts,
        topk: shape.topk,
        activation: spec.activation.to_string(),
        rows: Vec::with_capacity(tokens.len()),
    };
    if !args.json {
        emit(&report::shape_head(&times))?;
    }
    for &tokens in tokens {
        let batches = batches_of(cache_bytes, expected_touched_bytes(spec, tokens));
        let (row, unchecked) = measure(args, spec, &source, bench.as_mut(), ceilings, [tokens, batches])?;
        if !args.json {
            emit(&report::row(&row, unchecked))?;
        }
        times.rows.push(row);
    }
    Ok(times)
}

/// One number of tokens, and why it was not checked if it was not.
fn measure(
    args: &BenchArgs,
    spec: &LayerSpec,
    source: &RandomExperts,
    bench: &mut dyn Bench,
    ceilings: &Ceilings,
    [tokens, batches]: [usize; 2],
) -> anyhow::Result<(Row, Option<&'static str>)> {
    let shape = &spec.shape;
    let random =
        (0..batches).map(|seed| RandomInputs::new(shape, tokens, seed as u64)).collect::<anyhow::Result<Vec<_>>>()?;
    let inputs: Vec<Inputs<'_>> = random.iter().map(RandomInputs::inputs).collect();
    let timing = bench.time(&inputs, args.iterations as usize)?;
    let touched: usize = inputs.iter().map(|batch| touched_experts(batch, shape.experts)).sum();
    let (check_rel_l2, unchecked) = if args.no_check {
        (None, Some("--no-check"))
    } else if spec.scales == ScaleMode::PerTensor && tokens > check::SAMPLE_TOKENS {
        (None, Some("per-tensor scales depend on the whole batch"))
    } else {
        let output = bench.forward(&inputs[0])?;
        (Some(check::rel_l2_of_sample(spec, source, &inputs[0], &output)?), None)
    };
    let touched_bytes = touched as f64 / batches as f64 * expert_bytes(spec);
    let flops = 6.0 * (shape.hidden * shape.intermediate * tokens * shape.topk) as f64;
    let us = |ms: f64| ms * 1e3;
    let row = Row {
        tokens,
        variant: timing.variant,
        layer_us: us(median(&timing.layer_ms)),
        layer_us_range: [
            us(timing.layer_ms.iter().copied().fold(f64::INFINITY, f64::min)),
            us(timing.layer_ms.iter().copied().fold(0.0, f64::max)),
        ],
        stages: timing.stages.iter().map(|stage| stage_time(stage, ceilings)).collect(),
        touched_bytes,
        flops,
        floors: Floors::new(touched_bytes, flops, ceilings),
        samples: timing.layer_ms.len(),
        batches,
        copies: timing.copies,
        check_rel_l2,
        // A NaN is not within the tolerance.
        check_passed: check_rel_l2.map(|rel_l2| rel_l2 <= TOLERANCE),
    };
    Ok((row, unchecked))
}

fn stage_time(stage: &StageMs, ceilings: &Ceilings) -> StageTime {
    let gb_per_s = stage.moved_bytes.map(|bytes| bytes as f64 / (stage.ms * 1e6));
    StageTime {
        stage: stage.label.to_owned(),
        us: stage.ms * 1e3,
        moved_bytes: stage.moved_bytes,
        gb_per_s,
        of_copy: gb_per_s.map(|rate| rate / ceilings.copy_gb_per_s),
    }
}

/// Bytes of codes and block scales of one expert: three matrices, 9 bytes for 16 elements.
fn expert_bytes(spec: &LayerSpec) -> f64 {
    (3 * spec.shape.hidden * spec.shape.intermediate * 9 / 16) as f64
}

/// Bytes of the experts that get at least one of `tokens` tokens, each of which picks `topk` of them.
fn expected_touched_bytes(spec: &LayerSpec, tokens: usize) -> f64 {
    let (experts, topk) = (spec.shape.experts as f64, spec.shape.topk as f64);
    let untouched = (1.0 - topk / experts).max(0.0).powi(tokens.min(1 << 20) as i32);
    expert_bytes(spec) * experts * (1.0 - untouched)
}

/// Batches (and copies of the weights) that must take turns so that a cache does not hold what the next one reads.
fn batches_of(cache_bytes: u64, touched_bytes: f64) -> usize {
    let batches = (CACHE_FILLS * cache_bytes as f64 / touched_bytes).ceil() as usize;
    batches.clamp(LEAST_BATCHES, MOST_BATCHES)
}

fn touched_experts(batch: &Inputs<'_>, experts: usize) -> usize {
    let mut touched = vec![false; experts];
    batch.topk_ids.iter().for_each(|&id| touched[id as usize] = true);
    touched.into_iter().filter(|&touched| touched).count()
}

/// The middle one.
pub(super) fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_compared_with_the_copy_ceiling() {
        let ceilings = Ceilings { read_gb_per_s: 4000.0, copy_gb_per_s: 3000.0, matmul_tflop_per_s: None };
        let of = |moved_bytes| stage_time(&StageMs { label: "combine", ms: 0.002, moved_bytes }, &ceilings);
        let time = of(Some(3_000_000));
        assert_eq!((time.us, time.gb_per_s, time.of_copy), (2.0, Some(1500.0), Some(0.5)));
        assert_eq!((of(None).gb_per_s, of(None).of_copy), (None, None));
    }
}
