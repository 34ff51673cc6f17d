//! Streams, events and graphs of the emulator.

use std::collections::{BTreeMap, VecDeque};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use nvfp4_moe::driver::DriverError;
use nvfp4_moe::driver::backend::{Handle, Queues};
use nvfp4_moe_emulator::EmulatorError;

use super::{Emulated, Recorded, State};

/// What waits on a stream.
#[derive(Clone, Debug)]
enum Work {
    Launch(Recorded),
    Upload {
        address: u64,
        /// Exposed address of host memory that stays as it is until this has run.
        source: usize,
        bytes: usize,
    },
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Event(usize),
}

/// The streams, by handle, and the launches that are kept for graphs.
#[derive(Debug, Default)]
pub(super) struct Streams {
    waiting: BTreeMap<usize, VecDeque<Work>>,
    /// Handles given out.
    given: usize,
    capture: Option<Vec<Recorded>>,
    graphs: Vec<Arc<Vec<Recorded>>>,
}

impl Streams {
    /// A handle that no stream and no event has; 0 is the default stream.
    fn new_handle(&mut self) -> usize {
        self.given += 1;
        self.given
    }

    fn queue(&mut self, stream: Handle, work: Work) {
        self.waiting.entry(stream.0).or_default().push_back(work);
    }

    /// Queues a launch, or keeps it for the graph that is being captured.
    pub(super) fn launch(&mut self, stream: Handle, launch: Recorded) {
        match &mut self.capture {
            Some(launches) => launches.push(launch),
            None => self.queue(stream, Work::Launch(launch)),
        }
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// `source` has `bytes` readable bytes, which nobody writes or frees until the copy has run.
    pub(super) unsafe fn upload(&mut self, stream: Handle, address: u64, source: NonNull<u8>, bytes: usize) {
        self.queue(stream, Work::Upload { address, source: source.as_ptr().expose_provenance(), bytes });
    }
}

impl State {
    /// Runs what waits on a stream, as far as `until` if it is there. After an error the rest is dropped.
    fn run_stream(&mut self, stream: usize, until: Option<usize>) -> Result<(), EmulatorError> {
        while let Some(work) = self.streams.waiting.get_mut(&stream).and_then(VecDeque::pop_front) {
            let outcome = match &work {
                Work::Launch(launch) => self.run(launch),
                Work::Upload { address, source, bytes } => {
                    // SAFETY: what the caller of `Streams::upload` promised, for this has not run before.
                    let source = unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(*source), *bytes) };
                    self.emulator.memory_mut().write(*address, source)
                }
                Work::Copy { from, to, bytes } => {
                    let memory = self.emulator.memory().read(*from, *bytes);
                    memory.and_then(|copied| self.emulator.memory_mut().write(*to, &copied))
                }
                Work::Event(event) if until == Some(*event) => return Ok(()),
                Work::Event(_) => Ok(()),
            };
            if outcome.is_err() {
                self.streams.waiting.remove(&stream);
                return outcome;
            }
        }
        Ok(())
    }

    /// Runs what waits on any stream; the first error, if there is one.
    pub(super) fn run_all(&mut self) -> Result<(), EmulatorError> {
        let streams: Vec<usize> = self.streams.waiting.keys().copied().collect();
        let outcomes: Vec<_> = streams.into_iter().map(|stream| self.run_stream(stream, None)).collect();
        outcomes.into_iter().collect()
    }
}

impl Queues for Emulated {
    fn new_stream(&self) -> Result<Handle, DriverError> {
        Ok(Handle(self.state().streams.new_handle()))
    }

    fn destroy_stream(&self, stream: Handle) {
        let mut state = self.state();
        // Queued work finishes, and nobody waits for its error any more.
        let _ = state.run_stream(stream.0, None);
        state.streams.waiting.remove(&stream.0);
    }

    fn synchronize_stream(&self, stream: Handle) -> Result<(), DriverError> {
        let mut state = self.state();
        if state.streams.capture.is_some() {
            let detail = "a stream cannot be waited for while it is being captured".to_owned();
            return Err(DriverError::Backend { backend: self.name.clone(), detail });
        }
        state.run_stream(stream.0, None).map_err(|error| self.failed(&error))
    }

    fn copy(&self, from: u64, to: u64, bytes: usize, stream: Handle) -> Result<(), DriverError> {
        let streams = &mut self.state().streams;
        if streams.capture.is_some() {
            let detail = "a copy cannot be captured here; copy outside of the graph".to_owned();
            return Err(DriverError::Backend { backend: self.name.clone(), detail });
        }
        streams.queue(stream, Work::Copy { from, to, bytes });
        Ok(())
    }

    fn new_event(&self) -> Result<Handle, DriverError> {
        Ok(Handle(self.state().streams.new_handle()))
    }

    fn destroy_event(&self, _event: Handle) {}

    fn record_event(&self, event: Handle, stream: Handle) -> Result<(), DriverError> {
        let streams = &mut self.state().streams;
        if streams.capture.is_none() {
            // What was recorded before counts no more.
            for waiting in streams.waiting.values_mut() {
                waiting.retain(|work| !matches!(work, Work::Event(known) if *known == event.0));
            }
            streams.queue(stream, Work::Event(event.0));
        }
        Ok(())
    }

    fn synchronize_event(&self, event: Handle) -> Result<(), DriverError> {
        let mut state = self.state();
        let holds = |work: &Work| matches!(work, Work::Event(known) if *known == event.0);
        let stream = state.streams.waiting.iter().find(|(_, waiting)| waiting.iter().any(holds)).map(|(at, _)| *at);
        match stream {
            Some(stream) => state.run_stream(stream, Some(event.0)).map_err(|error| self.failed(&error)),
            None => Ok(()),
        }
    }

    /// Emulated time means nothing.
    fn elapsed_ms(&self, _earlier: Handle, _later: Handle) -> Result<f32, DriverError> {
        Ok(0.0)
    }

    fn begin_capture(&self, _stream: Handle) -> Result<(), DriverError> {
        self.state().streams.capture = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self, _stream: Handle) -> Result<Handle, DriverError> {
        let streams = &mut self.state().streams;
        let launches = streams.capture.take().unwrap_or_default();
        streams.graphs.push(Arc::new(launches));
        Ok(Handle(streams.graphs.len() - 1))
    }

    fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<(), DriverError> {
        let streams = &mut self.state().streams;
        let launches = Arc::clone(&streams.graphs[graph.0]);
        launches.iter().for_each(|launch| streams.queue(stream, Work::Launch(launch.clone())));
        Ok(())
    }

    fn destroy_graph(&self, _graph: Handle) {}
}
