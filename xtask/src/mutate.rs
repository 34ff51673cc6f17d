//! `cargo xtask mutate`: breaks the shipped kernels, one instruction at a time, and counts how often `verify` notices.
//!
//! A mutation that nothing notices is either one that changes nothing, which `xtask/mutants` then says with the reason,
//! or a hole in `verify`.

mod accepted;
mod checks;
mod kinds;
mod outcome;
mod statement;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use nvfp4_moe_tests::emulated::Architecture;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::process;
use accepted::Accepted;
use checks::Verdict;
use kinds::Kind;
use outcome::{Outcome, Summary};
use statement::{Statement, statements};

/// Arguments of `mutate`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Architecture whose kernels are mutated, one that the emulator plays: sm_80, sm_90a or sm_120a.
    #[arg(long, default_value = "sm_80")]
    arch: String,
    /// Mutate this kernel only; may be given more than once.
    #[arg(long = "kernel", value_name = "NAME")]
    kernels: Vec<String>,
    /// Mutations of this kind only, such as "drop barrier"; may be given more than once.
    #[arg(long = "kind", value_name = "KIND")]
    kinds: Vec<String>,
    /// Seed of the sample.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mutations to try, spread over all kernels and kinds.
    #[arg(long, default_value_t = 300)]
    count: usize,
    /// Try every mutation.
    #[arg(long, conflicts_with_all = ["count", "seed"])]
    all: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One mutation.
#[derive(Clone, Debug)]
struct Mutant {
    kind: Kind,
    statement: Statement,
    /// What stands in the statement's place.
    after: String,
    /// The statements around it, which may be what makes the mutation change nothing.
    previous: String,
    next: String,
    /// Whether it stands before the kernel's first barrier of the block, or before its first wait for an mbarrier where it
    /// has those.
    before_barrier: bool,
}

impl Mutant {
    /// The module with this mutation.
    fn apply(&self, ptx: &str) -> String {
        let range = &self.statement.range;
        format!("{}{}{}", &ptx[..range.start], self.after, &ptx[range.end..])
    }
}

/// Runs the verb; whether enough was noticed.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let root = process::workspace_root();
    let device = format!("emulator:{}", arguments.arch);
    let architecture =
        Architecture::named(&device).with_context(|| format!("the emulator does not play {}", arguments.arch))?;
    let module = architecture.kernels().module();
    let path = root.join("host/ptx").join(format!("{module}.ptx"));
    let ptx = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let accepted = Accepted::of_module(&root.join("xtask/mutants"), module)?;

    let mutants = chosen(arguments, &ptx)?;
    checks::unchanged_passes(architecture, &ptx, mutants.iter().map(|mutant| mutant.statement.kernel.as_str()))?;
    let verdicts = judge_all(architecture, &ptx, &mutants);
    let outcomes: Vec<_> = mutants
        .into_iter()
        .zip(verdicts)
        .map(|(mutant, verdict)| Outcome { reason: accepted.reason(&mutant).map(str::to_owned), mutant, verdict })
        .collect();
    let summary = Summary::new(&outcomes);
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary.to_json())?);
    } else {
        print!("{summary}");
    }
    Ok(summary.is_enough())
}

/// Every mutation of the kernels and kinds that were asked for, or a sample of them.
fn chosen(arguments: &Arguments, ptx: &str) -> Result<Vec<Mutant>> {
    for kind in &arguments.kinds {
        let known = Kind::ALL.iter().any(|known| known.label() == kind);
        ensure!(known, "there is no kind {kind}; there are {}", Kind::ALL.map(Kind::label).join(", "));
    }
    let statements = statements(ptx);
    for kernel in &arguments.kernels {
        ensure!(statements.iter().any(|statement| statement.kernel == *kernel), "there is no kernel {kernel}");
    }
    let mut first_barriers: BTreeMap<&str, u32> = BTreeMap::new();
    for barrier in statements.iter().filter(|statement| statement.opcode == "bar.sync") {
        first_barriers.entry(&barrier.kernel).or_insert(barrier.line);
    }
    let mut first_waits: BTreeMap<&str, u32> = BTreeMap::new();
    for wait in statements.iter().filter(|statement| statement.name() == "mbarrier" && statement.has("try_wait")) {
        first_waits.entry(&wait.kernel).or_insert(wait.line);
    }
    first_barriers.extend(first_waits);
    let wanted = |names: &[String], name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    let mut groups: BTreeMap<(String, Kind), Vec<Mutant>> = BTreeMap::new();
    for (index, statement) in statements.iter().enumerate() {
        if !wanted(&arguments.kernels, &statement.kernel) {
            continue;
        }
        let text_at = |index: usize| statements.get(index).map_or_else(String::new, Statement::text);
        let (previous, next) = (text_at(index.wrapping_sub(1)), text_at(index + 1));
        let first_barrier = first_barriers.get(statement.kernel.as_str());
        let before_barrier = first_barrier.is_none_or(|barrier| statement.line < *barrier);
        for (kind, after) in kinds::mutations(statement) {
            if wanted(&arguments.kinds, kind.label()) {
                let (statement, previous, next) = (statement.clone(), previous.clone(), next.clone());
                let mutant = Mutant { kind, statement, after, previous, next, before_barrier };
                groups.entry((mutant.statement.kernel.clone(), kind)).or_default().push(mutant);
            }
        }
    }
    if groups.is_empty() {
        bail!("there is nothing to mutate");
    }
    if arguments.all {
        return Ok(groups.into_values().flatten().collect());
    }
    // One of each group in turn, so that rare kinds and small kernels are not drowned.
    let mut rng = StdRng::seed_from_u64(arguments.seed);
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.iter_mut().for_each(|group| group.shuffle(&mut rng));
    groups.shuffle(&mut rng);
    let mut sample = Vec::new();
    while sample.len() < arguments.count && groups.iter().any(|group| !group.is_empty()) {
        sample.extend(groups.iter_mut().filter_map(Vec::pop));
    }
    sample.truncate(arguments.count);
    Ok(sample)
}

/// Judges on as many threads as there are cores: each emulator runs on one.
fn judge_all(architecture: Architecture, ptx: &str, mutants: &[Mutant]) -> Vec<Verdict> {
    // Checks that panic are an outcome like any other, hundreds of times.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let next = AtomicUsize::new(0);
    let verdicts = Mutex::new(Vec::new());
    let judge_some = || {
        loop {
            let index = next.fetch_add(1, Relaxed);
            let Some(mutant) = mutants.get(index) else { return };
            let verdict = checks::judge(architecture, &mutant.apply(ptx), &mutant.statement.kernel);
            verdicts.lock().unwrap_or_else(PoisonError::into_inner).push((index, verdict));
            if (index + 1).is_multiple_of(100) {
                eprintln!("{} of {}", index + 1, mutants.len());
            }
        }
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        (0..threads).for_each(|_| drop(scope.spawn(judge_some)));
    });
    std::panic::set_hook(hook);
    let mut verdicts = verdicts.into_inner().unwrap_or_else(PoisonError::into_inner);
    verdicts.sort_by_key(|(index, _)| *index);
    verdicts.into_iter().map(|(_, verdict)| verdict).collect()
}
