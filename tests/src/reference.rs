//! The layer in f64, deliberately plain: dequantize, loop, sum. No packed layout, no threads, no shortcuts.
//!
//! Only the rules that the contract fixes in f32 are f32 here: the quantizer itself and the h that it is given.

use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::{RawExpert, RawMatrix};
use nvfp4_moe::io::{HiddenRows, Inputs, ScaleMode};
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::format::{block, e2m1, ue4m3};

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
    let dequantized: Vec<_> = experts
        .iter()
        .map(|expert| (expert.gate.as_ref().map(matrix), matrix(&expert.up), matrix(&expert.down)))
        .collect();
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
        let (gate, up, _) = &dequantized[expert];
        let up = product(up, &x);
        let gate = gate.as_ref().map(|gate| product(gate, &x));
        let h = (0..up.len()).map(|i| activate(activation, gate.as_ref().map(|gate| gate[i]), up[i]) as f32).collect();
        slots.push(Slot { token, weight: inputs.topk_weights[pick], expert, h });
    }

    let batch_scale = scale_of(slots.iter().flat_map(|slot| &slot.h).copied().filter(|h| h.is_finite()));
    let mut out = vec![0.0; tokens * width];
    for slot in slots {
        let g = match scales {
            ScaleMode::Static => experts[slot.expert].down.input_scale.expect("down's input scale"),
            ScaleMode::PerToken => scale_of(slot.h.iter().copied()),
            ScaleMode::PerTensor => batch_scale,
        };
        let y = product(&dequantized[slot.expert].2, &quantized(&slot.h, g));
        for (out, y) in out[slot.token * width..].iter_mut().zip(y) {
            *out += slot.weight as f64 * y;
        }
    }
    out
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

/// Rows of a weight matrix.
fn matrix(raw: &RawMatrix<'_>) -> Vec<Vec<f64>> {
    (0..raw.rows)
        .map(|row| {
            let element = |k: usize| {
                let index = row * raw.cols + k;
                let code = raw.codes[index / 2] >> (4 * (index % 2));
                value(code, raw.scales[index / 16]) * raw.weight_scale as f64
            };
            (0..raw.cols).map(element).collect()
        })
        .collect()
}

fn product(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
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
