//! How a server embeds the layer: its CUDA context, stream and device pointers in, nothing copied, nothing waited for.
use anyhow::Context as _;
use nvfp4_moe::checkpoint::Checkpoint;
use nvfp4_moe::cuda::{CallAddresses, Engine, MoeLayer, Workspace};
use nvfp4_moe::driver::{Device, DeviceBuffer, Stream, StreamHandle};
use nvfp4_moe::{plan::Plan, shape::ExpertRange, spec::LayerSpec};

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).context("usage: embed CHECKPOINT")?;
    // The primary context, as CUDA's runtime uses it; Device::from_raw_context takes any other.
    let device = Device::open(0)?;
    let checkpoint = Checkpoint::open(path)?;
    let source = checkpoint.layer(checkpoint.layers()[0].index)?;
    let experts = ExpertRange::of_rank(source.experts(), 1, 0)?;
    let spec = LayerSpec::of_layer(
        &source,
        source.topk().context("config.json has no top-k; add num_experts_per_tok")?,
        experts,
        None,
    )?;
    let plan = Plan::new(spec, &device.limits(), 4096)?;
    let engine = Engine::new(&device)?;
    let layer = MoeLayer::load(&engine, &plan, &source, |_done, _all| {})?;
    let workspace = Workspace::new(&engine, &plan)?;

    // The server's side, here one token of zeros: a CUstream and CUdeviceptrs, whoever made them.
    let (server_stream, memory) = (Stream::new(&device)?, DeviceBuffer::alloc(&device, 4 << 20)?);
    memory.fill(0, memory.len_bytes(), 0)?;
    let [hidden, topk_ids, topk_weights, output] = [0, 1, 2, 3].map(|mib| memory.address() + (mib << 20));
    let call = CallAddresses::bf16(hidden, topk_ids, topk_weights, output, 1);
    // SAFETY: stream and memory live until the stream has passed; a graph that captures this must not outlive them.
    unsafe { layer.forward_raw(&workspace, &call, StreamHandle::from_raw(server_stream.handle().as_raw()))? };
    Ok(server_stream.synchronize()?)
}
