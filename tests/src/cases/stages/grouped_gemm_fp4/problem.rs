//! Weights, activations and scales of one launch: random ones, or such that every rounding and every branch of what comes
//! behind the sums is decided by the last bit.

use std::collections::BTreeMap;

use nvfp4_moe_device::format::{BLOCK, ue4m3};
use nvfp4_moe_device::params::{Epilogue, ExpertScales};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::super::setup::Matrix;
use super::super::grouped_gemm::matrix;
use super::{Codes, Experts, Request};

/// What a launch is given.
pub(super) struct Problem {
    /// Row of activations of each slot.
    pub(super) gather: Vec<u32>,
    /// Gate and up, or one matrix, of each expert.
    pub(super) matrices: Vec<Vec<Matrix>>,
    /// A row a token.
    pub(super) activations: Matrix,
    pub(super) row_scales: Vec<f32>,
    pub(super) expert_scales: Vec<ExpertScales>,
}

/// Rows of activations of a request, and which one each slot takes.
fn gathered(request: &Request) -> (usize, Vec<u32>) {
    let slots: usize = request.slots.iter().sum();
    let rows = if request.gather { slots.div_ceil(2) } else { slots };
    let row = |slot| if request.gather { (slot * 7 + 3) % rows } else { slot };
    (rows, (0..slots).map(|slot| row(slot) as u32).collect())
}

/// The last row has a scale that is no number, and another one a block.
fn with_nan(request: &Request, activations: &mut Matrix, row_scales: &mut [f32]) {
    if let [_, .., last] = row_scales {
        *last = f32::NAN;
    }
    if activations.rows > 2 {
        activations.scales[2 * request.k / BLOCK - 1] = ue4m3::NAN;
    }
}

pub(super) fn random(request: &Request, seed: u64) -> Problem {
    let rng = &mut StdRng::seed_from_u64(seed);
    let Request { epilogue, columns, k, .. } = *request;
    let halves = if epilogue == Epilogue::Gated { 2 } else { 1 };
    let experts = request.slots.len();
    let mut matrices: Vec<Vec<_>> =
        (0..experts).map(|_| (0..halves).map(|_| matrix(columns, k, rng)).collect()).collect();
    for matrix in matrices.iter_mut().flatten() {
        // A row whose sums are 0.
        let row = rng.random_range(0..columns);
        matrix.codes[row * k / 2..(row + 1) * k / 2].fill(0);
    }
    let (rows, gather) = gathered(request);
    let mut activations = matrix(rows, k, rng);
    let nan = f32::NAN;
    let scale = |rng: &mut StdRng| rng.random_range(0.5f32..2.0) / 64.0;
    // From products that vanish to such that leave the range of e^x.
    let mut row_scales: Vec<f32> = (0..rows).map(|row| scale(rng) * 2f32.powi(6 * (row % 4) as i32 - 8)).collect();
    with_nan(request, &mut activations, &mut row_scales);
    let by_expert = request.scales == Experts;
    let expert_scales = (0..experts)
        .map(|expert| {
            let mut used = |yes: bool| if yes { scale(rng) } else { nan };
            let (gate, up) = (used(epilogue == Epilogue::Gated), used(epilogue != Epilogue::Down));
            let down = used(epilogue == Epilogue::Down);
            let l1_input = used(by_expert && epilogue != Epilogue::Down);
            // With codes it is the scale of the output: some of its blocks saturate, some vanish.
            let l2_input = used(by_expert && epilogue == Epilogue::Down || request.output == Codes);
            ExpertScales { gate, up, down, l1_input, l2_input: l2_input * 2f32.powi(5 * (expert % 3) as i32 - 8) }
        })
        .collect();
    Problem { gather, matrices, activations, row_scales, expert_scales }
}

/// Every tie of a code, and the largest code, as codes and scales of weights; the sign bit is separate.
const TIES: [(u8, u8); 8] = [(7, 0x38), (1, 0x30), (3, 0x30), (2, 0x3A), (2, 0x3E), (4, 0x3A), (4, 0x3E), (6, 0x3A)];
/// Less than 1.
const SMALL: [(u8, u8); 3] = [(1, 0x38), (0, 0x38), (1, 0x30)];

/// Blocks of 16 columns under these scales: the largest element is 6, or 1 in either half of the block, or 0.
fn weight(column: usize) -> (u8, u8) {
    let (block, i) = (column / BLOCK, column % BLOCK);
    let negative = if i % 8 != 0 && i >= 8 { 8 } else { 0 };
    let (code, scale) = match (block, i) {
        (0, 8) => (0, 0x38),
        (0, _) => TIES[i % 8],
        (1 | 4, 5) | (2 | 5, 10) => (2, 0x38),
        (1 | 2 | 4 | 5, _) => SMALL[i % 3],
        _ => (0, 0x38),
    };
    (if code == 0 { 0 } else { code | negative }, scale)
}

