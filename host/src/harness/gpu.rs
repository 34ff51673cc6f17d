//! A layer on a GPU with host memory in front of it: device buffers made once, copies around every call.

use nvfp4_moe_device::params::Element;

use super::{HarnessError, hidden_element, output_element};
use crate::cuda::{Call, CallError, Engine, MoeLayer, Workspace};
use crate::driver::{DeviceBuffer, DriverError, Event, Graph, Stream, StreamHandle, capture};
use crate::io::{HiddenRows, Inputs, LengthError, OutputRows};
use crate::plan::Plan;
use crate::schedule::{CallAddresses, Stage};
use crate::weights::ExpertSource;

/// Every byte of a poisoned buffer: NaN in f32, f16 and bf16, and no valid index.
const POISON: u8 = 0xFF;

/// A layer on a GPU, its workspace, and buffers for the largest call.
#[derive(Debug)]
pub struct GpuLayer {
    engine: Engine,
    layer: MoeLayer,
    workspace: Workspace,
    buffers: Buffers,
    stream: Stream,
    tile: Option<usize>,
}

#[derive(Debug)]
struct Buffers {
    hidden: DeviceBuffer,
    topk_ids: DeviceBuffer,
    topk_weights: DeviceBuffer,
    output: DeviceBuffer,
    device_tokens: DeviceBuffer,
    before: Event,
    after: Event,
}

impl Buffers {
    fn new(engine: &Engine, plan: &Plan) -> Result<Self, DriverError> {
        let device = engine.device();
        let (tokens, shape) = (plan.max_tokens(), &plan.spec().shape);
        let alloc = |bytes| DeviceBuffer::alloc(device, bytes);
        Ok(Self {
            hidden: alloc(tokens * shape.hidden * 2)?,
            topk_ids: alloc(tokens * shape.topk * 4)?,
            topk_weights: alloc(tokens * shape.topk * 4)?,
            output: alloc(tokens * shape.hidden * 4)?,
            device_tokens: alloc(4)?,
            before: Event::new(device)?,
            after: Event::new(device)?,
        })
    }

    fn upload(&self, inputs: &Inputs<'_>) -> Result<(), DriverError> {
        match inputs.hidden {
            HiddenRows::Bf16(rows) => self.hidden.write(0, bytemuck::cast_slice(rows))?,
            HiddenRows::F16(rows) => self.hidden.write(0, bytemuck::cast_slice(rows))?,
        }
        self.topk_ids.write(0, bytemuck::cast_slice(inputs.topk_ids))?;
        self.topk_weights.write(0, bytemuck::cast_slice(inputs.topk_weights))
    }

    /// Prepares the output: what it holds when it is added to, else NaN if asked for.
    fn prepare_output(&self, output: &mut OutputRows<'_>, accumulate: bool, poison: bool) -> Result<(), DriverError> {
        if accumulate {
            self.output.write(0, output_bytes(output))?;
        } else if poison {
            self.output.fill(0, self.output.len_bytes(), POISON)?;
        }
        Ok(())
    }

    fn call(&self, tokens: usize, hidden: Element, output: Element, accumulate: bool) -> Call<'_> {
        Call {
            hidden: &self.hidden,
            hidden_element: hidden,
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
            output: &self.output,
            output_element: output,
            tokens,
            device_tokens: None,
            accumulate,
        }
    }

    /// Runs `enqueue` between two time stamps, waits, and returns the milliseconds.
    fn timed(
        &self,
        stream: &Stream,
        enqueue: impl FnOnce(StreamHandle<'_>) -> Result<(), HarnessError>,
    ) -> Result<f64, HarnessError> {
        self.before.record(stream.handle())?;
        enqueue(stream.handle())?;
        self.after.record(stream.handle())?;
        stream.synchronize()?;
        Ok(f64::from(self.before.elapsed_ms(&self.after)?))
    }
}

fn output_bytes<'a>(output: &'a mut OutputRows<'_>) -> &'a mut [u8] {
    match output {
        OutputRows::Bf16(rows) => bytemuck::cast_slice_mut(rows),
        OutputRows::F32(rows) => bytemuck::cast_slice_mut(rows),
    }
}

impl GpuLayer {
    pub(super) fn load(
        engine: &Engine,
        plan: &Plan,
        source: &dyn ExpertSource,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, HarnessError> {
        Ok(Self {
            layer: MoeLayer::load(engine, plan, source, progress)?,
            workspace: Workspace::new(engine, plan)?,
            buffers: Buffers::new(engine, plan)?,
            stream: Stream::new(engine.device())?,
            engine: engine.clone(),
            tile: None,
        })
    }

    /// The plan that the layer runs by.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        self.layer.plan()
    }

    /// The layer itself, with its packed weights.
    #[must_use]
    pub const fn layer(&self) -> &MoeLayer {
        &self.layer
    }

    /// The workspace, as the last call left it.
    #[must_use]
    pub const fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// The output of the last call, with room for the largest one.
    #[must_use]
    pub const fn output(&self) -> &DeviceBuffer {
        &self.buffers.output
    }

    pub(super) fn set_tile(&mut self, tile: Option<usize>) -> Result<(), HarnessError> {
        let have = self.plan().kernels().variants().len();
        if let Some(got) = tile.filter(|&tile| tile >= have) {
            return Err(HarnessError::NoSuchTile { got, have });
        }
        self.tile = tile;
        Ok(())
    }

