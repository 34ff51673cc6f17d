//! Single kernels on a GPU, bit for bit: the quantizer against golden vectors and the host's quantizer, and the routing
//! that a forward leaves in the workspace against the host's.

use anyhow::{Context, Result, ensure};
use bytemuck::Zeroable;
use half::bf16;
use nvfp4_moe::cuda::Engine;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::plan::{Plan, Region};
use nvfp4_moe::routing::Routing;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::format::tile_mma::activation_place;
use nvfp4_moe_device::format::{BLOCK, block, e2m1, float16, ue4m3};
use nvfp4_moe_device::kernels::{amax, quantize};
use nvfp4_moe_device::params::{Element, ExpertScales, QuantizeParams, RowScale, Rows, TokenCount};
use safetensors::SafeTensors;

use super::device_layout::same_bytes;
use super::setup::{Batch, Lab, Layer, ROW_MODES, SWIGLU, gpu};

/// Inside the program, so that it runs on a machine without the repository.
const GOLDEN: &[u8] = include_bytes!("../../golden/quantize_vectors.safetensors");

/// What a quantizer kernel wrote.
struct Quantized {
    /// Of `quantize_codes`: codes and block scales.
    codes: Vec<u8>,
    block_scales: Vec<u8>,
    /// Of `quantize`: `[rows, stride]`.
    products: Vec<u16>,
    stride: usize,
    row_scales: Vec<f32>,
}

/// Rows of f32 numbers of which each is a bf16 number too.
struct Vectors<'a> {
    x: &'a [f32],
    k: usize,
}

/// A buffer of this many bytes, all 0xFF: NaN where a kernel forgets to write.
fn poisoned(engine: &Engine, bytes: usize) -> Result<DeviceBuffer> {
    let buffer = DeviceBuffer::alloc(engine.device(), bytes)?;
    buffer.fill(0, bytes, 0xFF)?;
    Ok(buffer)
}

pub(super) fn uploaded(engine: &Engine, bytes: &[u8]) -> Result<DeviceBuffer> {
    let buffer = DeviceBuffer::alloc(engine.device(), bytes.len())?;
    buffer.write(0, bytes)?;
    Ok(buffer)
}

