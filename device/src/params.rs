//! The argument of each kernel: one `#[repr(C)]` struct, passed by value, shared with the host.
//!
//! Pointers are device addresses (`u64`), so that the structs are plain bytes on both sides.

use bytemuck::{Pod, Zeroable};

use crate::kernels::activation::ActivationParams;

/// Number of tokens of a call: a bound known at launch, and optionally the number itself in device memory, so that a
/// captured graph can be replayed with fewer tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TokenCount {
    /// Address of a `u32` in device memory, or 0; larger values than `bound` count as `bound`.
    pub device: u64,
    /// Tokens for which the call was launched.
    pub bound: u32,
    /// Zero.
    pub padding: u32,
}

/// Scales of one local expert; the global ones are decode scales.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ExpertScales {
    /// Weight scale of gate (of up where there is no gate).
    pub gate: f32,
    /// Weight scale of up.
    pub up: f32,
    /// Weight scale of down.
    pub down: f32,
    /// Input scale of gate and up (the larger of the two); 1 where the checkpoint has none.
    pub l1_input: f32,
    /// Input scale of down; 1 where the checkpoint has none.
    pub l2_input: f32,
}

/// `route_count`, `route_scan` and `route_place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RouteParams {
    /// Number of tokens.
    pub tokens: TokenCount,
    /// `[T, topk]` i32, global expert ids.
    pub topk_ids: u64,
    /// `[chunks, experts]` u32: entries of a chunk for an expert; after `route_scan`, those of earlier chunks.
    pub chunk_counts: u64,
    /// `[experts + 1]` u32: first slot of each expert.
    pub expert_offset: u64,
    /// `[experts + 1]` u32: first token tile of each expert.
    pub tile_offset: u64,
    /// `[slots]` u32: token of a slot.
    pub slot_token: u64,
    /// `[T, topk]` u32: slot of an entry, [`NO_SLOT`] where its expert is not here.
    pub entry_slot: u64,
    /// `[2]` u32, set to 0: the magnitudes that `amax` gathers.
    pub amax_bits: u64,
    /// `[2]` u32, set to 0: see [`GroupedGemmParams::claims`].
    pub claims: u64,
    /// Experts a token.
    pub topk: u32,
    /// Global id of the first local expert.
    pub first_expert: u32,
    /// Local experts.
    pub experts: u32,
    /// Chunks of [`crate::kernels::route::CHUNK_ENTRIES`] entries that the launch covers.
    pub chunks: u32,
    /// Slots of a token tile.
    pub token_tile: u32,
    /// 1: no kernel behind this one reads the routing before it waits, so they may start at once.
    pub unread: u32,
}

/// Slot of an entry whose expert is not here.
pub const NO_SLOT: u32 = u32::MAX;

/// Element type of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Element {
    /// bfloat16.
    Bf16 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// IEEE single precision.
    F32 = 2,
}

/// What the rows of a matrix are, and so how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Rows {
    /// A row a token.
    Token = 0,
    /// A row a slot.
    Slot = 1,
}

/// Where the decode scale of a row comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RowScale {
    /// The checkpoint's input scale of the row's expert (of expert 0 where rows are tokens: all are equal then).
    Static = 0,
    /// The row's own largest magnitude.
    PerToken = 1,
    /// The magnitude that `amax` gathered.
    PerTensor = 2,
}

/// `quantize` and `quantize_tiles` (to f16 products of code and scale), `quantize_codes` (to codes and scales), and `amax`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QuantizeParams {
    /// Number of tokens.
    pub tokens: TokenCount,
    /// `[.., k]` rows of `element`.
    pub input: u64,
    /// `[slots]` u32: input row of each row, or 0: the row itself.
    pub gather: u64,
    /// `[experts + 1]` u32: first slot of each expert.
    pub expert_offset: u64,
    /// `[experts]` [`ExpertScales`].
    pub expert_scales: u64,
    /// u32: bits of the tensor's largest magnitude (`PerTensor`).
    pub amax_bits: u64,
    /// `[rows, stride]` f16 for `quantize`, tiles of [`crate::format::slot_groups`] for `quantize_tiles`,
    /// `[rows, stride/2]` code bytes for `quantize_codes`.
    pub output: u64,
    /// `[rows, stride/16]` scale bytes for `quantize_codes`, else 0.
    pub block_scales: u64,
    /// `[rows]` f32: decode scale of each row; of each slot for `quantize_tiles`.
    pub row_scales: u64,
    /// Columns, a multiple of 16.
    pub k: u32,
    /// Columns of the output, `k` padded to whole weight tiles; the padding becomes zeros, or codes and scales of zeros.
    pub stride: u32,
    /// [`Element`].
    pub element: u32,
    /// [`Rows`].
    pub rows: u32,
    /// [`RowScale`].
    pub row_scale: u32,
    /// Local experts.
    pub experts: u32,
    /// 0: input scale of gate and up; 1: of down.
    pub second: u32,
    /// Experts a token.
    pub topk: u32,
    /// `[T, topk]` u32: slot of an entry or [`NO_SLOT`], for `quantize_tiles`.
    pub entry_slot: u64,
    /// `[T, topk]` i32, global expert ids, for `quantize_tiles` where rows are tokens.
    pub topk_ids: u64,
    /// Global id of the first local expert.
    pub first_expert: u32,
    /// 1: as [`RouteParams::unread`], for `quantize_tiles`.
    pub unread: u32,
}

