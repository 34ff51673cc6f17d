//! `cargo xtask roofline`: how long the FP4 kernels should take on GPUs that they have not run on. Predictions, from the
//! sizes of a layer, public rates of the GPUs and the instruction counts of `xtask/sass.json`; nothing is measured.

use std::path::Path;

use anyhow::{Context as _, Result};
use nvfp4_moe::kernel_family::KernelFamily;
use nvfp4_moe::shape::{MODELS, MoeShape};

use crate::process;
use crate::ptxas::recorded_loops;

/// A GPU's public rates; where they are from: docs/performance.md.
#[derive(Clone, Copy, Debug)]
struct Gpu {
    name: &'static str,
    multiprocessors: f64,
    ghz: f64,
    gb_per_s: f64,
    /// Dense FP4, what a loop of nothing else reaches.
    tflop_per_s: f64,
}

/// What such a loop was measured to reach of NVIDIA's figure, on an RTX 5090: 1474 of 1676 TFLOP/s.
const REACHED: f64 = 1474.2 / 1676.0;

const GPUS: [Gpu; 3] = [
    Gpu { name: "RTX 5090", multiprocessors: 170.0, ghz: 2.407, gb_per_s: 1792.0, tflop_per_s: 1676.0 * REACHED },
    Gpu { name: "RTX PRO 6000", multiprocessors: 188.0, ghz: 2.6, gb_per_s: 1792.0, tflop_per_s: 2000.0 * REACHED },
    Gpu { name: "DGX Spark", multiprocessors: 48.0, ghz: 2.5, gb_per_s: 273.0, tflop_per_s: 500.0 * REACHED },
];

const SHAPES: [&str; 4] = ["deepseek-v4-pro-ep8", "kimi-k2-ep8", "glm-4.7-ep8", "qwen3-30b"];
const TOKENS: [usize; 7] = [1, 16, 64, 256, 1024, 4096, 8192];

/// FLOPs of one `mma.m16n8k64`.
const MMA_FLOPS: f64 = 2.0 * 16.0 * 8.0 * 64.0;
/// Each multiprocessor issues one instruction a cycle in each of its quarters.
const SCHEDULERS: f64 = 4.0;
/// K of a stage of the ring.
const STAGE_K: usize = 128;
/// What the layer took beside its two GEMMs with 1 token of qwen3-30b on an H200, as a graph.
const OTHER_US: f64 = 10.0;

/// What the kernel's code says.
#[derive(Clone, Debug)]
struct Kernel {
    rows: usize,
    slots: usize,
    /// Instructions of the copying warp for a stage.
    copying: f64,
    /// Matrix instructions and all instructions of a multiplying warp for a stage; ascending.
    multiplying: Vec<(usize, usize)>,
}

impl Kernel {
    fn read(root: &Path) -> Result<Self> {
        let [variant] = KernelFamily::Fp4.variants() else {
            anyhow::bail!("the FP4 family has several variants of the grouped GEMM, and this formula is for one");
        };
        let loops = recorded_loops(root, "sm_120a", variant.kernel)?;
        let copying = loops.iter().find(|(matrix, _)| *matrix == 0).context("no loop copies")?.1 as f64;
        let mut multiplying: Vec<_> = loops.into_iter().filter(|(matrix, _)| *matrix > 0).collect();
        multiplying.sort_unstable();
        Ok(Self { rows: variant.rows, slots: variant.slots, copying, multiplying })
    }

    /// Cycles that a tile of so many slots keeps the tensor cores and the busiest scheduler, for one stage.
    fn stage_cycles(&self, slots: usize, mma_cycles: f64) -> (f64, f64) {
        // A loop multiplies 2 fragments of rows by `columns / 2` columns, twice; the largest is for a whole tile.
        let columns = |matrix: usize| self.slots * matrix / self.multiplying.last().map_or(1, |last| last.0);
        let fitting = self.multiplying.iter().find(|(matrix, _)| slots <= columns(*matrix));
        let &(matrix, instructions) = fitting.or(self.multiplying.last()).unwrap_or(&(0, 0));
        // A scheduler has one warp of each half of the columns, and one of the four has the copying warp too.
        let halves = if slots <= columns(matrix) / 2 { 1.0 } else { 2.0 };
        (halves * matrix as f64 * mma_cycles, self.copying + halves * instructions as f64)
    }
}

