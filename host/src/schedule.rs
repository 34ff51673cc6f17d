//! The launches of one forward, as data: which kernel, with which grid and argument. Pure; whoever runs kernels (the
//! CUDA engine) walks through the list.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::kernels::activation::{self, ActivationParams};
use nvfp4_moe_device::kernels::grouped_gemm::Variant;
use nvfp4_moe_device::kernels::{amax, combine, pack, quantize, route};
use nvfp4_moe_device::params::{
    CombineParams, Element, Epilogue, GroupedGemmParams, PackParams, QuantizeParams, ReadParams, RouteParams, RowScale,
    Rows, TokenCount,
};

use crate::activation::Activation;
use crate::io::ScaleMode;
use crate::kernel_family::KernelFamily;
use crate::plan::{Plan, Region};

/// A stage of the forward, as it is called in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Slots from `topk_ids`.
    Route,
    /// Hidden rows to NVFP4.
    QuantizeL1,
    /// Gate and up, with the activation.
    GroupedGemmL1,
    /// Rows of h to NVFP4.
    QuantizeL2,
    /// Down.
    GroupedGemmL2,
    /// Weighted sum of a token's slots.
    Combine,
}

impl Stage {
    /// All, in order.
    pub const ALL: [Self; 6] =
        [Self::Route, Self::QuantizeL1, Self::GroupedGemmL1, Self::QuantizeL2, Self::GroupedGemmL2, Self::Combine];

    /// Label in reports.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::QuantizeL1 => "quantize_l1",
            Self::GroupedGemmL1 => "grouped_gemm_l1",
            Self::QuantizeL2 => "quantize_l2",
            Self::GroupedGemmL2 => "grouped_gemm_l2",
            Self::Combine => "combine",
        }
    }
}

/// A kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Params {
    /// Of the route kernels.
    Route(RouteParams),
    /// Of the quantize kernels and `amax`.
    Quantize(QuantizeParams),
    /// Of the grouped GEMM.
    GroupedGemm(GroupedGemmParams),
    /// Of `combine`.
    Combine(CombineParams),
    /// Of `pack`.
    Pack(PackParams),
    /// Of `read_all`, which is in no schedule.
    Read(ReadParams),
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    /// Entry point of the module.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// Argument.
    pub params: Params,
}

/// Buffers of one call, as device addresses; all are 16-byte aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallAddresses {
    /// `[tokens, hidden]` of `hidden_element`.
    pub hidden: u64,
    /// bf16 or f16.
    pub hidden_element: Element,
    /// `[tokens, topk]` i32.
    pub topk_ids: u64,
    /// `[tokens, topk]` f32.
    pub topk_weights: u64,
    /// `[tokens, hidden]` of `output_element`.
    pub output: u64,
    /// bf16 or f32.
    pub output_element: Element,
    /// Number of tokens.
    pub tokens: usize,
    /// Address of a u32 with the number of tokens (at most `tokens`), or 0.
    pub device_tokens: u64,
    /// Add to the output instead of overwriting it.
    pub accumulate: bool,
}

impl CallAddresses {
    /// The usual call: bf16 in and out, overwriting the output, the number of tokens known to the host.
    #[must_use]
    pub const fn bf16(hidden: u64, topk_ids: u64, topk_weights: u64, output: u64, tokens: usize) -> Self {
        Self {
            hidden,
            hidden_element: Element::Bf16,
            topk_ids,
            topk_weights,
            output,
            output_element: Element::Bf16,
            tokens,
            device_tokens: 0,
            accumulate: false,
        }
    }
}

/// The kernels' form of an activation.
#[must_use]
pub fn activation_params(activation: Activation) -> ActivationParams {
    match activation {
        Activation::SwiGlu { limit } => ActivationParams {
            kind: activation::KIND_SWIGLU,
            limit: limit.unwrap_or(f32::INFINITY),
            alpha: 1.0,
            beta: 0.0,
        },
        Activation::SwiGluOai { alpha, beta, limit } => {
            ActivationParams { kind: activation::KIND_SWIGLU_OAI, limit, alpha, beta }
        }
        Activation::Relu2 => {
            ActivationParams { kind: activation::KIND_RELU2, limit: f32::INFINITY, alpha: 1.0, beta: 0.0 }
        }
    }
}

/// One forward of a plan, with all addresses known.
#[derive(Clone, Copy, Debug)]
pub struct Schedule<'a> {
    plan: &'a Plan,
    weights: u64,
    workspace: u64,
    call: CallAddresses,
    variant: &'static Variant,
}

