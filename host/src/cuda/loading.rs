//! Loading: reading, copying, uploading and packing of different experts at the same time.
//!
//! The calling thread opens and checks expert after expert and hands each out in chunks. A few threads copy the chunks into
//! page-locked slots (which reads the file, where the source is a memory map), check the block scales in them, and queue their
//! upload. Once all of an expert's uploads are queued, the calling thread queues packing behind them, on the stream of the
//! staging buffer; the streams of the other buffers go on meanwhile. A buffer is taken again when its expert is packed.
//!
//! Chunks are taken in the order of the experts, and after an error those that were taken are finished; so the error that is
//! reported is the first one in that order, whichever thread met one first.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};

use nvfp4_moe_device::params::ExpertScales;

use super::engine::Engine;
use super::staging::{Image, LoadMemory, StagingLayout};
use crate::driver::{Device, DeviceBuffer, DriverError, Stream, UploadRing};
use crate::load::{LoadError, check_all_but_block_scales};
use crate::plan::Plan;
use crate::schedule;
use crate::weights::ExpertSource;

/// Name of the threads that copy.
const THREAD_NAME: &str = "nvfp4-moe-load";

/// Experts ahead of the one that is handed out whose tensors the source is told to fetch.
const FETCHED_AHEAD: usize = 2;

/// Room for one raw expert on the device, and the order of what happens to it.
struct Set {
    buffer: DeviceBuffer,
    stream: Stream,
}

/// A range of an expert.
struct Chunk<'a> {
    /// Counted from the rank's first expert.
    local: usize,
    set: usize,
    image: Arc<Image<'a>>,
    range: Range<usize>,
}

/// What the calling thread and those that copy know of each other.
struct Board<'a> {
    state: Mutex<State<'a>>,
    /// There are chunks, or there will be none.
    work: Condvar,
    /// A set's chunks are uploaded, or something failed.
    news: Condvar,
}

struct State<'a> {
    chunks: VecDeque<Chunk<'a>>,
    /// Chunks of each set whose upload is not queued.
    left: Vec<usize>,
    /// No chunks will follow.
    closed: bool,
    /// The first error in the order of the chunks: expert and byte.
    failure: Option<((usize, usize), LoadError)>,
    /// A thread that copies has panicked.
    lost: bool,
}

impl<'a> Board<'a> {
    fn new(sets: usize) -> Self {
        let left = vec![0; sets];
        let state = State { chunks: VecDeque::new(), left, closed: false, failure: None, lost: false };
        Self { state: Mutex::new(state), work: Condvar::new(), news: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out an expert.
    fn put(&self, chunks: Vec<Chunk<'a>>, set: usize) {
        let mut state = self.state();
        state.left[set] = chunks.len();
        state.chunks.extend(chunks);
        self.work.notify_all();
    }

    /// The next chunk; `None` when there will be none.
    fn take(&self) -> Option<Chunk<'a>> {
        let mut state = self.state();
        loop {
            if let Some(chunk) = state.chunks.pop_front() {
                return Some(chunk);
            }
            if state.closed || state.failure.is_some() {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn uploaded(&self, set: usize) {
        let mut state = self.state();
        state.left[set] -= 1;
        if state.left[set] == 0 {
            self.news.notify_all();
        }
    }

    fn fail(&self, place: (usize, usize), error: LoadError) {
        let mut state = self.state();
        state.chunks.clear();
        if state.failure.as_ref().is_none_or(|(first, _)| place < *first) {
            state.failure = Some((place, error));
        }
        self.work.notify_all();
        self.news.notify_all();
    }

    /// Waits until the uploads of all of a set's chunks are queued.
    fn wait_for(&self, set: usize) -> Result<(), Stop> {
        let mut state = self.state();
        loop {
            if state.failure.is_some() || state.lost {
                return Err(Stop::Elsewhere);
            }
            if state.left[set] == 0 {
                return Ok(());
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the threads end: when they have finished what was handed out, or at once.
    fn close(&self, at_once: bool) {
        let mut state = self.state();
        state.closed = true;
        if at_once {
            state.chunks.clear();
        }
        self.work.notify_all();
    }
}

/// Why the calling thread stops.
enum Stop {
    /// A thread that copies has failed, and the board says how.
    Elsewhere,
    Here(LoadError),
}

impl<E: Into<LoadError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Here(error.into())
    }
}

/// The threads that copy. Dropping it ends them and waits until they have, whichever way the calling thread leaves: a panic
/// included.
struct Threads<'s, 'b, 'a> {
    board: &'b Board<'a>,
    handles: Vec<ScopedJoinHandle<'s, ()>>,
}

impl Drop for Threads<'_, '_, '_> {
    fn drop(&mut self) {
        self.board.close(thread::panicking());
        for handle in self.handles.drain(..) {
            if let Err(panic) = handle.join()
                && !thread::panicking()
            {
                resume_unwind(panic);
            }
        }
    }
}

/// Tells the calling thread when one that copies panics.
struct Leaving<'b, 'a>(&'b Board<'a>);

impl Drop for Leaving<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.state().lost = true;
            self.0.news.notify_all();
        }
    }
}

/// One load.
struct Load<'l> {
    engine: &'l Engine,
    plan: &'l Plan,
    weights: &'l DeviceBuffer,
    layout: StagingLayout,
    memory: LoadMemory,
    sets: Vec<Set>,
}

