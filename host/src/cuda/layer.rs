//! A layer's packed weights in device memory, its workspace, and the forward.

use nvfp4_moe_device::params::ExpertScales;

use super::call::{self, Call, CallError};
use super::engine::Engine;
use super::loading::load_experts;
use crate::driver::{DeviceBuffer, DriverError, StreamHandle};
use crate::load::LoadError;
use crate::plan::{Plan, Region};
use crate::schedule::{CallAddresses, Schedule, Stage};
use crate::weights::ExpertSource;

/// One layer of one rank: packed weights in device memory, and the plan that runs them.
#[derive(Debug)]
pub struct MoeLayer {
    engine: Engine,
    plan: Plan,
    weights: DeviceBuffer,
}

impl MoeLayer {
    /// Packs the plan's experts into device memory. Beside the packed weights only a few experts' raw tensors are ever on
    /// the device, and less in page-locked host memory: [`LoadMemory`](super::LoadMemory) says how many bytes.
    ///
    /// `progress` is told (experts done, experts in all), on this thread and in order. The threads that copy have ended, and
    /// after an error everything is given back, when this returns.
    ///
    /// # Errors
    /// [`LoadError`]: a plan for another GPU, tensors that are missing or do not fit the plan, not enough device
    /// memory, a driver failure.
    pub fn load(
        engine: &Engine,
        plan: &Plan,
        source: &dyn ExpertSource,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        if plan.kernels() != engine.kernels() {
            let planned = plan.limits().compute_capability;
            return Err(LoadError::OtherKernels { planned, found: engine.device().limits().compute_capability });
        }
        let weights = DeviceBuffer::alloc(engine.device(), plan.weights_bytes() as usize)?;
        let scales = load_experts(engine, plan, &weights, source, &mut progress)?;
        weights.write(plan.scales_offset() as usize, bytemuck::cast_slice::<ExpertScales, u8>(&scales))?;
        Ok(Self { engine: engine.clone(), plan: plan.clone(), weights })
    }

    /// The plan.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The packed weights, in the plan's layout, followed by the experts' scales.
    #[must_use]
    pub const fn weights(&self) -> &DeviceBuffer {
        &self.weights
    }

    /// Runs the layer on `stream` and returns without waiting. Allocates nothing, reads nothing back, and can be
    /// captured in a graph.
    ///
    /// # Errors
    /// [`CallError`]: buffers that do not fit the plan, or a driver failure.
    pub fn forward(&self, workspace: &Workspace, call: &Call<'_>, stream: StreamHandle<'_>) -> Result<(), CallError> {
        let addresses = call.addresses(&self.plan)?;
        // SAFETY: the buffers are alive and large enough; freeing one waits for the device.
        unsafe { self.forward_raw(workspace, &addresses, stream) }
    }

    /// [`MoeLayer::forward`] on raw device addresses, for servers with buffers of their own.
    ///
    /// # Errors
    /// [`CallError`], sizes aside.
    ///
    /// # Safety
    /// The addresses are device memory of the sizes that [`CallAddresses`] says for `tokens`, alive and not written
    /// otherwise until the stream has passed.
    pub unsafe fn forward_raw(
        &self,
        workspace: &Workspace,
        call: &CallAddresses,
        stream: StreamHandle<'_>,
    ) -> Result<(), CallError> {
        let tile = self.plan.tile(call.tokens);
        let schedule = self.schedule(workspace, call, tile)?;
        let mut follows = false;
        schedule.all(|launch| {
            // SAFETY: the caller's contract, and the plan's sizes of weights and workspace.
            unsafe { self.engine.launch(launch, follows, stream)? };
            follows = true;
            Ok(())
        })
    }

    /// Runs one stage alone, with a given variant of the grouped GEMM: for measurements and tests. The stages before it
    /// must have run with the same arguments.
    ///
    /// # Errors
    /// [`CallError`].
    ///
    /// # Safety
    /// As [`MoeLayer::forward_raw`].
    pub unsafe fn forward_stage(
        &self,
        workspace: &Workspace,
        call: &CallAddresses,
        stage: Stage,
        tile: usize,
        stream: StreamHandle<'_>,
    ) -> Result<(), CallError> {
        let schedule = self.schedule(workspace, call, tile)?;
        // SAFETY: the caller's contract, and the plan's sizes of weights and workspace.
        schedule.stage(stage, |launch| unsafe { self.engine.launch(launch, false, stream).map_err(CallError::from) })
    }

    fn schedule(&self, workspace: &Workspace, call: &CallAddresses, tile: usize) -> Result<Schedule<'_>, CallError> {
        call::check(call, &self.plan)?;
        let (found_bytes, needed_bytes) = (workspace.buffer.len_bytes() as u64, self.plan.workspace_bytes());
        if found_bytes < needed_bytes {
            return Err(CallError::Workspace { found_bytes, needed_bytes });
        }
        Ok(Schedule::new(&self.plan, self.weights.address(), workspace.buffer.address(), *call, tile))
    }
}

/// Scratch memory of a forward. One serves every layer whose plan needs no more, and any number of captured graphs, one
/// call at a time: calls that share a workspace must be ordered on one stream, or they overwrite each other's values.
#[derive(Debug)]
pub struct Workspace {
    buffer: DeviceBuffer,
}

impl Workspace {
    /// A workspace for `plan`.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] with the bytes asked for and free.
    pub fn new(engine: &Engine, plan: &Plan) -> Result<Self, DriverError> {
        let buffer = DeviceBuffer::alloc(engine.device(), plan.workspace_bytes() as usize)?;
        if plan.kernels().variants().iter().any(|variant| variant.tiles) {
            // Slots that fill up a group of 8 are multiplied whatever they hold, and nobody looks at their results.
            for region in [Region::Activations, Region::SecondActivations] {
                let span = plan.region(region);
                buffer.fill(span.offset as usize, span.bytes as usize, 0)?;
            }
        }
        Ok(Self { buffer })
    }

    /// The memory itself: what it holds between calls means nothing.
    #[must_use]
    pub const fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }
}
