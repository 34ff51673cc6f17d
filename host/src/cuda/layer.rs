//! A layer's packed weights in device memory, its workspace, and the forward.

use nvfp4_moe_device::params::ExpertScales;

use super::call::{self, Call, CallError};
use super::engine::Engine;
use crate::checkpoint::{RawExpert, RawMatrix};
use crate::driver::{DeviceBuffer, DriverError, Stream, StreamHandle};
use crate::load::{LoadError, check_expert};
use crate::plan::{Plan, Region};
use crate::schedule::{self, CallAddresses, Schedule, Stage, StagedExpert};
use crate::weights::ExpertSource;

/// One layer of one rank: packed weights in device memory, and the plan that runs them.
#[derive(Debug)]
pub struct MoeLayer {
    engine: Engine,
    plan: Plan,
    weights: DeviceBuffer,
}

/// Offset of a matrix's codes and scales in the staging buffer.
struct Staging {
    buffer: DeviceBuffer,
    matrix_bytes: usize,
    code_bytes: usize,
}

impl Staging {
    fn new(engine: &Engine, plan: &Plan) -> Result<Self, DriverError> {
        let elems = plan.spec().shape.hidden * plan.spec().shape.intermediate;
        let code_bytes = (elems / 2).next_multiple_of(16);
        let matrix_bytes = code_bytes + (elems / 16).next_multiple_of(16);
        let matrices = if plan.spec().activation.is_gated() { 3 } else { 2 };
        Ok(Self { buffer: DeviceBuffer::alloc(engine.device(), matrices * matrix_bytes)?, matrix_bytes, code_bytes })
    }

    /// Uploads one matrix; returns the addresses of its codes and scales.
    fn upload(&self, index: usize, matrix: &RawMatrix<'_>) -> Result<(u64, u64), DriverError> {
        let offset = index * self.matrix_bytes;
        self.buffer.write(offset, matrix.codes)?;
        self.buffer.write(offset + self.code_bytes, matrix.scales)?;
        let address = self.buffer.address() + offset as u64;
        Ok((address, address + self.code_bytes as u64))
    }

    fn upload_expert(&self, expert: &RawExpert<'_>) -> Result<StagedExpert, DriverError> {
        let up = self.upload(0, &expert.up)?;
        let down = self.upload(1, &expert.down)?;
        let gate = expert.gate.as_ref().map_or(Ok((0, 0)), |gate| self.upload(2, gate))?;
        Ok(StagedExpert { gate, up, down })
    }
}

impl MoeLayer {
    /// Packs the plan's experts into device memory, one expert at a time: beside the packed weights only one expert's
    /// raw tensors are ever on the device. `progress` is told (experts done, experts in all).
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
        let experts = plan.spec().experts;
        let weights = DeviceBuffer::alloc(engine.device(), plan.weights_bytes() as usize)?;
        let stream = Stream::new(engine.device())?;
        let staging = Staging::new(engine, plan)?;
        let mut scales: Vec<ExpertScales> = Vec::with_capacity(experts.count);
        for (local, id) in experts.ids().enumerate() {
            let expert = source.expert(id).map_err(|source| LoadError::Source { expert: id, source })?;
            scales.push(check_expert(plan.spec(), id, &expert, scales.first())?);
            let staged = staging.upload_expert(&expert)?;
            for launch in schedule::pack_expert(plan, weights.address(), local, &staged) {
                // SAFETY: the plan sizes the weights, the checks above the staged matrices; both outlive the
                // synchronisation below.
                unsafe { engine.launch(&launch, stream.handle())? };
            }
            stream.synchronize()?;
            progress(local + 1, experts.count);
        }
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
        // SAFETY: the caller's contract, and the plan's sizes of weights and workspace.
        schedule.all(|launch| unsafe { self.engine.launch(launch, stream).map_err(CallError::from) })
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
        schedule.stage(stage, |launch| unsafe { self.engine.launch(launch, stream).map_err(CallError::from) })
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
