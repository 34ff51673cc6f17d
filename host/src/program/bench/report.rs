//! What `bench` prints.

use nvfp4_moe::harness::Runner;
use nvfp4_moe::spec::LayerSpec;
use serde_json::{Map, Value, json};

use super::{BenchArgs, Measured};
use crate::program::choices::scales_label;

/// The lines above the rows.
pub(super) fn head(args: &BenchArgs, spec: &LayerSpec, runner: &Runner, ceiling: f64) -> String {
    let shape = &spec.shape;
    format!(
        "shape         {}: hidden {}, intermediate {}, {} experts here, top-k {}, {}, {} activation scales\n\
         device        {}: {} ({})\n\
         read ceiling  {ceiling:.0} GB/s, measured now\n\n\
         {:>8} {:>12} {:>9} {:>9} {:>9} {:>10}  stages [us]\n",
        args.shape.name,
        shape.hidden,
        shape.intermediate,
        shape.experts,
        shape.topk,
        spec.activation,
        scales_label(spec.scales),
        runner.target(),
        runner.device_name(),
        runner.reason(),
        "tokens",
        "layer [us]",
        "GB/s",
        "ceiling",
        "TFLOP/s",
        "check",
    )
}

/// One number of tokens.
pub(super) fn row(row: &Measured, ceiling: f64) -> String {
    let stages: Vec<_> = row.timing.stages.iter().map(|(label, ms)| format!("{label} {:.1}", ms * 1e3)).collect();
    let check = match row.check {
        Ok(rel_l2) if row.passed() => format!("{rel_l2:.1e}"),
        Ok(rel_l2) => format!("!{rel_l2:.1e}"),
        Err(_) => "-".to_owned(),
    };
    format!(
        "{:>8} {:>12.1} {:>9.1} {:>8.1}% {:>9.3} {:>10}  {}\n",
        row.tokens,
        row.timing.layer_ms * 1e3,
        row.gb_per_s(),
        row.gb_per_s() / ceiling * 100.0,
        row.tflop_per_s(),
        check,
        if stages.is_empty() { "-".to_owned() } else { stages.join(", ") },
    )
}

/// The lines below the rows.
pub(super) fn foot(rows: &[Measured]) -> String {
    let mut foot = "\nGB/s counts codes and block scales of the experts that got a token; check is the relative L2 distance of up to \
                    4 rows from the CPU engine (at most 1e-3).\n"
        .to_owned();
    for row in rows {
        let (tokens, batches, samples, copies) = (row.tokens, row.batches, row.timing.samples, row.timing.copies);
        foot += &format!(
            "{tokens} tokens: median of {samples} samples, {batches} batches in turn over {copies} copies of the weights"
        );
        match row.check {
            Ok(_) if row.passed() => {}
            Ok(rel_l2) => foot += &format!("; WRONG: {rel_l2:.1e} from the CPU engine"),
            Err(why) => foot += &format!("; not checked: {why}"),
        }
        foot.push('\n');
    }
    foot
}

/// One object.
pub(super) fn json(args: &BenchArgs, spec: &LayerSpec, runner: &Runner, ceiling: f64, rows: &[Measured]) -> Value {
    let shape = &spec.shape;
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let stages: Map<_, _> =
                row.timing.stages.iter().map(|&(label, ms)| (label.to_owned(), json!(ms))).collect();
            json!({
                "tokens": row.tokens,
                "layer_ms": row.timing.layer_ms,
                "stage_ms": stages,
                "touched_bytes": row.touched_bytes,
                "gb_per_s": row.gb_per_s(),
                "of_ceiling": row.gb_per_s() / ceiling,
                "tflop_per_s": row.tflop_per_s(),
                "samples": row.timing.samples,
                "batches": row.batches,
                "copies": row.timing.copies,
                "check_rel_l2": row.check.ok(),
                "check_passed": row.check.is_ok().then(|| row.passed()),
            })
        })
        .collect();
    json!({
        "shape": args.shape.name,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "topk": shape.topk,
        "activation": spec.activation.to_string(),
        "scales": scales_label(spec.scales),
        "device": runner.target().to_string(),
        "device_name": runner.device_name(),
        "device_reason": runner.reason(),
        "read_ceiling_gb_per_s": ceiling,
        "rows": rows,
    })
}
