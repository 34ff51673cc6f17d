//! The grouped GEMM of FP4 tensor cores on numbers whose sums are exact in f32 in any order: its results are known to the
//! bit, in f32 and quantized.

mod problem;

use anyhow::{Result, ensure};
use bytemuck::Zeroable;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe_device::format::packed::MatrixLayout;
use nvfp4_moe_device::format::tile_mxf4::Mxf4Tile;
use nvfp4_moe_device::format::{BLOCK, block, ue4m3};
use nvfp4_moe_device::kernels::grouped_gemm::sm120;
use nvfp4_moe_device::params::{Epilogue, GroupedGemmParams};

use super::super::device_kernels::downloaded;
use super::super::setup::{Matrix, OAI, SWIGLU};
use super::grouped_gemm::{element, packed, result, used_numbers};
use super::route::tile_offsets;
use super::{Bench, Lab, expert_of, expert_offsets, same, same_or_nan};
use problem::{Problem, random, special};

/// Columns of activations are padded to whole stages.
const STAGE_K: usize = 128;
/// K that fills the ring of stages.
const RING_K: usize = 5 * STAGE_K;
/// What nobody writes keeps this.
const UNTOUCHED: u8 = 0xA5;

/// Where the scale of an activation row comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    /// Each row has its own.
    Rows,
    /// Each expert has one.
    Experts,
}
use Scales::{Experts, Rows};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Output {
    F32,
    Codes,
}
use Output::{Codes, F32};

/// One launch.
struct Request {
    epilogue: Epilogue,
    activation: Activation,
    columns: usize,
    k: usize,
    /// Slots of each expert.
    slots: Vec<usize>,
    /// Whether slots take their rows from fewer tokens.
    gather: bool,
    scales: Scales,
    output: Output,
}

impl Request {
    fn new(epilogue: Epilogue, activation: Activation, [columns, k]: [usize; 2], slots: &[usize]) -> Self {
        let slots = slots.to_vec();
        Self { epilogue, activation, columns, k, slots, gather: false, scales: Rows, output: F32 }
    }

    fn gather(self) -> Self {
        Self { gather: true, ..self }
    }

    fn scaled_by(self, scales: Scales) -> Self {
        Self { scales, ..self }
    }

    fn into_codes(self) -> Self {
        Self { output: Codes, ..self }
    }
}

fn gated(activation: Activation, sizes: [usize; 2], slots: &[usize]) -> Request {
    Request::new(Epilogue::Gated, activation, sizes, slots)
}

fn ungated(activation: Activation, sizes: [usize; 2], slots: &[usize]) -> Request {
    Request::new(Epilogue::Ungated, activation, sizes, slots)
}

fn down(sizes: [usize; 2], slots: &[usize]) -> Request {
    Request::new(Epilogue::Down, SWIGLU, sizes, slots)
}

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    let limited = Activation::SwiGlu { limit: Some(5.0) };
    let barely_limited = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 150.0 };
    let relu2 = Activation::Relu2;
    // Around every number of slots at which the device chooses otherwise: fragments of 8, columns of 16 to 128, tiles.
    let counts = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 200];
    let each = [9, 29, 61, 125];
    let requests = [
        gated(SWIGLU, [16, 64], &[5]).gather(),
        gated(SWIGLU, [48, 80], &[0, 17, 0, 1]).gather().scaled_by(Experts).into_codes(),
        down([80, 144], &[3, 129]).scaled_by(Experts),
        ungated(relu2, [80, 16], &[7, 40]).gather().into_codes(),
        down([16, 16], &counts),
        down([16, 32], &counts).gather(),
        gated(limited, [16, 48], &counts).scaled_by(Experts).into_codes(),
        // Once around the ring, and not to its end; odd numbers of row tiles; the last stage whole, with one K tile, with
        // less.
        gated(SWIGLU, [80, RING_K + STAGE_K], &[33]).scaled_by(Experts).into_codes(),
        gated(OAI, [48, RING_K + 64], &[9, 65]).gather(),
        down([144, RING_K - STAGE_K + 16], &[16, 2, 33]),
        down([208, 240], &[70, 130]).scaled_by(Experts),
        ungated(relu2, [144, RING_K + 80], &[18]).scaled_by(Experts).into_codes(),
        down([16, 64], &[0, 0]),
        down([64, 128], &[2]).gather(),
        gated(barely_limited, [16, 64], &[5]).gather(),
        // Each number of columns in turn, and each activation in it.
        gated(SWIGLU, [48, 16], &each),
        gated(OAI, [16, 32], &each),
        gated(barely_limited, [16, 16], &each).gather().into_codes(),
        gated(limited, [32, 32], &each).gather().into_codes(),
        ungated(relu2, [48, 16], &each).scaled_by(Experts),
        // No layer asks for these, but they mean something: a gate that is not looked at, or is 0; codes of down; a row's
        // own scale, and codes.
        gated(relu2, [16, 16], &each),
        gated(relu2, [16, 16], &each).scaled_by(Experts).into_codes(),
        ungated(OAI, [48, 16], &each),
        ungated(limited, [48, 16], &each).into_codes(),
        down([48, 32], &each).into_codes(),
    ];
    for (index, request) in requests.iter().enumerate() {
        run(&bench, request, &random(request, index as u64))?;
    }
    every_value(&bench)
}

