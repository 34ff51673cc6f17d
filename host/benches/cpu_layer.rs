//! The CPU engine on a layer of the size of Qwen3-30B-A3B, beside a multi-threaded f32 matrix product of as many
//! floating-point operations. "elem" is one operation: Gelem/s reads as GFLOP/s.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::cpu::{Isa, MoeLayer, Workspace};
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{RandomExperts, RandomInputScales};
use rand::{Rng, SeedableRng, rngs::StdRng};

const SHAPE: MoeShape = MoeShape { hidden: 2048, intermediate: 768, experts: 128, topk: 8 };

/// Operations of one pick: three matrices, a multiplication and an addition for each of their elements.
const FLOPS_PER_PICK: usize = 3 * 2 * SHAPE.hidden * SHAPE.intermediate;

fn layer() -> MoeLayer {
    let experts = RandomExperts::new(SHAPE, true, RandomInputScales::SharedFirst, 1);
    let spec = LayerSpec {
        shape: SHAPE,
        experts: ExpertRange::all(SHAPE.experts),
        activation: Activation::SwiGlu { limit: None },
        scales: ScaleMode::Static,
        shared_l1_scale: true,
    };
    MoeLayer::load(&spec, &experts, &mut |_, _| {}).expect("random experts fit")
}

/// Distinct experts for each token, uniformly drawn.
fn pick_experts(rng: &mut StdRng, tokens: usize) -> Vec<i32> {
    let draw = |_| rand::seq::index::sample(rng, SHAPE.experts, SHAPE.topk).into_iter().map(|id| id as i32);
    (0..tokens).flat_map(draw).collect()
}

fn moe_layer(c: &mut Criterion) {
    let mut layer = layer();
    let mut group = c.benchmark_group("moe_layer");
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(4));
    for tokens in [1, 16, 128, 4096] {
        let mut rng = StdRng::seed_from_u64(2);
        let hidden: Vec<bf16> =
            (0..tokens * SHAPE.hidden).map(|_| bf16::from_f32(rng.random_range(-2.0..2.0))).collect();
        let topk_ids = pick_experts(&mut rng, tokens);
        let topk_weights = vec![1.0 / SHAPE.topk as f32; topk_ids.len()];
        let mut workspace = Workspace::new(&layer, tokens).expect("memory");
        let mut out = vec![bf16::ZERO; hidden.len()];
        let inputs = Inputs {
            hidden: HiddenRows::Bf16(&hidden),
            topk_ids: &topk_ids,
            topk_weights: &topk_weights,
            topk: SHAPE.topk,
        };
        group.throughput(Throughput::Elements((topk_ids.len() * FLOPS_PER_PICK) as u64));
        for isa in Isa::available() {
            if isa == Isa::PORTABLE && tokens != 16 {
                continue;
            }
            layer.set_isa(isa);
            group.bench_function(BenchmarkId::new(isa.name(), tokens), |b| {
                b.iter(|| layer.forward(&mut workspace, &inputs, OutputRows::Bf16(&mut out), false).expect("fits"));
            });
        }
        black_box(&out);
    }
    group.finish();
}

/// `[m, k] * [k, n]` with as many operations as the layer on the same number of tokens.
fn f32_matmul(c: &mut Criterion) {
    let mut group = c.benchmark_group("f32_matmul");
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(4));
    for tokens in [16, 128] {
        let (m, k, n) = (tokens, SHAPE.hidden, SHAPE.topk * 3 * SHAPE.intermediate);
        let mut rng = StdRng::seed_from_u64(3);
        let a: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
        let b: Vec<f32> = (0..k * n).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut out = vec![0f32; m * n];
        group.throughput(Throughput::Elements((2 * m * n * k) as u64));
        group.bench_function(BenchmarkId::new("gemm", tokens), |bencher| {
            bencher.iter(|| {
                // SAFETY: the three row-major matrices have the sizes and strides given here.
                unsafe {
                    let (out, a, b) = (out.as_mut_ptr(), a.as_ptr(), b.as_ptr());
                    let (row_n, row_k) = (n as isize, k as isize);
                    let parallelism = gemm::Parallelism::Rayon(0);
                    gemm::gemm(
                        m,
                        n,
                        k,
                        out,
                        1,
                        row_n,
                        false,
                        a,
                        1,
                        row_k,
                        b,
                        1,
                        row_n,
                        0.0,
                        1.0,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            });
        });
        black_box(&out);
    }
    group.finish();
}

criterion_group!(benches, moe_layer, f32_matmul);
criterion_main!(benches);
