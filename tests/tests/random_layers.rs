//! Random layers, batches and routing: on the CPU engine against the f64 reference, and with each family of GPU kernels on the
//! emulator against the CPU engine and each other.

use nvfp4_moe::activation::Activation;
use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe::weights::RandomInputScales;
use nvfp4_moe_tests::cases::{Batch, Lab, Layer, Size};
use nvfp4_moe_tests::emulated::ARCHITECTURES;
use nvfp4_moe_tests::reference::{CLOSE, Expected};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Largest sizes.
#[derive(Clone, Copy, Debug)]
struct Most {
    hidden: usize,
    intermediate: usize,
    tokens: usize,
}

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
    fn layer(most: Most)(
        sixteenths in (1..=most.hidden / 16, 1..=most.intermediate / 16),
        experts in 1usize..=9,
        topk in 1usize..=5,
        up_scale in 0.3f32..3.0,
        activation in activation(),
        (scales, input_scales) in mode(),
        cut in (0usize..=9, 0usize..=9),
        whole in any::<bool>(),
    ) -> Layer {
        let sizes = [16 * sixteenths.0, 16 * sixteenths.1, experts, topk];
        let mut layer = Layer::with_input_scales(sizes, activation, scales, input_scales);
        for expert in &mut layer.experts {
            expert.up.weight_scale *= up_scale;
        }
        if !whole {
            let first = cut.0.min(experts);
            layer.spec.experts = ExpertRange { first, count: cut.1.min(experts - first) };
        }
        layer
    }
}

prop_compose! {
    fn case(most: Most)(layer in layer(most))(
        ids in prop::collection::vec(id(layer.spec.shape.experts), layer.spec.shape.topk * most.tokens),
        tokens in 0..=most.tokens,
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
    fn random_layers_match_the_reference((layer, batch) in case(Most { hidden: 320, intermediate: 192, tokens: 24 })) {
        let runner = Runner::new(Target::Cpu).expect("the CPU");
        let lab = Lab { runner: &runner, size: Size::Full };
        if let Err(error) = lab.check(&layer, &batch, "random layer") {
            prop_assert!(false, "{error:#}");
        }
    }
}

/// Tokens such that an expert may get few or more than a tile holds.
const EMULATED: Most = Most { hidden: 208, intermediate: 144, tokens: 150 };

#[test]
fn random_layers_are_alike_on_all_kernels() {
    let cpu = Runner::new(Target::Cpu).expect("the CPU");
    let emulators = ARCHITECTURES.map(|architecture| architecture.runner().expect("kernels for the emulator"));
    let check = |layer: &Layer, batch: &Batch| -> anyhow::Result<()> {
        let inputs = batch.inputs();
        let forward = |runner: &Runner| -> anyhow::Result<Vec<f32>> {
            let mut loaded = runner.load(&layer.spec, layer, inputs.topk_ids.len() / inputs.topk, &mut |_, _| {})?;
            loaded.set_poison(true);
            Ok(loaded.forward_f32(&inputs)?)
        };
        let reference = layer.expected(&inputs);
        let mut earlier = vec![("the CPU", forward(&cpu)?)];
        for (runner, architecture) in emulators.iter().zip(ARCHITECTURES) {
            let got = forward(runner)?;
            for (other, values) in &earlier {
                // Each of two f32 forwards is that close to the exact result.
                let values = values.iter().copied().map(f64::from).collect();
                let expected = Expected { values, ..reference.clone() };
                let what = format!("{} against {other}, {:?}", architecture.name, layer.spec);
                expected.check(&got, 2.0 * CLOSE, &what).map_err(anyhow::Error::msg)?;
            }
            earlier.push((architecture.name, got));
        }
        Ok(())
    };
    let config = ProptestConfig { cases: 120, max_shrink_iters: 50, ..ProptestConfig::default() };
    let result = TestRunner::new(config).run(&case(EMULATED), |(layer, batch)| {
        check(&layer, &batch).map_err(|error| TestCaseError::fail(format!("{error:#}")))
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
