//! Mutations that change nothing that can be observed, each with the reason: `xtask/mutants/MODULE.json`, and `shared.json` for
//! what all modules have.

use std::path::Path;

use anyhow::{Context as _, Result};

use super::Mutant;
use super::statement::without_numbers;

/// One rule of the table. In each text a `*` stands for anything; registers have no numbers.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    kernel: String,
    before: String,
    after: String,
    /// The instructions before and behind the mutated one, where the reason needs them.
    #[serde(default = "anything")]
    previous: String,
    #[serde(default = "anything")]
    next: String,
    /// Whether the rule holds only before the kernel's first barrier: see [`Mutant::before_barrier`].
    #[serde(default)]
    before_barrier: bool,
    reason: String,
}

fn anything() -> String {
    "*".to_owned()
}

/// The table.
#[derive(Clone, Debug)]
pub(super) struct Accepted {
    rules: Vec<Rule>,
}

impl Accepted {
    /// The rules of a module and those of all.
    pub(super) fn of_module(folder: &Path, module: &str) -> Result<Self> {
        let mut rules = Self::read(&folder.join("shared.json"))?.rules;
        rules.extend(Self::read(&folder.join(format!("{module}.json")))?.rules);
        Ok(Self { rules })
    }

    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let rules = serde_json::from_str(&text).with_context(|| format!("{} is no table", path.display()))?;
        Ok(Self { rules })
    }

    /// Why a mutation changes nothing, if that is known.
    pub(super) fn reason(&self, mutant: &Mutant) -> Option<&str> {
        let [before, after, previous, next] =
            [&mutant.statement.text(), &mutant.after, &mutant.previous, &mutant.next].map(|text| without_numbers(text));
        let fits = |rule: &&Rule| {
            matches(&rule.kernel, &mutant.statement.kernel)
                && matches(&rule.before, &before)
                && matches(&rule.after, &after)
                && matches(&rule.previous, &previous)
                && matches(&rule.next, &next)
                && (mutant.before_barrier || !rule.before_barrier)
        };
        self.rules.iter().find(fits).map(|rule| rule.reason.as_str())
    }
}

/// Whether a text is as the pattern says.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).any(|skip| text.is_char_boundary(skip) && matches(rest, &text[skip..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::workspace_root;

    #[test]
    fn patterns() {
        assert!(matches("grouped_gemm_*", "grouped_gemm_n8") && matches("*", "") && matches("a*c", "abc"));
        assert!(!matches("a*c", "abd") && !matches("abc", "abcd") && !matches("", "a"));
    }

    #[test]
    fn tables_are_readable_and_give_reasons() {
        for entry in std::fs::read_dir(workspace_root().join("xtask/mutants")).expect("the directory") {
            let table = Accepted::read(&entry.expect("an entry").path()).expect("a table");
            assert!(table.rules.iter().all(|rule| rule.reason.len() > 20));
        }
    }
}
