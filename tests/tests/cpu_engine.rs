//! The CPU engine against the f64 reference and against itself.

use half::{bf16, f16};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::cpu::{ForwardError, Isa, MoeLayer, Workspace, WorkspaceError};
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::load::LoadError;
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales};
use nvfp4_moe_tests::reference;
use rand::{Rng, SeedableRng, rngs::StdRng};

const SWIGLU: Activation = Activation::SwiGlu { limit: None };
const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 1.0 };

/// A layer, where its experts came from, and inputs for it.
struct Case {
    source: RandomExperts,
    layer: MoeLayer,
    hidden: Vec<bf16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Case {
    fn new(shape: MoeShape, experts: ExpertRange, activation: Activation, scales: ScaleMode, tokens: usize) -> Self {
        Self::with_input_scales(shape, experts, activation, scales, tokens, RandomInputScales::PerExpert)
    }

    fn with_input_scales(
        shape: MoeShape,
        experts: ExpertRange,
        activation: Activation,
        scales: ScaleMode,
        tokens: usize,
        input_scales: RandomInputScales,
    ) -> Self {
        let source = RandomExperts::new(shape, activation.is_gated(), input_scales, 11);
        let shared_l1_scale = input_scales == RandomInputScales::SharedFirst;
        let spec = LayerSpec { shape, experts, activation, scales, shared_l1_scale };
        let mut last = (0, experts.count);
        let layer = MoeLayer::load(&spec, &source, &mut |done, total| last = (done, total)).unwrap();
        assert_eq!(last, (experts.count, experts.count));
        let mut rng = StdRng::seed_from_u64(shape.hidden as u64);
        let normal = |rng: &mut StdRng| (0..4).map(|_| rng.random_range(-0.9..0.9)).sum::<f32>();
        let hidden = (0..tokens * shape.hidden).map(|_| bf16::from_f32(normal(&mut rng))).collect();
        // Some ids are nobody's, and some rows name an expert twice.
        let topk_ids = (0..tokens * shape.topk)
            .map(|_| if rng.random_bool(0.1) { -1 } else { rng.random_range(0..shape.experts as i32) })
            .collect();
        let topk_weights = (0..tokens * shape.topk).map(|_| rng.random_range(0.05..1.0)).collect();
        Self { source, layer, hidden, topk_ids, topk_weights }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            hidden: HiddenRows::Bf16(&self.hidden),
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
            topk: self.layer.spec().shape.topk,
        }
    }

    fn forward(&self) -> Vec<f32> {
        run(&self.layer, &self.inputs())
    }

    fn expected(&self) -> Vec<f64> {
        let spec = self.layer.spec();
        let experts: Vec<_> = spec.experts.ids().map(|e| self.source.expert(e).unwrap()).collect();
        reference::forward(&experts, spec.experts, spec.activation, spec.scales, &self.inputs())
    }

    fn check(&self, what: &str) {
        let hidden = self.layer.spec().shape.hidden;
        reference::assert_rows_close(&self.forward(), &self.expected(), hidden, 0.1, what);
    }
}

