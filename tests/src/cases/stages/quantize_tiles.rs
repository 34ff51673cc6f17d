//! The quantizer into tiles of slots: of tokens, once for every slot, and of rows of h.

use anyhow::Result;
use bytemuck::Zeroable;
use half::f16;
use nvfp4_moe::routing::Routing;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::format::slot_groups::{GROUP_SLOTS, SlotGroups, TILE_K, most_groups};
use nvfp4_moe_device::format::{BLOCK, block};
use nvfp4_moe_device::kernels::quantize;
use nvfp4_moe_device::params::{Element, ExpertScales, QuantizeParams, RowScale, Rows, TokenCount};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::quantize::{every_warp, largest_finite, rows as rows_of, upload};
use super::{Bench, Lab, expert_of, same};

/// What to quantize, and how.
#[derive(Clone, Copy, Debug)]
struct Request {
    k: usize,
    element: Element,
    scale: RowScale,
    tokens: usize,
    topk: usize,
    /// Whether rows are slots, of h.
    second: bool,
    /// Threads of a block, and blocks of a row.
    threads: u32,
    blocks: u32,
    /// Power of two of all numbers and of static scales.
    exponent: i32,
}

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    let request = |k, element, scale, tokens, topk| Request {
        k,
        element,
        scale,
        tokens,
        topk,
        second: false,
        threads: quantize::THREADS,
        blocks: 1,
        exponent: 0,
    };
    let of_h = |k, scale| Request { second: true, ..request(k, Element::F32, scale, 5, 3) };
    let shared = |request, threads, blocks| Request { threads, blocks, ..request };
    // Every number of slots around four at a time, and more than a warp has lanes; rows longer than a block reads at once.
    let requests = [
        request(80, Element::Bf16, RowScale::Static, 9, 1),
        request(64, Element::F16, RowScale::PerToken, 7, 2),
        request(16, Element::Bf16, RowScale::PerTensor, 5, 3),
        request(48, Element::Bf16, RowScale::PerToken, 6, 4),
        request(144, Element::F16, RowScale::Static, 3, 5),
        request(32, Element::Bf16, RowScale::PerTensor, 2, 8),
        request(16, Element::Bf16, RowScale::PerToken, 2, 39),
        request(4176, Element::Bf16, RowScale::PerToken, 2, 2),
        request(4176, Element::F16, RowScale::PerToken, 2, 2),
        shared(request(2128, Element::Bf16, RowScale::Static, 4, 6), quantize::FEW_THREADS, 2),
        shared(request(2128, Element::F16, RowScale::PerToken, 4, 7), quantize::FEW_THREADS, 2),
        of_h(80, RowScale::Static),
        of_h(208, RowScale::PerTensor),
        of_h(4176, RowScale::PerToken),
    ];
    // So small and so large that quotients are not made of reciprocals.
    let extreme = [-125, -100, 100, 118].map(|exponent| {
        [
            request(48, Element::Bf16, RowScale::PerToken, 6, 2),
            of_h(80, RowScale::Static),
            of_h(48, RowScale::PerTensor),
        ]
        .map(|request| Request { exponent, ..request })
    });
    for (index, request) in requests.into_iter().chain(extreme.into_iter().flatten()).enumerate() {
        let mut rng = StdRng::seed_from_u64(index as u64);
        let x = |rows: usize, rng: &mut StdRng| rows_of(request.k, rows, rng);
        run(&bench, request, x, &mut rng)?;
    }
    // Rows whose largest element is one warp's after the other.
    let warps = quantize::THREADS as usize / 32;
    let k = quantize::THREADS as usize * BLOCK;
    let one_warps = |rows: usize, _: &mut StdRng| every_warp(rows, k);
    run(&bench, request(k, Element::Bf16, RowScale::PerToken, warps, 2), one_warps, &mut StdRng::seed_from_u64(0))
}

