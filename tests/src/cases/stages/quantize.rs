//! The quantizer of rows of tokens and of slots, under every scale, on every element type.

use anyhow::Result;
use bytemuck::Zeroable;
use half::{bf16, f16};
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe_device::format::tile_mma::activation_column;
use nvfp4_moe_device::format::{BLOCK, block};
use nvfp4_moe_device::kernels::{amax, quantize};
use nvfp4_moe_device::params::{Element, ExpertScales, QuantizeParams, RowScale, Rows, TokenCount};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{Bench, Lab, same};

/// First slot of each expert; the second of four has none.
const FOUR_EXPERTS: &[u32] = &[0, 2, 2, 3, SLOTS as u32];
const TWO_EXPERTS: &[u32] = &[0, 3, SLOTS as u32];
const SLOTS: usize = 7;
/// Input row of each slot where rows are gathered.
const GATHER: [u32; SLOTS] = [3, 0, 4, 4, 1, 2, 0];
const TOKENS: usize = 5;

/// What to quantize, and how.
#[derive(Clone, Copy, Debug)]
struct Request {
    k: usize,
    element: Element,
    scale: RowScale,
    /// Whether rows are slots, and of which experts.
    slots: Option<&'static [u32]>,
    /// Whether a slot's row is its token's.
    gather: bool,
    second: bool,
    /// Tokens for which the launch is made.
    tokens: usize,
    /// Tokens that a count on the device leaves.
    device_tokens: Option<usize>,
}

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    let tokens = |k, element, scale| Request {
        k,
        element,
        scale,
        slots: None,
        gather: false,
        second: false,
        tokens: TOKENS,
        device_tokens: None,
    };
    let slots = |k, element, scale, gather, second| Request {
        slots: Some(FOUR_EXPERTS),
        gather,
        second,
        ..tokens(k, element, scale)
    };
    for request in [
        tokens(80, Element::Bf16, RowScale::PerToken),
        tokens(64, Element::F16, RowScale::PerToken),
        tokens(16, Element::F32, RowScale::Static),
        Request { device_tokens: Some(3), ..tokens(80, Element::Bf16, RowScale::PerTensor) },
        Request { device_tokens: Some(99), ..tokens(48, Element::F16, RowScale::PerTensor) },
        Request { device_tokens: Some(0), ..tokens(16, Element::F32, RowScale::PerTensor) },
        slots(80, Element::Bf16, RowScale::Static, true, false),
        slots(144, Element::F32, RowScale::Static, false, true),
        Request { slots: Some(TWO_EXPERTS), ..slots(16, Element::F32, RowScale::Static, false, true) },
        slots(80, Element::F16, RowScale::PerToken, true, false),
        slots(80, Element::F32, RowScale::PerTensor, false, true),
        slots(80, Element::Bf16, RowScale::PerTensor, false, false),
        // More than a block reads at once.
        tokens(4112, Element::Bf16, RowScale::PerToken),
        tokens(4112, Element::F32, RowScale::PerTensor),
    ] {
        for seed in 0..2 {
            let x = rows(request.k, rows_of(&request).input, &mut StdRng::seed_from_u64(seed + request.k as u64));
            run(&bench, request, x, seed)?;
        }
    }
    // Nothing, so little that the scale would be 0, and as much as a scale is made of.
    for scale in [RowScale::PerToken, RowScale::PerTensor] {
        for x in [0.0, f32::from_bits(3), f32::MAX] {
            run(&bench, tokens(16, Element::F32, scale), vec![x; TOKENS * 16], 0)?;
        }
    }
    let (k, warps) = (quantize::THREADS as usize * BLOCK, quantize::THREADS as usize / 32);
    let one_warps = Request { tokens: warps, ..tokens(k, Element::Bf16, RowScale::PerToken) };
    run(&bench, one_warps, every_warp(warps, k), 0)?;
    every_place(&bench)
}

/// Rows whose largest element is one warp's after the other, where a block reads `k` at once.
pub(super) fn every_warp(rows: usize, k: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * k).map(|i| (i % 13) as f32 / 16.0).collect();
    for warp in 0..rows {
        x[warp * k + warp * 32 * BLOCK + 77] = -40.0 - warp as f32;
    }
    x
}

