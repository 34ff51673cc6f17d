//! The shipped kernels on the emulator, free of findings, against the CPU engine and plain functions.

use half::bf16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::device_limits::DeviceLimits;
use nvfp4_moe::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use nvfp4_moe::load::check_expert;
use nvfp4_moe::plan::{Plan, Region};
use nvfp4_moe::routing::Routing;
use nvfp4_moe::schedule::{CallAddresses, Launch, Params, Schedule, Stage, StagedExpert, pack_expert};
use nvfp4_moe::shape::{ExpertRange, MoeShape};
use nvfp4_moe::spec::LayerSpec;
use nvfp4_moe::weights::{ExpertSource, RandomExperts, RandomInputScales};
use nvfp4_moe_device::format::{BLOCK, block};
use nvfp4_moe_device::kernels::{grouped_gemm::sm80, quantize};
use nvfp4_moe_device::params::{Element, ExpertScales, QuantizeParams};
use nvfp4_moe_emulator::{Config, Emulator, Module};
use rand::{Rng, SeedableRng, rngs::StdRng};

const PTX: &str = include_str!("../../../host/ptx/sm_80.ptx");

fn module() -> Module {
    Module::parse(PTX).unwrap_or_else(|error| panic!("{error}"))
}

fn run(emulator: &mut Emulator, module: &Module, launch: &Launch) -> u64 {
    let params = match &launch.params {
        Params::Route(params) => bytemuck::bytes_of(params),
        Params::Quantize(params) => bytemuck::bytes_of(params),
        Params::GroupedGemm(params) => bytemuck::bytes_of(params),
        Params::Combine(params) => bytemuck::bytes_of(params),
        Params::Pack(params) => bytemuck::bytes_of(params),
        Params::Read(params) => bytemuck::bytes_of(params),
    };
    emulator
        .launch(module, launch.kernel, launch.grid, [launch.threads, 1, 1], launch.shared_bytes, params)
        .unwrap_or_else(|error| panic!("{error}"))
        .thread_instructions
}

/// A layer in emulated memory, with inputs.
struct Layer {
    emulator: Emulator,
    module: Module,
    plan: Plan,
    source: RandomExperts,
    weights: u64,
    workspace: u64,
    call: CallAddresses,
    hidden: Vec<bf16>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Layer {
    fn new(shape: MoeShape, experts: ExpertRange, activation: Activation, scales: ScaleMode, tokens: usize) -> Self {
        Self::with_scales(shape, experts, activation, scales, tokens, RandomInputScales::PerExpert)
    }

    fn with_scales(
        shape: MoeShape,
        experts: ExpertRange,
        activation: Activation,
        scales: ScaleMode,
        tokens: usize,
        input_scales: RandomInputScales,
    ) -> Self {
        let source = RandomExperts::new(shape, activation.is_gated(), input_scales, 3);
        let shared_l1_scale = input_scales == RandomInputScales::SharedFirst;
        let spec = LayerSpec { shape, experts, activation, scales, shared_l1_scale };
        let limits = DeviceLimits { multiprocessors: 2, ..DeviceLimits::H200 };
        let plan = Plan::new(spec, &limits, tokens).unwrap();
        let mut rng = StdRng::seed_from_u64(tokens as u64);
        let normal = |rng: &mut StdRng| (0..4).map(|_| rng.random_range(-0.9..0.9)).sum::<f32>();
        let hidden: Vec<_> = (0..tokens * shape.hidden).map(|_| bf16::from_f32(normal(&mut rng))).collect();
        let topk_ids: Vec<i32> = (0..tokens * shape.topk)
            .map(|_| if rng.random_bool(0.1) { -1 } else { rng.random_range(0..shape.experts as i32) })
            .collect();
        let topk_weights: Vec<f32> = (0..tokens * shape.topk).map(|_| rng.random_range(0.05..1.0)).collect();

        let mut emulator = Emulator::new(Config::default());
        let memory = emulator.memory_mut();
        let mut upload = |bytes: &[u8]| {
            let address = memory.alloc(bytes.len());
            memory.write(address, bytes).unwrap();
            address
        };
        let call = CallAddresses {
            hidden: upload(bytemuck::cast_slice(&hidden)),
            hidden_element: Element::Bf16,
            topk_ids: upload(bytemuck::cast_slice(&topk_ids)),
            topk_weights: upload(bytemuck::cast_slice(&topk_weights)),
            output: memory.alloc(hidden.len() * 4),
            output_element: Element::F32,
            tokens,
            device_tokens: 0,
            accumulate: false,
        };
        let weights = memory.alloc(plan.weights_bytes() as usize);
        let workspace = memory.alloc(plan.workspace_bytes() as usize);
        let mut layer =
            Self { emulator, module: module(), plan, source, weights, workspace, call, hidden, topk_ids, topk_weights };
        layer.load();
        layer
    }

    fn load(&mut self) {
        let mut scales: Vec<ExpertScales> = Vec::new();
        for (local, id) in self.plan.spec().experts.ids().enumerate() {
            let expert = self.source.expert(id).unwrap();
            scales.push(check_expert(self.plan.spec(), id, &expert, scales.first()).unwrap());
            let memory = self.emulator.memory_mut();
            let mut stage = |matrix: &nvfp4_moe::checkpoint::RawMatrix<'_>| {
                [matrix.codes, matrix.scales].map(|bytes| {
                    let address = memory.alloc(bytes.len());
                    memory.write(address, bytes).unwrap();
                    address
                })
            };
            let [gate, up, down] =
                [expert.gate.as_ref(), Some(&expert.up), Some(&expert.down)].map(|m| m.map_or([0, 0], &mut stage));
            let staged = StagedExpert { gate: gate.into(), up: up.into(), down: down.into() };
            for launch in pack_expert(&self.plan, self.weights, local, &staged) {
                run(&mut self.emulator, &self.module, &launch);
            }
            for address in [gate, up, down].into_iter().flatten().filter(|&address| address != 0) {
                self.emulator.memory_mut().free(address).unwrap();
            }
        }
        let at = self.weights + self.plan.scales_offset();
        self.emulator.memory_mut().write(at, bytemuck::cast_slice(&scales)).unwrap();
    }

