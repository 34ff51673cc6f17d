//! Random layers, batches and routing on the CPU engine against the f64 reference.

use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::weights::RandomInputScales;
use nvfp4_moe_tests::cases::{Batch, Lab, Layer, Size};
use proptest::prelude::*;

fn activation() -> impl Strategy<Value = Activation> {
    prop_oneof![
        Just(Activation::SwiGlu { limit: None }),
        (0.2f32..12.0).prop_map(|limit| Activation::SwiGlu { limit: Some(limit) }),
        (0.5f32..3.0, 0.0f32..2.0, 0.2f32..8.0).prop_map(|(alpha, beta, limit)| Activation::SwiGluOai {
            alpha,
            beta,
            limit
        }),
        Just(Activation::Relu2),
    ]
}

fn mode() -> impl Strategy<Value = (ScaleMode, RandomInputScales)> {
    prop_oneof![
        Just((ScaleMode::Static, RandomInputScales::SharedFirst)),
        Just((ScaleMode::Static, RandomInputScales::PerExpert)),
        Just((ScaleMode::PerToken, RandomInputScales::Missing)),
        Just((ScaleMode::PerTensor, RandomInputScales::Missing)),
    ]
}

/// Mostly ids of the layer, often repeated; some that nobody has.
fn id(experts: usize) -> impl Strategy<Value = i32> {
    prop_oneof![
        9 => 0..experts as i32,
        1 => prop_oneof![Just(-1), Just(i32::MIN), Just(i32::MAX), Just(experts as i32), any::<i32>()],
    ]
}

prop_compose! {
    fn layer()(
        sixteenths in (1usize..=20, 1usize..=12),
        experts in 1usize..=9,
        topk in 1usize..=5,
        activation in activation(),
        (scales, input_scales) in mode(),
        cut in (0usize..=9, 0usize..=9),
        whole in any::<bool>(),
    ) -> Layer {
        let sizes = [16 * sixteenths.0, 16 * sixteenths.1, experts, topk];
        let mut layer = Layer::with_input_scales(sizes, activation, scales, input_scales);
        if !whole {
            let first = cut.0.min(experts);
            layer.spec.experts = ExpertRange { first, count: cut.1.min(experts - first) };
        }
        layer
    }
}

prop_compose! {
    fn case()(layer in layer())(
        ids in prop::collection::vec(id(layer.spec.shape.experts), layer.spec.shape.topk * 24),
        tokens in 0usize..=24,
        seed in any::<u64>(),
        layer in Just(layer),
    ) -> (Layer, Batch) {
        let mut batch = Batch::new(&layer.spec.shape, tokens, seed);
        batch.ids.copy_from_slice(&ids[..tokens * layer.spec.shape.topk]);
        (layer, batch)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn random_layers_match_the_reference((layer, batch) in case()) {
        let runner = Runner::new(Target::Cpu).expect("the CPU");
        let lab = Lab { runner: &runner, size: Size::Full };
        if let Err(error) = lab.check(&layer, &batch, "random layer") {
            prop_assert!(false, "{error:#}");
        }
    }
}
