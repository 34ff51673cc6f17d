//! Loading: several experts under way at the same time, and still the same bytes, errors in the order of the experts,
//! nothing left behind, and progress in order.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::RawExpert;
use nvfp4_moe::cuda::MoeLayer;
use nvfp4_moe::harness::{HarnessError, Target};
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::load::LoadError;
use nvfp4_moe::plan::Plan;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::weights::{ExpertSource, SourceError};

use super::device_layout::{by_layout_for, same_bytes};
use super::memory::GRANULE;
use super::setup::{Lab, Layer, SWIGLU};

/// An expert has several chunks, and there are more experts than are under way at a time.
const SIZES: [usize; 4] = [320, 176, 10, 2];

/// A layer with experts that cannot be read.
struct Missing<'a> {
    layer: &'a Layer,
    experts: &'a [usize],
}

impl ExpertSource for Missing<'_> {
    fn expert(&self, id: usize) -> Result<RawExpert<'_>, SourceError> {
        if self.experts.contains(&id) {
            return Err(format!("the tensors of {id} are missing").into());
        }
        self.layer.expert(id)
    }
}

fn load(lab: &Lab<'_>, layer: &Layer, source: &dyn ExpertSource) -> Result<(), LoadError> {
    match lab.runner.load(&layer.spec, source, 1, &mut |_, _| {}) {
        Ok(_) => Ok(()),
        Err(HarnessError::Load(error)) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

fn says(outcome: Result<(), LoadError>, parts: &[&str], what: &dyn Display) -> Result<()> {
    let message = outcome.err().with_context(|| format!("{what}: loaded"))?.to_string();
    for part in parts {
        ensure!(message.contains(part), "{what}: {message:?} does not say {part:?}");
    }
    Ok(())
}

pub(super) fn first_error_counts(lab: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let missing = |experts| Missing { layer: &layer, experts };
    says(load(lab, &layer, &missing(&[7])), &["expert 7", "the tensors of 7 are missing"], &"expert 7")?;
    says(load(lab, &layer, &missing(&[0])), &["expert 0", "the tensors of 0 are missing"], &"expert 0")?;
    says(load(lab, &layer, &missing(&[9, 3, 4])), &["the tensors of 3 are missing"], &"experts 3, 4 and 9")?;

    let mut short = layer.clone();
    short.experts[7].down.codes.truncate(100);
    says(load(lab, &short, &short), &["down of expert 7", "100 bytes of codes"], &"a short tensor")?;

    // A bad byte is found while bytes are copied, a missing expert before: the earlier expert counts all the same.
    for (bad, missing, expected) in [(5, 6, "row 11"), (5, 5, "of 5 are missing"), (6, 5, "of 5 are missing")] {
        for matrix in 0..3 {
            let mut both = layer.clone();
            let changed = both.experts[bad].matrices().nth(matrix).context("three matrices")?;
            let blocks = changed.cols / 16;
            changed.scales[11 * blocks + 3] = 0xFF;
            // Not the first of its matrix any more, if chunks are looked at in another order.
            *changed.scales.last_mut().context("scales")? = 0x80;
            let source = Missing { layer: &both, experts: &[missing] };
            let what = format!("matrix {matrix} of {bad}, {missing} missing");
            says(load(lab, &both, &source), &[expected], &what)?;
        }
    }
    // And the device still works.
    load(lab, &layer, &layer)?;
    Ok(())
}

pub(super) fn packed_bytes(lab: &Lab<'_>) -> Result<()> {
    let engine = lab.runner.engine().context("a GPU")?;
    for activation in [SWIGLU, Activation::Relu2] {
        for range in [ExpertRange::all(10), ExpertRange { first: 3, count: 5 }, ExpertRange { first: 9, count: 1 }] {
            let layer = Layer::new(SIZES, activation, ScaleMode::PerToken).on_rank(range);
            let plan = Plan::new(layer.spec, &engine.device().limits(), 1)?;
            let expected = by_layout_for(plan.kernels(), &layer);
            let loaded = MoeLayer::load(engine, &plan, &layer, |_, _| {})?;
            let mut packed = vec![0; expected.len()];
            loaded.weights().read(0, &mut packed)?;
            same_bytes(&packed, &expected, &format!("{activation:?}, {range:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn progress_in_order(lab: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let here = thread::current().id();
    let mut told = Vec::new();
    lab.runner.load(&layer.spec, &layer, 1, &mut |done, all| told.push((done, all, thread::current().id())))?;
    ensure!(told == (1..=10).map(|done| (done, 10, here)).collect::<Vec<_>>(), "{told:?}");
    let none = layer.on_rank(ExpertRange { first: 4, count: 0 });
    lab.runner.load(&none.spec, &none, 1, &mut |_, _| panic!("no expert is done"))?;
    Ok(())
}

/// Threads of this process that copy for a load; `None` where the system does not say.
fn copying_threads() -> Option<usize> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?;
    let name =
        |thread: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok();
    Some(threads.filter_map(name).filter(|name| name.starts_with("nvfp4-moe-load")).count())
}

/// Checks that no more are left than there were. The system's list may be behind by a moment.
fn no_thread_is_left(before: Option<usize>, what: &str) -> Result<()> {
    let start = Instant::now();
    while copying_threads() > before {
        ensure!(start.elapsed() < Duration::from_secs(1), "{what}: a thread is left");
        thread::yield_now();
    }
    Ok(())
}

pub(super) fn nothing_is_left(lab: &Lab<'_>) -> Result<()> {
    let engine = lab.runner.engine().context("a GPU")?;
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let plan = Plan::new(layer.spec, &engine.device().limits(), 1)?;
    let mut bad = layer.clone();
    bad.experts[8].up.scales[0] = 0xFF;
    // A driver gives memory out in larger pieces; under a sanitizer, what is free says nothing.
    let counted = lab.is_full() || matches!(lab.runner.target(), Target::Backend(_));
    let slack = if matches!(lab.runner.target(), Target::Backend(_)) { 0 } else { GRANULE };
    let check_memory = |before: u64, what: &str| -> Result<()> {
        let after = engine.device().free_memory()?.0;
        ensure!(!counted || after + slack >= before, "{what}: {before} bytes were free, now {after}");
        Ok(())
    };
    // The first use of a kernel may take memory for its code.
    drop(MoeLayer::load(engine, &plan, &layer, |_, _| {})?);
    let before = engine.device().free_memory()?.0;
    // Threads that others started from one that copied have its name.
    let threads = copying_threads();
    let mut most_threads = threads;
    for (source, what) in [
        (&Missing { layer: &layer, experts: &[7] } as &dyn ExpertSource, "a missing expert"),
        (&bad, "a bad scale"),
        (&Missing { layer: &layer, experts: &[0] }, "a missing first expert"),
    ] {
        let outcome = MoeLayer::load(engine, &plan, source, |_, _| most_threads = most_threads.max(copying_threads()));
        ensure!(outcome.is_err(), "{what}: loaded");
        check_memory(before, what)?;
        no_thread_is_left(threads, what)?;
    }
    ensure!(threads.is_none() || most_threads > threads, "the threads have another name");
    // A panic of the caller's is the caller's, and no thread waits for ever.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        MoeLayer::load(engine, &plan, &layer, |done, _| {
            if done == 4 {
                std::panic::resume_unwind(Box::new("a caller's panic"));
            }
        })
    }));
    ensure!(panicked.is_err(), "the panic is lost");
    check_memory(before, "after a panic")?;
    no_thread_is_left(threads, "after a panic")?;
    drop(MoeLayer::load(engine, &plan, &layer, |_, _| {})?);
    Ok(())
}