    /// Copies in, runs, copies out; returns the milliseconds of the kernels.
    pub(super) fn forward(
        &mut self,
        inputs: &Inputs<'_>,
        tokens: usize,
        output: &mut OutputRows<'_>,
        accumulate: bool,
        poison: bool,
    ) -> Result<f64, HarnessError> {
        let Self { layer, workspace, buffers, stream, tile, .. } = self;
        buffers.upload(inputs)?;
        buffers.prepare_output(output, accumulate, poison)?;
        poison_workspace(workspace, poison)?;
        let call = buffers.call(tokens, hidden_element(&inputs.hidden), output_element(output), accumulate);
        let ms = buffers.timed(stream, |handle| Ok(enqueue(layer, workspace, &call, *tile, handle)?))?;
        buffers.output.read(0, output_bytes(output))?;
        Ok(ms)
    }

    pub(super) fn capture(
        &mut self,
        hidden: Element,
        output: Element,
        accumulate: bool,
        poison: bool,
    ) -> Result<CapturedForward<'_>, HarnessError> {
        let Self { engine, layer, workspace, buffers, stream, tile } = self;
        let (layer, workspace, buffers, stream, tile) = (&*layer, &*workspace, &*buffers, &*stream, *tile);
        let plan = layer.plan();
        let call = Call {
            device_tokens: Some(&buffers.device_tokens),
            ..buffers.call(plan.max_tokens(), hidden, output, accumulate)
        };
        let graph = capture(engine.device(), stream, move |handle| enqueue(layer, workspace, &call, tile, handle))?;
        Ok(CapturedForward { graph, plan, workspace, buffers, stream, hidden, output, accumulate, poison })
    }
}

fn poison_workspace(workspace: &Workspace, poison: bool) -> Result<(), DriverError> {
    if poison {
        let buffer = workspace.buffer();
        buffer.fill(0, buffer.len_bytes(), POISON)?;
    }
    Ok(())
}

/// One forward, with the plan's variant of the grouped GEMM or a given one.
fn enqueue(
    layer: &MoeLayer,
    workspace: &Workspace,
    call: &Call<'_>,
    tile: Option<usize>,
    handle: StreamHandle<'_>,
) -> Result<(), CallError> {
    let Some(tile) = tile else {
        return layer.forward(workspace, call, handle);
    };
    let addresses = CallAddresses {
        hidden: call.hidden.address(),
        hidden_element: call.hidden_element,
        topk_ids: call.topk_ids.address(),
        topk_weights: call.topk_weights.address(),
        output: call.output.address(),
        output_element: call.output_element,
        tokens: call.tokens,
        device_tokens: call.device_tokens.map_or(0, DeviceBuffer::address),
        accumulate: call.accumulate,
    };
    for stage in Stage::ALL {
        // SAFETY: the buffers were made for the plan's largest call, which the layer checks `tokens` against, and live
        // as long as the layer; the stages run in order.
        unsafe { layer.forward_stage(workspace, &addresses, stage, tile, handle)? };
    }
    Ok(())
}

/// A forward as a CUDA graph: captured once for the largest number of tokens, replayed with any.
///
/// It borrows the layer, so that weights, workspace and buffers outlive it.
#[derive(Debug)]
pub struct CapturedForward<'a> {
    graph: Graph<'a>,
    plan: &'a Plan,
    workspace: &'a Workspace,
    buffers: &'a Buffers,
    stream: &'a Stream,
    hidden: Element,
    output: Element,
    accumulate: bool,
    poison: bool,
}

impl CapturedForward<'_> {
    /// The output of the last replay, with room for the largest one.
    #[must_use]
    pub const fn output(&self) -> &DeviceBuffer {
        &self.buffers.output
    }

    /// Replays the graph with these inputs and waits for the result; returns the milliseconds of the kernels.
    ///
    /// # Errors
    /// [`HarnessError`]: lengths that do not fit, too many tokens, element types other than the captured ones, a
    /// failure of the driver.
    pub fn forward(&mut self, inputs: &Inputs<'_>, mut output: OutputRows<'_>) -> Result<f64, HarnessError> {
        let shape = &self.plan.spec().shape;
        let tokens = inputs.checked_tokens(shape.hidden, shape.topk)?;
        LengthError::check("output", output.len(), tokens * shape.hidden)?;
        if tokens > self.plan.max_tokens() {
            return Err(HarnessError::TooManyTokens { got: tokens, max: self.plan.max_tokens() });
        }
        for (argument, found, must) in
            [("hidden", hidden_element(&inputs.hidden), self.hidden), ("output", output_element(&output), self.output)]
        {
            if found != must {
                let must = "of the type that the graph was captured with";
                return Err(CallError::Element { argument, found, must }.into());
            }
        }
        self.buffers.upload(inputs)?;
        self.buffers.prepare_output(&mut output, self.accumulate, self.poison)?;
        poison_workspace(self.workspace, self.poison)?;
        self.buffers.device_tokens.write(0, &(tokens as u32).to_le_bytes())?;
        let ms = self.buffers.timed(self.stream, |handle| Ok(self.graph.launch(handle)?))?;
        self.buffers.output.read(0, output_bytes(&mut output))?;
        Ok(ms)
    }
}