/// A forward into a buffer that was full of NaN.
fn run(layer: &MoeLayer, inputs: &Inputs<'_>) -> Vec<f32> {
    let mut workspace = Workspace::new(layer, inputs.topk_ids.len() / inputs.topk).unwrap();
    assert_eq!(workspace.bytes(), Workspace::planned_bytes(layer.spec(), workspace.max_tokens()));
    let mut out = vec![f32::NAN; inputs.hidden.len()];
    layer.forward(&mut workspace, inputs, OutputRows::F32(&mut out), false).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn shape(hidden: usize, intermediate: usize, experts: usize, topk: usize) -> MoeShape {
    MoeShape::new(hidden, intermediate, experts, topk).unwrap()
}

#[test]
fn modes_and_activations_match_the_reference() {
    for activation in [SWIGLU, Activation::SwiGlu { limit: Some(0.7) }, OAI, Activation::Relu2] {
        for scales in [ScaleMode::Static, ScaleMode::PerToken, ScaleMode::PerTensor] {
            let case = Case::new(shape(320, 176, 5, 3), ExpertRange::all(5), activation, scales, 40);
            case.check(&format!("{activation}, {scales:?}"));
        }
    }
}

#[test]
fn shapes_match_the_reference() {
    for (hidden, intermediate, experts, topk, tokens) in
        [(16, 16, 1, 1, 3), (80, 96, 5, 2, 17), (96, 80, 130, 8, 33), (48, 352, 384, 1, 50), (2688, 160, 2, 2, 2)]
    {
        for scales in [ScaleMode::Static, ScaleMode::PerToken] {
            let shape = shape(hidden, intermediate, experts, topk);
            Case::new(shape, ExpertRange::all(experts), SWIGLU, scales, tokens)
                .check(&format!("{shape:?}, {scales:?}"));
        }
    }
}

#[test]
fn shared_input_scales_match_the_reference() {
    let shared = RandomInputScales::SharedFirst;
    let all = ExpertRange::all(5);
    Case::with_input_scales(shape(320, 176, 5, 3), all, SWIGLU, ScaleMode::Static, 30, shared).check("shared");
}

#[test]
fn f16_inputs_and_bf16_outputs() {
    let case = Case::new(shape(96, 80, 4, 2), ExpertRange::all(4), SWIGLU, ScaleMode::PerToken, 9);
    // bf16 values of this size are f16 values too.
    let hidden: Vec<f16> = case.hidden.iter().map(|x| f16::from_f32(x.to_f32())).collect();
    let exact: Vec<bf16> = hidden.iter().map(|x| bf16::from_f32(x.to_f32())).collect();
    let from_f16 = run(&case.layer, &Inputs { hidden: HiddenRows::F16(&hidden), ..case.inputs() });
    let from_bf16 = run(&case.layer, &Inputs { hidden: HiddenRows::Bf16(&exact), ..case.inputs() });
    let errors = reference::row_errors(&from_f16, &from_bf16.iter().map(|x| *x as f64).collect::<Vec<_>>(), 96);
    assert!(errors.iter().all(|error| *error < 0.05), "{errors:?}");
    let mut rounded = vec![bf16::NAN; exact.len()];
    let mut workspace = Workspace::new(&case.layer, 9).unwrap();
    case.layer.forward(&mut workspace, &case.inputs(), OutputRows::Bf16(&mut rounded), false).unwrap();
    assert_eq!(rounded, case.forward().iter().map(|y| bf16::from_f32(*y)).collect::<Vec<_>>());
}

#[test]
fn a_row_alone_has_the_bits_that_it_has_in_a_batch() {
    for scales in [ScaleMode::Static, ScaleMode::PerToken] {
        // Few experts, so that panels are full; more tokens than one pass takes.
        let case = Case::new(shape(80, 48, 3, 2), ExpertRange::all(3), SWIGLU, scales, 2100);
        let batch = case.forward();
        for token in [0, 1, 15, 16, 17, 700, 2047, 2048, 2099] {
            let alone = run(&case.layer, &case.inputs().tokens(token..token + 1, 80));
            assert_eq!(bits(&alone), bits(&batch[token * 80..][..80]), "{scales:?}, token {token}");
        }
    }
}

#[test]
fn instruction_sets_and_thread_counts_agree() {
    let mut case = Case::new(shape(320, 176, 5, 3), ExpertRange::all(5), OAI, ScaleMode::PerToken, 70);
    let expected = bits(&case.forward());
    for isa in Isa::available() {
        case.layer.set_isa(isa);
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(bits(&pool.install(|| case.forward())), expected, "{} on {threads} threads", isa.name());
        }
    }
}

#[test]
fn poison_stays_in_its_row() {
    for scales in [ScaleMode::Static, ScaleMode::PerToken, ScaleMode::PerTensor] {
        let mut case = Case::new(shape(96, 80, 3, 2), ExpertRange::all(3), SWIGLU, scales, 12);
        case.topk_ids.fill(1);
        // In its finite elements the poisoned batch has the same largest magnitude.
        case.hidden[0] = bf16::from_f32(8.0);
        case.hidden[4 * 96 + 7] = bf16::ZERO;
        case.hidden[9 * 96 + 95] = bf16::ZERO;
        let clean = case.forward();
        case.hidden[4 * 96 + 7] = bf16::NAN;
        case.hidden[9 * 96 + 95] = bf16::NEG_INFINITY;
        let out = case.forward();
        for token in 0..12 {
            let row = &out[token * 96..][..96];
            if token == 4 || token == 9 {
                assert!(row.iter().all(|y| y.is_nan()), "{scales:?}, token {token}");
            } else if scales == ScaleMode::PerTensor {
                // The other rows' h may have had the largest magnitude of the batch.
                assert!(row.iter().all(|y| y.is_finite()), "token {token}");
            } else {
                assert_eq!(bits(row), bits(&clean[token * 96..][..96]), "{scales:?}, token {token}");
            }
        }
    }
}

