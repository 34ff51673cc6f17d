//! The golden cases: whole layers with expected outputs that other people's tools computed.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nvfp4_moe::checkpoint::{Checkpoint, CheckpointError, HiddenStates, InputScales, LayerInputs, LayerView};
use nvfp4_moe::harness::{Comparison, LayerRequest, LoadedLayer, Runner, Target};
use nvfp4_moe::io::{HiddenRows, Inputs, ScaleMode};
use nvfp4_moe::shape::ExpertRange;

use super::closeness::{Bf16Closeness, compare, f32_problem, percent};
use super::report::{Outcome, Report};

const FILES: [&str; 3] = ["model.safetensors", "io.safetensors", "config.json"];

/// Mode, name, and the tensor with the expected output.
const MODES: [(ScaleMode, &str, &str); 3] = [
    (ScaleMode::Static, "static", "expected"),
    (ScaleMode::PerToken, "per-token", "expected_per_token"),
    (ScaleMode::PerTensor, "per-tensor", "expected_per_tensor"),
];

/// What ModelOpt's own bf16 forward gave: its roundings flip codes of h, so it is only roughly the same.
const ROUTED_OUT: &str = "routed_out";
const MAX_ROUTED_OUT_REL_L2: f64 = 6e-2;

/// Groups of ranks whose sum must be the one-rank result, but for the rounding of the sums.
const RANKS: [usize; 4] = [1, 2, 4, 5];
const MAX_RANKS_REL_L2: f64 = 1e-6;

/// Two devices, which may round a code of h to different sides.
const MAX_DEVICES_REL_L2: f64 = 1e-3;

/// A directory with a checkpoint, inputs and expected outputs.
#[derive(Clone, Debug)]
pub(super) struct Case {
    name: String,
    dir: PathBuf,
}

/// The f32 outputs of the first device that ran a check, for the others to be compared with.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    by_check: BTreeMap<String, (String, Vec<f32>)>,
}

/// Every directory in `golden`, and those of the command line. What is none is a failure in the report.
pub(super) fn find_cases(golden: &Path, extra: &[PathBuf], report: &mut Report) -> Vec<Case> {
    let mut dirs: Vec<PathBuf> = match fs::read_dir(golden) {
        Ok(listing) => listing.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect(),
        Err(_) => Vec::new(),
    };
    dirs.sort();
    if dirs.is_empty() {
        report.add("golden", Outcome::Failed(format!("there are no cases in {}", golden.display())));
    }
    dirs.extend_from_slice(extra);
    let mut cases = Vec::new();
    for dir in dirs {
        let missing = FILES.into_iter().find(|file| !dir.join(file).is_file());
        if let Some(file) = missing {
            report.add("golden", Outcome::Failed(format!("{} has no {file}, so it is no case", dir.display())));
            continue;
        }
        let absolute = dir.canonicalize().unwrap_or_else(|_| dir.clone());
        let name = absolute.file_name().map_or_else(|| dir.display().to_string(), |x| x.to_string_lossy().into_owned());
        cases.push(Case { name, dir });
    }
    cases
}

