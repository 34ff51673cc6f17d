//! Devices that cannot do it: each refusal is a sentence that names what was found and what is needed, and nothing is
//! half done.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::device_limits::DeviceLimits;
use nvfp4_moe::driver::{DeviceBuffer, DriverError, Stream};
use nvfp4_moe::harness::{DeviceChoice, HarnessError, Runner, Target};
use nvfp4_moe::io::{Inputs, OutputRows, ScaleMode};
use nvfp4_moe::plan::{Plan, PlanError};
use nvfp4_moe::shape::{ExpertRange, MoeShape};

use super::setup::{Batch, Lab, Layer, SWIGLU, matches};

const SIZES: [usize; 4] = [96, 80, 5, 2];

/// Checks that a message is a sentence with all of these in it.
fn says(error: &impl std::fmt::Display, parts: &[&str]) -> Result<()> {
    let message = error.to_string();
    for part in parts {
        ensure!(message.contains(part), "{message:?} does not say {part:?}");
    }
    Ok(())
}

pub(super) fn no_driver(_: &Lab<'_>) -> Result<()> {
    match Runner::new(Target::Cuda(0)).err().context("a GPU without a driver")? {
        HarnessError::Driver(error @ DriverError::NoDriver { .. }) => {
            says(&error, &["no NVIDIA driver is installed", "--device cpu"])?;
        }
        other => anyhow::bail!("{other}"),
    }
    let automatic = Runner::choose(DeviceChoice::Auto)?;
    ensure!(automatic.target() == Target::Cpu, "{:?}", automatic.target());
    says(&automatic.reason(), &["no NVIDIA driver"])
}

pub(super) fn no_such_gpu(_: &Lab<'_>) -> Result<()> {
    match Runner::new(Target::Cuda(9999)).err().context("GPU 9999")? {
        HarnessError::Driver(error @ DriverError::NoDevice { requested: 9999, .. }) => {
            says(&error, &["9999", "--device cpu"])
        }
        other => anyhow::bail!("{other}"),
    }
}

pub(super) fn driver_too_old(lab: &Lab<'_>) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let error = device.require_driver((99, 1)).err().context("a driver for CUDA 99.1")?;
    ensure!(matches!(error, DriverError::DriverTooOld { needed: (99, 1), .. }), "{error}");
    says(&error, &["CUDA 99.1", "install a newer driver", "--device cpu"])
}

pub(super) fn memory_cannot_be_had(lab: &Lab<'_>) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let total = device.free_memory()?.1;
    let asked = 2 * total;
    match DeviceBuffer::alloc(device, asked as usize).err().context("twice the GPU's memory")? {
        error @ DriverError::OutOfMemory { requested_bytes, .. } => {
            ensure!(requested_bytes == asked, "{error}");
            says(&error, &["GPU memory", "fewer experts or tokens"])?;
        }
        other => anyhow::bail!("{other}"),
    }
    // The plan says so before anything is allocated.
    let before = device.free_memory()?.0;
    let mut layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    layer.spec.shape = MoeShape::new(16384, 16384, 1400, 2)?;
    layer.spec.experts = ExpertRange::all(1400);
    let error = lab.load(&layer, 16).err().context("more experts than memory")?;
    match error.downcast::<HarnessError>()? {
        HarnessError::Plan(error @ PlanError::DeviceMemory { .. }) => says(&error, &["more ranks"])?,
        other => anyhow::bail!("{other}"),
    }
    ensure!(device.free_memory()?.0 == before, "memory was taken before the refusal");
    // And the device still works.
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    lab.check(&layer, &Batch::new(&layer.spec.shape, 9, 43), "after refusals")
}

/// What the copy ceiling is measured with.
pub(super) fn a_copy_inside_a_buffer(lab: &Lab<'_>) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let (buffer, stream) = (DeviceBuffer::alloc(device, 12)?, Stream::new(device)?);
    buffer.write(0, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])?;
    for (from, to, len) in [(0, 3, 4), (6, 2, 5), (9, 0, 4)] {
        let error = buffer.copy_within(from, to, len, stream.handle()).err().context("a wrong copy")?;
        match from + len > 12 {
            true => says(&error, &["a copy of 4 bytes at offset 9", "12 bytes"])?,
            false => says(&error, &[&format!("from offset {from} to offset {to}"), "overlaps itself"])?,
        }
    }
    buffer.copy_within(1, 8, 3, stream.handle())?;
    buffer.copy_within(11, 0, 1, stream.handle())?;
    buffer.copy_within(5, 5, 0, stream.handle())?;
    stream.synchronize()?;
    let mut found = [0; 12];
    buffer.read(0, &mut found)?;
    ensure!(found == [12, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 12], "{found:?}");
    Ok(())
}

