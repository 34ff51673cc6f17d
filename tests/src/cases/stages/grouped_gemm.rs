//! The grouped GEMM on numbers whose sums are exact in f32 in any order: its results are known to the bit.

use anyhow::{Result, ensure};
use half::f16;
use nvfp4_moe::activation::Activation;
use nvfp4_moe::schedule::activation_params;
use nvfp4_moe_device::format::block_fma::Processor;
use nvfp4_moe_device::format::packed::{Half, MatrixLayout, TileOrder, interleaved_row};
use nvfp4_moe_device::format::slot_groups::{GROUP_SLOTS, SlotGroups, most_groups};
use nvfp4_moe_device::format::tile_mma::{MmaTile, activation_place};
use nvfp4_moe_device::format::{BLOCK, block};
use nvfp4_moe_device::kernels::activation::{ActivationParams, activate};
use nvfp4_moe_device::kernels::grouped_gemm::{Variant, sm80, sm90};
use nvfp4_moe_device::params::{Epilogue, ExpertScales, GroupedGemmParams, TokenCount};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::device_kernels::downloaded;
use super::super::device_layout::{place, store_words};
use super::super::setup::{Matrix, OAI, SWIGLU};
use super::route::tile_offsets;
use super::{Bench, Lab, expert_of, expert_offsets, same_or_nan};

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
    /// Whether the results are to be quantized.
    quantized: bool,
}

/// The variants: the portable ones, then those for Hopper.
const VARIANTS: [Variant; 7] = {
    let ([a, b, c], [d, e, f, g]) = (sm80::VARIANTS, sm90::VARIANTS);
    [a, b, c, d, e, f, g]
};
/// Index of the first of those for few slots of Hopper, and of the first one behind them.
const FEW: usize = sm80::VARIANTS.len();
const WGMMA: usize = FEW + sm90::FEW_SHAPES.len();