/// Scales of rows.
const ROW_SCALES: [f32; 25] = [
    1.0,
    // The scale of a block of up to 6 and of up to 1 is a tie, of which the even one is below and above.
    1.0625,
    1.1875,
    6.375,
    7.125,
    // That of a block of up to 1 is the next number above a tie; the second one where 32 times the square is h.
    6.375_000_5,
    2.524_876_4,
    // The largest number, also as 32 times the square; products beyond it.
    f32::MAX,
    (1u64 << 61) as f32,
    4.253_529_6e37,
    // Nothing is left, or so little that a block's scale is 0.
    1e-45,
    1e-25,
    // Subnormal scales: ties, odd ones, the one that becomes normal; less than the smallest.
    1.5 / 512.0,
    2.5 / 512.0,
    3.0 / 512.0,
    7.75 / 512.0,
    0.3 / 512.0,
    // The largest scale, the tie below it, more than it.
    448.0,
    432.0,
    512.0,
    // Gates of 89, of what e^x makes the largest power of two, of 104 and beyond, times 32.
    2.8,
    2.77,
    3.25,
    4.0,
    0.3,
];

/// Which of [`ROW_SCALES`] each row gets, and whether it is negative: for each number of columns, even and odd experts, even
/// and odd slots all of them in turn.
fn special_rows(request: &Request, rows: usize, gather: &[u32]) -> Vec<(f32, bool)> {
    let mut taken = BTreeMap::new();
    let mut special = vec![None; rows];
    let mut gather = gather.iter();
    for (expert, &slots) in request.slots.iter().enumerate() {
        for (slot, &row) in gather.by_ref().take(slots).enumerate() {
            special[row as usize].get_or_insert_with(|| {
                let next = taken.entry((slots.next_power_of_two(), expert % 2, slot % 2)).or_insert(0);
                *next += 1;
                let (turn, index) = ((*next - 1) / ROW_SCALES.len(), (*next - 1) % ROW_SCALES.len());
                (ROW_SCALES[index], turn % 2 == 1)
            });
        }
    }
    special.into_iter().map(|row| row.unwrap_or((1.0, false))).collect()
}

/// Each row of activations is one element, so that the sums are the weights of [`weight`], or 1 for gate, with either sign.
pub(super) fn special(request: &Request) -> Problem {
    let Request { epilogue, columns, k, .. } = *request;
    let constant = |code: &dyn Fn(usize) -> (u8, u8)| Matrix {
        rows: columns,
        cols: k,
        codes: (0..columns * k / 2).map(|i| code(2 * i / k).0 * 0x11).collect(),
        scales: (0..columns * k / BLOCK).map(|i| code(i * BLOCK / k).1).collect(),
        weight_scale: 1.0,
        input_scale: None,
    };
    let mut matrices = vec![constant(&weight)];
    if epilogue == Epilogue::Gated {
        matrices.insert(0, constant(&|_| (2, 0x38)));
    }
    let (rows, gather) = gathered(request);
    let special = special_rows(request, rows, &gather);
    let mut activations =
        Matrix { codes: vec![0; rows * k / 2], scales: vec![0x38; rows * k / BLOCK], rows, ..constant(&weight) };
    for (row, (_, negative)) in special.iter().enumerate() {
        let place = row * 5 % k;
        activations.codes[(row * k + place) / 2] = (if *negative { 10 } else { 2 }) << (4 * (place % 2));
    }
    let mut row_scales: Vec<f32> = special.iter().map(|(scale, _)| *scale).collect();
    with_nan(request, &mut activations, &mut row_scales);
    let gated = epilogue == Epilogue::Gated;
    let expert_scales = (0..request.slots.len())
        .map(|expert| {
            let nan = f32::NAN;
            // With the last number below 2, gate times up is the largest number under the scale 2^61.
            let up = if expert % 2 == 0 { 1.0 } else { 2.0 - f32::EPSILON };
            let l2_input = match (request.output == Codes, gated) {
                (false, _) => nan,
                (true, false) => 1.0,
                (true, true) => [32.0, 34.0][expert % 2],
            };
            let (gate, down) = if gated { (32.0, nan) } else { (nan, up) };
            let (up, down) = if epilogue == Epilogue::Down { (nan, down) } else { (up, nan) };
            ExpertScales { gate, up, down, l1_input: nan, l2_input }
        })
        .collect();
    Problem { gather, matrices: vec![matrices; request.slots.len()], activations, row_scales, expert_scales }
}
