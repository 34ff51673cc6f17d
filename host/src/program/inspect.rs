//! `inspect`: the MoE layers of a checkpoint, and what one of them needs on a device.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use nvfp4_moe::checkpoint::{Checkpoint, CheckpointError, ExpertFormat, InputScales, LayerInfo, LayerView};
use nvfp4_moe::cpu;
use nvfp4_moe::harness::{DeviceChoice, LayerRequest, Runner};
use nvfp4_moe::plan::Plan;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use serde_json::{Value, json};

use super::choices::scales_label;
use super::forward::experts_unsaid;
use super::{Verdict, emit_report, human_bytes, numbers};

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// Directory of a model, or one safetensors file
    checkpoint: PathBuf,
    /// Device that the plan is for: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Most tokens of a call that the plan is for
    #[arg(long, default_value_t = 4096, value_name = "N")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    max_tokens: usize,
    /// Ranks that the experts are spread over; the plan is for the first, which has the most
    #[arg(long, default_value_t = 1, value_name = "R")]
    #[arg(allow_negative_numbers = true, value_parser = numbers::whole::<usize>)]
    ranks: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What a layer needs on a device.
struct Needs {
    layer: usize,
    spec: LayerSpec,
    kernels: String,
    weights_bytes: u64,
    workspace: Vec<(String, u64)>,
    workspace_bytes: u64,
}

pub(super) fn run(args: &InspectArgs) -> anyhow::Result<Verdict> {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let runner = Runner::choose(args.device)?;
    let layers: Vec<Layer<'_>> = checkpoint.layers().iter().map(|info| Layer::of(&checkpoint, info)).collect();
    let usable = layers.iter().find_map(|layer| layer.view.as_ref()?.as_ref().ok());
    let needs = usable.map(|view| needs(view, &runner, args)).transpose()?;
    let text = if args.json {
        let object = json!({
            "checkpoint": args.checkpoint.to_string_lossy(),
            "files": checkpoint.files(),
            "tensors": checkpoint.tensors(),
            "topk": checkpoint.topk(),
            "experts_from": if experts_unsaid(&checkpoint).is_some() { "tensors" } else { "config.json" },
            "layers": layers.iter().map(layer_json).collect::<Vec<_>>(),
            "plan": needs.map(|needs| needs_json(&needs, &runner, args)),
        });
        format!("{object:#}\n")
    } else {
        report(&checkpoint, &layers, needs.as_ref(), &runner, args)?
    };
    emit_report(&text)?;
    let mut errors = layers.iter().filter_map(|layer| layer.error());
    match (errors.next(), errors.count()) {
        (None, _) => Ok(Verdict::Passed),
        (Some(error), 0) => anyhow::bail!("{error}"),
        (Some(error), more) => anyhow::bail!("{error}; {more} more layer(s) cannot be used"),
    }
}

/// A layer, and what there is to say about it before its weights are read.
struct Layer<'a> {
    info: &'a LayerInfo,
    /// `None` for a layer that is not NVFP4; an error for one that a forward would refuse.
    view: Option<Result<LayerView<'a>, CheckpointError>>,
}

impl<'a> Layer<'a> {
    fn of(checkpoint: &'a Checkpoint, info: &'a LayerInfo) -> Self {
        let checked = || {
            let view = checkpoint.layer(info.index)?;
            view.check_global_scales()?;
            Ok(view)
        };
        Self { info, view: (info.format == ExpertFormat::Nvfp4).then(checked) }
    }

    fn error(&self) -> Option<&CheckpointError> {
        self.view.as_ref()?.as_ref().err()
    }

    /// The activation in words, or why the layer cannot be used.
    fn activation(&self) -> String {
        match &self.view {
            None => "-".to_owned(),
            Some(Ok(view)) => view.activation().to_string(),
            Some(Err(error)) => format!("cannot be used: {error}"),
        }
    }
}

/// Which kernels a plan runs, and why.
fn chosen_kernels(plan: &Plan) -> String {
    let (major, minor) = plan.limits().compute_capability;
    format!("{}; this GPU has {major}.{minor}", plan.kernels().description())
}

fn needs(view: &LayerView<'_>, runner: &Runner, args: &InspectArgs) -> anyhow::Result<Needs> {
    let layer = view.index();
    let experts = ExpertRange::of_rank(view.experts(), args.ranks, 0)?;
    let request = LayerRequest { topk: view.topk().unwrap_or(1), scales: None, activation: None };
    let spec = request.spec(view, experts)?;
    if let Some(engine) = runner.engine() {
        let plan = Plan::new(spec, &engine.device().limits(), args.max_tokens)?;
        let regions = plan.regions().iter().map(|span| (format!("{:?}", span.region), span.bytes));
        return Ok(Needs {
            layer,
            spec,
            kernels: chosen_kernels(&plan),
            weights_bytes: plan.weights_bytes(),
            workspace: regions.collect(),
            workspace_bytes: plan.workspace_bytes(),
        });
    }
    cpu::Workspace::check_tokens(&spec, args.max_tokens)?;
    let parts = cpu::Workspace::planned_parts(&spec, args.max_tokens);
    Ok(Needs {
        layer,
        spec,
        kernels: format!("the CPU engine's {} loops, the fastest that this CPU has", cpu::Isa::best().name()),
        weights_bytes: cpu::MoeLayer::planned_weight_bytes(&spec) as u64,
        workspace: parts.iter().map(|&(name, bytes)| (name.to_owned(), bytes as u64)).collect(),
        workspace_bytes: cpu::Workspace::planned_bytes(&spec, args.max_tokens) as u64,
    })
}