/// What comes behind the sums, at its limits: for each number of columns enough slots for [`special`]; an even one and an odd
/// one do not exist.
fn every_value(bench: &Bench<'_>) -> Result<()> {
    let slots = [16, 16, 16, 14, 16, 14, 16, 13, 32, 30, 32, 30, 64, 60, 128, 122];
    let activations = [
        SWIGLU,
        OAI,
        Activation::SwiGlu { limit: Some(5.0) },
        Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 150.0 },
        Activation::Relu2,
    ];
    for (index, activation) in activations.into_iter().enumerate() {
        for epilogue in [Epilogue::Gated, Epilogue::Ungated, Epilogue::Down] {
            if epilogue == Epilogue::Down && activation != SWIGLU {
                continue;
            }
            // Each kind of block that `special` has, and without gate in each half of a warp's rows.
            let columns = if epilogue == Epilogue::Gated { 64 } else { 112 };
            let request = |k| Request::new(epilogue, activation, [columns, k], &slots);
            let (mut values, mut codes) = (request(16), request(32).into_codes());
            (values.gather, codes.gather) = (index % 2 == 0, index % 2 == 1);
            run(bench, &values, &special(&values))?;
            run(bench, &codes, &special(&codes))?;
        }
    }
    Ok(())
}

/// Rows in a buffer with more room for each, which nobody writes, as the grouped GEMM itself leaves it, and nobody must read.
fn padded(bench: &Bench<'_>, bytes: &[u8], width: usize, stride: usize) -> Result<DeviceBuffer> {
    let buffer = bench.room(bytes.len() / width * stride)?;
    for (row, bytes) in bytes.chunks_exact(width).enumerate() {
        buffer.write(row * stride, bytes)?;
    }
    Ok(buffer)
}

