//! The GPU engine, timed by events around graph replays.
//!
//! The layer's time is that of a graph in which all batches follow each other, each with its own routing and, as far as
//! memory goes, its own copy of the weights: as the layers of a model do. A stage's time is taken between two events in
//! a forward of its own, so that every stage finds what it finds in real life: its weights in memory, and the result of
//! the stage before it where that left it.

use nvfp4_moe::cuda::{CallError, Engine, MoeLayer, ReadProbe, Workspace};
use nvfp4_moe::driver::{DeviceBuffer, DriverError, Event, Stream, capture};
use nvfp4_moe::io::{HiddenRows, Inputs};
use nvfp4_moe::plan::Plan;
use nvfp4_moe::schedule::{CallAddresses, Stage};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::traffic::moved_bytes;
use nvfp4_moe::weights::ExpertSource;
use nvfp4_moe_device::params::Element;

use super::{Bench, StageMs, Timing, median};
use crate::program::progress;

/// Copies of the weights; more batches than this share them, with other experts.
const MOST_COPIES: usize = 8;

/// Reading this much keeps the GPU busy until a forward's launches and events are queued behind it.
const BUSY_BYTES: u64 = 1 << 30;

const WARM_UP_REPLAYS: usize = 3;

pub(super) struct GpuBench {
    engine: Engine,
    plan: Plan,
    /// Copies of the same weights.
    layers: Vec<MoeLayer>,
    workspace: Workspace,
    output: DeviceBuffer,
    stream: Stream,
    probe: ReadProbe,
}

/// One batch in device memory.
struct Batch {
    hidden: DeviceBuffer,
    topk_ids: DeviceBuffer,
    topk_weights: DeviceBuffer,
    tokens: usize,
}

impl Batch {
    fn upload(engine: &Engine, inputs: &Inputs<'_>) -> anyhow::Result<Self> {
        let HiddenRows::Bf16(hidden) = inputs.hidden else {
            anyhow::bail!("measured hidden states are bf16");
        };
        let upload = |bytes: &[u8]| -> Result<DeviceBuffer, DriverError> {
            let buffer = DeviceBuffer::alloc(engine.device(), bytes.len())?;
            buffer.write(0, bytes)?;
            Ok(buffer)
        };
        Ok(Self {
            hidden: upload(bytemuck::cast_slice(hidden))?,
            topk_ids: upload(bytemuck::cast_slice(inputs.topk_ids))?,
            topk_weights: upload(bytemuck::cast_slice(inputs.topk_weights))?,
            tokens: inputs.topk_ids.len() / inputs.topk,
        })
    }

    fn call(&self, output: &DeviceBuffer, output_element: Element) -> CallAddresses {
        CallAddresses {
            hidden: self.hidden.address(),
            hidden_element: Element::Bf16,
            topk_ids: self.topk_ids.address(),
            topk_weights: self.topk_weights.address(),
            output: output.address(),
            output_element,
            tokens: self.tokens,
            device_tokens: 0,
            accumulate: false,
        }
    }
}

impl GpuBench {
    /// Loads up to `copies` copies of the layer, as many as memory allows.
    pub(super) fn load(
        engine: &Engine,
        spec: LayerSpec,
        source: &dyn ExpertSource,
        max_tokens: usize,
        copies: usize,
    ) -> anyhow::Result<Self> {
        let device = engine.device();
        let plan = Plan::new(spec, &device.limits(), max_tokens)?;
        let workspace = Workspace::new(engine, &plan)?;
        let output = DeviceBuffer::alloc(device, max_tokens * spec.shape.hidden * size_of::<f32>())?;
        let probe = ReadProbe::new(engine)?;
        // Batches need little beside the weights.
        let (free, _) = device.free_memory()?;
        let fitting = (free / 8 * 7 / plan.weights_bytes().max(1)) as usize;
        let copies = copies.min(MOST_COPIES).min(fitting).max(1);
        let mut layers = Vec::with_capacity(copies);
        let mut progress = progress::bar();
        for copy in 0..copies {
            let done_before = copy * spec.experts.count;
            let told = |done, _| progress(done_before + done, copies * spec.experts.count);
            layers.push(MoeLayer::load(engine, &plan, source, told)?);
        }
        let stream = Stream::new(device)?;
        Ok(Self { engine: engine.clone(), plan, layers, workspace, output, stream, probe })
    }