#[test]
fn accumulating_adds_once_and_leaves_tokens_without_experts_alone() {
    let mut case = Case::new(shape(96, 80, 6, 2), ExpertRange { first: 2, count: 3 }, SWIGLU, ScaleMode::Static, 5);
    case.topk_ids.copy_from_slice(&[2, 4, 1, 5, 3, 9, -1, i32::MAX, 4, i32::MIN]);
    let fresh = case.forward();
    let before: Vec<bf16> = (0..5 * 96).map(|i| bf16::from_f32(i as f32 * 0.01 - 2.0)).collect();
    let mut out = before.clone();
    let mut workspace = Workspace::new(&case.layer, 8).unwrap();
    case.layer.forward(&mut workspace, &case.inputs(), OutputRows::Bf16(&mut out), true).unwrap();
    for (i, (out, before)) in out.iter().zip(&before).enumerate() {
        let nobody = [1, 3].contains(&(i / 96));
        assert_eq!(nobody, fresh[i / 96 * 96..][..96].iter().all(|y| y.to_bits() == 0));
        let sum = bf16::from_f32(before.to_f32() + fresh[i]);
        assert_eq!(*out, if nobody { *before } else { sum }, "element {i}");
    }
}

#[test]
fn ranks_add_up() {
    let shape = shape(96, 80, 5, 3);
    let case = |range| Case::new(shape, range, SWIGLU, ScaleMode::PerToken, 20);
    let whole = case(ExpertRange::all(5)).forward();
    let mut sum = vec![0f64; whole.len()];
    for rank in 0..7 {
        let part = case(ExpertRange::of_rank(5, 7, rank).unwrap());
        part.check(&format!("rank {rank}"));
        for (sum, y) in sum.iter_mut().zip(part.forward()) {
            *sum += y as f64;
        }
    }
    let errors = reference::row_errors(&whole, &sum, 96);
    assert!(errors.iter().all(|error| *error < 1e-6), "{errors:?}");
}

#[test]
fn nothing_to_do() {
    let case = Case::new(shape(32, 16, 4, 2), ExpertRange { first: 2, count: 0 }, SWIGLU, ScaleMode::Static, 3);
    assert_eq!(bits(&case.forward()), [0; 96]);
    let none = Case::new(shape(32, 16, 4, 2), ExpertRange::all(4), SWIGLU, ScaleMode::PerTensor, 0);
    assert!(none.forward().is_empty());
    let mut all = Case::new(shape(32, 16, 4, 2), ExpertRange::all(4), SWIGLU, ScaleMode::PerTensor, 3);
    all.topk_ids.fill(-1);
    assert_eq!(bits(&all.forward()), [0; 96]);
}

#[test]
fn wrong_calls_are_named_and_write_nothing() {
    let case = Case::new(shape(32, 16, 4, 2), ExpertRange::all(4), SWIGLU, ScaleMode::Static, 3);
    let mut out = vec![7f32; 96];
    let mut workspace = Workspace::new(&case.layer, 2).unwrap();
    let error = case.layer.forward(&mut workspace, &case.inputs(), OutputRows::F32(&mut out), false).unwrap_err();
    assert_eq!(error, ForwardError::TooManyTokens { got: 3, max: 2 });
    let mut workspace = Workspace::new(&case.layer, 3).unwrap();
    let short = Inputs { topk_weights: &case.topk_weights[1..], ..case.inputs() };
    let error = case.layer.forward(&mut workspace, &short, OutputRows::F32(&mut out), false).unwrap_err();
    assert_eq!(error.to_string(), "topk_weights has 5 elements, but must have 6; give buffers of the layer's sizes");
    let error = case.layer.forward(&mut workspace, &case.inputs(), OutputRows::F32(&mut out[1..]), false).unwrap_err();
    assert_eq!(error.to_string(), "output has 95 elements, but must have 96; give buffers of the layer's sizes");
    let other = Case::new(shape(32, 16, 4, 2), ExpertRange::all(4), SWIGLU, ScaleMode::PerToken, 3);
    let error = other.layer.forward(&mut workspace, &other.inputs(), OutputRows::F32(&mut out), false).unwrap_err();
    assert_eq!(error, ForwardError::OtherLayer);
    assert!(out.iter().all(|y| *y == 7.0));
}

