//! `load`: times loading a layer, beside the two rates that bound it: reading its file, and uploading to the GPU.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use nvfp4_moe::checkpoint::{Checkpoint, LayerView};
use nvfp4_moe::cpu;
use nvfp4_moe::cuda::{LoadMemory, MoeLayer, upload_bandwidth};
use nvfp4_moe::harness::{DeviceChoice, Runner};
use nvfp4_moe::plan::Plan;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use serde_json::json;

use super::bench::median;
use super::choices::Scales;
use super::forward::first_layer;
use super::numbers;
use super::plain_read::{self, Place};
use super::{Verdict, emit_report, human_bytes, human_ms, progress};

#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    /// Directory of a model, or one safetensors file
    checkpoint: PathBuf,
    /// Layer of the model [default: the first with NVFP4 experts]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    layer: Option<usize>,
    /// Device: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Load only one rank's experts of R
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    ranks: Option<usize>,
    /// Which rank, counted from 0 [default: 0]
    #[arg(long, value_name = "r", requires = "ranks")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    rank: Option<usize>,
    /// Scales of the quantized activations
    #[arg(long, value_enum, default_value_t = Scales::Auto)]
    scales: Scales,
    /// Loads after the first one, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    #[arg(allow_negative_numbers = true)]
    repeats: u32,
    /// Read the file plainly before the first load too: for a file that is not in memory, whose first reader pays. Without
    /// it, the first load does
    #[arg(long)]
    read_first: bool,
    /// Fail if a load reaches less than this share of the slower of plain reading and uploading
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = numbers::not_negative)]
    at_least: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was measured, in seconds and GB/s.
struct Measured {
    /// Plain reading before anything else.
    read_first_s: Option<f64>,
    first_s: f64,
    repeated_s: f64,
    /// Plain reading after a load: of what is in memory, if it fits.
    read_s: f64,
    upload_gb_per_s: Option<f64>,
}

pub(super) fn run(args: &LoadArgs) -> anyhow::Result<Verdict> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let index = args.layer.unwrap_or_else(|| first_layer(&checkpoint));
    let layer = checkpoint.layer(index)?;
    let range = match args.ranks {
        Some(ranks) => ExpertRange::of_rank(layer.experts(), ranks, args.rank.unwrap_or(0))?,
        None => ExpertRange::all(layer.experts()),
    };
    // How many experts a token gets does not matter here.
    let spec = LayerSpec::of_layer(&layer, layer.topk().unwrap_or(1), range, args.scales.mode())?;
    let places: Vec<Place> =
        range.ids().flat_map(|id| layer.places(id)).map(|(path, range)| (path.to_owned(), range)).collect();
    let bytes = plain_read::bytes_of(&places);
    if bytes == 0 {
        let (rank, ranks) = (args.rank.unwrap_or(0), args.ranks.unwrap_or(1));
        anyhow::bail!("rank {rank} of {ranks} has no experts, so there is nothing to load; choose another");
    }
    let runner = Runner::choose(args.device)?;
    let memory = LoadMemory::here(&spec);

    let read = || plain_read::seconds(&places, memory.threads);
    let read_first_s = args.read_first.then(read).transpose()?;
    let first_s = load(&runner, &spec, &layer)?;
    let read_s = read()?;
    let repeated = (0..args.repeats).map(|_| load(&runner, &spec, &layer)).collect::<anyhow::Result<Vec<_>>>()?;
    let upload = runner.engine().map(|engine| upload_bandwidth(engine.device())).transpose()?;
    let measured = Measured { read_first_s, first_s, repeated_s: median(&repeated), read_s, upload_gb_per_s: upload };

    let rate = |seconds: f64| bytes as f64 / (seconds * 1e9);
    let bound = measured.upload_gb_per_s.unwrap_or(f64::INFINITY).min(rate(measured.read_s));
    let share = rate(measured.repeated_s) / bound;
    let passed = args.at_least.map(|at_least| share >= at_least);
    if args.json {
        let object = json!({
            "checkpoint": args.checkpoint.to_string_lossy(), "layer": index, "experts": range.count, "bytes": bytes,
            "device": runner.device_name(),
            "threads": memory.threads,
            "staging_host_bytes": memory.host_bytes(), "staging_device_bytes": memory.device_bytes(),
            "first_seconds": measured.first_s, "first_gb_per_s": rate(measured.first_s),
            "repeated_seconds": measured.repeated_s, "repeated_gb_per_s": rate(measured.repeated_s),
            "repeats": args.repeats,
            "plain_read_first_gb_per_s": measured.read_first_s.map(rate),
            "plain_read_gb_per_s": rate(measured.read_s),
            "upload_gb_per_s": measured.upload_gb_per_s,
            "share_of_bound": share, "at_least": args.at_least, "passed": passed,
        });
        emit_report(&format!("{object:#}\n"))?;
    } else {
        emit_report(&text(args, index, range.count, bytes, &runner, &memory, &measured, share, passed))?;
    }
    Ok(if passed == Some(false) { Verdict::Failed } else { Verdict::Passed })
}