pub(super) fn architecture_without_kernels(_: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    for found in [(7, 5), (7, 0), (6, 1)] {
        let limits = DeviceLimits { compute_capability: found, ..DeviceLimits::H200 };
        let error = Plan::new(layer.spec, &limits, 16).err().context("an old architecture")?;
        ensure!(error == PlanError::UnsupportedArchitecture { found }, "{error}");
        says(&error, &[&format!("compute capability {}.{}", found.0, found.1), "8.0", "--device cpu"])?;
    }
    for found in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let limits = DeviceLimits { compute_capability: found, ..DeviceLimits::H200 };
        ensure!(Plan::new(layer.spec, &limits, 16).is_ok(), "{found:?} is refused");
    }
    Ok(())
}

pub(super) fn not_enough_memory(_: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let plan = Plan::new(layer.spec, &DeviceLimits::H200, 500)?;
    let needed = plan.weights_bytes() + plan.workspace_bytes();
    let with =
        |total_memory_bytes| Plan::new(layer.spec, &DeviceLimits { total_memory_bytes, ..DeviceLimits::H200 }, 500);
    ensure!(with(needed).is_ok(), "exactly enough memory is refused");
    for total_bytes in [needed - 1, 1 << 10, 0] {
        let error = with(total_bytes).err().context("too little memory")?;
        let expected = PlanError::DeviceMemory {
            weights_bytes: plan.weights_bytes(),
            workspace_bytes: plan.workspace_bytes(),
            total_bytes,
        };
        ensure!(error == expected, "{error}");
        says(&error, &[&plan.weights_bytes().to_string(), &total_bytes.to_string(), "max_tokens", "ranks"])?;
    }
    let endless = DeviceLimits { total_memory_bytes: u64::MAX, ..DeviceLimits::H200 };
    match Plan::new(layer.spec, &endless, usize::MAX / 1000).err().context("endless tokens")? {
        error @ PlanError::TooManyTokens { limit, .. } => {
            says(&error, &["split the batch"])?;
            ensure!(Plan::new(layer.spec, &endless, limit).is_ok(), "{limit} tokens are refused");
            ensure!(Plan::new(layer.spec, &endless, limit + 1).is_err(), "more than {limit} tokens are accepted");
        }
        other => anyhow::bail!("{other}"),
    }
    Ok(())
}

pub(super) fn not_enough_shared_memory(_: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let limits = DeviceLimits { shared_bytes_per_block: 32 << 10, ..DeviceLimits::H200 };
    let error = Plan::new(layer.spec, &limits, 16).err().context("32 KiB of shared memory")?;
    ensure!(matches!(error, PlanError::SharedMemory { stage: "grouped_gemm", found_bytes: 32768, .. }), "{error}");
    says(&error, &["grouped_gemm", "32768", "--device cpu"])?;
    // More experts than the routing can count in a block.
    let mut spec = layer.spec;
    spec.shape.experts = 100_000;
    spec.experts = ExpertRange::all(100_000);
    let error = Plan::new(spec, &DeviceLimits::H200, 16).err().context("100,000 experts")?;
    ensure!(matches!(error, PlanError::SharedMemory { stage: "route", .. }), "{error}");
    Ok(())
}

pub(super) fn wrong_calls_write_nothing(lab: &Lab<'_>) -> Result<()> {
    let layer = Layer::new(SIZES, SWIGLU, ScaleMode::PerToken);
    let batch = Batch::new(&layer.spec.shape, 6, 44);
    let inputs = batch.inputs();
    let mut loaded = lab.load(&layer, 6)?;
    let mut out = vec![7f32; 6 * 96];
    for (axis, inputs, output) in [
        ("topk", Inputs { topk: 3, ..inputs }, 6 * 96),
        ("topk_ids", Inputs { topk_ids: &inputs.topk_ids[1..], ..inputs }, 6 * 96),
        ("topk_weights", Inputs { topk_weights: &inputs.topk_weights[1..], ..inputs }, 6 * 96),
        ("hidden", Inputs { hidden: inputs.hidden.slice(0..5 * 96), ..inputs }, 6 * 96),
        ("output", inputs, 6 * 96 - 1),
    ] {
        match loaded.forward(&inputs, OutputRows::F32(&mut out[..output]), false) {
            Err(HarnessError::Length(error)) => ensure!(error.axis == axis, "{axis}: {error}"),
            other => anyhow::bail!("{axis}: {other:?}"),
        }
        ensure!(out.iter().all(|y| *y == 7.0), "{axis}: something was written");
    }
    let beyond = layer.clone().on_rank(ExpertRange { first: 4, count: 3 });
    says(&lab.load(&beyond, 6).err().context("experts beyond the layer")?, &["experts", "7"])?;
    matches(&layer.expected(&inputs), &loaded.forward_f32(&inputs)?, "a right call after wrong ones")
}