#[test]
fn a_workspace_of_another_layer_is_refused() {
    let new = |sizes: [usize; 4], experts, mode| {
        let [hidden, intermediate, all, topk] = sizes;
        Case::new(shape(hidden, intermediate, all, topk), ExpertRange { first: 0, count: experts }, SWIGLU, mode, 3)
    };
    let case = new([64, 48, 8, 2], 8, ScaleMode::PerToken);
    for other in [
        new([32, 48, 8, 2], 8, ScaleMode::PerToken),
        new([64, 32, 8, 2], 8, ScaleMode::PerToken),
        new([48, 64, 8, 2], 8, ScaleMode::PerToken),
        new([64, 48, 9, 2], 8, ScaleMode::PerToken),
        new([64, 48, 8, 1], 8, ScaleMode::PerToken),
        new([64, 48, 8, 2], 4, ScaleMode::PerToken),
        new([64, 48, 8, 2], 0, ScaleMode::PerToken),
        new([64, 48, 8, 2], 8, ScaleMode::PerTensor),
        new([64, 48, 8, 2], 8, ScaleMode::Static),
    ] {
        for max_tokens in [3, 64] {
            let mut workspace = Workspace::new(&other.layer, max_tokens).unwrap();
            let mut out = vec![7f32; 3 * 64];
            let rows = OutputRows::F32(&mut out);
            let error = case.layer.forward(&mut workspace, &case.inputs(), rows, false).unwrap_err();
            assert_eq!(error, ForwardError::OtherLayer, "{:?}", other.layer);
            assert!(out.iter().all(|y| *y == 7.0));
        }
    }
}

#[test]
fn a_workspace_beyond_memory_or_32_bits_is_an_error() {
    let layer = |mode| Case::new(shape(64, 48, 8, 2), ExpertRange::all(8), SWIGLU, mode, 1).layer;
    let [per_tensor, per_token] = [ScaleMode::PerTensor, ScaleMode::PerToken].map(layer);
    for max_tokens in [usize::MAX, 1 << 40, 1 << 31] {
        for layer in [&per_tensor, &per_token] {
            let error = Workspace::new(layer, max_tokens).unwrap_err();
            assert!(matches!(error, WorkspaceError::TooManyTokens { limit: 2_147_483_646, .. }), "{error}");
        }
    }
    assert_eq!(Workspace::planned_bytes(per_tensor.spec(), usize::MAX), usize::MAX, "not wrapped");
    // The other modes work on a few tokens at a time, however many there are.
    assert!(Workspace::new(&per_token, 2_147_483_646).is_ok());
}

#[test]
fn weights_beyond_memory_are_an_error() {
    let size = 1 << 20;
    let spec = LayerSpec {
        shape: shape(size, size, 1 << 8, 1),
        experts: ExpertRange::all(1 << 8),
        activation: SWIGLU,
        scales: ScaleMode::PerToken,
        shared_l1_scale: true,
    };
    let never = RandomExperts::new(shape(16, 16, 1, 1), true, RandomInputScales::Missing, 0);
    let error = MoeLayer::load(&spec, &never, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, LoadError::Memory(_)), "{error}");
    assert!(error.to_string().starts_with("packed weights would take"), "{error}");
    let beyond = ExpertRange { first: usize::MAX, count: 2 };
    let error = MoeLayer::load(&LayerSpec { experts: beyond, ..spec }, &never, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, LoadError::Shape(error) if error.axis == "experts"));
}

#[test]
fn wrong_experts_are_named() {
    let shape = shape(32, 16, 4, 2);
    let load = |activation, experts, source: &RandomExperts| {
        let spec = LayerSpec { shape, experts, activation, scales: ScaleMode::Static, shared_l1_scale: false };
        MoeLayer::load(&spec, source, &mut |_, _| {}).unwrap_err()
    };
    let all = ExpertRange::all(4);
    let gated = RandomExperts::new(shape, true, RandomInputScales::PerExpert, 0);
    assert!(matches!(load(Activation::Relu2, all, &gated), LoadError::Gate { expert: 0, found: true }));
    let bare = RandomExperts::new(shape, true, RandomInputScales::Missing, 0);
    assert!(matches!(load(SWIGLU, all, &bare), LoadError::NoInputScale { expert: 0, .. }));
    let beyond = ExpertRange { first: 2, count: 3 };
    assert!(matches!(load(SWIGLU, beyond, &gated), LoadError::Shape(error) if error.axis == "experts"));
    let smaller = RandomExperts::new(MoeShape { hidden: 48, ..shape }, true, RandomInputScales::PerExpert, 0);
    assert!(matches!(load(SWIGLU, all, &smaller), LoadError::MatrixSize { got: 48, must: 32, .. }));
}
