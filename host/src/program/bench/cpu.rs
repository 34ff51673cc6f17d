//! The CPU engine, timed by the wall clock.

use std::hint::black_box;
use std::time::{Duration, Instant};

use nvfp4_moe::harness::{LoadedLayer, Runner, Target};
use nvfp4_moe::io::Inputs;
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::ExpertSource;
use rayon::prelude::*;

use super::{Bench, Timing, median};
use crate::program::progress;

/// Last-level caches are at most about this large; nobody says how large they are.
pub(super) const CACHE_BYTES: u64 = 64 << 20;

/// Words of the buffer that the read ceiling is measured on: 1 GiB.
const CEILING_WORDS: usize = 1 << 27;
const CEILING_RUNS: usize = 7;

/// Long enough for one number of tokens, once there are [`LEAST_SAMPLES`].
const ENOUGH: Duration = Duration::from_secs(5);
const LEAST_SAMPLES: usize = 3;

pub(super) struct CpuBench {
    layer: LoadedLayer,
}

impl CpuBench {
    pub(super) fn load(spec: &LayerSpec, source: &dyn ExpertSource, max_tokens: usize) -> anyhow::Result<Self> {
        let layer = Runner::new(Target::Cpu)?.load(spec, source, max_tokens, &mut progress::bar())?;
        Ok(Self { layer })
    }
}

impl Bench for CpuBench {
    fn read_ceiling(&self) -> anyhow::Result<f64> {
        let words = vec![1u64; CEILING_WORDS];
        // The fastest run: other processes only ever make it slower.
        let times = (0..CEILING_RUNS).map(|_| {
            let start = Instant::now();
            let sum: u64 = words.par_chunks(1 << 16).map(|chunk| chunk.iter().sum::<u64>()).sum();
            black_box(sum);
            start.elapsed().as_secs_f64()
        });
        let seconds = times.fold(f64::INFINITY, f64::min);
        Ok((CEILING_WORDS * size_of::<u64>()) as f64 / seconds / 1e9)
    }

    fn time(&mut self, batches: &[Inputs<'_>], iterations: usize) -> anyhow::Result<Timing> {
        // Also touches the workspace's pages for the first time.
        self.layer.forward_bf16(&batches[0])?;
        let start = Instant::now();
        let mut times = Vec::with_capacity(iterations);
        for batch in batches.iter().cycle().skip(1).take(iterations) {
            self.layer.forward_bf16(batch)?;
            times.push(self.layer.forward_ms());
            if start.elapsed() > ENOUGH && times.len() >= LEAST_SAMPLES {
                break;
            }
        }
        Ok(Timing { samples: times.len(), layer_ms: median(times), stages: Vec::new(), copies: 1 })
    }

    fn forward(&mut self, inputs: &Inputs<'_>) -> anyhow::Result<Vec<f32>> {
        Ok(self.layer.forward_f32(inputs)?)
    }
}