/// Of one number of tokens.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Of the first and the second GEMM.
    weight_bytes: [f64; 2],
    activation_bytes: [f64; 2],
    /// Of the kernels before, between and behind them.
    other_bytes: f64,
    flops: f64,
    /// Experts with slots, and slots of each, on average.
    experts: f64,
    slots: f64,
}

impl Load {
    fn new(shape: &MoeShape, tokens: usize) -> Self {
        let [hidden, intermediate, experts, topk, tokens] =
            [shape.hidden, shape.intermediate, shape.experts, shape.topk, tokens].map(|x| x as f64);
        let touched = experts * (1.0 - (1.0 - topk / experts).powf(tokens));
        let (entries, nvfp4) = (tokens * topk, 9.0 / 16.0);
        let matrix_bytes = touched * hidden * intermediate * nvfp4;
        let h_bytes = entries * intermediate * nvfp4;
        // Codes of the tokens once: what several slots gather is in the L2. y is f32.
        let (code_bytes, y_bytes) = (tokens * hidden * nvfp4, entries * hidden * 4.0);
        Self {
            weight_bytes: [2.0 * matrix_bytes, matrix_bytes],
            activation_bytes: [code_bytes + h_bytes, h_bytes + y_bytes],
            // bf16 to codes; y to bf16.
            other_bytes: tokens * hidden * 2.0 + code_bytes + y_bytes + tokens * hidden * 2.0,
            flops: 6.0 * hidden * intermediate * entries,
            experts: touched,
            slots: entries / touched,
        }
    }

    fn all_weight_bytes(&self) -> f64 {
        self.weight_bytes.iter().sum()
    }

    fn all_activation_bytes(&self) -> f64 {
        self.activation_bytes.iter().sum::<f64>() + self.other_bytes
    }
}

/// Microseconds of the whole layer by each limit alone, and with the larger one of each kernel.
#[derive(Clone, Copy, Debug)]
struct Prediction {
    memory: f64,
    tensor: f64,
    issue: f64,
    layer: f64,
}

impl Prediction {
    fn new(kernel: &Kernel, shape: &MoeShape, load: &Load, gpu: &Gpu) -> Self {
        let mma_cycles = MMA_FLOPS * SCHEDULERS * gpu.multiprocessors * gpu.ghz / (gpu.tflop_per_s * 1e3);
        let slots = load.slots.ceil() as usize;
        let token_tiles = slots.div_ceil(kernel.slots) as f64;
        let read_us = |bytes: f64| bytes / (gpu.gb_per_s * 1e3);
        let other = read_us(load.other_bytes);
        let mut all = Self { memory: other, tensor: 0.0, issue: 0.0, layer: other + OTHER_US };
        let sizes = [(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)];
        for (at, (rows, k)) in sizes.into_iter().enumerate() {
            let (row_tiles, stages) = (rows.div_ceil(kernel.rows) as f64, k.div_ceil(STAGE_K) as f64);
            // Whole rounds over the multiprocessors, of average tiles.
            let rounds = (load.experts * row_tiles * token_tiles / gpu.multiprocessors).ceil();
            let us = rounds * stages / token_tiles / (gpu.ghz * 1e3);
            let memory = read_us(load.weight_bytes[at] + load.activation_bytes[at]);
            let (mut tensor, mut issue) = (0.0, 0.0);
            for first in (0..slots).step_by(kernel.slots) {
                let (tensor_cycles, issue_cycles) = kernel.stage_cycles((slots - first).min(kernel.slots), mma_cycles);
                tensor += tensor_cycles * us;
                issue += issue_cycles * us;
            }
            all.memory += memory;
            all.tensor += tensor;
            all.issue += issue;
            all.layer += memory.max(tensor).max(issue);
        }
        all
    }

    fn bound(&self) -> &'static str {
        if self.memory >= self.tensor.max(self.issue) {
            "memory"
        } else if self.tensor >= self.issue {
            "tensor"
        } else {
            "issue"
        }
    }
}