fn report(
    checkpoint: &Checkpoint,
    layers: &[Layer<'_>],
    needs: Option<&Needs>,
    runner: &Runner,
    args: &InspectArgs,
) -> anyhow::Result<String> {
    let mut out = String::new();
    let model = checkpoint.config().and_then(|config| config.model_type()).unwrap_or("unknown model type");
    writeln!(out, "{}: {model}", args.checkpoint.display())?;
    let topk = checkpoint.topk().map_or("not said in config.json".to_owned(), |topk| topk.to_string());
    writeln!(
        out,
        "{} safetensors file(s), {} tensors, {} MoE layer(s), top-k {topk}",
        checkpoint.files(),
        checkpoint.tensors(),
        checkpoint.layers().len()
    )?;
    if let Some(why) = experts_unsaid(checkpoint) {
        writeln!(out, "as many experts as the tensors say: {why}")?;
    }
    let header = ["layer", "format", "names", "experts", "hidden", "intermediate", "input scales", "packed"];
    let mut rows = vec![header.map(str::to_owned)];
    for info in checkpoint.layers() {
        rows.push([
            info.index.to_string(),
            info.format.to_string(),
            info.style.map_or("-".to_owned(), |style| style.to_string()),
            info.experts.to_string(),
            info.hidden.to_string(),
            info.intermediate.to_string(),
            format!("L1 {}, L2 {}", info.l1_input_scales, info.l2_input_scales),
            human_bytes(info.nvfp4_bytes),
        ]);
    }
    out.push('\n');
    write_table(&mut out, &rows);
    out.push('\n');
    for layer in layers {
        writeln!(out, "layer {}: {}", layer.info.index, remarks(layer).join("; "))?;
    }
    let total: u64 = checkpoint.layers().iter().map(|info| info.nvfp4_bytes).sum();
    writeln!(out, "all layers: {} of NVFP4 codes and block scales", human_bytes(total))?;
    let Some(needs) = needs else {
        writeln!(out, "\nno layer is NVFP4 and can be used, so there is nothing to plan")?;
        return Ok(out);
    };
    writeln!(out, "\nplan of layer {} for up to {} tokens on {}", needs.layer, args.max_tokens, runner.device_name())?;
    writeln!(out, "  device             {} ({})", runner.target(), runner.reason())?;
    writeln!(out, "  kernels            {}", needs.kernels)?;
    let experts = needs.spec.experts;
    writeln!(out, "  experts            {} of {}, rank 0 of {}", experts.count, needs.spec.shape.experts, args.ranks)?;
    writeln!(out, "  activation scales  {}", scales_label(needs.spec.scales))?;
    let quantized = if needs.spec.quantizes_tokens() { "token, gathered by the first GEMM" } else { "slot" };
    writeln!(out, "  quantized once a   {quantized}")?;
    writeln!(out, "  packed weights     {} ({} bytes)", human_bytes(needs.weights_bytes), needs.weights_bytes)?;
    writeln!(out, "  workspace          {} ({} bytes)", human_bytes(needs.workspace_bytes), needs.workspace_bytes)?;
    for (name, bytes) in &needs.workspace {
        writeln!(out, "    {name:<16} {}", human_bytes(*bytes))?;
    }
    if checkpoint.topk().is_none() {
        writeln!(out, "  config.json does not say top-k: planned with 1")?;
    }
    Ok(out)
}

/// What is worth saying about a layer beside the table.
fn remarks(layer: &Layer<'_>) -> Vec<String> {
    let info = layer.info;
    let mut remarks = vec![info.module.clone(), layer.activation()];
    if !matches!(layer.view, Some(Ok(_))) {
        return remarks;
    }
    if !info.gated {
        remarks.push("no gate".to_owned());
    }
    if info.gate_up_differ {
        remarks.push("input scales of gate and up differ: the larger is used".to_owned());
    }
    remarks.push(match info.l1_input_scales {
        InputScales::All if info.l1_all_equal => "L1 input scales all equal: a token is quantized once".to_owned(),
        InputScales::All => "L1 input scales differ between experts: a token is quantized once a slot".to_owned(),
        InputScales::Some | InputScales::None => "static scales are not possible: per-token is used".to_owned(),
    });
    remarks
}

/// Left-aligned columns, as wide as their widest cell.
fn write_table<const N: usize>(out: &mut String, rows: &[[String; N]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
}

fn layer_json(layer: &Layer<'_>) -> Value {
    let info = layer.info;
    json!({
        "index": info.index,
        "module": info.module,
        "format": info.format.to_string(),
        "names": info.style.map(|style| style.to_string()),
        "experts": info.experts,
        "hidden": info.hidden,
        "intermediate": info.intermediate,
        "gated": info.gated,
        "activation": layer.activation(),
        "error": layer.error().map(CheckpointError::to_string),
        "l1_input_scales": info.l1_input_scales.to_string(),
        "l2_input_scales": info.l2_input_scales.to_string(),
        "gate_up_differ": info.gate_up_differ,
        "l1_all_equal": info.l1_all_equal,
        "nvfp4_bytes": info.nvfp4_bytes,
    })
}

fn needs_json(needs: &Needs, runner: &Runner, args: &InspectArgs) -> Value {
    let regions: serde_json::Map<_, _> =
        needs.workspace.iter().map(|(name, bytes)| (name.clone(), json!(bytes))).collect();
    json!({
        "layer": needs.layer,
        "device": runner.target().to_string(),
        "device_name": runner.device_name(),
        "device_reason": runner.reason(),
        "kernels": needs.kernels,
        "max_tokens": args.max_tokens,
        "ranks": args.ranks,
        "experts": needs.spec.experts.count,
        "topk": needs.spec.shape.topk,
        "scales": scales_label(needs.spec.scales),
        "weights_bytes": needs.weights_bytes,
        "workspace_bytes": needs.workspace_bytes,
        "workspace": regions,
    })
}
