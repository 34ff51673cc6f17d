//! The layer in f64, deliberately plain: dequantize, loop, sum. No packed layout, no threads, no shortcuts.
//!
//! Only the rules that the contract fixes in f32 are f32 here: the quantizer itself and the h that it is given.

use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::{RawExpert, RawMatrix};
use nvfp4_moe::io::{HiddenRows, Inputs, ScaleMode};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::format::{BLOCK, block, e2m1, ue4m3};

/// What a layer should give.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Columns.
    pub width: usize,
    /// `[tokens, width]`.
    pub values: Vec<f64>,
    /// Tokens of which some element of h lies so near the middle between two codes (or its block's scale between two
    /// scales) that an f32 and an f64 forward may round it differently.
    pub undecided: Vec<bool>,
}

/// The result, `[tokens, hidden]`, of the experts of `range` (`experts[i]` is the one with id `range.first + i`).
///
/// # Panics
/// When lengths do not fit, or a static scale is missing.
#[must_use]
pub fn forward(
    experts: &[RawExpert<'_>],
    range: ExpertRange,
    activation: Activation,
    scales: ScaleMode,
    inputs: &Inputs<'_>,
) -> Vec<f64> {
    expected(experts, range, activation, scales, inputs).values
}

/// [`forward`], with what is needed to judge an f32 forward by it.
///
/// # Panics
/// As [`forward`].
#[must_use]
pub fn expected(
    experts: &[RawExpert<'_>],
    range: ExpertRange,
    activation: Activation,
    scales: ScaleMode,
    inputs: &Inputs<'_>,
) -> Expected {
    assert_eq!(experts.len(), range.count);
    let tokens = inputs.topk_ids.len() / inputs.topk;
    let width = inputs.hidden.len() / tokens.max(1);
    let hidden: Vec<Vec<f32>> = (0..tokens).map(|token| row(&inputs.hidden, token, width)).collect();

    // Every (token, k) that has its expert here, with the activated result of the first product.
    struct Slot {
        token: usize,
        weight: f32,
        expert: usize,
        h: Vec<f32>,
    }
    let batch_scale = scale_of(hidden.iter().flatten().copied().filter(|x| x.is_finite()));
    let mut slots = Vec::new();
    for pick in 0..tokens * inputs.topk {
        let token = pick / inputs.topk;
        let Some(expert) = inputs.topk_ids[pick].checked_sub(range.first as i32).filter(|e| *e >= 0) else { continue };
        let expert = expert as usize;
        if expert >= range.count {
            continue;
        }
        let raw = &experts[expert];
        let g = match scales {
            ScaleMode::Static => {
                let up = raw.up.input_scale.expect("up's input scale");
                raw.gate.map_or(up, |gate| gate.input_scale.expect("gate's input scale").max(up))
            }
            ScaleMode::PerToken => scale_of(hidden[token].iter().copied()),
            ScaleMode::PerTensor => batch_scale,
        };
        let x = quantized(&hidden[token], g);
        let up = product(&raw.up, &x);
        let gate = raw.gate.as_ref().map(|gate| product(gate, &x));
        let h = (0..up.len()).map(|i| activate(activation, gate.as_ref().map(|gate| gate[i]), up[i]) as f32).collect();
        slots.push(Slot { token, weight: inputs.topk_weights[pick], expert, h });
    }

    let batch_scale = scale_of(slots.iter().flat_map(|slot| &slot.h).copied().filter(|h| h.is_finite()));
    let mut values = vec![0.0; tokens * width];
    let mut undecided = vec![false; tokens];
    for slot in slots {
        let raw = &experts[slot.expert].down;
        let g = match scales {
            ScaleMode::Static => raw.input_scale.expect("down's input scale"),
            ScaleMode::PerToken => scale_of(slot.h.iter().copied()),
            ScaleMode::PerTensor => batch_scale,
        };
        undecided[slot.token] |= slot.h.as_chunks().0.iter().any(|h| is_undecided(h, g));
        let y = product(raw, &quantized(&slot.h, g));
        for (value, y) in values[slot.token * width..].iter_mut().zip(y) {
            *value += f64::from(slot.weight) * y;
        }
    }
    Expected { width, values, undecided }
}

/// Whether a block is quantized differently when its elements change as much as f32 rounding can change them: some
/// 10 units in the last place of the largest, which is 6 or less in units of codes.
fn is_undecided(h: &[f32; BLOCK], g: f32) -> bool {
    const RELATIVE: f32 = 2e-6;
    const CODE_UNITS: f32 = 1e-5;
    let amax = h.iter().fold(0f32, |amax, x| amax.max(x.abs()));
    if !amax.is_finite() || amax == 0.0 {
        return false;
    }
    let s = (amax / (e2m1::MAX * g)).max(ue4m3::MIN_SUBNORMAL);
    let scale = ue4m3::encode(s);
    let divisor = ue4m3::decode(scale) * g;
    let code_is_undecided = |x: &f32| {
        let code = x / divisor;
        e2m1::decode(e2m1::encode(code - CODE_UNITS)) != e2m1::decode(e2m1::encode(code + CODE_UNITS))
    };
    ue4m3::encode(s * (1.0 - RELATIVE)) != ue4m3::encode(s * (1.0 + RELATIVE)) || h.iter().any(code_is_undecided)
}

/// One row of hidden states, exactly.
fn row(rows: &HiddenRows<'_>, token: usize, width: usize) -> Vec<f32> {
    match rows {
        HiddenRows::Bf16(rows) => rows[token * width..][..width].iter().map(|x| x.to_f32()).collect(),
        HiddenRows::F16(rows) => rows[token * width..][..width].iter().map(|x| x.to_f32()).collect(),
    }
}

/// Decode scale of a row or tensor: a largest magnitude that is 0 or not finite gives 1.
fn scale_of(values: impl Iterator<Item = f32>) -> f32 {
    let amax = values.fold(0f32, |amax, x| if x.is_finite() { amax.max(x.abs()) } else { f32::INFINITY });
    let g = amax / 2688.0;
    if g == 0.0 || !g.is_finite() { 1.0 } else { g }
}

/// What a row is after quantization under the decode scale `g`; NaN in a block that holds a number that is not finite.
fn quantized(row: &[f32], g: f32) -> Vec<f64> {
    row.as_chunks()
        .0
        .iter()
        .flat_map(|x| {
            let block = block::quantize(x, g);
            (0..16).map(move |i| value(block.code(i), block.scale) * g as f64)
        })
        .collect()
}

fn value(code: u8, scale: u8) -> f64 {
    e2m1::decode(code) as f64 * ue4m3::decode(scale) as f64
}

/// `matrix * x`: one row of the matrix at a time, one block at a time, so that large ones need no memory.
fn product(raw: &RawMatrix<'_>, x: &[f64]) -> Vec<f64> {
    let values: [f64; 16] = std::array::from_fn(|code| f64::from(e2m1::decode(code as u8)));
    let blocks = raw.cols / BLOCK;
    let row = |row: usize| {
        let codes = raw.codes[row * raw.cols / 2..][..raw.cols / 2].chunks_exact(BLOCK / 2);
        let scales = &raw.scales[row * blocks..][..blocks];
        let sums = codes.zip(x.chunks_exact(BLOCK)).map(|(codes, x)| {
            let pairs = codes.iter().zip(x.chunks_exact(2));
            pairs
                .map(|(byte, x)| values[(byte & 15) as usize] * x[0] + values[(byte >> 4) as usize] * x[1])
                .sum::<f64>()
        });
        let sum: f64 = sums.zip(scales).map(|(sum, scale)| sum * f64::from(ue4m3::decode(*scale))).sum();
        sum * f64::from(raw.weight_scale)
    };
    (0..raw.rows).map(row).collect()
}

fn activate(activation: Activation, gate: Option<f64>, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    // Comparisons, because f64::min and max would replace NaN by the limit.
    let below = |x: f64, limit: f64| if x > limit { limit } else { x };
    let within = |x: f64, limit: f64| if x < -limit { -limit } else { below(x, limit) };
    match activation {
        Activation::SwiGlu { limit } => {
            let limit = limit.map_or(f64::INFINITY, f64::from);
            let gate = below(gate.expect("a gate"), limit);
            gate * sigmoid(gate) * within(up, limit)
        }
        Activation::SwiGluOai { alpha, beta, limit } => {
            let gate = below(gate.expect("a gate"), limit.into());
            gate * sigmoid(f64::from(alpha) * gate) * (within(up, limit.into()) + f64::from(beta))
        }
        Activation::Relu2 if up < 0.0 => 0.0,
        Activation::Relu2 => up * up,
    }
}

/// Relative L2 distance of each row of `width` from the expected one; a row that should be NaN and is has 0.
#[must_use]
pub fn row_errors(got: &[f32], expected: &[f64], width: usize) -> Vec<f64> {
    assert_eq!(got.len(), expected.len());
    // No rows have no width.
    let width = width.max(1);
    got.chunks_exact(width)
        .zip(expected.chunks_exact(width))
        .map(|(got, expected)| {
            if expected.iter().all(|x| x.is_nan()) && got.iter().all(|x| x.is_nan()) {
                return 0.0;
            }
            let distance: f64 = got.iter().zip(expected).map(|(x, y)| (*x as f64 - y).powi(2)).sum();
            let norm: f64 = expected.iter().map(|y| y * y).sum();
            if distance == 0.0 { 0.0 } else { (distance / norm).sqrt() }
        })
        .collect()
}

/// As close as an f32 forward comes in every row, in relative L2: products of NVFP4 numbers lie on a coarse grid, so f32
/// sums are nearly exact, and what is left are the roundings of alpha, of the activation and of the router weights.
pub const CLOSE: f64 = 1e-6;
/// What a row may be off at most, unless a code of h may differ.
const FAR: f64 = 2e-3;
/// What a few differing codes of h can do to a row.
const FLIPPED: f64 = 0.1;

impl Expected {
    /// Checks an f32 result: at least 98% of the rows within `close` (all of few, but for one of which a code of h may
    /// differ), every row within 2e-3 unless a code of h may differ, and then within 0.1.
    ///
    /// # Errors
    /// What is off, beginning with `what`.
    pub fn check(&self, got: &[f32], close: f64, what: &str) -> Result<(), String> {
        if got.len() != self.values.len() {
            return Err(format!("{what}: {} elements, but {} were expected", got.len(), self.values.len()));
        }
        let errors = row_errors(got, &self.values, self.width);
        let far: Vec<_> = errors.iter().enumerate().filter(|(_, error)| error.is_nan() || **error > close).collect();
        let without_reason = far.iter().filter(|(row, _)| !self.undecided[*row]).count();
        let allowed = errors.len() / 50;
        if far.len() > allowed.max(1) || without_reason > allowed {
            let listed = &far[..far.len().min(8)];
            return Err(format!("{what}: {} of {} rows are off (row, error): {listed:?}", far.len(), errors.len()));
        }
        for (row, error) in &far {
            let bound = if self.undecided[*row] { FLIPPED } else { FAR };
            if error.is_nan() || **error > bound {
                return Err(format!("{what}: row {row} is off by {error:e}, more than {bound}"));
            }
        }
        Ok(())
    }
}

/// Checks [`row_errors`]: at least 98% of the rows (all but one of few) within 1e-6, and all of them within `flip`,
/// which leaves room for a rare E2M1 code of h that an f32 and an f64 sum round differently.
///
/// # Panics
/// When they are not.
pub fn assert_rows_close(got: &[f32], expected: &[f64], width: usize, flip: f64, what: &str) {
    let errors = row_errors(got, expected, width);
    let far: Vec<_> = errors.iter().enumerate().filter(|(_, error)| error.is_nan() || **error > 1e-6).collect();
    let allowed = (errors.len() / 50).max(1);
    assert!(
        far.len() <= allowed,
        "{what}: {} of {} rows are off: {:?}",
        far.len(),
        errors.len(),
        &far[..far.len().min(8)]
    );
    assert!(far.iter().all(|(_, error)| **error <= flip), "{what}: rows are too far off: {far:?}");
}