/// Rows of one block in which one element after the other is the one that matters: the largest, or not finite.
fn every_place(bench: &Bench<'_>) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(0);
    const SPECIAL: [f32; 6] = [-61.25, 0.75, 65504.0, f32::MAX, f32::INFINITY, f32::NAN];
    let mut rows: Vec<f32> = (0..SPECIAL.len() * BLOCK * BLOCK).map(|_| rng.random_range(-0.7..0.7)).collect();
    for (row, x) in rows.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        x[row % BLOCK] = SPECIAL[row / BLOCK];
    }
    for element in [Element::Bf16, Element::F16, Element::F32] {
        let request = Request {
            k: BLOCK,
            element,
            scale: RowScale::PerToken,
            slots: None,
            gather: false,
            second: false,
            tokens: SPECIAL.len() * BLOCK,
            device_tokens: None,
        };
        run(bench, request, rows.clone(), 0)?;
        for (row, x) in rows.as_chunks::<BLOCK>().0.iter().enumerate() {
            amax_of_one(bench, element, x, row)?;
        }
        amax_of_one(bench, element, &[0.0; BLOCK], rows.len())?;
        // Every place at a tie, just above one and just below one, under a scale of 1 or so: the last bit decides.
        let codes = [
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(|tie| (tie, 6.0)).to_vec(),
            [-0.25, -0.75, -1.25, -0.0].map(|tie| (tie, -6.0)).to_vec(),
            vec![(beside(element, 0.25, true), 6.0), (beside(element, 0.75, false), 6.0)],
            // Here it is the scale that is a tie.
            vec![(beside(element, 6.375, true), 0.0)],
        ]
        .concat();
        let mut ties = vec![0.0; codes.len() * BLOCK * BLOCK];
        for (row, x) in ties.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            (x[row % BLOCK], x[(row + 1) % BLOCK]) = codes[row / BLOCK];
        }
        run(bench, Request { scale: RowScale::Static, tokens: codes.len() * BLOCK, ..request }, ties, 0)?;
    }
    Ok(())
}

/// The number next to a number that has no more than 8 digits, above or below.
fn beside(element: Element, x: f32, above: bool) -> f32 {
    let digits = match element {
        Element::Bf16 => 7,
        Element::F16 => 10,
        Element::F32 => 23,
    };
    let step = 1 << (23 - digits);
    f32::from_bits(if above { x.to_bits() + step } else { x.to_bits() - step })
}

/// What `amax` gathers from a single block.
fn amax_of_one(bench: &Bench<'_>, element: Element, x: &[f32; BLOCK], row: usize) -> Result<()> {
    let mut x = x.to_vec();
    let (input, amax_bits) = (upload(bench, element, &mut x)?, bench.upload(&[0u32])?);
    let params = QuantizeParams {
        tokens: TokenCount { device: 0, bound: 1, padding: 0 },
        input: input.address(),
        amax_bits: amax_bits.address(),
        k: BLOCK as u32,
        element: element as u32,
        rows: Rows::Token as u32,
        ..QuantizeParams::zeroed()
    };
    let launch = Launch {
        kernel: "amax",
        grid: [1; 3],
        threads: amax::THREADS,
        shared_bytes: 0,
        params: Params::Quantize(params),
    };
    // SAFETY: the kernel's threads; it reads one row and raises one number.
    unsafe { bench.run(&[launch])? };
    same(&amax_bits, &[largest_finite(&x)], &format!("amax of one block, {element:?}, row {row}"))
}

/// Bits of the largest finite magnitude.
pub(super) fn largest_finite(x: &[f32]) -> u32 {
    x.iter().filter(|x| x.is_finite()).map(|x| block::magnitude_bits(*x)).max().unwrap_or(0)
}

/// How many rows there are to read and to write.
struct RowCounts {
    input: usize,
    output: usize,
}

/// What is not asked for does not exist.
fn rows_of(request: &Request) -> RowCounts {
    let tokens = request.device_tokens.unwrap_or(request.tokens).min(request.tokens);
    let output = if request.slots.is_some() { SLOTS } else { tokens };
    RowCounts { input: if request.gather { tokens } else { output }, output }
}

