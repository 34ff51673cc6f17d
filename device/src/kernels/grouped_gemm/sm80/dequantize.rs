//! From codes and scales to the A operand.

use crate::format::packed::TileOrder;
use crate::format::tile_mma::{MmaTile, PRODUCT_LOG2, fragment_registers, scale_pairs};
use crate::ptx::float::multiply_f16x2;
use crate::ptx::integer::xor_and;
use crate::ptx::matrix::broadcast_half;
use crate::ptx::shared;

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

/// A lane's part of one weight tile.
#[derive(Clone, Copy)]
pub(in crate::kernels::grouped_gemm) struct Weights {
    pub(in crate::kernels::grouped_gemm) codes: [u32; 4],
    pub(in crate::kernels::grouped_gemm) scales: [u32; 2],
}

impl Weights {
    /// From shared memory.
    #[inline(always)]
    pub(in crate::kernels::grouped_gemm) unsafe fn load(tile: u32, lane: u32) -> Self {
        // SAFETY: the caller's contract: the tile has landed.
        unsafe {
            Self {
                codes: shared::load_v4(tile + lane * 16),
                scales: shared::load_v2(tile + MmaTile::CODE_BYTES as u32 + lane / 4 * 8),
            }
        }
    }

    /// A operand of one step.
    #[inline(always)]
    pub(in crate::kernels::grouped_gemm) fn operand(&self, step: usize) -> [u32; 4] {
        dequantize(self.codes[step], &self.scales.map(scale_pairs), step)
    }
}