/// Quantizes so many rows that `rows` makes.
fn run(
    bench: &Bench<'_>,
    request: Request,
    rows: impl Fn(usize, &mut StdRng) -> Vec<f32>,
    rng: &mut StdRng,
) -> Result<()> {
    let Request { k, element, scale, tokens, topk, second, threads, blocks, exponent } = request;
    let power = 2f32.powi(exponent);
    // Some picks are not here, and one expert has none.
    let range = ExpertRange { first: 2, count: 6 };
    let mut ids: Vec<i32> = (0..tokens * topk).map(|_| [1, 2, 3, 5, 6, 7, 8, -1][rng.random_range(0..8)]).collect();
    ids[0] = 1;
    let routing = Routing::new(&ids, topk, range);
    let slots = routing.slots();
    let row_count = if second { slots } else { tokens };
    let mut x: Vec<f32> = rows(row_count, rng).iter().map(|x| x * power).collect();
    let input = upload(bench, element, &mut x)?;
    let row_of = |slot: usize| if second { slot } else { routing.slot_token[slot] as usize };
    let row = |row: usize| &x[row * k..(row + 1) * k];

    let nan = f32::NAN;
    // Of tokens, all experts have the same.
    let of_tokens = rng.random_range(0.5f32..2.0) * power;
    let scales: Vec<_> = (0..range.count)
        .map(|_| {
            let [l1_input, l2_input] =
                if second { [nan, rng.random_range(0.5f32..2.0) * power] } else { [of_tokens, nan] };
            ExpertScales { gate: nan, up: nan, down: nan, l1_input, l2_input }
        })
        .collect();
    let tensor = largest_finite(&x);
    let g = |slot: usize| match scale {
        RowScale::PerToken => {
            let magnitudes = row(row_of(slot)).iter().map(|x| block::magnitude_bits(*x));
            block::global_scale(magnitudes.max().unwrap_or(0))
        }
        RowScale::PerTensor => block::global_scale(tensor),
        RowScale::Static if second => scales[expert_of(&routing.expert_offset, slot)].l2_input,
        RowScale::Static => of_tokens,
    };

    let stride = k.next_multiple_of(TILE_K);
    let elements = (most_groups(slots, range.count) + 1) * GROUP_SLOTS * stride;
    // What fills up the groups stays as it is.
    let before = vec![f16::NAN; elements];
    let (output, row_scales) = (bench.upload(&before)?, bench.room(slots * 4)?);
    let (expert_offset, expert_scales) = (bench.upload(&routing.expert_offset)?, bench.upload(&scales)?);
    let (entry_slot, topk_ids) = (bench.upload(&routing.slot_of)?, bench.upload(&ids)?);
    let amax_bits = bench.upload(&[tensor])?;
    let params = QuantizeParams {
        tokens: TokenCount { device: 0, bound: tokens as u32, padding: 0 },
        input: input.address(),
        expert_offset: expert_offset.address(),
        expert_scales: expert_scales.address(),
        amax_bits: amax_bits.address(),
        output: output.address(),
        row_scales: row_scales.address(),
        k: k as u32,
        stride: stride as u32,
        element: element as u32,
        rows: if second { Rows::Slot } else { Rows::Token } as u32,
        row_scale: scale as u32,
        experts: range.count as u32,
        second: second.into(),
        topk: topk as u32,
        entry_slot: entry_slot.address(),
        topk_ids: topk_ids.address(),
        first_expert: range.first as u32,
        unread: (blocks > 1).into(),
        ..QuantizeParams::zeroed()
    };
    let launch = Launch {
        kernel: "quantize_tiles",
        // One row too many, which must do nothing.
        grid: [row_count as u32 + 1, blocks, 1],
        threads,
        shared_bytes: quantize::tiles_shared_bytes(topk as u32),
        params: Params::Quantize(params),
    };
    // SAFETY: the kernel's threads, grid and shared memory; the buffers have the documented sizes.
    unsafe { bench.run(&[launch])? };

    let mut expected: Vec<u16> = before.iter().map(|x| x.to_bits()).collect();
    for slot in 0..slots {
        let expert = expert_of(&routing.expert_offset, slot);
        let [first, end] = [0, 1].map(|i| routing.expert_offset[expert + i] as usize);
        let groups = SlotGroups::new(expert, first, end - first);
        let blocks: Vec<_> =
            row(row_of(slot)).as_chunks::<BLOCK>().0.iter().map(|x| block::quantize(x, g(slot))).collect();
        for column in 0..stride {
            let product = blocks.get(column / BLOCK).map_or(0, |block| block.f16(column % BLOCK));
            expected[groups.place(stride / TILE_K, slot - first, column)] = product;
        }
    }
    let g: Vec<u32> = (0..slots).map(|slot| g(slot).to_bits()).collect();
    same(&row_scales, &g, &format!("row scales, {request:?}"))?;
    same(&output, &expected, &format!("products, {request:?}"))
}