    fn stage(&mut self, stage: Stage, tile: usize) {
        let (plan, call) = (self.plan.clone(), self.call);
        let schedule = Schedule::new(&plan, self.weights, self.workspace, call, tile);
        schedule
            .stage::<()>(stage, |launch| {
                run(&mut self.emulator, &self.module, launch);
                Ok(())
            })
            .unwrap();
    }

    fn region<T: bytemuck::Pod>(&self, region: Region, count: usize) -> Vec<T> {
        let at = self.workspace + self.plan.region(region).offset;
        bytemuck::pod_collect_to_vec(&self.emulator.memory().read(at, count * size_of::<T>()).unwrap())
    }

    fn output(&self) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.emulator.memory().read(self.call.output, self.hidden.len() * 4).unwrap())
    }

    fn routing(&self) -> Routing {
        Routing::new(&self.topk_ids, self.plan.spec().shape.topk, self.plan.spec().experts)
    }

    fn check_routing(&self) {
        let routing = self.routing();
        let slots = routing.slots();
        assert_eq!(self.region::<u32>(Region::ExpertOffset, routing.expert_offset.len()), routing.expert_offset);
        assert_eq!(self.region::<u32>(Region::SlotToken, slots), routing.slot_token);
        assert_eq!(self.region::<u32>(Region::EntrySlot, self.topk_ids.len()), routing.slot_of);
    }

    /// All stages with one variant of the GEMM, against the CPU engine.
    fn check_forward(&mut self, tile: usize) -> Vec<f32> {
        let workspace_bytes = self.plan.workspace_bytes() as usize;
        self.emulator.memory_mut().forget(self.workspace, workspace_bytes).unwrap();
        for stage in Stage::ALL {
            self.stage(stage, tile);
            if stage == Stage::Route {
                self.check_routing();
            }
        }
        let spec = *self.plan.spec();
        let cpu = nvfp4_moe::cpu::MoeLayer::load(&spec, &self.source, &mut |_, _| {}).unwrap();
        let mut expected = vec![0f32; self.hidden.len()];
        let inputs = Inputs {
            hidden: HiddenRows::Bf16(&self.hidden),
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
            topk: spec.shape.topk,
        };
        let mut workspace = nvfp4_moe::cpu::Workspace::new(&cpu, self.call.tokens).unwrap();
        cpu.forward(&mut workspace, &inputs, OutputRows::F32(&mut expected), false).unwrap();
        let output = self.output();
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let difference = square(&mut output.iter().zip(&expected).map(|(a, b)| a - b));
        let reference = square(&mut expected.iter().copied());
        // The sums are added up in another order, so a few codes of h differ.
        assert!(difference <= 1e-4 * reference, "tile {tile}: {difference} of {reference}");
        output
    }
}

