//! What ran, on which device, and how it went.

use std::fmt;

use anyhow::Result;
use serde_json::{Value, json};

/// How a check went.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// It ran and is right.
    Passed {
        /// What the table shows beside the verdict; short.
        figure: String,
        /// What was found, in words.
        detail: String,
    },
    /// It ran and is wrong, or could not run although it had to: why.
    Failed(String),
    /// It did not run, which is never a pass: why.
    NotRun(String),
}

impl Outcome {
    /// A pass without a figure.
    pub(crate) fn passed(detail: impl Into<String>) -> Self {
        Self::Passed { figure: String::new(), detail: detail.into() }
    }

    /// The outcome of a step that has nothing to report but errors.
    pub(crate) fn of(result: Result<()>, detail: &str) -> Self {
        match result {
            Ok(()) => Self::passed(detail),
            Err(error) => Self::Failed(format!("{error:#}")),
        }
    }

    fn verdict(&self) -> &'static str {
        match self {
            Self::Passed { .. } => "passed",
            Self::Failed(_) => "failed",
            Self::NotRun(_) => "not run",
        }
    }

    fn detail(&self) -> &str {
        match self {
            Self::Passed { detail, .. } | Self::Failed(detail) | Self::NotRun(detail) => detail,
        }
    }

    fn cell(&self) -> String {
        match self {
            Self::Passed { figure, .. } => format!("ok {figure}"),
            Self::Failed(_) => "FAILED".to_owned(),
            Self::NotRun(_) => "not run".to_owned(),
        }
    }
}

#[derive(Clone, Debug)]
struct Check {
    name: String,
    device: Option<String>,
    outcome: Outcome,
}

