//! What `forward` prints: what ran where, how close to the expected values, how long.

use std::fmt::{self, Write};
use std::path::Path;

use nvfp4_moe::harness::{Comparison, Runner};
use nvfp4_moe::spec::LayerSpec;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::choices::{OutDtype, scales_label};
use super::human_ms;

/// Where the inputs come from.
pub(super) enum Source<'a> {
    /// A file; `found` beside the checkpoint rather than named.
    File { path: &'a Path, found: bool },
    /// Made up.
    Random { seed: u64 },
}

/// What the output is compared with.
pub(super) enum Expectation {
    /// A tensor of the inputs' file.
    Tensor { name: String, dtype: Dtype },
    /// Nothing, and why.
    None(&'static str),
}

/// Everything that there is to say about a forward.
pub(super) struct Report<'a> {
    pub(super) checkpoint: &'a Path,
    pub(super) layer: usize,
    pub(super) runner: &'a Runner,
    pub(super) spec: &'a LayerSpec,
    pub(super) tokens: usize,
    pub(super) config_topk: Option<usize>,
    pub(super) experts_unsaid: Option<&'static str>,
    pub(super) source: Source<'a>,
    pub(super) ranks: Option<usize>,
    pub(super) rank: Option<usize>,
    pub(super) out_dtype: OutDtype,
    pub(super) out: Option<&'a Path>,
    pub(super) expectation: &'a Expectation,
    pub(super) comparison: Option<&'a Comparison>,
    pub(super) tolerance: f64,
    pub(super) output_nan_count: usize,
    pub(super) load_ms: f64,
    pub(super) forward_ms: f64,
    pub(super) runs: usize,
    /// `None` where nothing was compared.
    pub(super) passed: Option<bool>,
}