/// All of one variant: `VARIANT` is its index in [`VARIANTS`].
pub(in crate::cases) fn check<const VARIANT: usize>(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    let variant = &VARIANTS[VARIANT];
    let slots = variant.slots;
    let few = (FEW..WGMMA).contains(&VARIANT);
    // Enough of K to go around the ring of stages and end in the middle of one; less than the ring; not one whole stage.
    let tile = VARIANT.checked_sub(1).and_then(|tile| sm80::TILES.get(tile));
    let stages = match tile {
        Some(tile) => tile.stages,
        None if few => sm90::FEW_SHAPES[VARIANT - FEW].stages,
        None if variant.tiles => sm90::TILES[VARIANT - WGMMA].stages,
        None => sm80::STREAM_DEEP_STAGES as usize,
    };
    let long = (stages + 1) * MmaTile::K - BLOCK;
    let short = (stages - 1) * MmaTile::K;
    let request = |epilogue, activation, columns, k, slots: &[usize], gather| Request {
        epilogue,
        activation,
        columns,
        k,
        slots: slots.to_vec(),
        // Tiles have a row a slot.
        gather: gather && !variant.tiles,
        quantized: false,
    };
    let barely_limited = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit: 150.0 };
    let limited = Activation::SwiGlu { limit: Some(5.0) };
    // Odd numbers of row tiles; columns that end inside of a tile.
    let requests = [
        request(Epilogue::Gated, SWIGLU, 80, long, &[0, slots + 3, 0, 1], true),
        request(Epilogue::Gated, OAI, 16, short, &[slots, slots - 1, 0], false),
        request(Epilogue::Gated, barely_limited, 16, 64, &[5], true),
        request(Epilogue::Gated, limited, 16, 64, &[7], false),
        request(Epilogue::Gated, limited, 48, 16, &[6], true),
        request(Epilogue::Down, SWIGLU, 208, 80, &[3, 2 * slots + 1], false),
        request(Epilogue::Down, SWIGLU, 400, 64, &[slots + 2, 1], false),
        request(Epilogue::Down, SWIGLU, 16, 128, &[0, 0], false),
        request(Epilogue::Down, SWIGLU, 16, 128, &[2], true),
        request(Epilogue::Ungated, Activation::Relu2, 80, 16, &[7], true),
        request(Epilogue::Ungated, Activation::Relu2, 16, 16, &[3], false),
        // No layer asks for these, but they mean something: a gate that is not looked at, or is 0.
        request(Epilogue::Gated, Activation::Relu2, 16, 64, &[5], false),
        request(Epilogue::Ungated, OAI, 16, 16, &[3], false),
        request(Epilogue::Ungated, limited, 16, 16, &[3], false),
    ];
    // The last row is copied by each of a thread's copies in turn, in a stage that ends inside of K. Without copies: each
    // number of slots around those for which other code runs.
    let without_copies = if variant.tiles {
        (1..=slots / GROUP_SLOTS).flat_map(|n| [GROUP_SLOTS * n - 1, GROUP_SLOTS * n]).collect()
    } else {
        vec![1, 8, 9, 16, 17, 23, 24]
    };
    let ends: Vec<usize> = tile.map_or(without_copies, |_| {
        let copied_at_once = sm80::THREADS as usize / sm80::TILE_CHUNKS;
        (1..=(slots / copied_at_once).max(1)).map(|copies| (copies * copied_at_once).min(slots)).collect()
    });
    // Rows that are gathered, too; or where they never are, a second row tile of a warp and a third that another one has.
    let last_rows = ends.into_iter().flat_map(|slots| {
        [false, true].map(|other| {
            let columns = if other && variant.tiles { 48 } else { 16 };
            request(Epilogue::Down, SWIGLU, columns, 176, &[slots], other)
        })
    });
    let quantized = [
        request(Epilogue::Gated, SWIGLU, 80, 144, &[0, slots + 3, 1, 17], true),
        request(Epilogue::Gated, limited, 16, 16, &[9, 3], false),
        request(Epilogue::Ungated, Activation::Relu2, 144, 64, &[5, 0, 12], false),
        request(Epilogue::Ungated, Activation::Relu2, 48, 32, &[1], true),
        request(Epilogue::Gated, SWIGLU, 80, 64, &[12, 20, 3], false),
        request(Epilogue::Gated, limited, 208, 64, &[slots - 7, 33], false),
        request(Epilogue::Gated, SWIGLU, 48, 64, &[slots, slots / 2 + 1], false),
        request(Epilogue::Ungated, Activation::Relu2, 80, 64, &[3, 12, 20], false),
    ];
    let quantized = quantized.into_iter().map(|request| Request { quantized: true, ..request });
    // So many units that more than half of a block's warps work, for every number of slot fragments, around their rings; or that
    // a block takes several turns, of one and of two token tiles.
    let columns = if few { 1040 } else { 352 };
    let busy = [&[12, 5], &[20, 10]].map(|slots| request(Epilogue::Down, SWIGLU, columns, long, slots, false));
    let busy = busy.into_iter().filter(|_| VARIANT == 0 || few);
    // An odd and an even number of tiles of K: the compiler copies in pairs.
    let busy = busy.chain(few.then(|| request(Epilogue::Down, SWIGLU, columns, long + MmaTile::K, &[12, 5], false)));
    // More experts than a lane looks at at once.
    let mut of_many = vec![0; 290];
    (of_many[3], of_many[170], of_many[289]) = (2, 9, 1);
    let busy = busy.chain(few.then(|| request(Epilogue::Down, SWIGLU, 48, 64, &of_many, false)));
    // Turns of all warps that begin anywhere in a group of row tiles and end in the next one.
    let busy = busy.chain(few.then(|| request(Epilogue::Down, SWIGLU, 1936, 128, &[12], false)));
    // Row tiles behind those that are stored side by side, for whoever copies groups of them.
    let wide = variant.tiles && !few;
    let busy = busy.chain(wide.then(|| request(Epilogue::Down, SWIGLU, 1936, 128, &[12, 3], false)));
    // Turns so long that the last ones are claimed, with an odd number of tiles of K: the compiler makes a loop of pairs.
    let busy = busy.chain(few.then(|| request(Epilogue::Down, SWIGLU, 1040, 2576, &[12, 3], false)));
    let requests = requests.into_iter().chain(last_rows).chain(busy).chain(quantized.filter(|request| {
        let swiglu = matches!(request.activation, Activation::SwiGlu { .. });
        variant.quantizes && (!variant.tiles || swiglu)
    }));
    for (index, request) in requests.enumerate() {
        run(&bench, VARIANT, &request, false, &mut StdRng::seed_from_u64(index as u64))?;
        if request.slots.iter().sum::<usize>() + NOT_HERE <= variant.routes_entries {
            run(&bench, VARIANT, &request, true, &mut StdRng::seed_from_u64(index as u64))?;
        }
    }
    Ok(())
}

