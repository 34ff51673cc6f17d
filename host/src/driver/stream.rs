//! Queues of work, time stamps in them, and graphs captured from them.

use std::marker::PhantomData;
use std::{fmt, ptr};

use cust::sys::{
    CUevent, CUevent_flags_enum, CUgraph, CUgraphExec, CUstream, CUstream_flags_enum, CUstreamCaptureMode_enum,
};

use super::device::Device;
use super::error::DriverError;
use super::symbols::api;

/// A queue of work on one GPU, which runs in the order in which it was queued.
///
/// It is a non-blocking stream: it neither waits for the default stream nor holds it up.
pub struct Stream {
    device: Device,
    raw: CUstream,
}

// SAFETY: stream handles may be used from any thread; the driver's calls on them take its own locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a new, empty stream.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn new(device: &Device) -> Result<Stream, DriverError> {
        let _current = device.enter()?;
        let mut raw: CUstream = ptr::null_mut();
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is a live variable, and the context is current.
        unsafe { api::cuStreamCreate(&mut raw, flags) }?;
        Ok(Stream { device: device.clone(), raw })
    }

    /// The stream, to queue work on.
    pub fn handle(&self) -> StreamHandle<'_> {
        StreamHandle { raw: self.raw, owner: PhantomData }
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
        // The driver lets queued work finish. An error cannot be reported from here.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the stream, and handles to it cannot outlive it.
            let _ = unsafe { api::cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("raw", &self.raw).finish_non_exhaustive()
    }
}

/// A stream that somebody else owns: a [`Stream`], or other CUDA code in the process.
#[derive(Clone, Copy)]
pub struct StreamHandle<'a> {
    raw: CUstream,
    owner: PhantomData<&'a Stream>,
}

// SAFETY: as for `Stream`.
unsafe impl Send for StreamHandle<'_> {}
// SAFETY: as for `Stream`.
unsafe impl Sync for StreamHandle<'_> {}

impl<'a> StreamHandle<'a> {
    /// Uses a stream that already exists. Null is the default stream.
    ///
    /// # Safety
    ///
    /// `raw` is a live stream, and stays alive for `'a`.
    pub unsafe fn from_raw(raw: CUstream) -> StreamHandle<'a> {
        StreamHandle { raw, owner: PhantomData }
    }

    /// The driver's handle, for other CUDA code.
    pub fn as_raw(self) -> CUstream {
        self.raw
    }

    /// Waits until everything queued so far has finished. `device` is the one that the stream is on.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn synchronize(self, device: &Device) -> Result<(), DriverError> {
        let _current = device.enter()?;
        // SAFETY: the stream is alive for as long as this handle.
        unsafe { api::cuStreamSynchronize(self.raw) }?;
        Ok(())
    }
}

impl fmt::Debug for StreamHandle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StreamHandle").field(&self.raw).finish()
    }
}

/// A time stamp that the GPU takes when a stream gets to it.
pub struct Event {
    device: Device,
    raw: CUevent,
}

// SAFETY: event handles may be used from any thread, as stream handles may.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event that has not been recorded.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn new(device: &Device) -> Result<Event, DriverError> {
        let _current = device.enter()?;
        let mut raw: CUevent = ptr::null_mut();
        let flags = CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: `raw` is a live variable, and the context is current.
        unsafe { api::cuEventCreate(&mut raw, flags) }?;
        Ok(Event { device: device.clone(), raw })
    }

    /// Queues taking the time stamp on `stream`.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn record(&self, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        let _current = self.device.enter()?;
        // SAFETY: the event is alive, and so is the stream for as long as its handle.
        unsafe { api::cuEventRecord(self.raw, stream.raw) }?;
        Ok(())
    }

    /// Waits until the time stamp has been taken.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the work queued before it, if that failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.device.enter()?;
        // SAFETY: the event is alive.
        unsafe { api::cuEventSynchronize(self.raw) }?;
        Ok(())
    }

    /// Waits for `later`, and returns the time from this time stamp to that one, in milliseconds. The
    /// resolution is about half a microsecond.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if either event has not been recorded, or queued work failed.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32, DriverError> {
        later.synchronize()?;
        let _current = self.device.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is a live variable, and both events are alive.
        unsafe { api::cuEventElapsedTime(&mut milliseconds, self.raw, later.raw) }?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // The driver lets a queued time stamp finish. An error cannot be reported from here.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the event, and nothing uses the handle afterwards.
            let _ = unsafe { api::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("raw", &self.raw).finish_non_exhaustive()
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
    let captured = capturing.end()?;
    Ok(captured.instantiate()?)
}

