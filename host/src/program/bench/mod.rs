//! `bench`: times a layer with random weights, beside what the device could do at best.

mod check;
mod cpu;
mod gpu;
mod report;

use clap::Args;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::{DeviceChoice, Runner};
use nvfp4_moe::io::{Inputs, ScaleMode};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};

use super::choices::Scales;
use super::random_inputs::RandomInputs;
use super::shape::NamedShape;
use super::{Verdict, emit};

/// Most different batches that take turns.
const MOST_BATCHES: usize = 32;

/// How often the L2 (or last-level cache) must be filled before a batch's experts are read again.
const CACHE_FILLS: f64 = 4.0;

/// Largest relative L2 distance from the CPU engine in the sample of rows.
const TOLERANCE: f64 = 1e-3;

#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// deepseek-v4-pro-ep8, deepseek-v3-ep8, kimi-k2-ep8, qwen3-30b, qwen3-235b, glm-4.7-ep8, or
    /// HIDDENxINTERMEDIATExEXPERTSxTOPK with the experts of one rank
    #[arg(long)]
    shape: NamedShape,
    /// Numbers of tokens, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_name = "T,..")]
    tokens: Vec<usize>,
    /// Device: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Scales of the quantized activations; auto is static
    #[arg(long, value_enum, default_value_t = Scales::Static)]
    scales: Scales,
    /// Timed replays on a GPU; the most forwards on the CPU, where large batches take fewer
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Do not compare rows with the CPU engine
    #[arg(long)]
    no_check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Medians of one number of tokens.
#[derive(Debug, Default)]
struct Timing {
    layer_ms: f64,
    /// Label and milliseconds; empty where only the whole was timed.
    stages: Vec<(&'static str, f64)>,
    /// Samples that the medians are of.
    samples: usize,
    /// Copies of the packed weights that took turns.
    copies: usize,
}

/// One row of the report.
#[derive(Debug)]
struct Measured {
    tokens: usize,
    timing: Timing,
    batches: usize,
    /// Bytes of codes and block scales of experts that got a token, on average.
    touched_bytes: f64,
    flops: f64,
    /// Relative L2 distance from the CPU engine in a sample of rows, or why there is none.
    check: Result<f64, &'static str>,
}

impl Measured {
    fn gb_per_s(&self) -> f64 {
        self.touched_bytes / (self.timing.layer_ms * 1e6)
    }

    fn tflop_per_s(&self) -> f64 {
        self.flops / (self.timing.layer_ms * 1e9)
    }

    fn passed(&self) -> bool {
        // A NaN is not within the tolerance.
        self.check.is_err() || self.check.is_ok_and(|rel_l2| rel_l2 <= TOLERANCE)
    }
}

/// A device with the layer loaded.
trait Bench {
    /// GB/s at which the device reads memory.
    fn read_ceiling(&self) -> anyhow::Result<f64>;

    /// Times the layer on these batches, which take turns.
    fn time(&mut self, batches: &[Inputs<'_>], iterations: usize) -> anyhow::Result<Timing>;

    /// One forward with f32 output.
    fn forward(&mut self, inputs: &Inputs<'_>) -> anyhow::Result<Vec<f32>>;
}

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let shape = args.shape.shape;
    if args.tokens.contains(&0) {
        anyhow::bail!("--tokens has a 0, but nothing can be measured without tokens; leave it out");
    }
    let spec = LayerSpec {
        shape,
        experts: ExpertRange::all(shape.experts),
        activation: Activation::SwiGlu { limit: args.shape.limit },
        scales: args.scales.mode().unwrap_or(ScaleMode::Static),
        shared_l1_scale: true,
    };
    let source = RandomExperts::try_new(shape, true, RandomInputScales::SharedFirst, 0)?;
    let runner = Runner::choose(args.device)?;
    let most_tokens = args.tokens.iter().copied().max().unwrap_or(1);
    let least_touched =
        args.tokens.iter().map(|&tokens| expected_touched_bytes(&spec, tokens)).fold(f64::MAX, f64::min);
    let cache_bytes = runner.engine().map_or(cpu::CACHE_BYTES, |engine| u64::from(engine.device().limits().l2_bytes));
    let mut bench: Box<dyn Bench> = match runner.engine() {
        Some(engine) => {
            let copies = batches_of(cache_bytes, least_touched);
            Box::new(gpu::GpuBench::load(engine, spec, &source, most_tokens, copies)?)
        }
        None => Box::new(cpu::CpuBench::load(&spec, &source, most_tokens)?),
    };
    let ceiling = bench.read_ceiling()?;
    if !args.json {
        emit(&report::head(args, &spec, &runner, ceiling))?;
    }
    let mut rows = Vec::with_capacity(args.tokens.len());
    for &tokens in &args.tokens {
        let batches = batches_of(cache_bytes, expected_touched_bytes(&spec, tokens));
        let row = measure(args, &spec, &source, bench.as_mut(), tokens, batches)?;
        if !args.json {
            emit(&report::row(&row, ceiling))?;
        }
        rows.push(row);
    }
    let passed = rows.iter().all(Measured::passed);
    if args.json {
        emit(&format!("{}\n", report::json(args, &spec, &runner, ceiling, &rows)))?;
    } else {
        emit(&report::foot(&rows))?;
    }
    Ok(if passed { Verdict::Passed } else { Verdict::Failed })
}

fn measure(
    args: &BenchArgs,
    spec: &LayerSpec,
    source: &RandomExperts,
    bench: &mut dyn Bench,
    tokens: usize,
    batches: usize,
) -> anyhow::Result<Measured> {
    let shape = &spec.shape;
    let random =
        (0..batches).map(|seed| RandomInputs::new(shape, tokens, seed as u64)).collect::<anyhow::Result<Vec<_>>>()?;
    let inputs: Vec<Inputs<'_>> = random.iter().map(RandomInputs::inputs).collect();
    let timing = bench.time(&inputs, args.iterations as usize)?;
    let touched: usize = inputs.iter().map(|batch| touched_experts(batch, shape.experts)).sum();
    let check = if args.no_check {
        Err("--no-check")
    } else if spec.scales == ScaleMode::PerTensor && tokens > check::SAMPLE_TOKENS {
        Err("per-tensor scales depend on the whole batch")
    } else {
        let output = bench.forward(&inputs[0])?;
        Ok(check::rel_l2_of_sample(spec, source, &inputs[0], &output)?)
    };
    Ok(Measured {
        tokens,
        timing,
        batches,
        touched_bytes: touched as f64 / batches as f64 * expert_bytes(spec),
        flops: 6.0 * (shape.hidden * shape.intermediate * tokens * shape.topk) as f64,
        check,
    })
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
    batches.clamp(2, MOST_BATCHES)
}

fn touched_experts(batch: &Inputs<'_>, experts: usize) -> usize {
    let mut touched = vec![false; experts];
    batch.topk_ids.iter().for_each(|&id| touched[id as usize] = true);
    touched.into_iter().filter(|&touched| touched).count()
}

/// The middle one.
pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