/// Runs one case on one device, in every scale mode.
pub(super) fn run_case(runner: &Runner, case: &Case, outputs: &mut Outputs, report: &mut Report) {
    for (mode, mode_name, tensor) in MODES {
        let check = format!("{}, {mode_name}", case.name);
        // One row must not keep the others from running.
        let ran = catch_unwind(AssertUnwindSafe(|| run_mode(runner, case, mode, tensor, &check, outputs)));
        let outcome = match ran {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
            Err(panic) => Outcome::Failed(format!("it panicked: {}", panic_text(panic.as_ref()))),
        };
        report.add_on(check, runner.target().to_string(), outcome);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

fn run_mode(
    runner: &Runner,
    case: &Case,
    mode: ScaleMode,
    tensor: &str,
    check: &str,
    outputs: &mut Outputs,
) -> Result<Outcome> {
    let checkpoint = Checkpoint::open(&case.dir).context("cannot open the checkpoint")?;
    let view = checkpoint.layer(checkpoint.layers()[0].index)?;
    let file = LayerInputs::open(case.dir.join(FILES[1])).context("cannot read the inputs")?;
    let info = view.info();
    if mode == ScaleMode::Static && [info.l1_input_scales, info.l2_input_scales] != [InputScales::All; 2] {
        return Ok(Outcome::NotRun("the checkpoint has no input scales".to_owned()));
    }
    let expected = match file.expected(tensor) {
        Err(CheckpointError::MissingInput { .. }) => {
            return Ok(Outcome::NotRun(format!("{} has no tensor {tensor}", FILES[1])));
        }
        expected => expected?,
    };
    let hidden = match &file.hidden {
        HiddenStates::Bf16(rows) => HiddenRows::Bf16(rows),
        HiddenStates::F16(rows) => HiddenRows::F16(rows),
    };
    let inputs = Inputs { hidden, topk_ids: &file.topk_ids, topk_weights: &file.topk_weights, topk: file.topk };
    let request = LayerRequest { topk: file.topk, scales: Some(mode), activation: None };
    let spec = request.spec(&view, ExpertRange::all(view.experts()))?;
    let mut layer = runner.load(&spec, &view, file.tokens, &mut |_, _| {})?;
    // What is read before it was written then shows as NaN; the emulator knows it anyway, if nobody writes NaN there.
    layer.set_poison(!matches!(runner.target(), Target::Backend(_)));

    let columns = file.hidden_size;
    let mut problems = Vec::new();
    let output = layer.forward_f32(&inputs)?;
    let close = compare(&output, &expected, columns);
    problems.extend(f32_problem(&close));
    let rounded = layer.forward_bf16(&inputs)?;
    let bf16 = Bf16Closeness::new(&rounded, &expected, columns);
    problems.extend(bf16.problem());
    let mut detail = describe(&close, bf16);

    if mode == ScaleMode::Static {
        match file.expected(ROUTED_OUT) {
            Err(CheckpointError::MissingInput { .. }) => {}
            routed_out => {
                let rel_l2 = compare(&output, &routed_out?, columns).rel_l2;
                let _ = write!(detail, "; {ROUTED_OUT} {rel_l2:.2e}");
                if rel_l2 > MAX_ROUTED_OUT_REL_L2 {
                    problems.push(format!("{rel_l2:.2e} from {ROUTED_OUT}, must be at most {MAX_ROUTED_OUT_REL_L2}"));
                }
            }
        }
    }
    if layer.forward_f32(&inputs)?.iter().zip(&output).any(|(again, first)| again.to_bits() != first.to_bits()) {
        problems.push("a second run gave other bits".to_owned());
    }
    // With one scale for the whole batch, a token alone, or the part of h that one rank sees, has another scale and so
    // other codes: both are different computations then, not different orders of the same one.
    if mode != ScaleMode::PerTensor {
        problems.extend(alone_problem(&mut layer, &inputs, &output, columns)?);
        drop(layer);
        for ranks in RANKS {
            problems.extend(ranks_problem(runner, &view, &request, ranks, &inputs, &output)?);
        }
    }
    match outputs.by_check.get(check) {
        None => {
            outputs.by_check.insert(check.to_owned(), (runner.target().to_string(), output));
        }
        Some((device, other)) => {
            let rel_l2 = compare(&output, other, columns).rel_l2;
            let _ = write!(detail, "; {rel_l2:.2e} from {device}");
            if rel_l2 > MAX_DEVICES_REL_L2 {
                problems
                    .push(format!("{rel_l2:.2e} from the output of {device}, must be at most {MAX_DEVICES_REL_L2}"));
            }
        }
    }
    if problems.is_empty() {
        return Ok(Outcome::Passed { figure: format!("{:.1e}", close.rel_l2), detail });
    }
    Ok(Outcome::Failed(problems.join("; ")))
}

fn describe(close: &Comparison, bf16: Bf16Closeness) -> String {
    format!(
        "f32: relative L2 {:.2e}, worst row {:.2e}, {} of the rows within 1e-6; bf16: {} of the elements correctly \
         rounded, {} of the rows within a step",
        close.rel_l2,
        close.worst_row_rel_l2,
        percent(close.rows_close),
        percent(bf16.exact),
        percent(bf16.rows_within_a_step)
    )
}

/// Whether a token by itself gets other bits than in the batch.
fn alone_problem(
    layer: &mut LoadedLayer,
    inputs: &Inputs<'_>,
    output: &[f32],
    columns: usize,
) -> Result<Option<String>> {
    for (token, row) in output.chunks(columns).enumerate() {
        let alone = layer.forward_f32(&inputs.tokens(token..token + 1, columns))?;
        if alone.iter().zip(row).any(|(alone, batch)| alone.to_bits() != batch.to_bits()) {
            return Ok(Some(format!("token {token} alone has other bits than in the batch")));
        }
    }
    Ok(None)
}

/// Whether the sum over the ranks of a group is not the one-rank result, or a rank without tokens gives anything but
/// zeros.
fn ranks_problem(
    runner: &Runner,
    view: &LayerView<'_>,
    request: &LayerRequest,
    ranks: usize,
    inputs: &Inputs<'_>,
    output: &[f32],
) -> Result<Option<String>> {
    let mut sum = vec![0f32; output.len()];
    let columns = view.hidden();
    for rank in 0..ranks {
        let experts = ExpertRange::of_rank(view.experts(), ranks, rank)?;
        let spec = request.spec(view, experts)?;
        let mut layer = runner.load(&spec, view, output.len() / columns, &mut |_, _| {})?;
        layer.set_poison(!matches!(runner.target(), Target::Backend(_)));
        let part = layer.forward_f32(inputs)?;
        let is_here = |id: &i32| usize::try_from(*id).is_ok_and(|id| experts.contains(id));
        let has_tokens = inputs.topk_ids.iter().any(is_here);
        if !has_tokens && part.iter().any(|x| x.to_bits() != 0) {
            return Ok(Some(format!("rank {rank} of {ranks} has no tokens, but its output is not zero")));
        }
        sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    let rel_l2 = compare(&sum, output, columns).rel_l2;
    Ok((rel_l2 > MAX_RANKS_REL_L2).then(|| {
        format!("the sum over {ranks} ranks is {rel_l2:.2e} from the one-rank result, must be {MAX_RANKS_REL_L2:.0e}")
    }))
}