impl Report<'_> {
    /// NaN where there should be none; without an expectation every NaN counts.
    fn nan_count(&self) -> usize {
        self.comparison.map_or(self.output_nan_count, |comparison| comparison.nan_count)
    }

    /// How long a forward took; nothing happens in one without tokens.
    fn timed_ms(&self) -> Option<f64> {
        (self.tokens > 0).then_some(self.forward_ms)
    }

    /// One object. Numbers that are not finite are strings, since JSON has none; it has no paths that are not UTF-8
    /// either, so those are shown as well as can be.
    pub(super) fn json(&self) -> Value {
        let of_comparison = |value: fn(&Comparison) -> f64| self.comparison.map(|comparison| number(value(comparison)));
        let (inputs, seed) = match self.source {
            Source::File { path, .. } => (Some(path.to_string_lossy()), None),
            Source::Random { seed } => (None, Some(seed)),
        };
        let expect = match self.expectation {
            Expectation::Tensor { name, .. } => Some(name),
            Expectation::None(_) => None,
        };
        json!({
            "device": self.runner.target().to_string(),
            "device_name": self.runner.device_name(),
            "device_reason": self.runner.reason(),
            "checkpoint": self.checkpoint.to_string_lossy(),
            "layer": self.layer,
            "experts": self.spec.shape.experts,
            "experts_from": if self.experts_unsaid.is_some() { "tensors" } else { "config.json" },
            "hidden": self.spec.shape.hidden,
            "intermediate": self.spec.shape.intermediate,
            "topk": self.spec.shape.topk,
            "config_topk": self.config_topk,
            "activation": self.spec.activation.to_string(),
            "scales": scales_label(self.spec.scales),
            "ranks": self.ranks,
            "rank": self.rank,
            "tokens": self.tokens,
            "inputs": inputs,
            "seed": seed,
            "out_dtype": self.out_dtype.label(),
            "out": self.out.map(Path::to_string_lossy),
            "expect": expect,
            "tolerance": number(self.tolerance),
            "rel_l2": of_comparison(|comparison| comparison.rel_l2),
            "worst_row_rel_l2": of_comparison(|comparison| comparison.worst_row_rel_l2),
            "rows_close": of_comparison(|comparison| comparison.rows_close),
            "max_abs_error": of_comparison(|comparison| comparison.max_abs_error),
            "first_difference": self.comparison.and_then(|comparison| comparison.first_difference).map(|place| json!({
                "row": place.row,
                "column": place.column,
                "got": number(place.got.into()),
                "expected": number(place.expected.into()),
            })),
            "nan_count": self.nan_count(),
            "load_ms": self.load_ms,
            "forward_ms": self.timed_ms(),
            "runs": self.runs,
            "passed": self.passed,
        })
    }

    /// Lines for people.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        self.write_text(&mut out).expect("a String takes whatever is written");
        out
    }

    fn write_text(&self, out: &mut String) -> fmt::Result {
        let shape = &self.spec.shape;
        writeln!(out, "checkpoint  {}, layer {}", self.checkpoint.display(), self.layer)?;
        writeln!(
            out,
            "layer       {} experts, hidden {}, intermediate {}, top-k {}, {}, {} activation scales",
            shape.experts,
            shape.hidden,
            shape.intermediate,
            shape.topk,
            self.spec.activation,
            scales_label(self.spec.scales)
        )?;
        if let Some(why) = self.experts_unsaid {
            writeln!(out, "            ({} experts, as the tensors say: {why})", shape.experts)?;
        }
        if let Some(config) = self.config_topk
            && config != shape.topk
        {
            writeln!(out, "            (config.json says top-k {config}; the inputs' topk_ids are what counts)")?;
        }
        match (self.ranks, self.rank) {
            (Some(ranks), Some(rank)) => {
                let (first, count) = (self.spec.experts.first, self.spec.experts.count);
                writeln!(out, "ranks       only rank {rank} of {ranks}: {count} experts from expert {first} on")?;
            }
            (Some(ranks), None) => writeln!(out, "ranks       {ranks}, one after the other, summed in f32")?,
            (None, _) => {}
        }
        match &self.source {
            Source::File { path, found } => {
                let how = if *found { ", found beside the checkpoint" } else { "" };
                writeln!(out, "inputs      {} tokens of {}{how}", self.tokens, path.display())?;
            }
            Source::Random { seed } => writeln!(out, "inputs      {} random tokens, seed {seed}", self.tokens)?,
        }
        writeln!(
            out,
            "device      {}: {} ({})",
            self.runner.target(),
            self.runner.device_name(),
            self.runner.reason()
        )?;
        match self.timed_ms() {
            Some(ms) => write!(out, "time        {} a forward", human_ms(ms))?,
            None => write!(out, "time        - (no tokens)")?,
        }
        if self.runs > 1 && self.tokens > 0 {
            write!(out, " (median of {}, all with the same bits)", self.runs)?;
        }
        writeln!(out, ", {} to load", human_ms(self.load_ms))?;
        write!(out, "output      {}", self.out_dtype.label())?;
        if let Some(path) = self.out {
            write!(out, ", written to {} as the tensor output", path.display())?;
        }
        writeln!(out, ", {} NaN", self.output_nan_count)?;
        match self.expectation {
            Expectation::Tensor { name, dtype } => writeln!(out, "expected    {name} ({dtype}) of the inputs' file")?,
            Expectation::None(why) => writeln!(out, "expected    not compared: {why}")?,
        }
        self.comparison.map_or(Ok(()), |comparison| self.write_comparison(out, comparison))
    }

    fn write_comparison(&self, out: &mut String, comparison: &Comparison) -> fmt::Result {
        let Comparison { rel_l2, max_abs_error, rows_close, worst_row_rel_l2, nan_count, .. } = comparison;
        writeln!(out, "  relative L2        {rel_l2:.3e} (tolerance {:.1e})", self.tolerance)?;
        writeln!(out, "  worst row          {worst_row_rel_l2:.3e}")?;
        let share = rows_close * 100.0;
        let must = if self.out_dtype == OutDtype::F32 { " (at least 98%)" } else { "" };
        writeln!(out, "  rows within 1e-6   {share:.1}%{must}")?;
        writeln!(out, "  largest error      {max_abs_error:.3e}")?;
        writeln!(out, "  unexpected NaN     {nan_count}")?;
        if let Some(place) = comparison.first_difference {
            writeln!(
                out,
                "  first difference   row {}, column {}: {} instead of {}",
                place.row, place.column, place.got, place.expected
            )?;
        }
        writeln!(out, "{}", if self.passed == Some(true) { "PASSED" } else { "FAILED" })
    }
}

/// A JSON number, or a string where the value is not finite.
fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!(value.to_string()) }
}
