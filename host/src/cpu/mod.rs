//! The engine for processors without a GPU, and the one that the GPU's results are compared with.
//!
//! It computes with the same numbers as the GPU kernels: exact integer dot products of E2M1 codes for each block of 16,
//! summed in f32 along K in ascending order. Results are the same bits for every number of threads, every instruction
//! set, and (but for [`ScaleMode::PerTensor`](crate::io::ScaleMode)) every batch around a token.
//!
//! ```
//! use nvfp4_moe::activation::Activation;
//! use nvfp4_moe::cpu::{MoeLayer, Workspace};
//! use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
//! use nvfp4_moe::shape::{ExpertRange, MoeShape};
//! use nvfp4_moe::spec::LayerSpec;
//! use nvfp4_moe::weights::{RandomExperts, RandomInputScales};
//!
//! let shape = MoeShape::new(64, 32, 4, 2)?;
//! let experts = RandomExperts::new(shape, true, RandomInputScales::Missing, 0);
//! let spec = LayerSpec {
//!     shape,
//!     experts: ExpertRange::all(shape.experts),
//!     activation: Activation::SwiGlu { limit: None },
//!     scales: ScaleMode::PerToken,
//!     shared_l1_scale: false,
//! };
//! let layer = MoeLayer::load(&spec, &experts, &mut |_done, _total| {})?;
//! let mut workspace = Workspace::new(&layer, 16)?;
//! let hidden = vec![half::bf16::ONE; 64];
//! let inputs = Inputs { hidden: HiddenRows::Bf16(&hidden), topk_ids: &[3, 1], topk_weights: &[0.75, 0.25], topk: 2 };
//! let mut out = vec![half::bf16::ZERO; 64];
//! layer.forward(&mut workspace, &inputs, OutputRows::Bf16(&mut out), false)?;
//! assert!(out.iter().any(|y| y.to_f32() != 0.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod combine;
mod kernel;
mod load;
mod split;
mod stages;
mod workspace;

use nvfp4_moe_device::format::packed::LayerLayout;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::kernels::activation::ActivationParams;
use nvfp4_moe_device::params::ExpertScales;
use thiserror::Error;

use crate::io::{Inputs, LengthError, OutputRows};
use crate::shape::MoeShape;
use crate::spec::LayerSpec;

pub use kernel::Isa;
pub use workspace::{Workspace, WorkspaceError};

/// Why a forward did not start. Nothing has been written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ForwardError {
    /// A buffer's length does not fit.
    #[error(transparent)]
    Length(#[from] LengthError),
    /// More tokens than the workspace was planned for.
    #[error("the batch has {got} tokens, but the workspace was planned for at most {max}; plan a larger one")]
    TooManyTokens {
        /// Tokens of the batch.
        got: usize,
        /// Tokens that the workspace was planned for.
        max: usize,
    },
    /// The workspace was planned for another layer.
    #[error("the workspace was planned for a layer with other sizes or another scale mode; plan one for this layer")]
    OtherLayer,
}

/// A cache line of packed weights: gives the buffer its alignment.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// One layer's experts, packed for the CPU.
pub struct MoeLayer {
    spec: LayerSpec,
    params: ActivationParams,
    layout: LayerLayout<CpuTile>,
    experts: Vec<ExpertScales>,
    weights: Vec<Line>,
    isa: Isa,
}

impl std::fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeLayer").field("spec", &self.spec).field("isa", &self.isa).finish_non_exhaustive()
    }
}

impl MoeLayer {
    /// What the layer computes.
    #[must_use]
    pub const fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// Bytes of the packed weights.
    #[must_use]
    pub const fn weight_bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Bytes that the packed weights of a layer like this take, loaded or not. Its shape must be a valid one.
    #[must_use]
    pub const fn planned_weight_bytes(spec: &LayerSpec) -> usize {
        let MoeShape { hidden, intermediate, .. } = spec.shape;
        LayerLayout::<CpuTile>::new(hidden, intermediate, spec.experts.count, spec.activation.is_gated()).bytes()
    }

    /// The instruction set in use; the fastest one unless [`Self::set_isa`] chose another.
    #[must_use]
    pub const fn isa(&self) -> Isa {
        self.isa
    }

    /// Uses another instruction set; the results stay the same, bit for bit.
    pub const fn set_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }

    /// Runs the layer on `inputs`, on the threads of the current rayon pool.
    ///
    /// `out` is overwritten; a token without experts here gets zeros. With `accumulate` the result is added to what
    /// `out` holds, with one rounding, and a token without experts here keeps what it had. Allocates nothing. Input
    /// that is not finite gives NaN in that token's row only.
    ///
    /// # Errors
    /// [`ForwardError`] when a length does not fit, there are more tokens than the workspace was planned for, or it was
    /// planned for another layer; then nothing is written.
    pub fn forward(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_>,
        mut out: OutputRows<'_>,
        accumulate: bool,
    ) -> Result<(), ForwardError> {
        let MoeShape { hidden, topk, .. } = self.spec.shape;
        let tokens = inputs.checked_tokens(hidden, topk)?;
        LengthError::check("output", out.len(), tokens * hidden)?;
        workspace.check(self, tokens)?;
        let mut first = 0;
        while first < tokens {
            let end = tokens.min(first + workspace.chunk_tokens());
            let rows = out.slice(first * hidden..end * hidden);
            self.forward_chunk(workspace, &inputs.tokens(first..end, hidden), rows, accumulate);
            first = end;
        }
        Ok(())
    }

    fn packed(&self) -> &[u8] {
        bytemuck::cast_slice(&self.weights)
    }
}