    /// Milliseconds of one forward among the others: `replays` samples.
    fn time_layer(&self, batches: &[Batch], replays: usize) -> anyhow::Result<Vec<f64>> {
        let Self { engine, layers, workspace, output, stream, .. } = self;
        let graph = capture(engine.device(), stream, move |handle| {
            for (batch, layer) in batches.iter().zip(layers.iter().cycle()) {
                // SAFETY: the buffers hold `batch.tokens` tokens, at most the plan's; the graph is dropped before them.
                unsafe { layer.forward_raw(workspace, &batch.call(output, Element::Bf16), handle)? };
            }
            Ok::<_, CallError>(())
        })?;
        for _ in 0..WARM_UP_REPLAYS {
            graph.launch(stream.handle())?;
        }
        let events = (0..=replays).map(|_| Event::new(engine.device())).collect::<Result<Vec<_>, _>>()?;
        events[0].record(stream.handle())?;
        for after in &events[1..] {
            graph.launch(stream.handle())?;
            after.record(stream.handle())?;
        }
        stream.synchronize()?;
        let per_batch = |pair: &[Event]| Ok(f64::from(pair[0].elapsed_ms(&pair[1])?) / batches.len() as f64);
        events.windows(2).map(per_batch).collect()
    }

    /// Milliseconds of each stage: as many samples as forwards.
    fn time_stages(&self, batches: &[Batch], forwards: usize) -> anyhow::Result<Vec<StageMs>> {
        let device = self.engine.device().clone();
        let events = (0..=Stage::ALL.len()).map(|_| Event::new(&device)).collect::<Result<Vec<_>, _>>()?;
        let mut samples = vec![Vec::with_capacity(forwards); Stage::ALL.len()];
        for forward in 0..forwards {
            let batch = &batches[forward % batches.len()];
            let layer = &self.layers[forward % batches.len() % self.layers.len()];
            let call = batch.call(&self.output, Element::Bf16);
            let tile = self.plan.tile(batch.tokens);
            self.probe.enqueue(BUSY_BYTES, self.stream.handle())?;
            events[0].record(self.stream.handle())?;
            for (stage, after) in Stage::ALL.into_iter().zip(&events[1..]) {
                // SAFETY: the buffers hold `batch.tokens` tokens, at most the plan's, and outlive the synchronisation
                // below; the stages run in order.
                unsafe { layer.forward_stage(&self.workspace, &call, stage, tile, self.stream.handle())? };
                after.record(self.stream.handle())?;
            }
            self.stream.synchronize()?;
            for (times, pair) in samples.iter_mut().zip(events.windows(2)) {
                times.push(f64::from(pair[0].elapsed_ms(&pair[1])?));
            }
        }
        let tokens = batches.first().map_or(0, |batch| batch.tokens);
        let times = Stage::ALL.into_iter().zip(samples);
        Ok(times
            .map(|(stage, samples)| StageMs {
                label: stage.label(),
                ms: median(&samples),
                moved_bytes: moved_bytes(&self.plan, stage, tokens),
            })
            .collect())
    }
}

/// GB/s of reading and of copying memory.
pub(super) fn memory_rates(engine: &Engine) -> anyhow::Result<(f64, f64)> {
    let probe = ReadProbe::new(engine)?;
    Ok((probe.bandwidth()?, probe.copy_bandwidth()?))
}

impl Bench for GpuBench {
    fn time(&mut self, batches: &[Inputs<'_>], iterations: usize) -> anyhow::Result<Timing> {
        let uploaded =
            batches.iter().map(|inputs| Batch::upload(&self.engine, inputs)).collect::<anyhow::Result<Vec<_>>>()?;
        let times = self.time_layer(&uploaded, iterations)?;
        let stages = self.time_stages(&uploaded, iterations.max(uploaded.len()))?;
        let copies = self.layers.len().min(batches.len());
        let tokens = uploaded.first().map_or(0, |batch| batch.tokens);
        let variant = self.plan.variant(tokens);
        let variant = Some(format!("{}, {} x {}", variant.kernel, variant.rows, variant.slots));
        Ok(Timing { layer_ms: times, stages, variant, copies })
    }

    fn forward(&mut self, inputs: &Inputs<'_>) -> anyhow::Result<Vec<f32>> {
        let batch = Batch::upload(&self.engine, inputs)?;
        let call = batch.call(&self.output, Element::F32);
        // SAFETY: as above; the synchronisation is the next line.
        unsafe { self.layers[0].forward_raw(&self.workspace, &call, self.stream.handle())? };
        self.stream.synchronize()?;
        let mut output = vec![0f32; batch.tokens * self.plan.spec().shape.hidden];
        self.output.read(0, bytemuck::cast_slice_mut(&mut output))?;
        Ok(output)
    }
}