impl Check {
    fn title(&self) -> String {
        match &self.device {
            Some(device) => format!("{} on {device}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Every check so far, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    checks: Vec<Check>,
}

impl Report {
    /// Adds a check that has nothing to do with a device.
    pub(crate) fn add(&mut self, name: impl Into<String>, outcome: Outcome) {
        self.push(Check { name: name.into(), device: None, outcome });
    }

    /// Adds a check on one device.
    pub(crate) fn add_on(&mut self, name: impl Into<String>, device: impl Into<String>, outcome: Outcome) {
        self.push(Check { name: name.into(), device: Some(device.into()), outcome });
    }

    /// A failure is said at once, and again in the end.
    fn push(&mut self, check: Check) {
        if let Outcome::Failed(reason) = &check.outcome {
            eprintln!("FAILED {}: {reason}", check.title());
        }
        self.checks.push(check);
    }

    /// How many checks passed.
    pub(crate) fn passed(&self) -> usize {
        self.count("passed")
    }

    /// How many failed.
    pub(crate) fn failed(&self) -> usize {
        self.count("failed")
    }

    fn count(&self, verdict: &str) -> usize {
        self.checks.iter().filter(|check| check.outcome.verdict() == verdict).count()
    }

    /// The whole report as one object.
    pub(crate) fn to_json(&self) -> Value {
        let checks = self.checks.iter().map(|check| {
            json!({
                "check": check.name,
                "device": check.device,
                "outcome": check.outcome.verdict(),
                "detail": check.outcome.detail(),
            })
        });
        json!({
            "checks": checks.collect::<Vec<_>>(),
            "passed": self.passed(),
            "failed": self.failed(),
            "not_run": self.count("not run"),
        })
    }

    /// The names in the order of their first appearance.
    fn names(&self, on_device: bool) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for check in self.checks.iter().filter(|check| check.device.is_some() == on_device) {
            if !names.contains(&check.name.as_str()) {
                names.push(&check.name);
            }
        }
        names
    }

    fn devices(&self) -> Vec<&str> {
        let mut devices: Vec<&str> = Vec::new();
        for device in self.checks.iter().filter_map(|check| check.device.as_deref()) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices();
        let names = self.names(true);
        if names.is_empty() {
            return Ok(());
        }
        let mut rows = vec![vec!["case".to_owned()]];
        rows[0].extend(devices.iter().map(|device| (*device).to_owned()));
        for name in names {
            let mut row = vec![name.to_owned()];
            row.extend(devices.iter().map(|device| {
                let here = |check: &&Check| check.name == name && check.device.as_deref() == Some(*device);
                self.checks.iter().find(here).map_or_else(|| "-".to_owned(), |check| check.outcome.cell())
            }));
            rows.push(row);
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..=devices.len()).map(width).collect();
        writeln!(f)?;
        for row in &rows {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("   ").trim_end())?;
        }
        let has_figure = |check: &Check| matches!(&check.outcome, Outcome::Passed { figure, .. } if !figure.is_empty());
        if self.checks.iter().any(has_figure) {
            writeln!(f, "The figures are the relative L2 distances of the f32 outputs from the expected ones.")?;
        }
        Ok(())
    }

    fn write_list(&self, f: &mut fmt::Formatter<'_>, title: &str, verdict: &str) -> fmt::Result {
        let mut listed = self.checks.iter().filter(|check| check.outcome.verdict() == verdict).peekable();
        if listed.peek().is_some() {
            writeln!(f, "\n{title}")?;
        }
        listed.try_for_each(|check| writeln!(f, "  {}: {}", check.title(), check.outcome.detail()))
    }
}

impl fmt::Display for Report {
    /// The table, what did not run, what failed, and the counts alone on the last line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_table(f)?;
        writeln!(f)?;
        for name in self.names(false) {
            for check in self.checks.iter().filter(|check| check.name == name && check.device.is_none()) {
                let detail = match &check.outcome {
                    Outcome::Passed { detail, .. } => detail,
                    _ => "see below",
                };
                writeln!(f, "{name:10} {:7}  {detail}", check.outcome.cell().trim_end())?;
            }
        }
        self.write_list(f, "Not run:", "not run")?;
        self.write_list(f, "Failed:", "failed")?;
        writeln!(f, "\n{} passed, {} failed", self.passed(), self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Report {
        let mut report = Report::default();
        report.add("build", Outcome::passed("fine"));
        let figure = Outcome::Passed { figure: "1.0e-8".to_owned(), detail: "close".to_owned() };
        report.add_on("ragged, static", "cpu", figure);
        report.add_on("ragged, static", "cuda:0", Outcome::Failed("3 rows are off".to_owned()));
        report.add_on("ragged, per-token", "cpu", Outcome::NotRun("there is nothing to compare with".to_owned()));
        report
    }

    #[test]
    fn the_last_line_is_the_counts_and_nothing_else() {
        let text = example().to_string();
        assert_eq!(text.lines().last(), Some("2 passed, 1 failed"));
        assert_eq!(Report::default().to_string().lines().last(), Some("0 passed, 0 failed"));
    }

    #[test]
    fn what_did_not_run_is_listed_with_its_reason_and_is_no_pass() {
        let report = example();
        let text = report.to_string();
        assert!(text.contains("ragged, per-token on cpu: there is nothing to compare with"), "{text}");
        assert!(text.contains("ragged, static on cuda:0: 3 rows are off"), "{text}");
        assert_eq!((report.passed(), report.failed()), (2, 1));
    }

    #[test]
    fn the_table_has_a_row_a_case_and_a_column_a_device() {
        let text = example().to_string();
        let rows: Vec<Vec<&str>> =
            text.lines().skip(1).take(3).map(|line| line.split("   ").map(str::trim).collect()).collect();
        assert_eq!(rows[0].first().zip(rows[0].last()), Some((&"case", &"cuda:0")));
        assert!(text.contains("ragged, static      ok 1.0e-8   FAILED"), "{text}");
        assert!(text.contains("ragged, per-token   not run     -"), "{text}");
    }

    #[test]
    fn json_has_every_check() {
        let json = example().to_json();
        assert_eq!((&json["passed"], &json["failed"], &json["not_run"]), (&json!(2), &json!(1), &json!(1)));
        assert_eq!(json["checks"][2]["device"], "cuda:0");
        assert_eq!(json["checks"][2]["outcome"], "failed");
        assert_eq!(json["checks"][0]["device"], Value::Null);
    }
}
