//! Planning: what a layer needs on a device, to the byte, before anything is allocated or launched.
//!
//! [`Plan::new`] is pure: the same layer, limits and tokens give the same plan, with or without a GPU.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::slot_groups::{GROUP_SLOTS, most_groups};
use nvfp4_moe_device::kernels::grouped_gemm::{UNIT_ROWS, Variant};
use nvfp4_moe_device::kernels::route;
use nvfp4_moe_device::params::ExpertScales;
use thiserror::Error;

use crate::activation::Activation;
use crate::device_limits::DeviceLimits;
use crate::io::ScaleMode;
use crate::kernel_family::{KernelFamily, PackedMatrix};
use crate::shape::ShapeError;
use crate::spec::LayerSpec;

/// A layer that cannot run on a device, or a request that makes no sense.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PlanError {
    /// A size is not allowed.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No kernel for this architecture.
    #[error(
        "the GPU has compute capability {}.{}, but the kernels need 8.0 or newer (Ampere); use a newer GPU or the CPU \
         engine (--device cpu)", .found.0, .found.1
    )]
    UnsupportedArchitecture {
        /// Compute capability found.
        found: (u32, u32),
    },
    /// A block's shared memory is too small.
    #[error(
        "the GPU gives a block {found_bytes} bytes of shared memory, but {stage} needs {needed_bytes}; use another GPU \
         or the CPU engine (--device cpu)"
    )]
    SharedMemory {
        /// Stage that needs it.
        stage: &'static str,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes that a block can have.
        found_bytes: u64,
    },
    /// Weights and workspace do not fit.
    #[error(
        "the layer needs {weights_bytes} bytes of packed weights and {workspace_bytes} bytes of workspace, but the GPU \
         has {total_bytes} bytes; lower max_tokens or spread the experts over more ranks"
    )]
    DeviceMemory {
        /// Packed weights.
        weights_bytes: u64,
        /// Workspace.
        workspace_bytes: u64,
        /// Memory of the device.
        total_bytes: u64,
    },
    /// More tokens than the kernels can count.
    #[error(
        "max_tokens is {max_tokens}, but {limit} tokens are the most that 32-bit indices allow for this layer; split the batch"
    )]
    TooManyTokens {
        /// Tokens asked for.
        max_tokens: usize,
        /// Most tokens.
        limit: usize,
    },
}

/// One part of the workspace. h and y share a region, and so do the portable kernels' activations of both GEMMs, unless the
/// first GEMM quantizes its own results: the one is dead before the other is written. A region that the kernels do not
/// need has no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// u32 `[chunks, experts]`: routing counts.
    ChunkCounts,
    /// u32 `[experts + 1]`: first slot of each expert.
    ExpertOffset,
    /// u32 `[experts + 1]`: first token tile of each expert.
    TileOffset,
    /// u32 `[slots]`: token of each slot.
    SlotToken,
    /// u32 `[tokens, topk]`: slot of each entry.
    EntrySlot,
    /// u32 `[2]`: largest magnitudes, of hidden and of h.
    Amax,
    /// u32 `[2]`: blocks of each GEMM that have claimed the last part of their work.
    Claims,
    /// f32 `[rows]`: decode scale of each activation row.
    RowScales,
    /// Quantized activations, rows of padded k. Portable: f16, of the GEMM at hand. FP4: codes, of the first GEMM.
    Activations,
    /// FP4: block scales of the first GEMM's activations.
    BlockScales,
    /// Quantized activations of the second GEMM. Portable: where the first GEMM makes them.
    SecondActivations,
    /// FP4: their block scales.
    SecondBlockScales,
    /// f32 `[slots, intermediate]`, then `[slots, hidden]`: h, then y.
    SlotValues,
}

/// Place of a region in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpan {
    /// Which.
    pub region: Region,
    /// First byte, a multiple of 256.
    pub offset: u64,
    /// Bytes used.
    pub bytes: u64,
}

const REGION_ALIGNMENT: u64 = 256;
const REGIONS: usize = 13;

/// Everything about running one layer on one device, to the byte.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    spec: LayerSpec,
    limits: DeviceLimits,
    max_tokens: usize,
    regions: [RegionSpan; REGIONS],
    workspace_bytes: u64,
    kernels: KernelFamily,
    matrices: [PackedMatrix; 2],
}

