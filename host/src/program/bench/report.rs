//! What `bench` prints for people.

use nvfp4_moe::measurement::{Measurement, Row, ShapeTimes};

/// The lines above everything.
pub(super) fn head(measured: &Measurement) -> String {
    let Measurement { machine, ceilings, scales, .. } = measured;
    let matmul = match ceilings.matmul_tflop_per_s {
        Some(rate) => format!("{rate:.0} TFLOP/s, given"),
        None => "not given (--matmul-tflops): floors are those of reading only".to_owned(),
    };
    format!(
        "device        {}: {} ({})\n\
         read ceiling  {:.0} GB/s, measured now\n\
         copy ceiling  {:.0} GB/s (read + written), measured now\n\
         dense matmul  {matmul}\n\
         scales        {scales}\n",
        machine.device, machine.name, machine.reason, ceilings.read_gb_per_s, ceilings.copy_gb_per_s,
    )
}

/// The lines above a shape's rows.
pub(super) fn shape_head(times: &ShapeTimes) -> String {
    let ShapeTimes { shape, hidden, intermediate, experts, topk, activation, .. } = times;
    format!(
        "\nshape         {shape}: hidden {hidden}, intermediate {intermediate}, {experts} experts here, top-k {topk}, \
         {activation}\n\n\
         {:>8} {:>11} {:>21} {:>10} {:>9} {:>8} {:>8} {:>9} {:>8} {:>9}  stages [us] (of copy ceiling); variant\n",
        "tokens",
        "layer [us]",
        "fastest..slowest",
        "floor [us]",
        "of floor",
        "GB/s",
        "of read",
        "TFLOP/s",
        "of dense",
        "check",
    )
}

/// One number of tokens; `unchecked` says why it was not checked.
pub(super) fn row(row: &Row, unchecked: Option<&str>) -> String {
    let stages: Vec<_> = row
        .stages
        .iter()
        .map(|stage| {
            let of_copy = stage.of_copy.map_or_else(String::new, |part| format!(" ({:.0}%)", part * 100.0));
            format!("{} {:.1}{of_copy}", stage.stage, stage.us)
        })
        .collect();
    let check = match (row.check_rel_l2, row.check_passed) {
        (Some(rel_l2), Some(true)) => format!("{rel_l2:.1e}"),
        (Some(rel_l2), _) => format!("!{rel_l2:.1e}"),
        (None, _) => "-".to_owned(),
    };
    let [fastest, slowest] = row.layer_us_range;
    let mut line = format!(
        "{:>8} {:>11.1} {:>21} {:>10.1} {:>8.1}% {:>8.1} {:>7.1}% {:>9.3} {:>8} {check:>9}  {}",
        row.tokens,
        row.layer_us,
        format!("{fastest:.1}..{slowest:.1}"),
        row.floors.us(),
        row.of_floor() * 100.0,
        row.gb_per_s(),
        row.of_read() * 100.0,
        row.tflop_per_s(),
        row.of_matmul().map_or_else(|| "-".to_owned(), |part| format!("{:.1}%", part * 100.0)),
        if stages.is_empty() { "-".to_owned() } else { stages.join(", ") },
    );
    if let Some(variant) = &row.variant {
        line += &format!("; {variant}");
    }
    line += &format!(
        "\n{:>8} median of {} samples, {} batches in turn over {} copies of the weights",
        "", row.samples, row.batches, row.copies
    );
    match (row.check_passed, unchecked) {
        (Some(false), _) => {
            line += &format!("; WRONG: {:.1e} from the CPU engine", row.check_rel_l2.unwrap_or(f64::NAN));
        }
        (_, Some(why)) => line += &format!("; not checked: {why}"),
        _ => {}
    }
    line + "\n"
}

/// The lines below everything.
pub(super) const FOOT: &str = "\n\
    GB/s counts codes and block scales of the experts that got a token. The floor is the larger time of reading them at \
    the read ceiling and of the FLOPs at the dense rate. Quantize and combine are compared with the copy ceiling by the \
    bytes that they must read and write. check is the relative L2 distance of up to 4 rows from the CPU engine (at most \
    1e-3).\n";
