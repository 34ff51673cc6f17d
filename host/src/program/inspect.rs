//! `inspect`: the MoE layers of a checkpoint, and what one of them needs on a device.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use nvfp4_moe::checkpoint::{Checkpoint, ExpertFormat, InputScales, LayerInfo};
use nvfp4_moe::cpu;
use nvfp4_moe::harness::{DeviceChoice, LayerRequest, Runner};
use nvfp4_moe::plan::Plan;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::spec::LayerSpec;
use serde_json::{Value, json};

use super::choices::scales_label;
use super::{Verdict, emit, human_bytes};

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// Directory of a model, or one safetensors file
    checkpoint: PathBuf,
    /// Device that the plan is for: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Most tokens of a call that the plan is for
    #[arg(long, default_value_t = 4096, value_name = "N")]
    max_tokens: usize,
    /// Ranks that the experts are spread over; the plan is for the first, which has the most
    #[arg(long, default_value_t = 1, value_name = "R")]
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
    let usable = checkpoint.layers().iter().find(|layer| layer.format == ExpertFormat::Nvfp4);
    let needs = usable.map(|info| needs(&checkpoint, info.index, &runner, args)).transpose()?;
    let text = if args.json {
        let object = json!({
            "checkpoint": args.checkpoint.to_string_lossy(),
            "files": checkpoint.files(),
            "tensors": checkpoint.tensors(),
            "topk": checkpoint.topk(),
            "layers": checkpoint.layers().iter().map(|info| layer_json(&checkpoint, info)).collect::<Vec<_>>(),
            "plan": needs.map(|needs| needs_json(&needs, &runner, args)),
        });
        format!("{object:#}\n")
    } else {
        report(&checkpoint, needs.as_ref(), &runner, args)?
    };
    emit(&text)?;
    Ok(Verdict::Passed)
}

/// Which kernels a plan runs, and why.
fn chosen_kernels(plan: &Plan) -> String {
    let (major, minor) = plan.limits().compute_capability;
    format!("{}; this GPU has {major}.{minor}", plan.kernels().description())
}

fn needs(checkpoint: &Checkpoint, layer: usize, runner: &Runner, args: &InspectArgs) -> anyhow::Result<Needs> {
    let view = checkpoint.layer(layer)?;
    let experts = ExpertRange::of_rank(view.experts(), args.ranks, 0)?;
    let request = LayerRequest { topk: checkpoint.topk().unwrap_or(1), scales: None, activation: None };
    let spec = request.spec(&view, experts)?;
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

/// The activation in words, or why it cannot be used.
fn activation(checkpoint: &Checkpoint, info: &LayerInfo) -> String {
    if info.format != ExpertFormat::Nvfp4 {
        return "-".to_owned();
    }
    match checkpoint.layer(info.index) {
        Ok(view) => view.activation().to_string(),
        Err(error) => format!("cannot be used: {error}"),
    }
}

fn report(
    checkpoint: &Checkpoint,
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
    for info in checkpoint.layers() {
        writeln!(out, "layer {}: {}", info.index, remarks(checkpoint, info).join("; "))?;
    }
    let total: u64 = checkpoint.layers().iter().map(|info| info.nvfp4_bytes).sum();
    writeln!(out, "all layers: {} of NVFP4 codes and block scales", human_bytes(total))?;
    let Some(needs) = needs else {
        writeln!(out, "\nno layer is NVFP4, so there is nothing to plan")?;
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
fn remarks(checkpoint: &Checkpoint, info: &LayerInfo) -> Vec<String> {
    let mut remarks = vec![info.module.clone(), activation(checkpoint, info)];
    if info.format != ExpertFormat::Nvfp4 {
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

fn layer_json(checkpoint: &Checkpoint, info: &LayerInfo) -> Value {
    json!({
        "index": info.index,
        "module": info.module,
        "format": info.format.to_string(),
        "names": info.style.map(|style| style.to_string()),
        "experts": info.experts,
        "hidden": info.hidden,
        "intermediate": info.intermediate,
        "gated": info.gated,
        "activation": activation(checkpoint, info),
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