/// Random codes under scales of two exponents and all mantissas.
pub(super) fn matrix(rows: usize, k: usize, rng: &mut StdRng) -> Matrix {
    let scale = |rng: &mut StdRng| [0x30, 0x38][rng.random_range(0..2)] + rng.random_range(0u8..8);
    Matrix {
        rows,
        cols: k,
        codes: (0..rows * k / 2).map(|_| rng.random()).collect(),
        scales: (0..rows * k / BLOCK).map(|_| scale(rng)).collect(),
        weight_scale: 1.0,
        input_scale: None,
    }
}

/// An element of a matrix in units of 1/32.
pub(super) fn element(matrix: &Matrix, row: usize, k: usize) -> i64 {
    const HALVES: [i64; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let code = matrix.codes[(row * matrix.cols + k) / 2] >> (4 * (k % 2)) & 15;
    let scale = matrix.scales[(row * matrix.cols + k) / BLOCK];
    let sixteenths = i64::from(scale & 7 | 8) << (scale >> 3 & 1);
    HALVES[usize::from(code & 7)] * sixteenths * if code & 8 == 0 { 1 } else { -1 }
}

/// The kernels' form of an activation, with NaN for the numbers that it must not use.
pub(super) fn used_numbers(activation: Activation) -> ActivationParams {
    let params = activation_params(activation);
    if matches!(activation, Activation::SwiGluOai { .. }) {
        return params;
    }
    ActivationParams { alpha: f32::NAN, beta: f32::NAN, ..params }
}

/// Packed gate and up, or one matrix.
pub(super) fn packed<T: TileOrder>(matrices: &[Matrix]) -> Vec<u8> {
    let layout = MatrixLayout::<T>::new(matrices[0].rows * matrices.len(), matrices[0].cols);
    let mut packed = vec![0; layout.bytes()];
    for (half, matrix) in [Half::Gate, Half::Up].into_iter().zip(matrices) {
        let interleaved = |row| interleaved_row(T::INTERLEAVE, half, row);
        let row_of = |row| if matrices.len() == 2 { interleaved(row) } else { row };
        place(layout, &matrix.raw(), row_of, &mut packed);
    }
    store_words::<T>(&mut packed);
    packed
}

/// Entries of no expert that is here.
const NOT_HERE: usize = 5;

/// One launch, in which the kernel finds first slots and token tiles itself or not.
fn run(bench: &Bench<'_>, variant: usize, request: &Request, routes: bool, rng: &mut StdRng) -> Result<()> {
    let Request { epilogue, columns, k, .. } = *request;
    let halves = if epilogue == Epilogue::Gated { 2 } else { 1 };
    let variant = &VARIANTS[variant];
    let experts = request.slots.len();
    let expert_offset = expert_offsets(&request.slots);
    let slots = expert_offset[experts] as usize;
    let rows = if request.gather { slots.div_ceil(2) } else { slots };
    let gather: Vec<u32> = (0..slots).map(|slot| ((slot * 7 + 3) % rows.max(1)) as u32).collect();

    let matrices: Vec<Vec<_>> = (0..experts).map(|_| (0..halves).map(|_| matrix(columns, k, rng)).collect()).collect();
    let stride = k.next_multiple_of(MmaTile::K);
    // In quarters; the padding of a row is zeros, as `quantize` leaves it.
    let quarters: Vec<i64> =
        (0..rows * stride).map(|i| if i % stride < k { rng.random_range(-40..=40) } else { 0 }).collect();
    let nan = f32::NAN;
    // From products that vanish to such that leave the range of e^x; the last row has no number at all.
    let scale = |rng: &mut StdRng| rng.random_range(0.5f32..2.0) / 64.0;
    let mut row_scales: Vec<f32> = (0..rows).map(|row| scale(rng) * 2f32.powi(6 * (row % 4) as i32 - 8)).collect();
    if let Some(last) = row_scales[rows.min(1)..].last_mut() {
        *last = nan;
    }
    // Scales that are known beforehand are the experts'.
    let (row_scales, known) = if request.quantized { (vec![], true) } else { (row_scales, false) };
    let expert_scales: Vec<_> = (0..experts)
        .map(|_| {
            let mut used = |yes: bool| if yes { scale(rng) } else { nan };
            let (gate, up) = (used(epilogue == Epilogue::Gated), used(epilogue != Epilogue::Down));
            let (l1_input, l2_input) = (used(known), used(known));
            ExpertScales { gate, up, down: used(epilogue == Epilogue::Down), l1_input, l2_input }
        })
        .collect();
    let activation = used_numbers(request.activation);

    let all_packed: Vec<u8> = matrices.iter().flat_map(|matrices| packed::<MmaTile>(matrices)).collect();
    let layout = MatrixLayout::<MmaTile>::new(columns * halves, k);
    let halves_of = |quarter: &i64| f16::from_f32(*quarter as f32 / 4.0);
    let weights = bench.upload(&all_packed)?;
    let row_of = |slot: usize| if request.gather { gather[slot] as usize } else { slot };
    let places = Places { tiles: variant.tiles, expert_offset: &expert_offset, k };
    let there = if variant.tiles { slots } else { rows };
    // What fills up the groups has no number.
    let mut in_order = vec![f16::NAN; places.len(there)];
    for (row, k) in (0..there).flat_map(|row| (0..stride).map(move |k| (row, k))) {
        let source = if variant.tiles { row_of(row) } else { row };
        in_order[places.place(row, k)] = halves_of(&quarters[source * stride + k]);
    }
    let activations = bench.upload(&in_order)?;
    let (gathered, row_scales_there) = (bench.upload(&gather)?, bench.upload(&row_scales)?);
    let scales_there = bench.upload(&expert_scales)?;
    let mut tile_offsets = tile_offsets(&expert_offset, variant.slots as u32);
    let (first_expert, topk) = (7, 3);
    let mut ids: Vec<i32> = (0..slots).map(|slot| first_expert + expert_of(&expert_offset, slot) as i32).collect();
    ids.extend([-1, 0, first_expert - 1, first_expert + experts as i32, i32::MIN][..NOT_HERE].iter());
    ids.shuffle(rng);
    let tokens = ids.len().div_ceil(topk);
    ids.resize(tokens * topk, i32::MAX);
    let (ids, there_tokens) = (bench.upload(&ids)?, bench.upload(&[tokens as u32])?);
    // What must not be read leads nowhere.
    let mut offsets_there = expert_offset.clone();
    if routes {
        offsets_there.fill(0);
        tile_offsets.fill(0);
    }
    let (offset_there, tile_offset) = (bench.upload(&offsets_there)?, bench.upload(&tile_offsets)?);
    let output_stride = columns.next_multiple_of(MmaTile::K);
    let output_places = Places { k: columns, ..places };
    let output_bytes = if request.quantized { output_places.len(slots) * 2 } else { slots * columns * 4 };
    let output = bench.room(output_bytes)?;
    let claims = bench.upload(&[0u32])?;
    let params = GroupedGemmParams {
        weights: weights.address(),
        expert_bytes: layout.bytes() as u64,
        activations: activations.address(),
        block_scales: 0,
        gather: if request.gather { gathered.address() } else { 0 },
        row_scales: if known { 0 } else { row_scales_there.address() },
        expert_scales: scales_there.address(),
        expert_offset: offset_there.address(),
        tile_offset: tile_offset.address(),
        output: output.address(),
        output_scales: 0,
        columns: columns as u32,
        row_tiles: layout.row_tiles() as u32,
        k_tiles: layout.k_tiles() as u32,
        experts: experts as u32,
        epilogue: epilogue as u32,
        k: k as u32,
        activation,
        quantized: request.quantized.into(),
        topk: topk as u32,
        first_expert: first_expert as u32,
        padding: 0,
        // The bound is larger than what there is.
        tokens: TokenCount { device: there_tokens.address(), bound: tokens as u32 + 2, padding: 0 },
        topk_ids: if routes { ids.address() } else { 0 },
        claims: claims.address(),
    };
    // SAFETY: the buffers have the documented sizes.
    unsafe { bench.grouped_gemm(variant, params)? };

    let mut expected = Vec::with_capacity(slots * columns);
    for slot in 0..slots {
        let expert = expert_of(&expert_offset, slot);
        let row = row_of(slot);
        for column in 0..columns {
            let mut sums = [0.0; 2];
            for (sum, matrix) in sums.iter_mut().zip(&matrices[expert]) {
                *sum = exact_sum(matrix, column, &quarters[row * stride..][..k])?;
            }
            let g = if known { expert_scales[expert].l1_input } else { row_scales[row] };
            expected.push(result(epilogue, &activation, sums, g, &expert_scales[expert]));
        }
    }
    let what = format!("{}, {epilogue:?}, k {k}, slots {:?}, routes {routes}", variant.kernel, request.slots);
    if !request.quantized {
        return same_or_nan(downloaded(&output)?, &expected, &what);
    }
    let products: Vec<u16> = downloaded(&output)?;
    for (slot, h) in expected.chunks_exact(columns).enumerate() {
        let mut padding = (columns..output_stride).map(|column| products[output_places.place(slot, column)]);
        ensure!(padding.all(|product| product == 0), "{what}: padding of slot {slot} is not 0");
        let expert = expert_of(&expert_offset, slot);
        for (index, h) in h.as_chunks::<BLOCK>().0.iter().enumerate() {
            let expected = block::quantize(h, expert_scales[expert].l2_input);
            for i in 0..BLOCK {
                let product = products[output_places.place(slot, index * BLOCK + i)];
                ensure!(
                    product == expected.f16(i),
                    "{what}: slot {slot}, column {}: {product:#06x}",
                    index * BLOCK + i
                );
            }
        }
    }
    Ok(())
}

/// Where a variant has the quantized numbers of a row (of a slot, in tiles).
#[derive(Clone, Copy)]
struct Places<'a> {
    tiles: bool,
    expert_offset: &'a [u32],
    k: usize,
}

