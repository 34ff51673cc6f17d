//! Where the experts' raw tensors come from.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::kernels::activation::{ActivationParams, KIND_RELU2, KIND_SWIGLU, KIND_SWIGLU_OAI};
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};

use crate::activation::Activation;
use crate::checkpoint::{LayerView, Origin, RawExpert, RawMatrix};
use crate::memory::{self, OutOfMemory};
use crate::shape::{MoeShape, ShapeError};

/// Why a source could not give an expert.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Anything that can give the raw tensors of one layer's experts, one at a time.
pub trait ExpertSource {
    /// The expert with this id, counted over all ranks.
    ///
    /// # Errors
    /// When there is no such expert or its tensors cannot be read.
    fn expert(&self, global_index: usize) -> Result<RawExpert<'_>, SourceError>;

    /// Says that this expert's tensors will be read soon, so that a source that reads a file can begin. Nothing depends on
    /// it, and there need not be such an expert.
    fn will_need(&self, global_index: usize) {
        let _ = global_index;
    }
}

/// Which `input_scale`s random experts carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RandomInputScales {
    /// None, as a checkpoint that was not calibrated.
    Missing,
    /// All experts the same for the first product (the usual checkpoint), each its own for the second.
    SharedFirst,
    /// Each expert its own, also different ones for gate and up.
    PerExpert,
}

/// Random experts whose outputs are of the order of 1 for normally distributed inputs: for tests and measurements.
///
/// Codes are uniform, block scales lie between 0.5 and 2, gate and up have different weight scales. All experts are cut
/// from one pool of random bytes at their own places, so memory is that of two matrices, whatever the number of experts.
#[derive(Debug, Clone)]
pub struct RandomExperts {
    shape: MoeShape,
    gated: bool,
    input_scales: RandomInputScales,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

/// Bytes of the pool behind a matrix's own length: how far apart the experts' places can be.
const POOL_SPREAD_BYTES: usize = 1 << 16;

/// Bytes of codes and of block scales in the pool.
const fn pool_bytes(shape: &MoeShape) -> (usize, usize) {
    let elems = shape.hidden * shape.intermediate;
    (elems / 2 + POOL_SPREAD_BYTES, elems / BLOCK + POOL_SPREAD_BYTES)
}

impl RandomExperts {
    /// Experts of a layer of this shape; the same seed gives the same experts.
    ///
    /// # Panics
    /// Where [`Self::try_new`] fails.
    #[must_use]
    pub fn new(shape: MoeShape, gated: bool, input_scales: RandomInputScales, seed: u64) -> Self {
        Self::try_new(shape, gated, input_scales, seed).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Bytes of memory that the experts of this shape take; the largest number where that is beyond all memory.
    #[must_use]
    pub const fn bytes(shape: &MoeShape) -> usize {
        let (codes, scales) = pool_bytes(shape);
        codes.saturating_add(scales)
    }

    /// As [`Self::new`], for shapes that may be larger than memory.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new(
        shape: MoeShape,
        gated: bool,
        input_scales: RandomInputScales,
        seed: u64,
    ) -> Result<Self, OutOfMemory> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (codes_bytes, scales_bytes) = pool_bytes(&shape);
        let mut codes = memory::zeros("random codes", codes_bytes)?;
        let mut scales = memory::zeros("random block scales", scales_bytes)?;
        rng.fill_bytes(&mut codes);
        scales.fill_with(|| rng.random_range(0x30..=0x40));
        Ok(Self { shape, gated, input_scales, codes, scales })
    }

    /// Matrix `which` (0 gate, 1 up, 2 down) of an expert.
    fn matrix(&self, expert: usize, which: usize, rows: usize, cols: usize) -> RawMatrix<'_> {
        let mut rng = StdRng::seed_from_u64((expert * 3 + which) as u64);
        let code_start = rng.random_range(0..POOL_SPREAD_BYTES);
        let scale_start = rng.random_range(0..POOL_SPREAD_BYTES);
        // Root mean squares: of the codes 2.9, of the scales about 1.2.
        let unit = 1.0 / (3.5 * (cols as f32).sqrt());
        // A first product's input is of the order of 1 and reaches 4; a second one's is about half of that.
        let range = rng.random_range(2.0..4.0) / 2688.0;
        let input_scale = match self.input_scales {
            RandomInputScales::Missing => None,
            RandomInputScales::SharedFirst if which < 2 => Some(4.0 / 2688.0),
            RandomInputScales::SharedFirst | RandomInputScales::PerExpert => Some(range),
        };
        RawMatrix {
            rows,
            cols,
            codes: &self.codes[code_start..][..rows * cols / 2],
            scales: &self.scales[scale_start..][..rows * cols / BLOCK],
            weight_scale: unit * rng.random_range(0.8..1.25),
            input_scale,
            origin: Origin::default(),
        }
    }
}

impl ExpertSource for RandomExperts {
    fn expert(&self, global_index: usize) -> Result<RawExpert<'_>, SourceError> {
        if global_index >= self.shape.experts {
            let must = "be below the number of experts of the layer; choose a lower one";
            return Err(ShapeError { axis: "expert", got: global_index, must }.into());
        }
        let MoeShape { hidden, intermediate, .. } = self.shape;
        Ok(RawExpert {
            gate: self.gated.then(|| self.matrix(global_index, 0, intermediate, hidden)),
            up: self.matrix(global_index, 1, intermediate, hidden),
            down: self.matrix(global_index, 2, hidden, intermediate),
        })
    }
}

impl From<Activation> for ActivationParams {
    /// What the kernels are given; a missing limit is infinity.
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::SwiGlu { limit } => {
                Self { kind: KIND_SWIGLU, limit: limit.unwrap_or(f32::INFINITY), alpha: 1.0, beta: 0.0 }
            }
            Activation::SwiGluOai { alpha, beta, limit } => Self { kind: KIND_SWIGLU_OAI, limit, alpha, beta },
            Activation::Relu2 => Self { kind: KIND_RELU2, limit: f32::INFINITY, alpha: 1.0, beta: 0.0 },
        }
    }
}

impl ExpertSource for LayerView<'_> {
    fn expert(&self, global_index: usize) -> Result<RawExpert<'_>, SourceError> {
        Ok(LayerView::expert(self, global_index)?)
    }

    fn will_need(&self, global_index: usize) {
        LayerView::will_need(self, global_index);
    }
}