const SWIGLU: Activation = Activation::SwiGlu { limit: None };
const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 1.0 };

#[test]
fn everything_decodes() {
    assert_eq!(module().kernels().count(), PTX.matches(".visible .entry ").count());
}

#[test]
fn routing_in_one_launch_and_in_three() {
    for (experts, tokens, topk) in [(5, 7, 3), (70, 600, 2), (300, 33, 8), (70, 1500, 3)] {
        let shape = MoeShape::new(16, 16, experts, topk).unwrap();
        let range = ExpertRange { first: 1, count: experts - 2 };
        let source = RandomExperts::new(shape, true, RandomInputScales::Missing, 3);
        drop(source);
        let mut layer = Layer::unloaded(shape, range, tokens);
        for tile in [0, 1] {
            layer.stage(Stage::Route, tile);
            layer.check_routing();
            let offsets = layer.region::<u32>(Region::TileOffset, experts - 1);
            let routing = layer.routing();
            let slots = sm80::VARIANTS[tile].slots as u32;
            let mut tiles = 0;
            for (e, &offset) in offsets.iter().enumerate().take(experts - 2) {
                assert_eq!(offset, tiles);
                tiles += (routing.expert_offset[e + 1] - routing.expert_offset[e]).div_ceil(slots);
            }
            assert_eq!(offsets[experts - 2], tiles);
        }
    }
}

impl Layer {
    /// Without packed weights.
    fn unloaded(shape: MoeShape, experts: ExpertRange, tokens: usize) -> Self {
        let mut layer = Self::new(shape, ExpertRange { first: 0, count: 0 }, SWIGLU, ScaleMode::PerToken, tokens);
        let spec = LayerSpec { experts, ..*layer.plan.spec() };
        layer.plan = Plan::new(spec, &DeviceLimits::H200, tokens).unwrap();
        layer.workspace = layer.emulator.memory_mut().alloc(layer.plan.workspace_bytes() as usize);
        layer
    }
}

#[test]
fn quantized_rows_in_every_mode() {
    let shape = MoeShape::new(144, 48, 6, 2).unwrap();
    for (scales, input_scales) in [
        (ScaleMode::PerToken, RandomInputScales::Missing),
        (ScaleMode::PerTensor, RandomInputScales::Missing),
        (ScaleMode::Static, RandomInputScales::SharedFirst),
        (ScaleMode::Static, RandomInputScales::PerExpert),
    ] {
        let mut layer = Layer::with_scales(shape, ExpertRange { first: 1, count: 4 }, SWIGLU, scales, 9, input_scales);
        layer.stage(Stage::Route, 0);
        layer.stage(Stage::QuantizeL1, 0);
        let routing = layer.routing();
        let by_token = layer.plan.spec().quantizes_tokens();
        let rows = if by_token { 9 } else { routing.slots() };
        let stride = shape.hidden.next_multiple_of(64);
        let activations = layer.region::<u16>(Region::Activations, rows * stride);
        let row_scales = layer.region::<f32>(Region::RowScales, rows);
        let input = HiddenRows::Bf16(&layer.hidden);
        let blocks = shape.hidden / BLOCK;
        let amax = |token: usize| {
            (0..blocks).flat_map(|b| input.block(token * blocks + b)).map(block::magnitude_bits).max().unwrap()
        };
        let expert_scales: Vec<ExpertScales> = bytemuck::pod_collect_to_vec(
            &layer.emulator.memory().read(layer.weights + layer.plan.scales_offset(), 4 * 20).unwrap(),
        );
        for row in 0..rows {
            let token = if by_token { row } else { routing.slot_token[row] as usize };
            let g = match scales {
                ScaleMode::PerToken => block::global_scale(amax(token)),
                ScaleMode::PerTensor => block::global_scale((0..9).map(amax).max().unwrap()),
                ScaleMode::Static => {
                    let expert = routing.expert_offset.iter().filter(|&&offset| offset as usize <= row).count() - 1;
                    expert_scales[if by_token { 0 } else { expert }].l1_input
                }
            };
            assert_eq!(row_scales[row], g);
            for b in 0..stride / BLOCK {
                let expected = if b < blocks {
                    block::quantize(&input.block(token * blocks + b), g)
                } else {
                    block::Block { codes: 0, scale: 0 }
                };
                for i in 0..BLOCK {
                    assert_eq!(activations[row * stride + b * BLOCK + i], expected.f16(i), "{scales:?} {row} {b} {i}");
                }
            }
        }
    }
}