/// Prints the tables.
pub(crate) fn run() -> Result<()> {
    let kernel = Kernel::read(&process::workspace_root())?;
    for name in SHAPES {
        let model = MODELS.iter().find(|model| model.name == name).with_context(|| format!("no model {name}"))?;
        let MoeShape { hidden, intermediate, experts, topk } = model.shape;
        println!("{name} ({hidden} x {intermediate}, {experts} experts, top-k {topk})\n");
        let [first, ..] = GPUS;
        let others = GPUS.map(|gpu| format!("{} us", gpu.name)).join(" | ");
        println!(
            "| tokens | weights MB | activations MB | GFLOP | {}: memory us | tensor us | issue us | {others} |",
            first.name
        );
        println!("|{}", "---|".repeat(7 + GPUS.len()));
        for tokens in TOKENS {
            let load = Load::new(&model.shape, tokens);
            let all = GPUS.map(|gpu| Prediction::new(&kernel, &model.shape, &load, &gpu));
            let [Prediction { memory, tensor, issue, .. }, ..] = all;
            println!(
                "| {tokens} | {:.1} | {:.1} | {:.2} | {memory:.0} | {tensor:.0} | {issue:.0} | {} |",
                load.all_weight_bytes() / 1e6,
                load.all_activation_bytes() / 1e6,
                load.flops / 1e9,
                all.map(|each| format!("{:.0} ({})", each.layer, each.bound())).join(" | ")
            );
        }
        println!();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel { rows: 128, slots: 128, copying: 400.0, multiplying: vec![(4, 50), (8, 60), (16, 80), (32, 100)] }
    }

    #[test]
    fn a_stage_takes_the_loop_that_fits_its_slots() {
        for (slots, cycles) in [
            (1, (64.0, 450.0)),
            (8, (64.0, 450.0)),
            (9, (128.0, 500.0)),
            (17, (256.0, 520.0)),
            (64, (512.0, 560.0)),
            (65, (1024.0, 600.0)),
            (128, (1024.0, 600.0)),
        ] {
            assert_eq!(kernel().stage_cycles(slots, 16.0), cycles, "{slots}");
        }
    }

    #[test]
    fn one_token_reads_its_experts_and_many_read_all() {
        let shape = MoeShape { hidden: 2048, intermediate: 768, experts: 128, topk: 8 };
        let expert = 3.0 * 2048.0 * 768.0 * 9.0 / 16.0;
        let one = Load::new(&shape, 1);
        assert!((one.all_weight_bytes() - 8.0 * expert).abs() < 1.0 && (one.slots - 1.0).abs() < 1e-9);
        let many = Load::new(&shape, 8192);
        assert!((many.all_weight_bytes() - 128.0 * expert).abs() < 1.0 && (many.slots - 512.0).abs() < 1e-6);
        assert!((many.flops - 6.0 * 2048.0 * 768.0 * 65536.0).abs() < 1.0);
    }

    /// Whole tiles on whole rounds take what the rate of the tensor cores says, and one tile more takes a round more.
    #[test]
    fn full_tiles_run_at_the_rate_of_the_tensor_cores() {
        let gpu = Gpu { name: "x", multiprocessors: 4.0, ghz: 1.0, gb_per_s: 1e9, tflop_per_s: 4.0 * 4.0 * 1.024 };
        let shape = MoeShape { hidden: 512, intermediate: 256, experts: 1, topk: 1 };
        let load = Load::new(&shape, 256);
        let prediction = Prediction::new(&kernel(), &shape, &load, &gpu);
        let floor = load.flops / (gpu.tflop_per_s * 1e6);
        assert!((prediction.tensor / floor - 1.0).abs() < 1e-9, "{prediction:?} {floor}");
        assert_eq!(prediction.bound(), "tensor");
        assert!((prediction.layer - prediction.tensor - OTHER_US) < 0.01 * prediction.layer, "{prediction:?}");
        let more = Prediction::new(&kernel(), &shape, &Load::new(&shape, 257), &gpu);
        assert!(more.tensor > prediction.tensor);
    }

    #[test]
    fn the_record_has_what_the_formula_needs() {
        let kernel = Kernel::read(&process::workspace_root()).unwrap();
        let matrix: Vec<_> = kernel.multiplying.iter().map(|(matrix, _)| *matrix).collect();
        assert_eq!(matrix, [4, 8, 16, 32], "a loop for 16, 32, 64 and 128 columns");
    }
}
