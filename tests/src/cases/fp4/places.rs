//! Where the library puts the operands: packed weights against the document's maps, and the grouped GEMM from checkpoint
//! order to results, one element and one scale at a time.

use anyhow::{Result, ensure};
use bytemuck::Zeroable;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe_device::kernels::grouped_gemm::sm120;
use nvfp4_moe_device::kernels::pack;
use nvfp4_moe_device::params::{Epilogue, ExpertScales, GroupedGemmParams, PackParams};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::device_kernels::downloaded;
use super::super::setup::Lab;
use super::super::stages::Bench;
use super::document::{K, LANES, M, ONE, SCALE_K, SCALE_ONE, a_element, e2m1, scale_a_row, ue4m3};

/// Rows of a packed tile, whose fragments of 16 rows follow each other, then the scales.
const TILE_ROWS: usize = 64;
const FRAGMENT_BYTES: usize = M * K / 2;
const SCALES_AT: usize = TILE_ROWS * K / 2;
const TILE_BYTES: usize = SCALES_AT + TILE_ROWS * 4;
/// Columns of activations are padded to this.
const ACTIVATION_K: usize = 2 * K;

/// A matrix in the checkpoint's order: rows of K, the even element in the low half of a byte.
#[derive(Clone)]
struct Rows {
    k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Rows {
    fn new(rows: usize, k: usize, code: impl Fn(usize, usize) -> u8, scale: impl Fn(usize, usize) -> u8) -> Self {
        let bytes = (0..rows * k / 2).map(|i| {
            let (row, column) = (2 * i / k, 2 * i % k);
            code(row, column) | code(row, column + 1) << 4
        });
        let blocks = k / SCALE_K;
        let scales = (0..rows * blocks).map(|i| scale(i / blocks, i % blocks));
        Self { k, codes: bytes.collect(), scales: scales.collect() }
    }

    fn rows(&self) -> usize {
        self.scales.len() * SCALE_K / self.k
    }

    fn code(&self, row: usize, k: usize) -> u8 {
        self.codes[(row * self.k + k) / 2] >> (4 * (k % 2)) & 15
    }

    fn scale(&self, row: usize, block: usize) -> u8 {
        self.scales[row * self.k / SCALE_K + block]
    }

    fn values(&self) -> Vec<f64> {
        let value = |i: usize| {
            let (row, k) = (i / self.k, i % self.k);
            e2m1(self.code(row, k)) * ue4m3(self.scale(row, k / SCALE_K))
        };
        (0..self.rows() * self.k).map(value).collect()
    }
}

/// One matrix, or gate and up, as the kernel `pack` leaves it.
fn packed(bench: &Bench<'_>, matrices: &[&Rows]) -> Result<DeviceBuffer> {
    let (rows, k) = (matrices[0].rows(), matrices[0].k);
    let bytes = (rows * matrices.len()).div_ceil(TILE_ROWS) * k.div_ceil(K) * TILE_BYTES;
    let sources: Vec<_> = matrices
        .iter()
        .map(|matrix| Ok([bench.upload(&matrix.codes)?, bench.upload(&matrix.scales)?]))
        .collect::<Result<_>>()?;
    let address = |matrix: usize, part: usize| sources.get(matrix).map_or(0, |buffers| buffers[part].address());
    let output = bench.room(bytes)?;
    let params = PackParams {
        codes: address(0, 0),
        scales: address(0, 1),
        up_codes: address(1, 0),
        up_scales: address(1, 1),
        output: output.address(),
        rows: rows as u32,
        k: k as u32,
    };
    let launch = Launch {
        kernel: "pack",
        grid: [(bytes / 4).div_ceil(pack::THREADS as usize) as u32, 1, 1],
        threads: pack::THREADS,
        shared_bytes: 0,
        params: Params::Pack(params),
    };
    // SAFETY: blocks for all words of the output; the sources have as many rows as the params say.
    unsafe { bench.run(&[launch])? };
    Ok(output)
}

/// Every code and every scale of packed weights is where the lane that needs it reads: the four registers of a lane of an A
/// fragment are 16 bytes, those of the lanes follow each other; with them goes one word of scales, which serves the two
/// fragments of a pair by way of the thread selector.
pub(in crate::cases) fn packed_weights(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    // One matrix, and gate and up, in turns of 8 rows: a fragment has gate in its upper half and up in the lower one.
    for (halves, rows, k) in [(1, 144, 208), (2, 80, 208), (1, 64, 64), (2, 32, 128), (2, 16, 16)] {
        let source = |row: usize| match halves {
            1 => (0, row),
            _ => (row / 8 % 2, row / 16 * 8 + row % 8),
        };
        // Elements are numbered, and packed one digit of the number after the other.
        let (mut elements, mut scales) = (Vec::new(), Vec::new());
        for digit in 0..4 {
            let code = |half: usize, row: usize, column: usize| ((half * rows + row) * k + column) >> (4 * digit) & 15;
            let scale =
                |half: usize, row: usize, block: usize| ((half * rows + row) * k / 16 + block) >> (4 * digit) & 15;
            let matrices: Vec<_> = (0..halves)
                .map(|half| Rows::new(rows, k, |row, k| code(half, row, k) as u8, |row, b| scale(half, row, b) as u8))
                .collect();
            let bytes: Vec<u8> = downloaded(&packed(&bench, &matrices.iter().collect::<Vec<_>>())?)?;
            elements.resize(2 * bytes.len(), 0);
            scales.resize(bytes.len(), 0);
            for (place, byte) in bytes.iter().enumerate() {
                elements[2 * place] |= usize::from(byte & 15) << (4 * digit);
                elements[2 * place + 1] |= usize::from(byte >> 4) << (4 * digit);
                scales[place] |= usize::from(*byte) << (4 * digit);
            }
        }
        ensure!(halves * rows * k < 1 << 16, "more elements than numbers");
        let k_tiles = k.div_ceil(K);
        for fragment in 0..(halves * rows).div_ceil(TILE_ROWS) * TILE_ROWS / M {
            for k_tile in 0..k_tiles {
                let tile = (fragment / 4 * k_tiles + k_tile) * TILE_BYTES;
                let what = |lane: usize| {
                    format!("{halves} of {rows} x {k}, fragment {fragment}, K tile {k_tile}, lane {lane}")
                };
                for lane in 0..LANES {
                    for i in 0..32 {
                        let (m, column) = a_element(lane, i);
                        let (half, row) = source(fragment * M + m);
                        let column = k_tile * K + column;
                        let exists = row < rows && column < k;
                        let expected = if exists { (half * rows + row) * k + column } else { 0 };
                        let found = elements[2 * (tile + fragment % 4 * FRAGMENT_BYTES + 16 * lane) + i];
                        ensure!(found == expected, "{}: element {i} is {found}, not {expected}", what(lane));
                    }
                    // Rows of a pair of fragments, in the order of lanes.
                    let word = tile + SCALES_AT + 4 * (fragment % 4 / 2 * 32 + 8 * (lane % 4) + lane / 4);
                    let Some(m) = scale_a_row(lane, fragment % 2) else { continue };
                    let (half, row) = source(fragment * M + m);
                    for quarter in 0..4 {
                        let block = k_tile * 4 + quarter;
                        let exists = row < rows && block < k / SCALE_K;
                        let expected = if exists { (half * rows + row) * k / SCALE_K + block } else { 0 };
                        let found = scales[word + quarter];
                        ensure!(found == expected, "{}: scale {quarter} is {found}, not {expected}", what(lane));
                    }
                }
            }
        }
    }
    Ok(())
}

/// The result `[slots, rows]` of the shipped grouped GEMM for one expert, all global scales 1.
fn multiply(bench: &Bench<'_>, weights: &Rows, activations: &Rows) -> Result<Vec<f32>> {
    let (rows, k, slots) = (weights.rows(), weights.k, activations.rows());
    let stride = k.next_multiple_of(ACTIVATION_K);
    // Nothing behind the last column is read: codes of -6 and scales that are no numbers.
    let padded = |bytes: &[u8], width: usize, stride: usize| -> Vec<u8> {
        let row = |row: &[u8]| [row, &vec![0xFF; stride - width]].concat();
        bytes.chunks_exact(width).flat_map(row).collect()
    };
    let there = packed(bench, &[weights])?;
    let codes = bench.upload(&padded(&activations.codes, k / 2, stride / 2))?;
    let scales = bench.upload(&padded(&activations.scales, k / SCALE_K, stride / SCALE_K))?;
    let one = bench.upload(&[ExpertScales { gate: 1.0, up: 1.0, down: 1.0, l1_input: 1.0, l2_input: 1.0 }])?;
    let variant = &sm120::VARIANTS[0];
    let (offsets, tiles) =
        (bench.upload(&[0, slots as u32])?, bench.upload(&[0, slots.div_ceil(variant.slots) as u32])?);
    let output = bench.room(slots * rows * 4)?;
    let row_tiles = rows.div_ceil(TILE_ROWS) as u32;
    let params = GroupedGemmParams {
        weights: there.address(),
        expert_bytes: there.len_bytes() as u64,
        activations: codes.address(),
        block_scales: scales.address(),
        expert_scales: one.address(),
        expert_offset: offsets.address(),
        tile_offset: tiles.address(),
        output: output.address(),
        columns: rows as u32,
        row_tiles,
        k_tiles: k.div_ceil(K) as u32,
        experts: 1,
        epilogue: Epilogue::Down as u32,
        k: k as u32,
        ..GroupedGemmParams::zeroed()
    };
    // SAFETY: the buffers have the documented sizes.
    unsafe { bench.grouped_gemm(variant, params)? };
    downloaded(&output)
}

/// Multiplies and compares each result with the naive one, which is exact.
fn compare(bench: &Bench<'_>, weights: &Rows, activations: &Rows, what: &str) -> Result<()> {
    let got = multiply(bench, weights, activations)?;
    let (of_weights, of_activations) = (weights.values(), activations.values());
    for (i, got) in got.iter().enumerate() {
        let (slot, row, k) = (i / weights.rows(), i % weights.rows(), weights.k);
        let pairs = of_weights[row * k..][..k].iter().zip(&of_activations[slot * k..][..k]);
        let expected: f64 = pairs.map(|(weight, activation)| weight * activation).sum();
        ensure!(f64::from(*got) == expected, "{what}: row {row} of slot {slot} is {got}, but {expected} was expected");
    }
    Ok(())
}

/// Numbers of slots for each number of columns that the device may choose (16, 32, 64, 128), and one that takes two tiles.
const SLOTS: [usize; 5] = [16, 32, 64, 128, 129];

/// The grouped GEMM, with one element of each row of weights, then with one scale of each row of either side that matters.
pub(in crate::cases) fn grouped_gemm(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    // Three tiles of rows, of which a block takes two; three along K, of which a stage takes two, the last not whole.
    let (rows, k) = (144, 144);
    let blocks = k / SCALE_K;
    let plain = |_, _| SCALE_ONE;
    let mut rng = StdRng::seed_from_u64(144);
    let random: Vec<u8> = (0..SLOTS[4] * k).map(|_| rng.random_range(0..16)).collect();
    for slots in SLOTS {
        let activations = Rows::new(slots, k, |slot, column| random[slot * k + column], plain);
        // Each element in turn where there are few slots, each seventh where there are more: rows differ in theirs.
        for shift in (0..k).step_by(if slots == SLOTS[0] { 1 } else { 7 }) {
            let place = |row: usize| (5 * row + shift) % k;
            let weights = Rows::new(rows, k, |row, column| if column == place(row) { ONE } else { 0 }, plain);
            compare(&bench, &weights, &activations, &format!("{slots} slots, row m has column 5 m + {shift}"))?;
        }
        // Numbers from 1 to 0x7E, so all but 0 and NaN; in blocks of zeros the largest ones.
        let number = |row: usize, block: usize, at: usize| match block == at {
            true => (1 + (row * 7 + block * 29) % 126) as u8,
            false => 0x7E,
        };
        let ones =
            |rows| Rows::new(rows, k, |row, column| if column % SCALE_K == row % SCALE_K { ONE } else { 0 }, plain);
        let in_block = |rows, at: usize| {
            let code = move |_: usize, column: usize| if column / SCALE_K == at { ONE } else { 0 };
            Rows::new(rows, k, code, move |row, block| number(row, block, at))
        };
        for at in 0..blocks {
            compare(
                &bench,
                &in_block(rows, at),
                &ones(slots),
                &format!("{slots} slots, scales of weights, block {at}"),
            )?;
            compare(&bench, &ones(rows), &in_block(slots, at), &format!("{slots} slots, scales of slots, block {at}"))?;
        }
    }
    Ok(())
}