/// A stream in capture. Dropping it ends the capture and discards what was captured.
struct Capturing<'s> {
    device: &'s Device,
    stream: &'s Stream,
    ended: bool,
}

impl<'s> Capturing<'s> {
    fn begin(device: &'s Device, stream: &'s Stream) -> Result<Self, DriverError> {
        let _current = device.enter()?;
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and the context is current.
        unsafe { api::cuStreamBeginCapture_v2(stream.raw, mode) }?;
        Ok(Capturing { device, stream, ended: false })
    }

    fn end(mut self) -> Result<Captured<'s>, DriverError> {
        self.ended = true;
        self.finish()
    }

    fn finish(&self) -> Result<Captured<'s>, DriverError> {
        let _current = self.device.enter()?;
        let mut raw: CUgraph = ptr::null_mut();
        // SAFETY: `raw` is a live variable, and this thread began the capture of this live stream.
        let result = unsafe { api::cuStreamEndCapture(self.stream.raw, &mut raw) };
        // Made before the result is looked at, so that a graph is destroyed in any case.
        let captured = Captured { device: self.device, raw };
        result?;
        Ok(captured)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The caller is already on the way out with the error that matters.
            drop(self.finish());
        }
    }
}

/// A captured graph that has not been made ready to launch.
struct Captured<'s> {
    device: &'s Device,
    raw: CUgraph,
}

impl Captured<'_> {
    fn instantiate<'a>(&self) -> Result<Graph<'a>, DriverError> {
        let _current = self.device.enter()?;
        let mut raw: CUgraphExec = ptr::null_mut();
        // SAFETY: `raw` is a live variable, the graph is alive, and 0 is no flags.
        unsafe { api::cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) }?;
        Ok(Graph { device: self.device.clone(), raw, borrowed: PhantomData })
    }
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the graph; an instantiated graph does not need it any more.
            let _ = unsafe { api::cuGraphDestroy(self.raw) };
        }
    }
}

/// Work that was captured from a stream and can be launched again and again, at the cost of one launch.
///
/// It borrows, for `'a`, what it works on. It may move between threads, but two threads cannot launch it
/// at once.
pub struct Graph<'a> {
    device: Device,
    raw: CUgraphExec,
    borrowed: PhantomData<&'a ()>,
}

// SAFETY: a graph may be used from any thread, one at a time. The raw pointer keeps this from being Sync,
// because the driver does not lock graphs.
unsafe impl Send for Graph<'_> {}

impl Graph<'_> {
    /// Queues one run of the whole graph on `stream`. A run starts after the previous run of the same
    /// graph has finished, whatever streams they are on.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver fails.
    pub fn launch(&self, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        let _current = self.device.enter()?;
        // SAFETY: the graph is alive, and so is the stream for as long as its handle. What the graph works
        // on is alive for `'a`, and freeing it waits for runs that are still queued.
        unsafe { api::cuGraphLaunch(self.raw, stream.raw) }?;
        Ok(())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // The driver lets queued runs finish. An error cannot be reported from here.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the graph, and nothing uses the handle afterwards.
            let _ = unsafe { api::cuGraphExecDestroy(self.raw) };
        }
    }
}

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("raw", &self.raw).finish_non_exhaustive()
    }
}
