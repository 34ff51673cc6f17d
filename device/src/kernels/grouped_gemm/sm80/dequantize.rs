//! From codes and scales to the A operand.

use crate::format::tile_mma::{PRODUCT_LOG2, fragment_registers};
use crate::ptx::float::multiply_f16x2;
use crate::ptx::integer::xor_and;
use crate::ptx::matrix::broadcast_half;

/// What sums of products with [`dequantize`]d weights must be multiplied by: the power of two that those carry, undone.
pub(in crate::kernels::grouped_gemm) const UNSCALE: f32 = (1u32 << -PRODUCT_LOG2) as f32;

/// f16 fragment of 16 rows x 16 K, 2^-7 times the weights, from its word of codes and the pairs of scales of its two rows.
#[inline(always)]
pub(in crate::kernels::grouped_gemm) fn dequantize(codes: u32, scales: &[[u32; 2]; 2], step: usize) -> [u32; 4] {
    let scale = |row: usize| {
        let pair = scales[row][step % 2];
        if step / 2 == 1 { broadcast_half::<true>(pair) } else { broadcast_half::<false>(pair) }
    };
    let (low, high) = (scale(0), scale(1));
    let registers = fragment_registers(codes, xor_and);
    [
        multiply_f16x2(registers[0], low),
        multiply_f16x2(registers[1], high),
        multiply_f16x2(registers[2], low),
        multiply_f16x2(registers[3], high),
    ]
}