/// Rows whose blocks have all kinds of magnitudes: every tie of the code and of the scale, saturation, zeros, numbers
/// that underflow; one row is zero, one has an element that is not finite where `element` is wide enough.
pub(super) fn rows(k: usize, count: usize, rng: &mut StdRng) -> Vec<f32> {
    const TIES: [f32; 16] =
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0];
    let mut x = Vec::with_capacity(count * k);
    for row in 0..count {
        for index in 0..k / BLOCK {
            let exponent = 2f32.powi(rng.random_range(-9..4));
            x.extend((0..BLOCK).map(|i| match (row + index) % 6 {
                0 => TIES[i] * exponent,
                // The block's scale is a tie: 1 and an odd number of sixteenths.
                1 => exponent * if i == 3 { 6.375 } else { rng.random_range(-6f32..6.0) },
                2 => exponent * if i == 15 { -6.375 * 2f32.powi(-6) } else { rng.random_range(-1f32..1.0) * 0.01 },
                3 if row == 2 => 0.0,
                4 => rng.random_range(-1f32..1.0) * 2f32.powi(rng.random_range(-30..-10)),
                _ => rng.random_range(-2f32..2.0),
            }));
        }
    }
    if count > 3 {
        x[k..2 * k].fill(0.0);
        x[3 * k + k - 1] = f32::INFINITY;
        x[2 * k] = f32::NAN;
    }
    x
}

/// The rows in device memory, and what they are there.
pub(super) fn upload(bench: &Bench<'_>, element: Element, x: &mut [f32]) -> Result<DeviceBuffer> {
    match element {
        Element::F32 => bench.upload(x),
        Element::Bf16 => {
            let narrow: Vec<_> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            x.iter_mut().zip(&narrow).for_each(|(x, narrow)| *x = narrow.to_f32());
            bench.upload(&narrow)
        }
        Element::F16 => {
            let narrow: Vec<_> = x.iter().map(|x| f16::from_f32(*x)).collect();
            x.iter_mut().zip(&narrow).for_each(|(x, narrow)| *x = narrow.to_f32());
            bench.upload(&narrow)
        }
    }
}