impl Places<'_> {
    /// Elements that so many rows take.
    fn len(&self, rows: usize) -> usize {
        let stride = self.k.next_multiple_of(MmaTile::K);
        let experts = self.expert_offset.len() - 1;
        if self.tiles { (most_groups(rows, experts) + 1) * GROUP_SLOTS * stride } else { rows * stride }
    }

    fn place(&self, row: usize, k: usize) -> usize {
        let k_tiles = self.k.div_ceil(MmaTile::K);
        if !self.tiles {
            return row * k_tiles * MmaTile::K + activation_place(k);
        }
        let expert = expert_of(self.expert_offset, row);
        let [first, end] = [0, 1].map(|i| self.expert_offset[expert + i] as usize);
        SlotGroups::new(expert, first, end - first).place(k_tiles, row - first, k)
    }
}

/// The dot product of a row with activations in quarters, exact in f32 whatever the order.
fn exact_sum(matrix: &Matrix, row: usize, quarters: &[i64]) -> Result<f32> {
    let products = || quarters.iter().enumerate().map(|(k, quarter)| quarter * element(matrix, row, k));
    ensure!(products().map(i64::abs).sum::<i64>() < 1 << 24, "sums of {} products are not exact", matrix.cols);
    Ok(products().sum::<i64>() as f32 / 128.0)
}

/// What a GEMM makes of the sums of gate and up, or of its one matrix; `g` is the activation row's scale.
pub(super) fn result(
    epilogue: Epilogue,
    activation: &ActivationParams,
    [first, up]: [f32; 2],
    g: f32,
    scales: &ExpertScales,
) -> f32 {
    match epilogue {
        Epilogue::Gated => activate(activation, first * (g * scales.gate), up * (g * scales.up), Processor),
        Epilogue::Ungated => activate(activation, 0.0, first * (g * scales.up), Processor),
        Epilogue::Down => first * (g * scales.down),
    }
}
