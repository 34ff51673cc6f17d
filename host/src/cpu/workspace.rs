//! Everything that a forward needs beside the weights, sized up front.

use nvfp4_moe_device::format::BLOCK;
use thiserror::Error;

use super::kernel::ActBlock;
use super::{ForwardError, MoeLayer};
use crate::io::ScaleMode;
use crate::memory::{self, OutOfMemory};
use crate::routing::{NOT_LOCAL, Routing};
use crate::shape::MoeShape;
use crate::spec::LayerSpec;

/// Tokens that are worked on at a time: larger batches run in several passes, so that the workspace stays small.
/// Results do not depend on it: only per-tensor scales look at other tokens, and then there is one pass.
const CHUNK_TOKENS: usize = 2048;

/// Why there is no workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WorkspaceError {
    /// More tokens than 32 bits count slots.
    #[error(
        "a workspace for {max_tokens} tokens was asked for, but {limit} tokens are the most that 32-bit indices allow for \
         this layer; split the batch"
    )]
    TooManyTokens {
        /// Tokens asked for.
        max_tokens: usize,
        /// Most tokens.
        limit: usize,
    },
    /// Not enough memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
}

/// Lengths of all buffers, in elements: what is allocated and what [`Workspace::bytes`] counts. Where a length is
/// beyond all memory it is the largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    picks: usize,
    expert_offsets: usize,
    token_blocks: usize,
    slot_blocks: usize,
    h: usize,
    y: usize,
    token_scales: usize,
}

impl Sizes {
    fn new(spec: &LayerSpec, tokens: usize) -> Self {
        let MoeShape { hidden, intermediate, topk, .. } = spec.shape;
        let picks = tokens.saturating_mul(topk);
        let slots = if spec.experts.is_empty() { 0 } else { picks };
        Self {
            picks,
            expert_offsets: spec.experts.count + 1,
            token_blocks: if spec.quantizes_tokens() { tokens.saturating_mul(hidden / BLOCK) } else { 0 },
            slot_blocks: slots.saturating_mul(hidden.max(intermediate) / BLOCK),
            h: slots.saturating_mul(intermediate),
            y: slots.saturating_mul(hidden),
            token_scales: tokens,
        }
    }

    /// The one list of parts: it both counts and names.
    const fn parts(&self) -> [(&'static str, usize); 5] {
        [
            // Routing has three numbers a pick; besides it each pick has a panel's expert and its first slot.
            ("routing", bytes_of::<u32>(self.picks.saturating_mul(5), self.expert_offsets * 2)),
            ("scales", bytes_of::<f32>(self.token_scales, self.picks)),
            ("activations", bytes_of::<ActBlock>(self.token_blocks, self.slot_blocks)),
            ("h", bytes_of::<f32>(self.h, 0)),
            ("y", bytes_of::<f32>(self.y, 0)),
        ]
    }

    const fn bytes(&self) -> usize {
        let [routing, scales, activations, h, y] = self.parts();
        routing.1.saturating_add(scales.1).saturating_add(activations.1).saturating_add(h.1).saturating_add(y.1)
    }
}

/// Bytes of two buffers of these lengths.
const fn bytes_of<T>(first: usize, second: usize) -> usize {
    first.saturating_add(second).saturating_mul(size_of::<T>())
}

/// A panel of slots: which expert's, and which of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panel {
    pub(super) expert: u32,
    pub(super) index: u32,
}