pub(super) fn downloaded<T: bytemuck::Pod>(buffer: &DeviceBuffer) -> Result<Vec<T>> {
    let mut values = vec![T::zeroed(); buffer.len_bytes() / size_of::<T>()];
    buffer.read(0, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// Runs `amax` (in the mode `PerTensor`), `quantize_codes` and `quantize` on the rows. `g` is the static scale; with
/// `second` it is the one of the second GEMM.
fn run(
    engine: &Engine,
    vectors: &Vectors<'_>,
    element: Element,
    mode: RowScale,
    g: f32,
    second: bool,
) -> Result<Quantized> {
    let k = vectors.k;
    let rows = vectors.x.len() / k;
    let stride = k.next_multiple_of(64);
    let narrow: Vec<bf16> = vectors.x.iter().map(|x| bf16::from_f32(*x)).collect();
    let input = match element {
        Element::F32 => uploaded(engine, bytemuck::cast_slice(vectors.x))?,
        _ => uploaded(engine, bytemuck::cast_slice(&narrow))?,
    };
    // The scales that must not be used are NaN.
    let nan = f32::NAN;
    let (l1_input, l2_input) = if second { (nan, g) } else { (g, nan) };
    let scales = ExpertScales { gate: nan, up: nan, down: nan, l1_input, l2_input };
    let expert_scales = uploaded(engine, bytemuck::bytes_of(&scales))?;
    let amax_bits = uploaded(engine, &[0; 4])?;
    let (codes, block_scales) = (poisoned(engine, rows * k / 2)?, poisoned(engine, rows * k / BLOCK)?);
    let products = poisoned(engine, rows * stride * 2)?;
    let row_scales = [poisoned(engine, rows * 4)?, poisoned(engine, rows * 4)?];
    let to_codes = QuantizeParams {
        tokens: TokenCount { device: 0, bound: rows as u32, padding: 0 },
        input: input.address(),
        gather: 0,
        expert_offset: 0,
        expert_scales: expert_scales.address(),
        amax_bits: amax_bits.address(),
        output: codes.address(),
        block_scales: block_scales.address(),
        row_scales: row_scales[0].address(),
        k: k as u32,
        stride: k as u32,
        element: element as u32,
        rows: Rows::Token as u32,
        row_scale: mode as u32,
        experts: 1,
        second: second.into(),
        ..QuantizeParams::zeroed()
    };
    let to_products = QuantizeParams {
        output: products.address(),
        block_scales: 0,
        row_scales: row_scales[1].address(),
        stride: stride as u32,
        ..to_codes
    };
    let launch = |kernel, threads, shared_bytes, params| Launch {
        kernel,
        grid: [rows as u32, 1, 1],
        threads,
        shared_bytes,
        params: Params::Quantize(params),
    };
    let mut launches = vec![
        launch("quantize_codes", quantize::THREADS, quantize::SHARED_BYTES, to_codes),
        launch("quantize", quantize::THREADS, quantize::SHARED_BYTES, to_products),
    ];
    if mode == RowScale::PerTensor {
        launches.insert(0, launch("amax", amax::THREADS, 0, to_codes));
    }
    // SAFETY: a block a row, with the kernel's threads and shared memory; all buffers have the sizes that QuantizeParams
    // documents, and nothing else uses them.
    unsafe { engine.run_alone(&launches)? };
    let [scales, again] = [downloaded::<u32>(&row_scales[0])?, downloaded(&row_scales[1])?];
    ensure!(scales == again, "the two kernels write different row scales");
    Ok(Quantized {
        codes: downloaded(&codes)?,
        block_scales: downloaded(&block_scales)?,
        products: downloaded(&products)?,
        stride,
        row_scales: scales.into_iter().map(f32::from_bits).collect(),
    })
}

/// Checks everything against the host's quantizer under the decode scales `g`, one a row.
fn check(got: &Quantized, vectors: &Vectors<'_>, g: &[f32], what: &str) -> Result<()> {
    let k = vectors.k;
    for (row, (x, &g)) in vectors.x.chunks_exact(k).zip(g).enumerate() {
        ensure!(
            got.row_scales[row].to_bits() == g.to_bits(),
            "{what}: scale {} of row {row}, not {g}",
            got.row_scales[row]
        );
        for (index, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let expected = block::quantize(x, g);
            let at = row * k / BLOCK + index;
            let place = format!("{what}: row {row}, block {index}");
            ensure!(got.block_scales[at] == expected.scale, "{place}: scale {:#x}", got.block_scales[at]);
            same_bytes(&got.codes[at * 8..][..8], &expected.codes.to_le_bytes(), &place)?;
            for i in 0..BLOCK {
                let product = got.products[row * got.stride + activation_place(index * BLOCK + i)];
                ensure!(product == expected.f16(i), "{place}, element {i}: product {product:#06x}");
                let exact = e2m1::decode(expected.code(i)) * ue4m3::decode(expected.scale);
                let value = float16::f16_to_f32(product);
                ensure!(value == exact || (value.is_nan() && exact.is_nan()), "{place}, element {i}: not exact");
            }
        }
        let mut padding = (k..got.stride).map(|column| got.products[row * got.stride + activation_place(column)]);
        ensure!(padding.all(|product| product == 0), "{what}: padding of row {row} is not 0");
    }
    Ok(())
}

fn largest(x: &[f32]) -> u32 {
    x.iter().map(|x| block::magnitude_bits(*x)).max().unwrap_or(0)
}

pub(super) fn quantizer(lab: &Lab<'_>) -> Result<()> {
    let engine = lab.runner.engine().context("a GPU")?;
    let file = SafeTensors::deserialize(GOLDEN)?;
    let floats = |name: &str| -> Result<Vec<f32>> { Ok(bytemuck::pod_collect_to_vec(file.tensor(name)?.data())) };
    let mut cases = 0;
    for case in file.names().into_iter().filter_map(|name| name.strip_suffix(".x")) {
        let x = floats(&format!("{case}.x"))?;
        let g = floats(&format!("{case}.global"))?[0];
        let k = file.tensor(&format!("{case}.x"))?.shape()[1];
        let vectors = Vectors { x: &x, k };
        let rows = x.len() / k;
        for element in [Element::F32, Element::Bf16] {
            let what = format!("{case}, {element:?}");
            for second in [false, true] {
                let got = run(engine, &vectors, element, RowScale::Static, g, second)?;
                same_bytes(&got.codes, file.tensor(&format!("{case}.packed"))?.data(), &format!("{what}: codes"))?;
                same_bytes(
                    &got.block_scales,
                    file.tensor(&format!("{case}.scale"))?.data(),
                    &format!("{what}: scales"),
                )?;
                check(&got, &vectors, &vec![g; rows], &what)?;
            }
            let got = run(engine, &vectors, element, RowScale::PerTensor, f32::NAN, false)?;
            let own = block::global_scale(largest(&x));
            ensure!(!case.ends_with(".own") || own == g, "{what}: the golden scale is {g}, not {own}");
            check(&got, &vectors, &vec![own; rows], &format!("{what}, per tensor"))?;

            // Rows of a length that leaves padding, some of them longer than a pass of the block.
            for k in [80, 16, 4112] {
                let ragged = Vectors { x: &x[..x.len() / k * k], k };
                let g: Vec<_> = ragged.x.chunks_exact(k).map(|x| block::global_scale(largest(x))).collect();
                if g.is_empty() {
                    continue;
                }
                let got = run(engine, &ragged, element, RowScale::PerToken, f32::NAN, false)?;
                check(&got, &ragged, &g, &format!("{what}, per token, k {k}"))?;
            }
        }
        cases += 1;
    }
    ensure!(cases == 12, "{cases} golden cases");
    not_finite(engine)
}

/// Blocks that are not finite get the scale NaN, also where the rest of the row is fine.
fn not_finite(engine: &Engine) -> Result<()> {
    let mut x: Vec<f32> = (0..4 * 96).map(|i| (i % 23) as f32 * 0.25 - 2.0).collect();
    x[5] = f32::NAN;
    x[96 + 95] = f32::INFINITY;
    x[2 * 96 + 40] = f32::NEG_INFINITY;
    let vectors = Vectors { x: &x, k: 96 };
    for element in [Element::F32, Element::Bf16] {
        let g: Vec<_> = x.chunks_exact(96).map(|x| block::global_scale(largest(x))).collect();
        let got = run(engine, &vectors, element, RowScale::PerToken, f32::NAN, false)?;
        check(&got, &vectors, &g, "not finite, per token")?;
        let finite: Vec<_> = x.iter().copied().filter(|x| x.is_finite()).collect();
        let g = block::global_scale(largest(&finite));
        let got = run(engine, &vectors, element, RowScale::PerTensor, f32::NAN, false)?;
        check(&got, &vectors, &[g; 4], "not finite, per tensor")?;
    }
    Ok(())
}

/// The first u32 of a region of the workspace.
fn region(workspace: &DeviceBuffer, plan: &Plan, region: Region, count: usize) -> Result<Vec<u32>> {
    let mut values = vec![0u32; count];
    workspace.read(plan.region(region).offset as usize, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// The routing of one chunk of entries, of several, and of chunks with a ragged end; few and many experts.
pub(super) fn slots(lab: &Lab<'_>) -> Result<()> {
    for (experts, range, topk) in [
        (6, ExpertRange { first: 0, count: 6 }, 3),
        (40, ExpertRange { first: 13, count: 19 }, 8),
        (384, ExpertRange { first: 0, count: 384 }, 8),
        (1, ExpertRange { first: 0, count: 1 }, 1),
        (5, ExpertRange { first: 2, count: 0 }, 2),
    ] {
        for mode in ROW_MODES {
            let layer = Layer::new([16, 16, experts, topk], SWIGLU, mode).on_rank(range);
            let mut loaded = lab.load(&layer, 5000)?;
            let counts = [2049, 683, 33, 1, 2, 255, 256, 257, 2048, 5000];
            for &tokens in if lab.is_full() { &counts[..] } else { &counts[..3] } {
                let batch = Batch::new(&layer.spec.shape, tokens, 47 + tokens as u64);
                loaded.forward_f32(&batch.inputs())?;
                let gpu = gpu(&mut loaded)?;
                let (plan, workspace) = (gpu.plan(), gpu.workspace().buffer());
                let expected = Routing::new(&batch.ids, topk, range);
                let what = format!("{tokens} tokens, {range:?} of {experts} experts, topk {topk}");
                let offsets = region(workspace, plan, Region::ExpertOffset, range.count + 1)?;
                ensure!(offsets == expected.expert_offset, "{what}: expert_offset");
                let slot_token = region(workspace, plan, Region::SlotToken, expected.slots())?;
                ensure!(slot_token == expected.slot_token, "{what}: slot_token");
                let entry_slot = region(workspace, plan, Region::EntrySlot, batch.ids.len())?;
                ensure!(entry_slot == expected.slot_of, "{what}: entry_slot");
                let token_tile = plan.variant(tokens).slots as u32;
                let mut tiles = vec![0];
                for slots in offsets.windows(2) {
                    tiles.push(tiles[tiles.len() - 1] + (slots[1] - slots[0]).div_ceil(token_tile));
                }
                let tile_offset = region(workspace, plan, Region::TileOffset, range.count + 1)?;
                ensure!(tile_offset == tiles, "{what}: tile_offset");
            }
        }
    }
    Ok(())
}
