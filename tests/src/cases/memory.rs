//! Memory: plans that say every byte, loading that keeps a few experts beside the packed weights, forwards without an
//! allocation.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::cpu;
use nvfp4_moe::cuda::{LoadMemory, MoeLayer};
use nvfp4_moe::device_limits::DeviceLimits;
use nvfp4_moe::driver::Device;
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::plan::{Plan, Region};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};
use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::kernels::route::CHUNK_ENTRIES;

use super::setup::{Batch, Lab, Layer, MODES, SWIGLU, gpu, same_bits};

/// Where regions begin.
const ALIGNMENT: u64 = 256;
/// What the driver gives memory out in.
pub(super) const GRANULE: u64 = 2 << 20;

/// Bytes of a region, from its documentation.
fn documented_bytes(spec: &LayerSpec, compute_capability: (u32, u32), tokens: usize, region: Region) -> u64 {
    let (hopper, fp4) = (compute_capability == (9, 0), compute_capability == (12, 0));
    let MoeShape { hidden, intermediate, topk, .. } = spec.shape;
    let (slots, experts) = (tokens * topk, spec.experts.count);
    let padded = |k: usize| if fp4 { k.next_multiple_of(128) } else { k.next_multiple_of(64) };
    let rows = if spec.scales == ScaleMode::Static && !spec.shared_l1_scale { slots } else { tokens };
    let (first, second) = (rows * padded(hidden), slots * padded(intermediate));
    // Groups of 8 slots: whole ones, one for what is left of each expert that can have a slot, and one behind the last.
    let grouped = if hopper && slots > 0 { (slots / 8 + experts.min(slots) + 1) * 8 } else { 0 };
    let bytes = match region {
        Region::ChunkCounts => slots.div_ceil(CHUNK_ENTRIES as usize) * experts * 4,
        Region::ExpertOffset | Region::TileOffset => (experts + 1) * 4,
        Region::SlotToken | Region::EntrySlot => slots * 4,
        Region::Amax | Region::Claims => 2 * 4,
        Region::RowScales => rows.max(slots) * 4,
        Region::Activations if fp4 => first / 2,
        Region::Activations => {
            let widest = padded(hidden).max(padded(intermediate));
            first.max(second).max(grouped * widest) * 2
        }
        Region::BlockScales => {
            if fp4 {
                first / BLOCK
            } else {
                0
            }
        }
        Region::SecondActivations => {
            if fp4 {
                second / 2
            } else if spec.scales == ScaleMode::Static {
                // Of as many tokens as give an expert no more than 24 slots by 5/4 of the average.
                let tokens = (0..=tokens).rev().find(|tokens| tokens * topk * 5 / (spec.shape.experts * 4) <= 24);
                let swiglu = matches!(spec.activation, Activation::SwiGlu { .. });
                let grouped = if swiglu { grouped } else { 0 };
                (tokens.unwrap_or(0) * topk).max(grouped) * padded(intermediate) * 2
            } else {
                0
            }
        }
        Region::SecondBlockScales => {
            if fp4 {
                second / BLOCK
            } else {
                0
            }
        }
        Region::SlotValues => slots * hidden.max(intermediate) * 4,
    };
    bytes as u64
}

fn check_plan(spec: &LayerSpec, tokens: usize) -> Result<Plan> {
    check_plan_for(spec, tokens, (12, 0))?;
    check_plan_for(spec, tokens, (9, 0))?;
    check_plan_for(spec, tokens, (8, 0))
}