#[test]
fn codes_and_scales() {
    let shape = MoeShape::new(80, 16, 2, 1).unwrap();
    let mut layer = Layer::new(shape, ExpertRange { first: 0, count: 0 }, SWIGLU, ScaleMode::PerToken, 5);
    let memory = layer.emulator.memory_mut();
    let [output, block_scales, row_scales] = [5 * 40, 5 * 5, 5 * 4].map(|bytes| memory.alloc(bytes));
    let params = QuantizeParams {
        tokens: nvfp4_moe_device::params::TokenCount { device: 0, bound: 5, padding: 0 },
        input: layer.call.hidden,
        gather: 0,
        expert_offset: 0,
        expert_scales: 0,
        amax_bits: 0,
        output,
        block_scales,
        row_scales,
        k: 80,
        stride: 80,
        element: Element::Bf16 as u32,
        rows: 0,
        row_scale: 1,
        experts: 0,
        second: 0,
        padding: 0,
    };
    let launch = Launch {
        kernel: "quantize_codes",
        grid: [5, 1, 1],
        threads: quantize::THREADS,
        shared_bytes: quantize::SHARED_BYTES,
        params: Params::Quantize(params),
    };
    run(&mut layer.emulator, &layer.module, &launch);
    let codes = layer.emulator.memory().read(output, 200).unwrap();
    let scales = layer.emulator.memory().read(block_scales, 25).unwrap();
    let input = HiddenRows::Bf16(&layer.hidden);
    for row in 0..5 {
        let bits = (0..5).flat_map(|b| input.block(row * 5 + b)).map(block::magnitude_bits).max().unwrap();
        for b in row * 5..row * 5 + 5 {
            let expected = block::quantize(&input.block(b), block::global_scale(bits));
            assert_eq!(codes[b * 8..b * 8 + 8], expected.codes.to_le_bytes());
            assert_eq!(scales[b], expected.scale);
        }
    }
}

#[test]
fn the_whole_layer_with_every_tile() {
    let shape = MoeShape::new(144, 80, 6, 3).unwrap();
    let mut layer = Layer::new(shape, ExpertRange { first: 1, count: 4 }, SWIGLU, ScaleMode::PerToken, 21);
    let outputs: Vec<_> = (0..sm80::VARIANTS.len()).map(|tile| layer.check_forward(tile)).collect();
    assert!(outputs.iter().all(|output| *output == outputs[0]), "the variants give different bits");
}

#[test]
fn the_whole_layer_in_every_mode() {
    let shape = MoeShape::new(64, 48, 5, 2).unwrap();
    for activation in [SWIGLU, OAI, Activation::Relu2, Activation::SwiGlu { limit: Some(0.5) }] {
        for scales in [ScaleMode::Static, ScaleMode::PerToken, ScaleMode::PerTensor] {
            let mut layer = Layer::new(shape, ExpertRange::all(5), activation, scales, 6);
            layer.check_forward(0);
        }
    }
}

#[test]
fn sums_added_to_bf16_output() {
    let shape = MoeShape::new(32, 16, 4, 2).unwrap();
    let mut layer = Layer::new(shape, ExpertRange { first: 0, count: 2 }, SWIGLU, ScaleMode::PerToken, 3);
    layer.topk_ids = vec![0, 1, 2, 3, 1, 3];
    let (ids, output) = (layer.call.topk_ids, layer.call.output);
    layer.emulator.memory_mut().write(ids, bytemuck::cast_slice(&layer.topk_ids)).unwrap();
    layer.check_forward(0);
    let fresh = layer.output();
    let held: Vec<bf16> = (0..96).map(|i| bf16::from_f32(i as f32 / 16.0)).collect();
    layer.emulator.memory_mut().write(output, bytemuck::cast_slice(&held)).unwrap();
    layer.call.accumulate = true;
    layer.call.output_element = Element::Bf16;
    layer.stage(Stage::Combine, 0);
    let bytes = layer.emulator.memory().read(output, 96 * 2).unwrap();
    let sums: Vec<bf16> = bytemuck::pod_collect_to_vec(&bytes);
    for i in 0..96 {
        let expected = if i / 32 == 1 { held[i] } else { bf16::from_f32(held[i].to_f32() + fresh[i]) };
        assert_eq!(sums[i], expected, "{i}");
    }
}