fn run(bench: &Bench<'_>, request: Request, mut x: Vec<f32>, seed: u64) -> Result<()> {
    let Request { k, element, scale, slots, gather, second, device_tokens, .. } = request;
    let mut rng = StdRng::seed_from_u64(seed + k as u64);
    let bound = if slots.is_some() { SLOTS } else { request.tokens };
    let rows_here = rows_of(&request).output;
    let input = upload(bench, element, &mut x)?;
    let row = |row: usize| {
        let from = if gather { GATHER[row] as usize } else { row };
        &x[from * k..(from + 1) * k]
    };

    let nan = f32::NAN;
    let scales: Vec<_> = (0..slots.map_or(1, |offsets| offsets.len() - 1))
        .map(|_| {
            let g = 2f32.powi(rng.random_range(-2..2)) * [1.0, rng.random_range(0.5..1.5)][seed as usize];
            let (l1_input, l2_input) = if second { (nan, g) } else { (g, nan) };
            ExpertScales { gate: nan, up: nan, down: nan, l1_input, l2_input }
        })
        .collect();
    let largest = |x: &mut dyn Iterator<Item = &f32>| x.map(|x| block::magnitude_bits(*x)).max().unwrap_or(0);
    let tensor = largest_finite(&x);
    let g: Vec<_> = (0..rows_here)
        .map(|r| match scale {
            RowScale::PerToken => block::global_scale(largest(&mut row(r).iter())),
            RowScale::PerTensor => block::global_scale(tensor),
            RowScale::Static => {
                let expert = slots.unwrap_or(&[]).iter().filter(|&&offset| offset as usize <= r).count();
                let scales = &scales[expert.saturating_sub(1)];
                if second { scales.l2_input } else { scales.l1_input }
            }
        })
        .collect();

    let stride = k.next_multiple_of(64);
    let on_device = bench.upload(&[device_tokens.unwrap_or(0) as u32])?;
    let (gathered, expert_offset) = (bench.upload(&GATHER)?, bench.upload(slots.unwrap_or(&[]))?);
    let (expert_scales, amax_bits) = (bench.upload(&scales)?, bench.upload(&[0u32])?);
    let (codes, block_scales) = (bench.room(rows_here * k / 2)?, bench.room(rows_here * k / BLOCK)?);
    let products = [bench.room(rows_here * stride * 2)?, bench.room(rows_here * stride * 2)?];
    let row_scales = [bench.room(rows_here * 4)?, bench.room(rows_here * 4)?, bench.room(rows_here * 4)?];
    let to_products = QuantizeParams {
        tokens: TokenCount {
            device: if device_tokens.is_some() { on_device.address() } else { 0 },
            bound: request.tokens as u32,
            padding: 0,
        },
        input: input.address(),
        gather: if gather { gathered.address() } else { 0 },
        expert_offset: expert_offset.address(),
        expert_scales: expert_scales.address(),
        amax_bits: amax_bits.address(),
        output: products[0].address(),
        block_scales: 0,
        row_scales: row_scales[0].address(),
        k: k as u32,
        stride: stride as u32,
        element: element as u32,
        rows: if slots.is_some() { Rows::Slot } else { Rows::Token } as u32,
        row_scale: scale as u32,
        experts: slots.map_or(0, |offsets| offsets.len() as u32 - 1),
        second: second.into(),
        ..QuantizeParams::zeroed()
    };
    let to_codes = QuantizeParams {
        output: codes.address(),
        block_scales: block_scales.address(),
        row_scales: row_scales[1].address(),
        stride: k as u32,
        ..to_products
    };
    let launch = |kernel, blocks: usize, threads, shared_bytes, params| Launch {
        kernel,
        grid: [blocks as u32, 1, 1],
        threads,
        shared_bytes,
        params: Params::Quantize(params),
    };
    let mut launches = Vec::new();
    if scale == RowScale::PerTensor {
        // Fewer blocks than rows, and a gather that it must not need: the largest of all rows is asked for.
        launches.push(launch("amax", 2, amax::THREADS, 0, to_products));
    }
    // One block too many, which must do nothing.
    let bound = bound + 1;
    launches.push(launch("quantize", bound, quantize::THREADS, quantize::SHARED_BYTES, to_products));
    // Several small blocks a row.
    let shared = QuantizeParams { output: products[1].address(), row_scales: row_scales[2].address(), ..to_products };
    let of_a_row = launch("quantize", bound, 64, quantize::SHARED_BYTES, shared);
    launches.push(Launch { grid: [bound as u32, 3, 1], ..of_a_row });
    launches.push(launch("quantize_codes", bound, quantize::THREADS, quantize::SHARED_BYTES, to_codes));
    // SAFETY: the kernels' threads, grids and shared memory; the buffers have the documented sizes.
    unsafe { bench.run(&launches)? };

    let (mut all_codes, mut all_scales, mut all_products) = (Vec::new(), Vec::new(), Vec::new());
    let mut blocks = Vec::new();
    for (r, &g) in g.iter().enumerate() {
        for x in row(r).as_chunks::<BLOCK>().0 {
            let block = block::quantize(x, g);
            all_codes.push(block.codes);
            all_scales.push(block.scale);
            blocks.push(block);
        }
        all_products.extend(
            (0..stride).map(activation_column).map(|column| {
                if column < k { blocks[r * (k / BLOCK) + column / BLOCK].f16(column % BLOCK) } else { 0 }
            }),
        );
    }
    let what = |part: &str| format!("{part}, {request:?}, seed {seed}");
    let g: Vec<_> = g.iter().map(|g| g.to_bits()).collect();
    if scale == RowScale::PerTensor {
        same(&amax_bits, &[tensor], &what("amax"))?;
    }
    same(&row_scales[0], &g, &what("row scales"))?;
    same(&row_scales[1], &g, &what("row scales of codes"))?;
    same(&row_scales[2], &g, &what("row scales of shared rows"))?;
    same(&block_scales, &all_scales, &what("block scales"))?;
    same(&codes, bytemuck::cast_slice::<_, u8>(&all_codes), &what("codes"))?;
    same(&products[0], &all_products, &what("products"))?;
    same(&products[1], &all_products, &what("products of shared rows"))
}
