//! Single kernels against plain functions, bit for bit, on inputs that reach every branch: each buffer is an allocation of
//! its own, as large as documented and no larger, and holds nothing that its kernel has not been given.

pub(super) mod combine;
pub(super) mod grouped_gemm;
pub(super) mod grouped_gemm_fp4;
pub(super) mod quantize;
pub(super) mod quantize_tiles;
pub(super) mod route;
pub(super) mod weights;

use anyhow::{Context, Result, ensure};
use nvfp4_moe::cuda::Engine;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::harness::Target;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe_device::kernels::grouped_gemm::Variant;
use nvfp4_moe_device::params::GroupedGemmParams;

use super::device_kernels::{downloaded, uploaded};
use super::setup::Lab;

/// A device that runs single kernels.
#[derive(Clone, Copy)]
pub(super) struct Bench<'a> {
    pub(super) engine: &'a Engine,
    /// Whether fresh memory is filled, so that what is read before it is written shows; an emulator knows it anyway.
    poison: bool,
}

impl<'a> Bench<'a> {
    pub(super) fn new(lab: &'a Lab<'_>) -> Result<Self> {
        let engine = lab.runner.engine().context("a GPU")?;
        Ok(Self { engine, poison: !matches!(lab.runner.target(), Target::Backend(_)) })
    }

    /// Room for a kernel's results.
    pub(super) fn room(&self, bytes: usize) -> Result<DeviceBuffer> {
        let buffer = DeviceBuffer::alloc(self.engine.device(), bytes)?;
        if self.poison {
            buffer.fill(0, bytes, 0xFF)?;
        }
        Ok(buffer)
    }

    pub(super) fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> Result<DeviceBuffer> {
        uploaded(self.engine, bytemuck::cast_slice(values))
    }

    /// Runs the kernels in this order.
    ///
    /// # Safety
    /// As [`Engine::run_alone`].
    pub(super) unsafe fn run(&self, launches: &[Launch]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.engine.run_alone(launches)? };
        Ok(())
    }

    /// Runs a grouped GEMM on two blocks: so few that each takes several tiles.
    ///
    /// # Safety
    /// The params' buffers have the documented sizes.
    pub(super) unsafe fn grouped_gemm(&self, variant: &Variant, params: GroupedGemmParams) -> Result<()> {
        let launch = Launch {
            kernel: variant.kernel,
            grid: [2, 1, 1],
            threads: variant.threads,
            shared_bytes: variant.shared_bytes,
            params: Params::GroupedGemm(params),
        };
        // SAFETY: the kernel's threads and shared memory; the caller's contract.
        unsafe { self.run(&[launch]) }
    }
}

/// First slot of each expert, and the number of slots, from the experts' numbers of slots.
fn expert_offsets(slots: &[usize]) -> Vec<u32> {
    let ends = slots.iter().scan(0, |end, slots| {
        *end += *slots as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// The expert that a slot belongs to.
fn expert_of(expert_offset: &[u32], slot: usize) -> usize {
    expert_offset.iter().filter(|&&offset| offset as usize <= slot).count() - 1
}

/// Checks what a kernel wrote, and names the first place that differs.
fn same<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(
    buffer: &DeviceBuffer,
    expected: &[T],
    what: &str,
) -> Result<()> {
    let got: Vec<T> = downloaded(buffer)?;
    ensure!(got.len() >= expected.len(), "{what}: {} elements, but {} expected", got.len(), expected.len());
    let place = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(place) = place {
        anyhow::bail!("{what}: element {place} is {:?}, but {:?} was expected", got[place], expected[place]);
    }
    Ok(())
}

/// [`same`], bit for bit, but for the bits of what is not a number.
fn same_or_nan(got: Vec<f32>, expected: &[f32], what: &str) -> Result<()> {
    let same = |got: &f32, expected: &f32| got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
    let place = got.iter().zip(expected).position(|(got, expected)| !same(got, expected));
    if let Some(place) = place {
        anyhow::bail!("{what}: element {place} is {:e}, but {:e} was expected", got[place], expected[place]);
    }
    Ok(())
}
