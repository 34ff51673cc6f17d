//! What came of the mutations, by kind, and what is left to explain.

use std::fmt;

use serde_json::{Value, json};

use super::Mutant;
use super::checks::Verdict;
use super::kinds::Kind;

/// Of the mutations that change something, so many must be caught.
const ENOUGH: f64 = 0.95;

/// One mutation and how it fared.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) mutant: Mutant,
    pub(super) verdict: Verdict,
    /// Why it changes nothing, if that is known.
    pub(super) reason: Option<String>,
}

/// Counts of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counts {
    tried: usize,
    caught: usize,
    /// Of those, by the emulator's checks rather than by wrong results.
    by_finding: usize,
    /// Survived, and known to change nothing.
    equivalent: usize,
}

impl Counts {
    fn add(&mut self, outcome: &Outcome) {
        self.tried += 1;
        match &outcome.verdict {
            Verdict::Caught { message, .. } => {
                self.caught += 1;
                self.by_finding += usize::from(is_finding(message));
            }
            _ => self.equivalent += usize::from(outcome.reason.is_some()),
        }
    }

    fn survivors(&self) -> usize {
        self.tried - self.caught - self.equivalent
    }

    /// Share that was caught of all mutations.
    fn raw_share(&self) -> f64 {
        self.caught as f64 / self.tried.max(1) as f64
    }

    /// Share that was caught of those that change something.
    fn share(&self) -> f64 {
        let different = self.tried - self.equivalent;
        if different == 0 { 1.0 } else { self.caught as f64 / different as f64 }
    }
}

/// A finding names the line of the module.
fn is_finding(message: &str) -> bool {
    message.contains(": kernel ") && message.contains(", line ")
}

/// All of a run.
#[derive(Clone, Debug)]
pub(super) struct Summary<'a> {
    outcomes: &'a [Outcome],
}

impl<'a> Summary<'a> {
    pub(super) fn new(outcomes: &'a [Outcome]) -> Self {
        Self { outcomes }
    }

    /// Mutations that the emulator read.
    fn judged(&self) -> impl Iterator<Item = &'a Outcome> {
        self.outcomes.iter().filter(|outcome| !matches!(outcome.verdict, Verdict::Rejected(_)))
    }

    fn counts(&self, kind: Option<Kind>) -> Counts {
        let mut counts = Counts::default();
        self.judged().filter(|outcome| kind.is_none_or(|kind| outcome.mutant.kind == kind)).for_each(|o| counts.add(o));
        counts
    }

    fn survivors(&self) -> impl Iterator<Item = &'a Outcome> {
        self.judged().filter(|outcome| outcome.verdict == Verdict::Survived)
    }

    /// Whether enough of what changes something was caught.
    pub(super) fn is_enough(&self) -> bool {
        self.counts(None).share() >= ENOUGH
    }

    /// The whole run as one object.
    pub(super) fn to_json(&self) -> Value {
        let figures = |counts: Counts| {
            json!({
                "tried": counts.tried,
                "caught": counts.caught,
                "caught_by_finding": counts.by_finding,
                "equivalent": counts.equivalent,
                "survived": counts.survivors(),
                "share_of_all": counts.raw_share(),
                "share_of_different": counts.share(),
            })
        };
        let kinds: serde_json::Map<_, _> =
            Kind::ALL.into_iter().map(|kind| (kind.label().to_owned(), figures(self.counts(Some(kind))))).collect();
        let mutants = self.outcomes.iter().map(|Outcome { mutant, verdict, reason }| {
            let (verdict, check, message) = match verdict {
                Verdict::Caught { check, message } => ("caught", Some(*check), Some(message)),
                Verdict::Survived => ("survived", None, None),
                Verdict::Rejected(message) => ("not read", None, Some(message)),
            };
            json!({
                "kind": mutant.kind.label(),
                "kernel": mutant.statement.kernel,
                "line": mutant.statement.line,
                "before": mutant.statement.text(),
                "after": mutant.after,
                "previous": mutant.previous,
                "next": mutant.next,
                "before_barrier": mutant.before_barrier,
                "verdict": verdict,
                "check": check,
                "message": message,
                "equivalent_because": reason,
            })
        });
        json!({ "total": figures(self.counts(None)), "kinds": kinds, "mutants": mutants.collect::<Vec<_>>() })
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24} {:>6} {:>7} {:>11} {:>11} {:>9} {:>7} {:>10}",
            "kind", "tried", "caught", "by finding", "equivalent", "survived", "of all", "different"
        )?;
        let kinds = Kind::ALL.into_iter().map(|kind| (kind.label(), self.counts(Some(kind))));
        for (label, counts) in kinds.filter(|(_, counts)| counts.tried > 0).chain([("all", self.counts(None))]) {
            writeln!(
                f,
                "{label:<24} {:>6} {:>7} {:>11} {:>11} {:>9} {:>6.1}% {:>9.1}%",
                counts.tried,
                counts.caught,
                counts.by_finding,
                counts.equivalent,
                counts.survivors(),
                100.0 * counts.raw_share(),
                100.0 * counts.share()
            )?;
        }
        for outcome in self.survivors() {
            let Outcome { mutant, reason, .. } = outcome;
            let after = if mutant.after.is_empty() { "nothing" } else { &mutant.after };
            let place = format!("{}, line {}", mutant.statement.kernel, mutant.statement.line);
            writeln!(f, "\n{}: {place}\n  {}\n  {after}", mutant.kind.label(), mutant.statement.text())?;
            match reason {
                Some(reason) => writeln!(f, "  equivalent: {reason}")?,
                None => writeln!(f, "  SURVIVED")?,
            }
        }
        let rejected = self.outcomes.len() - self.judged().count();
        if rejected > 0 {
            writeln!(f, "\n{rejected} more were no PTX that the emulator reads.")?;
        }
        Ok(())
    }
}