/// Memory of a forward, planned for one layer (or several alike) and a largest number of tokens.
///
/// One forward at a time uses it; layers of equal sizes and scale mode can share one.
pub struct Workspace {
    shape: MoeShape,
    scale_mode: ScaleMode,
    max_tokens: usize,
    chunk_tokens: usize,
    sizes: Sizes,
    pub(super) routing: Routing,
    /// Experts that have slots, ascending.
    pub(super) active: Vec<u32>,
    /// Their panels, in the order of the slots.
    pub(super) panels: Vec<Panel>,
    /// Global scale of each token's hidden state, `[tokens]`.
    pub(super) token_scales: Vec<f32>,
    /// Global scale of each slot's input of the second product, `[slots]`.
    pub(super) slot_scales: Vec<f32>,
    /// Quantized hidden states, `[tokens, hidden / 16]`; empty where they differ between experts.
    pub(super) token_blocks: Vec<ActBlock>,
    /// Quantized inputs of a product, in panels: `[slots, hidden / 16]`, then `[slots, intermediate / 16]`.
    pub(super) slot_blocks: Vec<ActBlock>,
    /// Activated result of the first product, in row tiles, `[slots, intermediate]`.
    pub(super) h: Vec<f32>,
    /// Result of the second product, in row tiles, `[slots, hidden]`.
    pub(super) y: Vec<f32>,
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace")
            .field("shape", &self.shape)
            .field("scale_mode", &self.scale_mode)
            .field("max_tokens", &self.max_tokens)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Workspace {
    /// A workspace for batches of up to `max_tokens` tokens on `layer`, and on others of the same kind.
    ///
    /// # Errors
    /// [`WorkspaceError`]: not enough memory, or more tokens than 32 bits count slots.
    pub fn new(layer: &MoeLayer, max_tokens: usize) -> Result<Self, WorkspaceError> {
        Self::check_tokens(&layer.spec, max_tokens)?;
        let chunk_tokens = Self::chunk(&layer.spec, max_tokens);
        let sizes = Sizes::new(&layer.spec, chunk_tokens);
        Ok(Self {
            shape: layer.spec.shape,
            scale_mode: layer.spec.scales,
            max_tokens,
            chunk_tokens,
            sizes,
            routing: Routing::with_capacity(sizes.picks, layer.spec.experts.count)?,
            active: memory::room("the list of experts", sizes.expert_offsets)?,
            panels: memory::room("the workspace's panels", sizes.picks)?,
            token_scales: memory::zeros("the tokens' scales", sizes.token_scales)?,
            slot_scales: memory::zeros("the slots' scales", sizes.picks)?,
            token_blocks: memory::zeros("the workspace's quantized tokens", sizes.token_blocks)?,
            slot_blocks: memory::zeros("the workspace's quantized slots", sizes.slot_blocks)?,
            h: memory::zeros("the first product's results", sizes.h)?,
            y: memory::zeros("the second product's results", sizes.y)?,
        })
    }

    /// Checks that batches of up to `max_tokens` tokens are possible for a layer like this, if there is memory for them.
    ///
    /// # Errors
    /// [`WorkspaceError::TooManyTokens`].
    pub fn check_tokens(spec: &LayerSpec, max_tokens: usize) -> Result<(), WorkspaceError> {
        // What is worked on at a time would be fewer, but no batch has as many, and a GPU's plan has such a limit too.
        let limit = NOT_LOCAL as usize / spec.shape.topk - 1;
        if max_tokens > limit { Err(WorkspaceError::TooManyTokens { max_tokens, limit }) } else { Ok(()) }
    }

    /// Bytes that [`Self::new`] would allocate for a layer like this, loaded or not.
    #[must_use]
    pub fn planned_bytes(spec: &LayerSpec, max_tokens: usize) -> usize {
        Sizes::new(spec, Self::chunk(spec, max_tokens)).bytes()
    }

    /// [`Self::planned_bytes`] part by part, with a name for each.
    #[must_use]
    pub fn planned_parts(spec: &LayerSpec, max_tokens: usize) -> [(&'static str, usize); 5] {
        Sizes::new(spec, Self::chunk(spec, max_tokens)).parts()
    }

    /// Bytes of this one.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.sizes.bytes()
    }

    /// Tokens that it was planned for.
    #[must_use]
    pub const fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    pub(super) const fn chunk_tokens(&self) -> usize {
        self.chunk_tokens
    }

    fn chunk(spec: &LayerSpec, max_tokens: usize) -> usize {
        match spec.scales {
            ScaleMode::PerTensor => max_tokens,
            ScaleMode::Static | ScaleMode::PerToken => max_tokens.min(CHUNK_TOKENS),
        }
    }

    /// Whether a forward of `tokens` tokens on `layer` fits.
    pub(super) fn check(&self, layer: &MoeLayer, tokens: usize) -> Result<(), ForwardError> {
        if tokens > self.max_tokens {
            return Err(ForwardError::TooManyTokens { got: tokens, max: self.max_tokens });
        }
        let fits = self.scale_mode == layer.spec.scales && self.sizes == Sizes::new(&layer.spec, self.chunk_tokens);
        if fits && self.shape == layer.spec.shape { Ok(()) } else { Err(ForwardError::OtherLayer) }
    }
}