impl Plan {
    /// Plans `spec` for up to `max_tokens` tokens a call on a device with these limits.
    ///
    /// # Errors
    /// [`PlanError`]: an unsupported architecture, a layer or number of tokens that does not fit.
    pub fn new(spec: LayerSpec, limits: &DeviceLimits, max_tokens: usize) -> Result<Self, PlanError> {
        spec.shape.validate()?;
        if spec.experts.end() > spec.shape.experts {
            let must = "end at or below the layer's number of experts; give a range of the layer";
            return Err(ShapeError { axis: "experts of the rank", got: spec.experts.end(), must }.into());
        }
        if limits.compute_capability < (8, 0) {
            return Err(PlanError::UnsupportedArchitecture { found: limits.compute_capability });
        }
        let kernels = KernelFamily::of(limits.compute_capability);
        let widest_tile = kernels.variants().iter().map(|tile| u64::from(tile.shared_bytes)).max().unwrap_or(0);
        let route_bytes = u64::from(route::shared_bytes(spec.experts.count as u32));
        // What a block gets without asking is enough for 1,500 experts.
        let (widest_block, default_block) =
            (u64::from(limits.shared_bytes_per_block), u64::from(route::DEFAULT_SHARED_BYTES));
        for (stage, needed_bytes, found_bytes) in
            [("grouped_gemm", widest_tile, widest_block), ("route", route_bytes, default_block)]
        {
            if needed_bytes > found_bytes {
                return Err(PlanError::SharedMemory { stage, needed_bytes, found_bytes });
            }
        }
        // Entries, and 16-byte chunks of the activations, are counted in 32 bits.
        let shape = &spec.shape;
        let matrices = [false, true].map(|second| kernels.packed_matrix(&spec, second));
        let widest = matrices[0].stride.max(matrices[1].stride);
        let limit = (u32::MAX as usize / 2) / (shape.topk * widest.div_ceil(8));
        if max_tokens > limit {
            return Err(PlanError::TooManyTokens { max_tokens, limit });
        }

        let mut end = 0;
        let regions = region_bytes(&spec, kernels, &matrices, max_tokens).map(|(region, bytes)| {
            let span = RegionSpan { region, offset: end, bytes };
            end = (end + bytes).next_multiple_of(REGION_ALIGNMENT);
            span
        });
        let plan = Self { spec, limits: *limits, max_tokens, regions, workspace_bytes: end, kernels, matrices };
        if plan.weights_bytes() + end > limits.total_memory_bytes {
            return Err(PlanError::DeviceMemory {
                weights_bytes: plan.weights_bytes(),
                workspace_bytes: end,
                total_bytes: limits.total_memory_bytes,
            });
        }
        Ok(plan)
    }

    /// The layer.
    #[must_use]
    pub const fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// Limits of the device.
    #[must_use]
    pub const fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// Most tokens of a call.
    #[must_use]
    pub const fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Which kernels run.
    #[must_use]
    pub const fn kernels(&self) -> KernelFamily {
        self.kernels
    }

    /// The packed first (gate and up) or second (down) matrix.
    #[must_use]
    pub const fn matrix(&self, second: bool) -> &PackedMatrix {
        &self.matrices[second as usize]
    }

    /// Whether the first GEMM of a call with this many tokens quantizes its own results: the scales of h are known
    /// beforehand, the variant can, and there is room for them beside the activations that it reads.
    #[must_use]
    pub fn fuses_quantization(&self, variant: &Variant, tokens: usize) -> bool {
        let slots = tokens * self.spec.shape.topk;
        let bytes = activation_bytes(self.kernels, variant, slots, self.spec.experts.count, self.matrices[1].stride);
        let room = self.region(Region::SecondActivations).bytes;
        can_fuse(&self.spec, variant) && bytes as u64 <= room
    }

    /// Bytes of packed weights.
    #[must_use]
    pub const fn packed_bytes(&self) -> u64 {
        let [l1, l2] = &self.matrices;
        (self.spec.experts.count * (l1.bytes + l2.bytes)) as u64
    }

    /// First byte of the experts' scales, behind the packed weights.
    #[must_use]
    pub const fn scales_offset(&self) -> u64 {
        self.packed_bytes().next_multiple_of(REGION_ALIGNMENT)
    }

    /// Bytes of packed weights and scales.
    #[must_use]
    pub const fn weights_bytes(&self) -> u64 {
        self.scales_offset() + (self.spec.experts.count * size_of::<ExpertScales>()) as u64
    }

    /// Bytes of the workspace.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Regions of the workspace, in order.
    #[must_use]
    pub const fn regions(&self) -> &[RegionSpan] {
        &self.regions
    }

    /// Place of one region.
    #[must_use]
    pub fn region(&self, region: Region) -> RegionSpan {
        self.regions[region as usize]
    }

    /// Variant of the grouped GEMM for a call with this many tokens: an index into [`KernelFamily::variants`]. Every
    /// variant gives the same bits.
    ///
    /// The first one that is meant for the expected slots of an expert and the expected units of a multiprocessor.
    #[must_use]
    pub fn tile(&self, tokens: usize) -> usize {
        let (entries, experts) = (tokens.saturating_mul(self.spec.shape.topk), &self.spec.experts);
        let expected_slots = entries / self.spec.shape.experts;
        let busy_experts = entries.saturating_mul(experts.count).div_ceil(self.spec.shape.experts).min(experts.count);
        let rows = self.matrix(false).row_tiles * self.matrix(false).tile_rows;
        let expected_units = busy_experts * rows / UNIT_ROWS / self.limits.multiprocessors.max(1) as usize;
        let variants = self.kernels.variants();
        let meant =
            |variant: &Variant| variant.expected_slots >= expected_slots && variant.expected_units >= expected_units;
        variants.iter().position(meant).unwrap_or(variants.len() - 1)
    }

