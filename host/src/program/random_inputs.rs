//! Seeded inputs: normally distributed hidden states, and a router without preferences.

use std::f32::consts::TAU;

use half::bf16;
use nvfp4_moe::io::{HiddenRows, Inputs};
use nvfp4_moe::memory;
use nvfp4_moe::shape::MoeShape;
use rand::{Rng, SeedableRng, rngs::StdRng};
use rayon::prelude::*;

/// Hidden elements that share a seed.
const PIECE_ELEMS: usize = 1 << 16;

/// Inputs of one forward, owned.
#[derive(Debug)]
pub(super) struct RandomInputs {
    pub(super) hidden: Vec<bf16>,
    pub(super) topk_ids: Vec<i32>,
    pub(super) topk_weights: Vec<f32>,
    topk: usize,
}

impl RandomInputs {
    /// Checks that there is memory for so many tokens, without taking it.
    pub(super) fn check_room(shape: &MoeShape, tokens: usize) -> anyhow::Result<()> {
        Self::room(shape, tokens).map(drop)
    }

    fn room(shape: &MoeShape, tokens: usize) -> anyhow::Result<Self> {
        let &MoeShape { hidden, topk, .. } = shape;
        Ok(Self {
            hidden: memory::zeros("random hidden states", tokens.saturating_mul(hidden))?,
            topk_ids: memory::room("random expert ids", tokens.saturating_mul(topk))?,
            topk_weights: memory::room("random router weights", tokens.saturating_mul(topk))?,
            topk,
        })
    }

    /// `tokens` tokens, each with `topk` distinct experts of all of the layer's and weights that sum to 1. The same
    /// seed gives the same inputs.
    pub(super) fn new(shape: &MoeShape, tokens: usize, seed: u64) -> anyhow::Result<Self> {
        let &MoeShape { experts, topk, .. } = shape;
        if topk > experts {
            anyhow::bail!(
                "topk is {topk}, but must be at most the layer's {experts} experts for random inputs; give --inputs"
            );
        }
        let mut random = Self::room(shape, tokens)?;
        // A seed for each piece, so that threads share the work and their number changes nothing.
        random.hidden.par_chunks_mut(PIECE_ELEMS).enumerate().for_each(|(piece, elements)| {
            let mut rng = StdRng::seed_from_u64(seed.wrapping_add((piece as u64 + 1) << 32));
            elements.fill_with(|| bf16::from_f32(normal(&mut rng)));
        });
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..tokens {
            random.topk_ids.extend(rand::seq::index::sample(&mut rng, experts, topk).iter().map(|id| id as i32));
            let raw: Vec<f32> = (0..topk).map(|_| rng.random_range(0.1..1.0)).collect();
            let sum: f32 = raw.iter().sum();
            random.topk_weights.extend(raw.iter().map(|weight| weight / sum));
        }
        Ok(random)
    }

    pub(super) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            hidden: HiddenRows::Bf16(&self.hidden),
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
            topk: self.topk,
        }
    }
}

/// A normally distributed number, by Box and Muller.
fn normal(rng: &mut StdRng) -> f32 {
    let (radius, angle): (f32, f32) = (rng.random(), rng.random());
    (-2.0 * (1.0 - radius).ln()).sqrt() * (TAU * angle).cos()
}
