//! The CPU engine, timed by the wall clock.

use std::hint::black_box;
use std::time::{Duration, Instant};

use nvfp4_moe::harness::{LoadedLayer, Runner, Target};
use nvfp4_moe::io::Inputs;
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::ExpertSource;
use rayon::prelude::*;

use super::{Bench, Timing};
use crate::program::progress;

/// Last-level caches are at most about this large; nobody says how large they are.
pub(super) const CACHE_BYTES: u64 = 64 << 20;

/// Words of the buffer that the ceilings are measured on: 1 GiB.
const CEILING_WORDS: usize = 1 << 27;
/// Words that a thread takes at a time.
const CHUNK_WORDS: usize = 1 << 16;
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

/// GB/s of reading and of copying memory.
pub(super) fn memory_rates() -> (f64, f64) {
    let mut words = vec![1u64; CEILING_WORDS];
    let bytes = size_of_val(words.as_slice()) as f64;
    let read = rate(bytes, || {
        let sum: u64 = words.par_chunks(CHUNK_WORDS).map(|chunk| chunk.iter().sum::<u64>()).sum();
        black_box(sum);
    });
    let (from, to) = words.split_at_mut(CEILING_WORDS / 2);
    let copy = rate(bytes, || {
        to.par_chunks_mut(CHUNK_WORDS)
            .zip(from.par_chunks(CHUNK_WORDS))
            .for_each(|(to, from)| to.copy_from_slice(from));
    });
    (read, copy)
}

/// GB/s of the fastest run: other processes only ever make it slower.
fn rate(bytes: f64, mut run: impl FnMut()) -> f64 {
    let times = (0..CEILING_RUNS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    bytes / times.fold(f64::INFINITY, f64::min) / 1e9
}

impl Bench for CpuBench {
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
        Ok(Timing { layer_ms: times, stages: Vec::new(), variant: None, copies: 1 })
    }

    fn forward(&mut self, inputs: &Inputs<'_>) -> anyhow::Result<Vec<f32>> {
        Ok(self.layer.forward_f32(inputs)?)
    }
}