impl<'a> Schedule<'a> {
    /// The forward of `call` with the weights and the workspace at these addresses.
    ///
    /// `call.tokens` is at most the plan's; `tile` is the grouped GEMM's variant (see [`Plan::tile`]).
    #[must_use]
    pub const fn new(plan: &'a Plan, weights: u64, workspace: u64, call: CallAddresses, tile: usize) -> Self {
        Self { plan, weights, workspace, call, variant: &plan.kernels().variants()[tile] }
    }

    /// Launches of one stage, in order.
    ///
    /// # Errors
    /// The first error of `launch`.
    pub fn stage<E>(&self, stage: Stage, mut launch: impl FnMut(&Launch) -> Result<(), E>) -> Result<(), E> {
        let nothing_here = self.plan.spec().experts.is_empty();
        if self.call.tokens == 0 || (nothing_here && !matches!(stage, Stage::Route | Stage::Combine)) {
            return Ok(());
        }
        match stage {
            Stage::Route => self.route(launch),
            Stage::QuantizeL1 | Stage::QuantizeL2 => {
                let second = stage == Stage::QuantizeL2;
                if second && self.fuses() {
                    return Ok(());
                }
                let (amax, quantize) = self.quantize(second);
                if self.plan.spec().scales == ScaleMode::PerTensor {
                    launch(&amax)?;
                }
                launch(&quantize)
            }
            Stage::GroupedGemmL1 => launch(&self.grouped_gemm(false)),
            Stage::GroupedGemmL2 => launch(&self.grouped_gemm(true)),
            Stage::Combine => launch(&self.combine()),
        }
    }

    /// All launches, in order.
    ///
    /// # Errors
    /// The first error of `launch`.
    pub fn all<E>(&self, mut launch: impl FnMut(&Launch) -> Result<(), E>) -> Result<(), E> {
        Stage::ALL.into_iter().try_for_each(|stage| self.stage(stage, &mut launch))
    }

    fn at(&self, region: Region) -> u64 {
        self.workspace + self.plan.region(region).offset
    }

    fn tokens(&self) -> TokenCount {
        TokenCount { device: self.call.device_tokens, bound: self.call.tokens as u32, padding: 0 }
    }

    fn entries(&self) -> u32 {
        (self.call.tokens * self.plan.spec().shape.topk) as u32
    }

    fn experts(&self) -> u32 {
        self.plan.spec().experts.count as u32
    }

    fn expert_scales(&self) -> u64 {
        self.weights + self.plan.scales_offset()
    }

    fn route<E>(&self, mut launch: impl FnMut(&Launch) -> Result<(), E>) -> Result<(), E> {
        let spec = self.plan.spec();
        let chunks = self.entries().div_ceil(route::CHUNK_ENTRIES);
        let params = RouteParams {
            tokens: self.tokens(),
            topk_ids: self.call.topk_ids,
            chunk_counts: self.at(Region::ChunkCounts),
            expert_offset: self.at(Region::ExpertOffset),
            tile_offset: self.at(Region::TileOffset),
            slot_token: self.at(Region::SlotToken),
            entry_slot: self.at(Region::EntrySlot),
            amax_bits: self.at(Region::Amax),
            claims: self.at(Region::Claims),
            topk: spec.shape.topk as u32,
            first_expert: spec.experts.first as u32,
            experts: self.experts(),
            chunks,
            token_tile: self.variant.slots as u32,
            unread: self.first_routes_itself().into(),
        };
        let over = |kernel, blocks, threads, shared_bytes| Launch {
            kernel,
            grid: [blocks, 1, 1],
            threads,
            shared_bytes,
            params: Params::Route(params),
        };
        let of_chunks = |kernel, blocks| over(kernel, blocks, route::THREADS, route::shared_bytes(self.experts()));
        if let Some(single) = route::single(self.entries(), self.experts()) {
            return launch(&over("route_single", single.blocks, single.threads, single.shared_bytes));
        }
        let launches = [of_chunks("route_count", chunks), of_chunks("route_scan", 1), of_chunks("route_place", chunks)];
        launches.iter().try_for_each(launch)
    }

    /// Whether the first GEMM finds first slots and token tiles of the experts itself: the kernels in front of it let it start at
    /// once.
    fn first_routes_itself(&self) -> bool {
        !self.plan.spec().experts.is_empty() && self.entries() as usize <= self.variant.routes_entries
    }

