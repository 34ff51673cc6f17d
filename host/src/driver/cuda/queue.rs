//! Streams, events and graphs.

use std::ptr;

use cust::sys::{
    CUevent, CUevent_flags_enum, CUgraph, CUgraphExec, CUstream, CUstream_flags_enum, CUstreamCaptureMode_enum,
};

use super::super::backend::{Handle, Queues};
use super::super::error::DriverError;
use super::super::symbols::api;
use super::Cuda;

// SAFETY of this file: every handle comes from the call above that made it, and its one owner gives it up when it is
// destroyed; the context is current during each call. Errors of a destruction cannot be reported and undo nothing.
impl Queues for Cuda {
    fn new_stream(&self) -> Result<Handle, DriverError> {
        let _current = self.enter()?;
        let mut raw: CUstream = ptr::null_mut();
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is a live variable, and the context is current.
        unsafe { api::cuStreamCreate(&mut raw, flags) }?;
        Ok(Handle::of(raw))
    }

    fn destroy_stream(&self, stream: Handle) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the owner gives the stream up; queued work finishes.
            let _ = unsafe { api::cuStreamDestroy_v2(stream.pointer()) };
        }
    }

    fn synchronize_stream(&self, stream: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the stream is alive.
        unsafe { api::cuStreamSynchronize(stream.pointer()) }?;
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, bytes: usize, stream: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: both ranges are inside live allocations and do not overlap, freeing waits for the copy, and the stream
        // is alive.
        unsafe { api::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.pointer()) }?;
        Ok(())
    }

    fn new_event(&self) -> Result<Handle, DriverError> {
        let _current = self.enter()?;
        let mut raw: CUevent = ptr::null_mut();
        let flags = CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: `raw` is a live variable, and the context is current.
        unsafe { api::cuEventCreate(&mut raw, flags) }?;
        Ok(Handle::of(raw))
    }

    fn destroy_event(&self, event: Handle) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the owner gives the event up; a queued time stamp is still taken.
            let _ = unsafe { api::cuEventDestroy_v2(event.pointer()) };
        }
    }

    fn record_event(&self, event: Handle, stream: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: event and stream are alive.
        unsafe { api::cuEventRecord(event.pointer(), stream.pointer()) }?;
        Ok(())
    }

    fn synchronize_event(&self, event: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the event is alive.
        unsafe { api::cuEventSynchronize(event.pointer()) }?;
        Ok(())
    }

    fn elapsed_ms(&self, earlier: Handle, later: Handle) -> Result<f32, DriverError> {
        let _current = self.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is a live variable, and both events are alive.
        unsafe { api::cuEventElapsedTime(&mut milliseconds, earlier.pointer(), later.pointer()) }?;
        Ok(milliseconds)
    }

    fn begin_capture(&self, stream: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and the context is current.
        unsafe { api::cuStreamBeginCapture_v2(stream.pointer(), mode) }?;
        Ok(())
    }

    fn end_capture(&self, stream: Handle) -> Result<Handle, DriverError> {
        let _current = self.enter()?;
        let (mut captured, mut graph): (CUgraph, CUgraphExec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `captured` is a live variable, and this thread began the capture of this live stream.
        unsafe { api::cuStreamEndCapture(stream.pointer(), &mut captured) }?;
        // SAFETY: `graph` is a live variable, the captured graph is alive, and 0 is no flags.
        let instantiated = unsafe { api::cuGraphInstantiateWithFlags(&mut graph, captured, 0) };
        // SAFETY: this owns the captured graph; an instantiated one does not need it any more.
        let _ = unsafe { api::cuGraphDestroy(captured) };
        instantiated?;
        Ok(Handle::of(graph))
    }

    fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: graph and stream are alive. What the graph works on is alive as long as the graph, and freeing it
        // waits for runs that are still queued.
        unsafe { api::cuGraphLaunch(graph.pointer(), stream.pointer()) }?;
        Ok(())
    }

    fn destroy_graph(&self, graph: Handle) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the owner gives the graph up; queued runs finish.
            let _ = unsafe { api::cuGraphExecDestroy(graph.pointer()) };
        }
    }
}
