//! Thread-instructions a second over shipped kernels without matrix instructions: pack, route, quantize and combine.
//!
//! `cargo bench -p nvfp4-moe-emulator` prints one line a kernel; the rate counts each instruction once for each thread.

use std::time::Instant;

use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::device_limits::DeviceLimits;
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::plan::{Plan, Region};
use nvfp4_moe::schedule::{CallAddresses, Launch, Params, Schedule, Stage, StagedExpert, pack_expert};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales};
use nvfp4_moe_device::params::Element;
use nvfp4_moe_emulator::{Config, Emulator, Module};

const PTX: &str = include_str!("../../../host/ptx/sm_80.ptx");
const TOKENS: usize = 512;
const ROUNDS: usize = 8;

/// What ran under one label.
#[derive(Default)]
struct Meter {
    instructions: u64,
    seconds: f64,
}

impl Meter {
    fn run(&mut self, emulator: &mut Emulator, module: &Module, launch: &Launch) {
        let params = match &launch.params {
            Params::Route(params) => bytemuck::bytes_of(params),
            Params::Quantize(params) => bytemuck::bytes_of(params),
            Params::GroupedGemm(params) => bytemuck::bytes_of(params),
            Params::Combine(params) => bytemuck::bytes_of(params),
            Params::Pack(params) => bytemuck::bytes_of(params),
            Params::Read(params) => bytemuck::bytes_of(params),
        };
        let (start, block) = (Instant::now(), [launch.threads, 1, 1]);
        let report = emulator.launch(module, launch.kernel, launch.grid, block, launch.shared_bytes, params);
        self.seconds += start.elapsed().as_secs_f64();
        self.instructions += report.unwrap_or_else(|error| panic!("{error}")).thread_instructions;
    }

    fn print(&self, name: &str) {
        let rate = self.instructions as f64 / self.seconds / 1e6;
        println!(
            "{name:<10} {:>12} thread-instructions {:>8.3} s {rate:>8.1} million/s",
            self.instructions, self.seconds
        );
    }
}

fn upload(emulator: &mut Emulator, bytes: &[u8]) -> u64 {
    let address = emulator.memory_mut().alloc(bytes.len());
    emulator.memory_mut().write(address, bytes).unwrap_or_else(|error| panic!("{error}"));
    address
}

fn main() {
    let shape = MoeShape::new(1024, 512, 16, 4).unwrap_or_else(|error| panic!("{error}"));
    let experts = ExpertRange { first: 0, count: 16 };
    let activation = Activation::SwiGlu { limit: None };
    let spec = LayerSpec { shape, experts, activation, scales: ScaleMode::PerToken, shared_l1_scale: false };
    let plan = Plan::new(spec, &DeviceLimits::H200, TOKENS).unwrap_or_else(|error| panic!("{error}"));
    let source = RandomExperts::new(shape, true, RandomInputScales::Missing, 3);
    let module = Module::parse(PTX).unwrap_or_else(|error| panic!("{error}"));
    let mut emulator = Emulator::new(Config::default());

    let hidden: Vec<bf16> = (0..TOKENS * shape.hidden).map(|i| bf16::from_f32((i as f32 * 0.7).sin())).collect();
    let ids: Vec<i32> = (0..TOKENS * shape.topk).map(|i| (i * 7 % 16) as i32).collect();
    let call = CallAddresses {
        hidden: upload(&mut emulator, bytemuck::cast_slice(&hidden)),
        hidden_element: Element::Bf16,
        topk_ids: upload(&mut emulator, bytemuck::cast_slice(&ids)),
        topk_weights: upload(&mut emulator, bytemuck::cast_slice(&vec![0.25f32; ids.len()])),
        output: emulator.memory_mut().alloc(hidden.len() * 4),
        output_element: Element::F32,
        tokens: TOKENS,
        device_tokens: 0,
        accumulate: false,
    };
    let weights = emulator.memory_mut().alloc(plan.weights_bytes() as usize);
    let workspace = emulator.memory_mut().alloc(plan.workspace_bytes() as usize);

    let mut total = Meter::default();
    let mut pack = Meter::default();
    for id in 0..4 {
        let expert = source.expert(id).unwrap_or_else(|error| panic!("{error}"));
        let mut stage = |matrix: &nvfp4_moe::checkpoint::RawMatrix<'_>| {
            [matrix.codes, matrix.scales].map(|bytes| upload(&mut emulator, bytes))
        };
        let [gate, up, down] =
            [expert.gate.as_ref(), Some(&expert.up), Some(&expert.down)].map(|m| m.map_or([0, 0], &mut stage));
        let staged = StagedExpert { gate: gate.into(), up: up.into(), down: down.into() };
        for launch in pack_expert(&plan, weights, id, &staged) {
            pack.run(&mut emulator, &module, &launch);
        }
    }
    pack.print("pack");
    let mut meters = vec![pack];
    // What combine reads is not computed here: any numbers do.
    let down = plan.region(Region::SlotValues);
    let filled = emulator.memory_mut().fill(workspace + down.offset, 0x3C, down.bytes as usize);
    filled.unwrap_or_else(|error| panic!("{error}"));
    let schedule = Schedule::new(&plan, weights, workspace, call, 0);
    for (name, stage) in [("route", Stage::Route), ("quantize", Stage::QuantizeL1), ("combine", Stage::Combine)] {
        let mut meter = Meter::default();
        for _ in 0..ROUNDS {
            let launched = schedule.stage::<()>(stage, |launch| {
                meter.run(&mut emulator, &module, launch);
                Ok(())
            });
            launched.unwrap_or_default();
        }
        meter.print(name);
        meters.push(meter);
    }
    for meter in &meters {
        total.instructions += meter.instructions;
        total.seconds += meter.seconds;
    }
    total.print("all");
}