    /// Whether the first GEMM quantizes its own results.
    fn fuses(&self) -> bool {
        self.plan.fuses_quantization(self.variant, self.call.tokens)
    }

    /// Quantized activations of the first or second GEMM and, where they are codes, their block scales.
    fn activations(&self, second: bool) -> (u64, u64) {
        match (self.plan.kernels(), second) {
            (KernelFamily::Portable | KernelFamily::Hopper, true) if self.fuses() => {
                (self.at(Region::SecondActivations), 0)
            }
            (KernelFamily::Portable | KernelFamily::Hopper, _) => (self.at(Region::Activations), 0),
            (KernelFamily::Fp4, false) => (self.at(Region::Activations), self.at(Region::BlockScales)),
            (KernelFamily::Fp4, true) => (self.at(Region::SecondActivations), self.at(Region::SecondBlockScales)),
        }
    }

    /// `amax` and `quantize` before the first or second GEMM.
    fn quantize(&self, second: bool) -> (Launch, Launch) {
        let spec = self.plan.spec();
        let a_row_a_token = !second && spec.quantizes_tokens();
        let k = if second { spec.shape.intermediate } else { spec.shape.hidden };
        let topk = spec.shape.topk as u32;
        let (kernel, shared_bytes) = match self.plan.kernels() {
            KernelFamily::Fp4 => ("quantize_codes", quantize::SHARED_BYTES),
            _ if self.variant.tiles => ("quantize_tiles", quantize::tiles_shared_bytes(topk)),
            _ => ("quantize", quantize::SHARED_BYTES),
        };
        let (output, block_scales) = self.activations(second);
        let params = QuantizeParams {
            tokens: self.tokens(),
            input: if second { self.at(Region::SlotValues) } else { self.call.hidden },
            gather: if second || a_row_a_token { 0 } else { self.at(Region::SlotToken) },
            expert_offset: self.at(Region::ExpertOffset),
            expert_scales: self.expert_scales(),
            amax_bits: self.at(Region::Amax) + if second { 4 } else { 0 },
            output,
            block_scales,
            row_scales: self.at(Region::RowScales),
            k: k as u32,
            stride: self.plan.matrix(second).stride as u32,
            element: if second { Element::F32 } else { self.call.hidden_element } as u32,
            rows: if a_row_a_token { Rows::Token } else { Rows::Slot } as u32,
            row_scale: match spec.scales {
                ScaleMode::Static => RowScale::Static,
                ScaleMode::PerToken => RowScale::PerToken,
                ScaleMode::PerTensor => RowScale::PerTensor,
            } as u32,
            experts: self.experts(),
            second: second.into(),
            topk,
            entry_slot: self.at(Region::EntrySlot),
            topk_ids: self.call.topk_ids,
            first_expert: spec.experts.first as u32,
            unread: (!second && self.first_routes_itself()).into(),
        };
        let rows = if a_row_a_token { self.call.tokens as u32 } else { self.entries() };
        let amax = Launch {
            kernel: "amax",
            grid: [rows.min(self.plan.limits().multiprocessors * 8), 1, 1],
            threads: amax::THREADS,
            shared_bytes: 0,
            params: Params::Quantize(params),
        };
        // Where the GEMM starts at once, rows are shared among small blocks.
        let (threads, blocks) = if params.unread == 0 {
            (quantize::THREADS, 1)
        } else {
            (quantize::FEW_THREADS, params.stride.div_ceil(quantize::FEW_THREADS * BLOCK as u32))
        };
        let quantize =
            Launch { kernel, grid: [rows, blocks, 1], threads, shared_bytes, params: Params::Quantize(params) };
        (amax, quantize)
    }