/// What a grouped GEMM does with its accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Epilogue {
    /// Gate and up interleaved: alphas, clamp, activation.
    Gated = 0,
    /// Up alone: alpha, activation.
    Ungated = 1,
    /// Down: alpha.
    Down = 2,
}

/// `grouped_gemm`: one GEMM an expert, of its slots' activations with its weights.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct GroupedGemmParams {
    /// Packed matrix of local expert 0.
    pub weights: u64,
    /// Bytes from one expert's matrix to the next.
    pub expert_bytes: u64,
    /// Activations: `[.., stride]` f16, or tiles of [`crate::format::slot_groups`], or `[.., stride/2]` bytes of codes where
    /// the tensor cores are FP4.
    pub activations: u64,
    /// `[.., stride/16]` scale bytes of the codes, else 0.
    pub block_scales: u64,
    /// `[slots]` u32: activation row of each slot, or 0: the slot itself.
    pub gather: u64,
    /// f32 decode scale of each activation row, or 0: each expert's input scale.
    pub row_scales: u64,
    /// `[experts]` [`ExpertScales`].
    pub expert_scales: u64,
    /// `[experts + 1]` u32: first slot of each expert.
    pub expert_offset: u64,
    /// `[experts + 1]` u32: first token tile of each expert.
    pub tile_offset: u64,
    /// `[slots, columns]` f32, or quantized as the second GEMM's activations.
    pub output: u64,
    /// `[slots, stride/16]` scale bytes of the output's codes, else 0.
    pub output_scales: u64,
    /// Columns of the output: intermediate or hidden.
    pub columns: u32,
    /// Tiles of weight rows of an expert.
    pub row_tiles: u32,
    /// Weight tiles along K.
    pub k_tiles: u32,
    /// Local experts.
    pub experts: u32,
    /// [`Epilogue`].
    pub epilogue: u32,
    /// Columns of the activations that mean something.
    pub k: u32,
    /// Activation of the first GEMM.
    pub activation: ActivationParams,
    /// 1: the output is quantized under the experts' second input scale.
    pub quantized: u32,
    /// Experts a token.
    pub topk: u32,
    /// Global id of the first local expert.
    pub first_expert: u32,
    /// Zero.
    pub padding: u32,
    /// Number of tokens.
    pub tokens: TokenCount,
    /// `[T, topk]` i32, global expert ids, where the kernel is to find first slots and token tiles of the experts itself, or 0:
    /// the routing is there when it starts.
    pub topk_ids: u64,
    /// u32: how many blocks have claimed the last part of their work; 0 when the kernel starts.
    pub claims: u64,
}

/// `combine`: the weighted sum of a token's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CombineParams {
    /// Number of tokens.
    pub tokens: TokenCount,
    /// `[slots, hidden]` f32, or 0: no expert is here.
    pub slots: u64,
    /// `[T, topk]` u32: slot of an entry or [`NO_SLOT`].
    pub entry_slot: u64,
    /// `[T, topk]` f32.
    pub topk_weights: u64,
    /// `[T, hidden]` bf16 or f32.
    pub output: u64,
    /// Experts a token.
    pub topk: u32,
    /// Columns.
    pub hidden: u32,
    /// [`Element`] of the output, bf16 or f32.
    pub element: u32,
    /// 1: add to what the output holds, and leave tokens without local experts alone.
    pub accumulate: u32,
}

/// `pack`: one matrix of one expert from the checkpoint's order into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PackParams {
    /// `[rows, k/2]` code bytes; of gate where two matrices are interleaved.
    pub codes: u64,
    /// `[rows, k/16]` scale bytes; of gate where two matrices are interleaved.
    pub scales: u64,
    /// Code bytes of up, or 0: one matrix.
    pub up_codes: u64,
    /// Scale bytes of up, or 0.
    pub up_scales: u64,
    /// The packed matrix.
    pub output: u64,
    /// Rows of one matrix of the checkpoint.
    pub rows: u32,
    /// Columns, a multiple of 16.
    pub k: u32,
}

/// `read_all`: reads a buffer and keeps nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReadParams {
    /// The buffer, 16-byte aligned.
    pub data: u64,
    /// Its bytes, a multiple of 16.
    pub bytes: u64,
    /// u32: written if a thread's words happen to give [`crate::kernels::measure::UNLIKELY`].
    pub sums: u64,
}
