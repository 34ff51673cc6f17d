//! The activation between the two GEMMs, in f32, the same bits on the GPU and on the CPU.
//!
//! Only additions, multiplications and IEEE divisions, none of them contracted; so an f32 here is the same number
//! wherever it is computed. `gate` and `up` come with their alpha applied.

use crate::format::block_fma::Arithmetic;
use bytemuck::{Pod, Zeroable};

/// Which activation, with its numbers; shared by host and device.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ActivationParams {
    /// One of the `KIND_` constants.
    pub kind: u32,
    /// Clamp: upper bound of gate, both bounds of up; infinity where there is none.
    pub limit: f32,
    /// Factor inside the sigmoid (swigluoai).
    pub alpha: f32,
    /// Added to up (swigluoai).
    pub beta: f32,
}

/// `silu(gate) * up`.
pub const KIND_SWIGLU: u32 = 0;
/// `gate * sigmoid(alpha * gate) * (up + beta)` (gpt-oss).
pub const KIND_SWIGLU_OAI: u32 = 1;
/// `max(up, 0)^2`, no gate.
pub const KIND_RELU2: u32 = 2;

/// e^x in f32, within 2 units in the last place, for x from -86 to 87; e^-86 below, e^87 above and for NaN.
///
/// In a sigmoid e^-86 is nothing next to 1, and the reciprocal of e^87 is the end of the normal numbers.
#[inline(always)]
#[allow(clippy::manual_clamp, reason = "two instructions, and NaN needs no care here")]
pub fn exp(x: f32, arithmetic: impl Arithmetic) -> f32 {
    // Adding this rounds to the nearest integer and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has so few bits that its product with n is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.min(87.0).max(-86.0);
    let shifted = arithmetic.fused(x, core::f32::consts::LOG2_E, ROUND);
    let whole = shifted - ROUND;
    let r = arithmetic.fused(whole, -LN2_LOW, arithmetic.fused(whole, -LN2_HIGH, x));
    // 2 e^r for |r| <= 0.347: of the polynomials that begin with 2 + 2 r, the one whose largest relative error is least, 3.1e-9
    // (Remez).
    let mut sum = 2.762_893_4e-3;
    sum = arithmetic.fused(sum, r, 1.673_756_2e-2);
    sum = arithmetic.fused(sum, r, 8.333_679e-2);
    sum = arithmetic.fused(sum, r, 3.333_304e-1);
    sum = arithmetic.fused(sum, r, 9.999_999e-1);
    sum = arithmetic.fused(sum, r, 2.0);
    sum = arithmetic.fused(sum, r, 2.0);
    // Times 2^(n-1), which is a normal number for n from -124 to 128. The shift leaves nothing of ROUND's own bits.
    sum * f32::from_bits((shifted.to_bits() << 23).wrapping_add(126 << 23))
}

/// `x * (1 / (1 + e^-(alpha x)))`.
#[inline(always)]
pub fn scaled_silu(x: f32, alpha: f32, arithmetic: impl Arithmetic) -> f32 {
    x * arithmetic.reciprocal(1.0 + exp(-(alpha * x), arithmetic))
}

/// One element of h from one element of gate and up.
#[inline(always)]
pub fn activate(params: &ActivationParams, gate: f32, up: f32, arithmetic: impl Arithmetic) -> f32 {
    if params.kind == KIND_RELU2 {
        let positive = if up < 0.0 { 0.0 } else { up };
        return positive * positive;
    }
    let gate = arithmetic.at_most(gate, params.limit);
    let up = arithmetic.at_least(arithmetic.at_most(up, params.limit), -params.limit);
    if params.kind == KIND_SWIGLU {
        scaled_silu(gate, 1.0, arithmetic) * up
    } else {
        scaled_silu(gate, params.alpha, arithmetic) * (up + params.beta)
    }
}