    fn grouped_gemm(&self, second: bool) -> Launch {
        let spec = self.plan.spec();
        let matrix = self.plan.matrix(second);
        let (activations, block_scales) = self.activations(second);
        let quantized = !second && self.fuses();
        let (output, output_scales) = if quantized { self.activations(true) } else { (self.at(Region::SlotValues), 0) };
        let params = GroupedGemmParams {
            weights: self.weights + matrix.offset as u64,
            expert_bytes: matrix.bytes as u64,
            activations,
            block_scales,
            gather: if !second && spec.quantizes_tokens() && !self.variant.tiles {
                self.at(Region::SlotToken)
            } else {
                0
            },
            row_scales: if spec.scales == ScaleMode::Static { 0 } else { self.at(Region::RowScales) },
            expert_scales: self.expert_scales(),
            expert_offset: self.at(Region::ExpertOffset),
            tile_offset: self.at(Region::TileOffset),
            output,
            output_scales,
            columns: if second { spec.shape.hidden } else { spec.shape.intermediate } as u32,
            row_tiles: matrix.row_tiles as u32,
            k_tiles: matrix.k_tiles as u32,
            experts: self.experts(),
            epilogue: match (second, spec.activation.is_gated()) {
                (true, _) => Epilogue::Down,
                (false, true) => Epilogue::Gated,
                (false, false) => Epilogue::Ungated,
            } as u32,
            k: if second { spec.shape.intermediate } else { spec.shape.hidden } as u32,
            activation: activation_params(spec.activation),
            quantized: quantized.into(),
            topk: spec.shape.topk as u32,
            first_expert: spec.experts.first as u32,
            padding: 0,
            tokens: self.tokens(),
            topk_ids: if !second && self.first_routes_itself() { self.call.topk_ids } else { 0 },
            claims: self.at(Region::Claims) + if second { 4 } else { 0 },
        };
        let variant = self.variant;
        // No more tiles than this exist: an expert with slots has at least one, and each slot is in one.
        let slots = self.entries() as usize;
        let token_tiles = slots.min(slots.div_ceil(variant.slots) + spec.experts.count);
        let tiles = token_tiles * (matrix.row_tiles * matrix.tile_rows).div_ceil(variant.rows);
        Launch {
            kernel: variant.kernel,
            grid: [self.plan.persistent_blocks(variant).min(tiles as u32), 1, 1],
            threads: variant.threads,
            shared_bytes: variant.shared_bytes,
            params: Params::GroupedGemm(params),
        }
    }

    fn combine(&self) -> Launch {
        let shape = &self.plan.spec().shape;
        let params = CombineParams {
            tokens: self.tokens(),
            slots: if self.plan.spec().experts.is_empty() { 0 } else { self.at(Region::SlotValues) },
            entry_slot: self.at(Region::EntrySlot),
            topk_weights: self.call.topk_weights,
            output: self.call.output,
            topk: shape.topk as u32,
            hidden: shape.hidden as u32,
            element: self.call.output_element as u32,
            accumulate: self.call.accumulate.into(),
        };
        Launch {
            kernel: "combine",
            grid: [self.call.tokens as u32, (shape.hidden as u32).div_ceil(combine::BLOCK_COLUMNS), 1],
            threads: combine::THREADS,
            shared_bytes: 0,
            params: Params::Combine(params),
        }
    }
}

/// The matrices of one expert in device memory, in the checkpoint's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedExpert {
    /// Code and scale bytes of gate; 0 where there is no gate.
    pub gate: (u64, u64),
    /// Code and scale bytes of up.
    pub up: (u64, u64),
    /// Code and scale bytes of down.
    pub down: (u64, u64),
}

/// Launches that pack local expert `expert` into the weights at this address.
#[must_use]
pub fn pack_expert(plan: &Plan, weights: u64, expert: usize, staged: &StagedExpert) -> [Launch; 2] {
    let shape = &plan.spec().shape;
    let (first_matrix, second_matrix) = (plan.matrix(false), plan.matrix(true));
    let launch = |params: PackParams, bytes: usize| Launch {
        kernel: "pack",
        grid: [(bytes / 4).div_ceil(pack::THREADS as usize) as u32, 1, 1],
        threads: pack::THREADS,
        shared_bytes: 0,
        params: Params::Pack(params),
    };
    let (first, second) =
        if plan.spec().activation.is_gated() { (staged.gate, staged.up) } else { (staged.up, (0, 0)) };
    let l1 = PackParams {
        codes: first.0,
        scales: first.1,
        up_codes: second.0,
        up_scales: second.1,
        output: weights + (first_matrix.offset + expert * first_matrix.bytes) as u64,
        rows: shape.intermediate as u32,
        k: shape.hidden as u32,
    };
    let l2 = PackParams {
        codes: staged.down.0,
        scales: staged.down.1,
        up_codes: 0,
        up_scales: 0,
        output: weights + (second_matrix.offset + expert * second_matrix.bytes) as u64,
        rows: shape.hidden as u32,
        k: shape.intermediate as u32,
    };
    [launch(l1, first_matrix.bytes), launch(l2, second_matrix.bytes)]
}