fn run(bench: &Bench<'_>, request: &Request, problem: &Problem) -> Result<()> {
    let Request { epilogue, columns, k, .. } = *request;
    let Problem { gather, matrices, activations: x, row_scales, expert_scales } = problem;
    let halves = matrices.first().map_or(1, Vec::len);
    let variant = &sm120::VARIANTS[0];
    let experts = request.slots.len();
    let expert_offset = expert_offsets(&request.slots);
    let slots = expert_offset[experts] as usize;
    let by_expert = request.scales == Experts;
    let activation = used_numbers(request.activation);

    let all_packed: Vec<u8> = matrices.iter().flat_map(|matrices| packed::<Mxf4Tile>(matrices)).collect();
    let layout = MatrixLayout::<Mxf4Tile>::new(columns * halves, k);
    let stride = k.next_multiple_of(STAGE_K);
    let weights = bench.upload(&all_packed)?;
    let codes = padded(bench, &x.codes, k / 2, stride / 2)?;
    let block_scales = padded(bench, &x.scales, k / BLOCK, stride / BLOCK)?;
    let (gathered, row_scales_there) = (bench.upload(gather)?, bench.upload(row_scales)?);
    let (scales_there, offset_there) = (bench.upload(expert_scales)?, bench.upload(&expert_offset)?);
    let tile_offset = bench.upload(&tile_offsets(&expert_offset, variant.slots as u32))?;
    let output_stride = columns.next_multiple_of(STAGE_K);
    let output = bench.room(slots * columns * 4)?;
    let output_codes = bench.upload(&vec![UNTOUCHED; slots * output_stride / 2])?;
    let output_scales = bench.upload(&vec![UNTOUCHED; slots * output_stride / BLOCK])?;
    let to_codes = request.output == Codes;
    let params = GroupedGemmParams {
        weights: weights.address(),
        expert_bytes: layout.bytes() as u64,
        activations: codes.address(),
        block_scales: block_scales.address(),
        gather: if request.gather { gathered.address() } else { 0 },
        row_scales: if by_expert { 0 } else { row_scales_there.address() },
        expert_scales: scales_there.address(),
        expert_offset: offset_there.address(),
        tile_offset: tile_offset.address(),
        output: if to_codes { output_codes.address() } else { output.address() },
        output_scales: if to_codes { output_scales.address() } else { 0 },
        columns: columns as u32,
        row_tiles: layout.row_tiles() as u32,
        k_tiles: layout.k_tiles() as u32,
        experts: experts as u32,
        epilogue: epilogue as u32,
        k: k as u32,
        activation,
        quantized: to_codes.into(),
        ..GroupedGemmParams::zeroed()
    };
    // SAFETY: the buffers have the documented sizes.
    unsafe { bench.grouped_gemm(variant, params)? };

    let mut expected = Vec::with_capacity(slots * columns);
    let mut expected_codes = vec![UNTOUCHED; slots * output_stride / 2];
    let mut expected_scales = vec![UNTOUCHED; slots * output_stride / BLOCK];
    for (slot, gathered) in gather.iter().enumerate() {
        let expert = expert_of(&expert_offset, slot);
        let scales = &expert_scales[expert];
        let row = if request.gather { *gathered as usize } else { slot };
        let g = match (request.scales, epilogue) {
            (Rows, _) => row_scales[row],
            (Experts, Epilogue::Down) => scales.l2_input,
            (Experts, _) => scales.l1_input,
        };
        for column in 0..columns {
            let mut sums = [0.0; 2];
            for (sum, matrix) in sums.iter_mut().zip(&matrices[expert]) {
                *sum = exact_sum(matrix, column, x, row)?;
            }
            expected.push(result(epilogue, &activation, sums, g, scales));
        }
        let values = &expected[slot * columns..];
        for (index, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let quantized = block::quantize(values, scales.l2_input);
            let at = slot * output_stride / BLOCK + index;
            expected_codes[8 * at..8 * at + 8].copy_from_slice(&quantized.codes.to_le_bytes());
            expected_scales[at] = quantized.scale;
        }
    }
    let what = format!("{epilogue:?}, {columns} columns, k {k}, slots {:?}, {:?}", request.slots, request.scales);
    if to_codes {
        same(&output_scales, &expected_scales, &format!("{what}: block scales"))?;
        return same(&output_codes, &expected_codes, &format!("{what}: codes"));
    }
    same_or_nan(downloaded(&output)?, &expected, &what)
}

/// The dot product of a row of weights with one of activations, exact in f32 whatever the order: both are in units of 1/32.
fn exact_sum(weights: &Matrix, column: usize, activations: &Matrix, row: usize) -> Result<f32> {
    let blocks = weights.cols / BLOCK;
    if activations.scales[row * blocks..(row + 1) * blocks].contains(&ue4m3::NAN) {
        return Ok(f32::NAN);
    }
    let (mut sum, mut magnitudes) = (0, 0);
    for k in 0..weights.cols {
        let product = element(weights, column, k) * element(activations, row, k);
        sum += product;
        magnitudes += product.abs();
    }
    ensure!(magnitudes < 1 << 24, "sums of {} products are not exact", weights.cols);
    Ok(sum as f32 / 1024.0)
}