/// Packs the plan's experts into `weights`, and returns their scales. `progress` is told (experts done, experts in all).
///
/// Everything beside `weights` is given back, and everything queued is done, before this returns.
pub(super) fn load_experts(
    engine: &Engine,
    plan: &Plan,
    weights: &DeviceBuffer,
    source: &dyn ExpertSource,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<ExpertScales>, LoadError> {
    let memory = LoadMemory::here(plan.spec());
    let layout = StagingLayout::of(plan.spec());
    let device = engine.device();
    let new_set = |_| {
        Ok::<_, DriverError>(Set {
            buffer: DeviceBuffer::alloc(device, memory.expert_bytes)?,
            stream: Stream::new(device)?,
        })
    };
    let sets = (0..memory.sets).map(new_set).collect::<Result<Vec<_>, _>>()?;
    if sets.is_empty() {
        return Ok(Vec::new());
    }
    let load = Load { engine, plan, weights, layout, memory, sets };
    let board = Board::new(memory.sets);
    let outcome = thread::scope(|scope| {
        let _threads = start_threads(scope, &load, &board)?;
        load.hand_out(&board, source, progress)
    });
    let failure = board.state.into_inner().unwrap_or_else(PoisonError::into_inner).failure;
    match (failure, outcome) {
        (Some((_, error)), _) | (None, Err(Stop::Here(error))) => Err(error),
        (None, Ok(scales)) => Ok(scales),
        // A thread that ends early without an error has panicked, and joining it has passed that on.
        (None, Err(Stop::Elsewhere)) => Err(LoadError::Threads { reason: "one ended early".to_owned() }),
    }
}

/// Starts as many threads as the system gives, at least one.
fn start_threads<'s, 'b, 'a>(
    scope: &'s Scope<'s, '_>,
    load: &'b Load<'_>,
    board: &'b Board<'a>,
) -> Result<Threads<'s, 'b, 'a>, LoadError>
where
    'b: 's,
{
    let mut threads = Threads { board, handles: Vec::new() };
    for _ in 0..load.memory.threads {
        let started = thread::Builder::new().name(THREAD_NAME.to_owned()).spawn_scoped(scope, move || {
            let _leaving = Leaving(board);
            copy_chunks(load, board);
        });
        match started {
            Ok(handle) => threads.handles.push(handle),
            Err(error) if threads.handles.is_empty() => {
                return Err(LoadError::Threads { reason: error.to_string() });
            }
            Err(_) => break,
        }
    }
    Ok(threads)
}

/// What a thread does.
fn copy_chunks(load: &Load<'_>, board: &Board<'_>) {
    let device: &Device = load.engine.device();
    let mut ring = match UploadRing::new(device, load.memory.slots, load.memory.slot_bytes) {
        Ok(ring) => ring,
        Err(error) => return board.fail((0, 0), error.into()),
    };
    while let Some(chunk) = board.take() {
        match copy_chunk(&mut ring, &chunk, &load.sets[chunk.set]) {
            Ok(()) => board.uploaded(chunk.set),
            Err(error) => board.fail((chunk.local, chunk.range.start), error),
        }
    }
}

fn copy_chunk(ring: &mut UploadRing, chunk: &Chunk<'_>, set: &Set) -> Result<(), LoadError> {
    let range = &chunk.range;
    chunk.image.copy(range, ring.slot()?)?;
    // SAFETY: nobody captures a set's stream.
    unsafe { ring.upload(range.len(), &set.buffer, range.start, &set.stream)? };
    Ok(())
}

impl Load<'_> {
    /// What the calling thread does: every expert in turn, and at last those that are still under way.
    fn hand_out<'a>(
        &self,
        board: &Board<'a>,
        source: &'a dyn ExpertSource,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<ExpertScales>, Stop> {
        let (spec, sets) = (self.plan.spec(), self.sets.len());
        let experts = spec.experts;
        let mut scales: Vec<ExpertScales> = Vec::with_capacity(experts.count);
        experts.ids().take(FETCHED_AHEAD).for_each(|id| source.will_need(id));
        for (local, id) in experts.ids().enumerate() {
            if let Some(earlier) = local.checked_sub(sets) {
                self.finish(board, earlier)?;
                progress(earlier + 1, experts.count);
            }
            experts.ids().nth(local + FETCHED_AHEAD).into_iter().for_each(|ahead| source.will_need(ahead));
            let expert = source.expert(id).map_err(|source| LoadError::Source { expert: id, source })?;
            scales.push(check_all_but_block_scales(spec, id, &expert, scales.first())?);
            let (set, image) = (local % sets, Arc::new(self.layout.image(&expert)));
            let ranges = image.ranges(self.memory.slot_bytes);
            board.put(ranges.map(|range| Chunk { local, set, image: Arc::clone(&image), range }).collect(), set);
        }
        for earlier in experts.count - sets..experts.count {
            self.finish(board, earlier)?;
            progress(earlier + 1, experts.count);
        }
        Ok(scales)
    }

    /// Packs an expert once it is uploaded, and waits for it.
    fn finish(&self, board: &Board<'_>, local: usize) -> Result<(), Stop> {
        let at = local % self.sets.len();
        let set = &self.sets[at];
        board.wait_for(at)?;
        let staged = self.layout.staged(set.buffer.address());
        for launch in schedule::pack_expert(self.plan, self.weights.address(), local, &staged) {
            // SAFETY: the plan sizes the weights, the checks of the expert its staged tensors, which the uploads before
            // this on the stream fill; both outlive the synchronisation below, before which nobody writes them again.
            unsafe { self.engine.launch(&launch, false, set.stream.handle())? };
        }
        Ok(set.stream.synchronize()?)
    }
}