/// Seconds of one load.
fn load(runner: &Runner, spec: &LayerSpec, layer: &LayerView<'_>) -> anyhow::Result<f64> {
    let Some(engine) = runner.engine() else {
        let start = Instant::now();
        let loaded = cpu::MoeLayer::load(spec, layer, &mut progress::bar())?;
        let seconds = start.elapsed().as_secs_f64();
        drop(loaded);
        return Ok(seconds);
    };
    let plan = Plan::new(*spec, &engine.device().limits(), 1)?;
    let start = Instant::now();
    let loaded = MoeLayer::load(engine, &plan, layer, progress::bar())?;
    let seconds = start.elapsed().as_secs_f64();
    drop(loaded);
    Ok(seconds)
}

#[allow(clippy::too_many_arguments, reason = "the lines of one report")]
fn text(
    args: &LoadArgs,
    index: usize,
    experts: usize,
    bytes: u64,
    runner: &Runner,
    memory: &LoadMemory,
    measured: &Measured,
    share: f64,
    passed: Option<bool>,
) -> String {
    let line = |seconds: f64| format!("{:>10} {:7.2} GB/s", human_ms(seconds * 1e3), bytes as f64 / (seconds * 1e9));
    let mut text = String::new();
    let path = args.checkpoint.display();
    // Writing to a string does not fail.
    let _ = writeln!(text, "checkpoint    {path}, layer {index}: {experts} experts, {bytes} bytes");
    let _ = writeln!(text, "device        {}: {}", runner.target(), runner.device_name());
    if runner.engine().is_some() {
        let (host, device) = (human_bytes(memory.host_bytes() as u64), human_bytes(memory.device_bytes() as u64));
        let threads = memory.threads;
        let _ = writeln!(text, "staging       {threads} threads, {host} page-locked, {device} on the device");
    }
    if let Some(seconds) = measured.read_first_s {
        let _ = writeln!(text, "plain read    {} of the file as it was found", line(seconds));
    }
    let found = if args.read_first { "after that" } else { "of the file as it was found" };
    let _ = writeln!(text, "first load    {} {found}", line(measured.first_s));
    let _ = writeln!(text, "plain read    {} after that, by {} threads", line(measured.read_s), memory.threads);
    let _ = writeln!(text, "load          {} (median of {})", line(measured.repeated_s), args.repeats);
    if let Some(upload) = measured.upload_gb_per_s {
        let _ = writeln!(text, "upload        {:>10} {upload:7.2} GB/s from page-locked memory", "");
    }
    let _ = writeln!(text, "share         {:.1}% of the slower of plain reading and uploading", share * 100.0);
    if let (Some(at_least), Some(passed)) = (args.at_least, passed) {
        let verdict = if passed { "PASSED" } else { "FAILED" };
        let _ = writeln!(text, "{verdict}: at least {:.1}% was asked for", at_least * 100.0);
    }
    text
}
