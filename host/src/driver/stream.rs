//! Queues of work, time stamps in them, and graphs captured from them.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use cust::sys::CUstream;

use super::backend::Handle;
use super::device::Device;
use super::error::DriverError;

/// A queue of work on one GPU, which runs in the order in which it was queued.
///
/// It is a non-blocking stream: it neither waits for the default stream nor holds it up.
pub struct Stream {
    device: Device,
    stream: Handle,
}

impl Stream {
    /// Makes a new, empty stream.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn new(device: &Device) -> Result<Stream, DriverError> {
        Ok(Stream { device: device.clone(), stream: device.backend().new_stream()? })
    }

    /// The stream, to queue work on.
    pub fn handle(&self) -> StreamHandle<'_> {
        StreamHandle { stream: self.stream, owner: PhantomData }
    }

    /// The device that the stream is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until everything queued so far has finished.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.handle().synchronize(&self.device)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Handles to it cannot outlive it.
        self.device.backend().destroy_stream(self.stream);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// A stream that somebody else owns: a [`Stream`], or other CUDA code in the process.
#[derive(Clone, Copy)]
pub struct StreamHandle<'a> {
    stream: Handle,
    owner: PhantomData<&'a Stream>,
}

impl<'a> StreamHandle<'a> {
    /// Uses a stream that already exists. Null is the default stream.
    ///
    /// # Safety
    ///
    /// `raw` is a live stream, and stays alive for `'a`.
    pub unsafe fn from_raw(raw: CUstream) -> StreamHandle<'a> {
        StreamHandle { stream: Handle::of(raw), owner: PhantomData }
    }

    /// The driver's handle, for other CUDA code.
    pub fn as_raw(self) -> CUstream {
        self.stream.pointer()
    }

    pub(super) fn handle(self) -> Handle {
        self.stream
    }

    /// Waits until everything queued so far has finished. `device` is the one that the stream is on.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn synchronize(self, device: &Device) -> Result<(), DriverError> {
        device.backend().synchronize_stream(self.stream)
    }
}

impl fmt::Debug for StreamHandle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamHandle").field(&self.stream).finish()
    }
}

/// A time stamp that the device takes when a stream gets to it.
pub struct Event {
    device: Device,
    event: Handle,
}

impl Event {
    /// Makes an event that has not been recorded.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn new(device: &Device) -> Result<Event, DriverError> {
        Ok(Event { device: device.clone(), event: device.backend().new_event()? })
    }

    /// Queues taking the time stamp on `stream`.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn record(&self, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        self.device.backend().record_event(self.event, stream.stream)
    }

    /// Waits until the time stamp has been taken.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the work queued before it, if that failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.device.backend().synchronize_event(self.event)
    }

    /// Waits for `later`, and returns the time from this time stamp to that one, in milliseconds. The
    /// resolution is about half a microsecond.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if either event has not been recorded, or queued work failed.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32, DriverError> {
        later.synchronize()?;
        self.device.backend().elapsed_ms(self.event, later.event)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.backend().destroy_event(self.event);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("event", &self.event).finish_non_exhaustive()
    }
}

/// Runs `enqueue` once and keeps what it queued on the stream as a [`Graph`], instead of running it.
///
/// The graph refers to the memory that `enqueue` used, by address. `'a` is the life of what `enqueue`
/// borrows, and the graph cannot outlive it; so let `enqueue` borrow its buffers, not own them.
///
/// Capture concerns the calling thread only: others may go on using the device.
///
/// # Errors
///
/// The error of `enqueue`, if it fails. A [`DriverError::Call`], if the stream is being captured already,
/// if `enqueue` did something that cannot be captured (waiting or allocating, say), or if the driver
/// fails. In every case, a panic of `enqueue` included, the stream is out of capture afterwards.
pub fn capture<'a, E, F>(device: &Device, stream: &Stream, enqueue: F) -> Result<Graph<'a>, E>
where
    E: From<DriverError>,
    F: FnOnce(StreamHandle<'_>) -> Result<(), E> + 'a,
{
    let capturing = Capturing::begin(device, stream)?;
    enqueue(stream.handle())?;
    Ok(capturing.end()?)
}

/// A stream in capture. Dropping it ends the capture and discards what was captured.
struct Capturing<'s> {
    device: &'s Device,
    stream: &'s Stream,
    ended: bool,
}

impl<'s> Capturing<'s> {
    fn begin(device: &'s Device, stream: &'s Stream) -> Result<Self, DriverError> {
        device.backend().begin_capture(stream.stream)?;
        Ok(Capturing { device, stream, ended: false })
    }

    fn end<'a>(mut self) -> Result<Graph<'a>, DriverError> {
        self.ended = true;
        let graph = self.device.backend().end_capture(self.stream.stream)?;
        Ok(Graph { device: self.device.clone(), graph, borrowed: PhantomData })
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // The caller is already on the way out with the error that matters.
        if let Ok(graph) = self.device.backend().end_capture(self.stream.stream) {
            self.device.backend().destroy_graph(graph);
        }
    }
}

/// Work that was captured from a stream and can be launched again and again, at the cost of one launch.
///
/// It borrows, for `'a`, what it works on. It may move between threads, but two threads cannot launch it
/// at once.
pub struct Graph<'a> {
    device: Device,
    graph: Handle,
    /// Not Sync, because the driver does not lock graphs.
    borrowed: PhantomData<(&'a (), Cell<()>)>,
}

impl Graph<'_> {
    /// Queues one run of the whole graph on `stream`. A run starts after the previous run of the same
    /// graph has finished, whatever streams they are on.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn launch(&self, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        self.device.backend().launch_graph(self.graph, stream.stream)
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        self.device.backend().destroy_graph(self.graph);
    }
}

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("graph", &self.graph).finish_non_exhaustive()
    }
}
