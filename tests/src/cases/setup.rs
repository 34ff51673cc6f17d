//! Layers, batches and comparisons that the checks share.

use anyhow::{Context, Result, ensure};
use half::{bf16, f16};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::{Origin, RawExpert, RawMatrix};
use nvfp4_moe::harness::{GpuLayer, LoadedLayer, Runner};
use nvfp4_moe::io::{HiddenRows, Inputs, ScaleMode};
use nvfp4_moe::shape::{ExpertRange, MoeShape, ShapeError};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales, SourceError};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::index};

use crate::reference::{self, CLOSE, Expected};

/// How much to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Without the big sizes: for runs under a sanitizer.
    Small,
    /// Everything; a CPU still gets fewer tokens where a check is about many.
    Full,
}

/// A device to run checks on.
#[derive(Debug)]
pub struct Lab<'a> {
    /// The device.
    pub runner: &'a Runner,
    /// How much to run.
    pub size: Size,
}

pub(super) const MODES: [ScaleMode; 3] = [ScaleMode::Static, ScaleMode::PerToken, ScaleMode::PerTensor];
/// The modes in which a token does not depend on the others.
pub(super) const ROW_MODES: [ScaleMode; 2] = [ScaleMode::Static, ScaleMode::PerToken];
pub(super) const SWIGLU: Activation = Activation::SwiGlu { limit: None };
pub(super) const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 7.0 };

/// One matrix of an expert, owned, so that a check can change it.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Elements along K.
    pub cols: usize,
    /// Two codes a byte.
    pub codes: Vec<u8>,
    /// Block scales.
    pub scales: Vec<u8>,
    /// Decode scale of the weights.
    pub weight_scale: f32,
    /// Decode scale of the input.
    pub input_scale: Option<f32>,
}

impl Matrix {
    fn of(raw: &RawMatrix<'_>) -> Self {
        Self {
            rows: raw.rows,
            cols: raw.cols,
            codes: raw.codes.to_vec(),
            scales: raw.scales.to_vec(),
            weight_scale: raw.weight_scale,
            input_scale: raw.input_scale,
        }
    }

    /// The form that engines load.
    #[must_use]
    pub fn raw(&self) -> RawMatrix<'_> {
        RawMatrix {
            rows: self.rows,
            cols: self.cols,
            codes: &self.codes,
            scales: &self.scales,
            weight_scale: self.weight_scale,
            input_scale: self.input_scale,
            origin: Origin::default(),
        }
    }
}

/// One expert, owned.
#[derive(Clone, Debug)]
pub struct Expert {
    /// `[intermediate, hidden]`, where there is a gate.
    pub gate: Option<Matrix>,
    /// `[intermediate, hidden]`.
    pub up: Matrix,
    /// `[hidden, intermediate]`.
    pub down: Matrix,
}

impl Expert {
    pub(super) fn raw(&self) -> RawExpert<'_> {
        RawExpert { gate: self.gate.as_ref().map(Matrix::raw), up: self.up.raw(), down: self.down.raw() }
    }

    /// The gate matrix of an expert that has one.
    pub(super) fn gate(&mut self) -> &mut Matrix {
        self.gate.as_mut().expect("a gated layer")
    }

    /// All matrices, for changes to each.
    pub(super) fn matrices(&mut self) -> impl Iterator<Item = &mut Matrix> {
        self.gate.iter_mut().chain([&mut self.up, &mut self.down])
    }
}

/// A layer and all its experts, by global id.
#[derive(Clone, Debug)]
pub struct Layer {
    /// What it computes.
    pub spec: LayerSpec,
    /// Every expert of the model's layer, here or not.
    pub experts: Vec<Expert>,
}

impl ExpertSource for Layer {
    fn expert(&self, global_index: usize) -> Result<RawExpert<'_>, SourceError> {
        let beyond = || ShapeError { axis: "expert", got: global_index, must: "be one of the layer" };
        Ok(self.experts.get(global_index).ok_or_else(beyond)?.raw())
    }
}

impl Layer {
    /// Random experts whose input scales all differ, all of them on one rank.
    #[must_use]
    pub fn new(sizes: [usize; 4], activation: Activation, scales: ScaleMode) -> Self {
        Self::with_input_scales(sizes, activation, scales, RandomInputScales::PerExpert)
    }