fn check_plan_for(spec: &LayerSpec, tokens: usize, compute_capability: (u32, u32)) -> Result<Plan> {
    let limits = DeviceLimits { total_memory_bytes: 1 << 40, compute_capability, ..DeviceLimits::H200 };
    let fp4 = compute_capability == (12, 0);
    let plan = Plan::new(*spec, &limits, tokens)?;
    let mut end = 0;
    for span in plan.regions() {
        let what = format!("{:?} of {tokens} tokens of {spec:?}", span.region);
        ensure!(span.offset == end, "{what} begins at {}, the one before it ends at {end}", span.offset);
        let documented = documented_bytes(spec, compute_capability, tokens, span.region);
        ensure!(span.bytes == documented, "{what} has {} bytes instead of {documented}", span.bytes);
        ensure!(plan.region(span.region) == *span, "{what} is not where it is looked up");
        end = (end + span.bytes).next_multiple_of(ALIGNMENT);
    }
    ensure!(plan.workspace_bytes() == end, "the workspace has {} bytes, its regions {end}", plan.workspace_bytes());
    let tile_rows = if fp4 { 64 } else { 16 };
    let tiles = |rows: usize, k: usize| rows.next_multiple_of(tile_rows) * k.next_multiple_of(64) * 9 / 16;
    let MoeShape { hidden, intermediate, .. } = spec.shape;
    let halves = if spec.activation.is_gated() { 2 } else { 1 };
    let expert = tiles(intermediate * halves, hidden) + tiles(hidden, intermediate);
    let packed = plan.packed_bytes();
    ensure!(packed == (spec.experts.count * expert) as u64, "packed weights have {packed} bytes");
    let scales = (spec.experts.count * 5 * 4) as u64;
    let behind = packed.next_multiple_of(ALIGNMENT);
    ensure!(plan.weights_bytes() == behind + scales, "weights and scales have {} bytes", plan.weights_bytes());
    Ok(plan)
}

pub(super) fn plans_are_exact(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let sizes = [[96, 80, 5, 2], [80, 16, 1, 1], [320, 176, 130, 8]];
        for &sizes in if lab.is_full() { &sizes[..] } else { &sizes[..2] } {
            for tokens in [0, 1, 33, 129, 5000] {
                let layer = Layer::new(sizes, SWIGLU, mode);
                check_plan(&layer.spec, tokens)?;
                let none = layer.clone().on_rank(ExpertRange { first: 0, count: 0 });
                check_plan(&none.spec, tokens)?;
                if tokens > 200 {
                    continue;
                }
                let mut loaded = lab.load(&layer, tokens)?;
                if let Some(gpu) = loaded.gpu() {
                    let plan = gpu.plan();
                    ensure!(gpu.layer().weights().len_bytes() as u64 == plan.weights_bytes(), "weights");
                    ensure!(gpu.workspace().buffer().len_bytes() as u64 == plan.workspace_bytes(), "workspace");
                }
                let on_cpu = cpu::MoeLayer::load(&layer.spec, &layer, &mut |_, _| {})?;
                ensure!(on_cpu.weight_bytes() == cpu::MoeLayer::planned_weight_bytes(&layer.spec), "CPU weights");
                let bytes = cpu::Workspace::new(&on_cpu, tokens)?.bytes();
                let planned = cpu::Workspace::planned_bytes(&layer.spec, tokens);
                let parts: usize = cpu::Workspace::planned_parts(&layer.spec, tokens).iter().map(|part| part.1).sum();
                ensure!(bytes == planned && bytes == parts, "CPU workspace: {bytes}, {planned}, {parts}");
            }
        }
    }
    Ok(())
}

pub(super) fn largest_and_smallest_plan(lab: &Lab<'_>) -> Result<()> {
    let spec = LayerSpec {
        shape: MoeShape::new(7168, 3072, 384, 6)?,
        experts: ExpertRange { first: 48, count: 48 },
        activation: SWIGLU,
        scales: ScaleMode::Static,
        shared_l1_scale: true,
    };
    let smallest = check_plan(&spec, 1)?.workspace_bytes();
    ensure!(smallest < 1 << 20, "one token needs {smallest} bytes of workspace");
    // A group of 8 for each of 6 slots.
    let smallest = check_plan_for(&spec, 1, (9, 0))?.workspace_bytes();
    ensure!(smallest < 2 << 20, "one token needs {smallest} bytes of workspace");
    // h or y in f32 and the activations of all slots in f16, and little beside them.
    let slots: u64 = 32768 * 6;
    let largest = check_plan(&spec, 32768)?.workspace_bytes();
    // 1279 tokens are the most that the kernel for few slots takes.
    let needed = slots * 7168 * 4 + (slots * 3072).max(32768 * 7168) * 2 + 1279 * 6 * 3072 * 2;
    ensure!(largest < needed + (16 << 20), "32768 tokens need {largest} bytes of workspace, not {needed}");
    // Both activations of all slots.
    let largest = check_plan_for(&spec, 32768, (9, 0))?.workspace_bytes();
    let needed = slots * 7168 * 4 + slots * (7168 + 3072) * 2;
    ensure!(largest < needed + (32 << 20), "32768 tokens need {largest} bytes of workspace, not {needed}");
    for mode in MODES {
        let layer = Layer::new([64, 32, 5, 2], SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, 1, 40);
        let alone = lab.load(&layer, 1)?.forward_f32(&batch.inputs())?;
        let roomy = lab.load(&layer, 32768)?.forward_f32(&batch.inputs())?;
        same_bits(&roomy, &alone, &format!("one token, planned for 32768, {mode:?}"))?;
    }
    Ok(())
}