    /// The variant of [`Plan::tile`].
    #[must_use]
    pub fn variant(&self, tokens: usize) -> &'static Variant {
        &self.kernels.variants()[self.tile(tokens)]
    }

    /// Blocks of a persistent grouped GEMM: as many as are resident at once.
    #[must_use]
    pub fn persistent_blocks(&self, variant: &Variant) -> u32 {
        // A block reserves 1 KiB of shared memory for itself.
        let by_shared = self.limits.shared_bytes_per_multiprocessor / (variant.shared_bytes + 1024);
        let by_registers = self.limits.registers_per_multiprocessor / (variant.threads * variant.registers);
        let by_threads = self.limits.max_threads_per_multiprocessor / variant.threads;
        self.limits.multiprocessors * by_shared.min(by_registers).min(by_threads).max(1)
    }
}

/// Whether a variant can quantize the results of a layer's first GEMM.
fn can_fuse(spec: &LayerSpec, variant: &Variant) -> bool {
    let quantizes = variant.quantizes && (!variant.tiles || matches!(spec.activation, Activation::SwiGlu { .. }));
    quantizes && spec.scales == ScaleMode::Static
}

/// Bytes of the quantized activations, block scales apart, that a variant reads for so many slots (or tokens, where it
/// gathers rows). Tiles: a token tile may read one group behind the last expert's.
const fn activation_bytes(
    kernels: KernelFamily,
    variant: &Variant,
    rows: usize,
    experts: usize,
    stride: usize,
) -> usize {
    let rows = if variant.tiles && rows > 0 { (most_groups(rows, experts) + 1) * GROUP_SLOTS } else { rows };
    kernels.activation_bytes(rows * stride)
}

/// The one list of regions: it both counts and carves.
fn region_bytes(
    spec: &LayerSpec,
    kernels: KernelFamily,
    matrices: &[PackedMatrix; 2],
    max_tokens: usize,
) -> [(Region, u64); REGIONS] {
    let shape = &spec.shape;
    let slots = max_tokens * shape.topk;
    let chunks = slots.div_ceil(route::CHUNK_ENTRIES as usize);
    let l1_rows = if spec.quantizes_tokens() { max_tokens } else { slots };
    let experts = spec.experts.count;
    // Activations and block scales of the first GEMM, then of the second.
    let activations = match kernels {
        KernelFamily::Portable | KernelFamily::Hopper => {
            let variants = kernels.variants();
            let bytes = |variant: &Variant, rows: usize, second: bool| {
                activation_bytes(kernels, variant, rows, experts, matrices[usize::from(second)].stride)
            };
            let first = variants.iter().map(|variant| {
                let rows = if variant.tiles { slots } else { l1_rows };
                bytes(variant, rows, false).max(bytes(variant, slots, true))
            });
            let fusing = variants.iter().enumerate().filter(|(_, variant)| can_fuse(spec, variant));
            // Second activations beside the first ones only for the tokens of the variants that need it.
            let second = fusing.map(|(index, variant)| {
                let last = index + 1 == variants.len();
                let most = ((variant.expected_slots + 1) * shape.experts - 1) / shape.topk;
                bytes(variant, if last { max_tokens } else { most.min(max_tokens) } * shape.topk, true)
            });
            [first.max().unwrap_or(0), 0, second.max().unwrap_or(0), 0]
        }
        KernelFamily::Fp4 => {
            let [first, second] = [l1_rows * matrices[0].stride, slots * matrices[1].stride];
            [first / 2, first / BLOCK, second / 2, second / BLOCK]
        }
    };
    [
        (Region::ChunkCounts, chunks * experts * 4),
        (Region::ExpertOffset, (experts + 1) * 4),
        (Region::TileOffset, (experts + 1) * 4),
        (Region::SlotToken, slots * 4),
        (Region::EntrySlot, slots * 4),
        (Region::Amax, 2 * 4),
        (Region::Claims, 2 * 4),
        (Region::RowScales, l1_rows.max(slots) * 4),
        (Region::Activations, activations[0]),
        (Region::BlockScales, activations[1]),
        (Region::SecondActivations, activations[2]),
        (Region::SecondBlockScales, activations[3]),
        (Region::SlotValues, slots * shape.hidden.max(shape.intermediate) * 4),
    ]
    .map(|(region, bytes)| (region, bytes as u64))
}