    /// [`Self::new`] with a choice of input scales. `sizes` are hidden, intermediate, experts and topk.
    ///
    /// # Panics
    /// When a size is not allowed.
    #[must_use]
    pub fn with_input_scales(
        sizes: [usize; 4],
        activation: Activation,
        scales: ScaleMode,
        input_scales: RandomInputScales,
    ) -> Self {
        let [hidden, intermediate, experts, topk] = sizes;
        let shape = MoeShape::new(hidden, intermediate, experts, topk).expect("sizes of a check");
        let source = RandomExperts::new(shape, activation.is_gated(), input_scales, (hidden * 7 + experts) as u64);
        let experts: Vec<_> = (0..experts)
            .map(|id| {
                let raw = source.expert(id).expect("a random expert");
                Expert { gate: raw.gate.as_ref().map(Matrix::of), up: Matrix::of(&raw.up), down: Matrix::of(&raw.down) }
            })
            .collect();
        let range = ExpertRange::all(experts.len());
        let shared_l1_scale = input_scales == RandomInputScales::SharedFirst;
        Self { spec: LayerSpec { shape, experts: range, activation, scales, shared_l1_scale }, experts }
    }

    pub(super) fn on_rank(mut self, range: ExpertRange) -> Self {
        self.spec.experts = range;
        self
    }

    pub(super) fn change(mut self, mut change: impl FnMut(&mut Expert)) -> Self {
        self.experts.iter_mut().for_each(&mut change);
        self
    }

    /// What the f64 reference gives.
    #[must_use]
    pub fn expected(&self, inputs: &Inputs<'_>) -> Expected {
        let spec = &self.spec;
        let experts: Vec<_> = self.experts[spec.experts.ids()].iter().map(Expert::raw).collect();
        reference::expected(&experts, spec.experts, spec.activation, spec.scales, inputs)
    }
}

/// Hidden states, owned.
#[derive(Clone, Debug)]
pub enum Hidden {
    /// In bf16.
    Bf16(Vec<bf16>),
    /// In f16.
    F16(Vec<f16>),
}

/// Inputs of a forward, owned.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Hidden states.
    pub hidden: Hidden,
    /// Expert ids.
    pub ids: Vec<i32>,
    /// Router weights.
    pub weights: Vec<f32>,
    /// Experts a token.
    pub topk: usize,
    /// Columns.
    pub width: usize,
}

impl Batch {
    /// Random hidden states and routing. One expert of the middle never gets a token, where there are several; some
    /// entries are -1; ids of a token differ as long as there are enough experts.
    #[must_use]
    pub fn new(shape: &MoeShape, tokens: usize, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let sum = |rng: &mut StdRng| (0..4).map(|_| rng.random_range(-0.9f32..0.9)).sum::<f32>();
        let hidden = (0..tokens * shape.hidden).map(|_| bf16::from_f32(sum(&mut rng))).collect();
        let empty = shape.experts / 2;
        let candidates: Vec<_> = (0..shape.experts).filter(|&id| shape.experts == 1 || id != empty).collect();
        let mut ids = Vec::with_capacity(tokens * shape.topk);
        for _ in 0..tokens {
            if shape.topk <= candidates.len() {
                ids.extend(index::sample(&mut rng, candidates.len(), shape.topk).iter().map(|i| candidates[i] as i32));
            } else {
                ids.extend((0..shape.topk).map(|_| candidates[rng.random_range(0..candidates.len())] as i32));
            }
        }
        for id in &mut ids {
            if rng.random_bool(0.06) {
                *id = -1;
            }
        }
        let weights = (0..ids.len()).map(|_| rng.random_range(0.05..1.0)).collect();
        Self { hidden: Hidden::Bf16(hidden), ids, weights, topk: shape.topk, width: shape.hidden }
    }

    pub(super) fn tokens(&self) -> usize {
        self.ids.len() / self.topk
    }