fn free(device: &Device) -> Result<u64> {
    Ok(device.free_memory()?.0)
}

/// Layers loaded one after the other: each takes its packed weights, and while it loads a few raw experts more.
pub(super) fn layer_after_layer(lab: &Lab<'_>) -> Result<()> {
    let engine = lab.runner.engine().context("a GPU")?;
    let device = engine.device();
    let shape = MoeShape::new(2048, 768, 8, 2)?;
    let source = RandomExperts::new(shape, true, RandomInputScales::Missing, 41);
    let experts = ExpertRange::all(8);
    let spec = LayerSpec { shape, experts, activation: SWIGLU, scales: ScaleMode::PerToken, shared_l1_scale: true };
    let plan = Plan::new(spec, &device.limits(), 16)?;
    let (staging, raw_expert) = (LoadMemory::here(&spec), 3 * 2048 * 768 * 9 / BLOCK);
    ensure!(staging.device_bytes() <= 3 * (raw_expert + 96), "{staging:?}");
    ensure!(staging.host_bytes() <= 2 * (raw_expert + 512), "{staging:?}");
    let weights = plan.weights_bytes().next_multiple_of(GRANULE);
    let peak = weights + staging.sets as u64 * (staging.expert_bytes as u64).next_multiple_of(GRANULE) + 2 * GRANULE;

    // The first use of a kernel may take memory for its code.
    drop(MoeLayer::load(engine, &plan, &source, |_, _| {})?);
    let before = free(device)?;
    let mut layers = Vec::new();
    for index in 0..lab.scaled(8, 3) {
        let start = free(device)?;
        let mut least = Ok(start);
        layers.push(MoeLayer::load(engine, &plan, &source, |_, _| {
            if let (Ok(known), now) = (&least, free(device)) {
                least = now.map(|now| now.min(*known));
            }
        })?);
        let (used, most) = (start.saturating_sub(free(device)?), start.saturating_sub(least?));
        ensure!(used <= weights + GRANULE, "layer {index} keeps {used} bytes, more than its {weights}");
        ensure!(most <= peak, "layer {index} takes {most} bytes while it loads, more than {peak}");
    }
    drop(layers);
    let after = free(device)?;
    ensure!(after + GRANULE >= before, "{} bytes are not given back", before - after);
    for _ in 0..lab.scaled(61, 4) {
        drop(MoeLayer::load(engine, &plan, &source, |_, _| {})?);
    }
    let after = free(device)?;
    ensure!(after + GRANULE >= before, "{} bytes are lost after many layers", before.saturating_sub(after));
    Ok(())
}

pub(super) fn forward_allocates_nothing(lab: &Lab<'_>) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let tokens = 3000;
    for mode in MODES {
        let layer = Layer::new([96, 80, 6, 2], SWIGLU, mode);
        let batch = Batch::new(&layer.spec.shape, tokens, 42);
        let mut loaded = lab.load(&layer, tokens)?;
        // The first launch of a kernel may take memory for its code and stack.
        for tile in 0..gpu(&mut loaded)?.plan().kernels().variants().len() {
            loaded.set_tile(Some(tile))?;
            loaded.forward_f32(&batch.inputs())?;
            loaded.forward_f32(&batch.token(0))?;
        }
        loaded.set_tile(None)?;
        let workspace = gpu(&mut loaded)?.workspace().buffer().address();
        let before = free(device)?;
        for count in [1, 16, 100, 1024, tokens] {
            loaded.forward_f32(&batch.inputs().tokens(0..count, 96))?;
            let after = free(device)?;
            ensure!(after == before, "{count} tokens, {mode:?}: {before} bytes were free, now {after}");
        }
        ensure!(gpu(&mut loaded)?.workspace().buffer().address() == workspace, "the workspace moved");
    }
    Ok(())
}