    /// Every hidden element, with its place, through f32.
    pub(super) fn map(mut self, mut change: impl FnMut(usize, f32) -> f32) -> Self {
        match &mut self.hidden {
            Hidden::Bf16(rows) => {
                rows.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(change(i, x.to_f32())));
            }
            Hidden::F16(rows) => {
                rows.iter_mut().enumerate().for_each(|(i, x)| *x = f16::from_f32(change(i, x.to_f32())));
            }
        }
        self
    }

    /// The same numbers, as far as f16 has them, in f16.
    pub(super) fn in_f16(mut self) -> Self {
        if let Hidden::Bf16(rows) = &self.hidden {
            self.hidden = Hidden::F16(rows.iter().map(|x| f16::from_f32(x.to_f32())).collect());
        }
        self
    }

    pub(super) fn with_ids(mut self, ids: impl IntoIterator<Item = i32>) -> Self {
        let ids: Vec<_> = ids.into_iter().collect();
        assert_eq!(ids.len(), self.ids.len());
        self.ids = ids;
        self
    }

    /// The borrowed form that a layer takes.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            hidden: match &self.hidden {
                Hidden::Bf16(rows) => HiddenRows::Bf16(rows),
                Hidden::F16(rows) => HiddenRows::F16(rows),
            },
            topk_ids: &self.ids,
            topk_weights: &self.weights,
            topk: self.topk,
        }
    }

    /// Inputs of one token.
    pub(super) fn token(&self, token: usize) -> Inputs<'_> {
        self.inputs().tokens(token..token + 1, self.width)
    }
}

impl Lab<'_> {
    pub(super) fn is_gpu(&self) -> bool {
        self.runner.engine().is_some()
    }

    /// Whether to run what takes long: never under a sanitizer.
    pub(super) fn is_full(&self) -> bool {
        self.size == Size::Full
    }

    /// The one number on a GPU that runs everything, else the other.
    pub(super) fn scaled(&self, gpu: usize, otherwise: usize) -> usize {
        if self.is_full() && self.is_gpu() { gpu } else { otherwise }
    }

    /// Loads a layer whose calls find NaN in the output and in the workspace.
    pub(super) fn load(&self, layer: &Layer, max_tokens: usize) -> Result<LoadedLayer> {
        let mut loaded = self.runner.load(&layer.spec, layer, max_tokens, &mut |_, _| {})?;
        loaded.set_poison(true);
        Ok(loaded)
    }

    /// Loads and runs once.
    pub(super) fn forward(&self, layer: &Layer, batch: &Batch) -> Result<Vec<f32>> {
        Ok(self.load(layer, batch.tokens())?.forward_f32(&batch.inputs())?)
    }

    /// Runs a layer and compares it with the reference.
    ///
    /// # Errors
    /// What failed or is off.
    pub fn check(&self, layer: &Layer, batch: &Batch, what: &str) -> Result<()> {
        let got = self.forward(layer, batch).with_context(|| what.to_owned())?;
        matches(&layer.expected(&batch.inputs()), &got, what)
    }
}

/// Checks a result against the reference.
pub(super) fn matches(expected: &Expected, got: &[f32], what: &str) -> Result<()> {
    expected.check(got, CLOSE, what).map_err(anyhow::Error::msg)
}

/// Checks that a comparison with something wrong fails: that the check can see it.
pub(super) fn differs(expected: &Expected, got: &[f32], what: &str) -> Result<()> {
    ensure!(expected.check(got, CLOSE, what).is_err(), "{what}: the comparison does not see it");
    Ok(())
}

/// Checks equality bit for bit, and names the first place that differs.
pub(super) fn same_bits(got: &[f32], expected: &[f32], what: &str) -> Result<()> {
    ensure!(got.len() == expected.len(), "{what}: {} elements, but {} expected", got.len(), expected.len());
    let place = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    if let Some(place) = place {
        anyhow::bail!("{what}: element {place} is {:e}, but {:e} was expected", got[place], expected[place]);
    }
    Ok(())
}

/// Checks that all are +0: what a token without local experts gets.
pub(super) fn exact_zeros(got: &[f32], what: &str) -> Result<()> {
    let place = got.iter().position(|y| y.to_bits() != 0);
    ensure!(place.is_none(), "{what}: element {place:?} is not zero");
    Ok(())
}

/// The GPU's part of a layer, for checks that are listed for GPUs only.
pub(super) fn gpu(loaded: &mut LoadedLayer) -> Result<&mut GpuLayer> {
    loaded.gpu().context("a GPU's layer")
}
