//! `ldmatrix` and `mma.sync` for f16 operands.

use core::arch::asm;

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row
/// addresses of matrix i; lane 4g + q receives elements 2q, 2q+1 of row g of each.
///
/// # Safety
/// All lanes take part; `row` is 16-byte aligned, inside the block's shared memory, and written.
#[inline(always)]
pub unsafe fn load_x4(row: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's contract.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row, options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32`: `accumulator += a * b`.
#[inline(always)]
pub fn mma_m16n8k16_f16(accumulator: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    let [c0, c1, c2, c3] = *accumulator;
    let (d0, d1, d2, d3): (f32, f32, f32, f32);
    // SAFETY: registers only.
    unsafe {
        asm!("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) c0 => d0, inout(reg32) c1 => d1, inout(reg32) c2 => d2, inout(reg32) c3 => d3,
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            options(pure, nomem, nostack))
    };
    *accumulator = [d0, d1, d2, d3];
}

/// One half of `pair` in both: the low one, or with `HIGH` the high one. In halves of registers, so that a multiplication
/// can take it as an operand's modifier.
#[inline(always)]
pub fn broadcast_half<const HIGH: bool>(pair: u32) -> u32 {
    let both;
    // SAFETY: registers only.
    unsafe {
        if HIGH {
            asm!("{{", ".reg .b16 low, high;", "mov.b32 {{low, high}}, {1};", "mov.b32 {0}, {{high, high}};", "}}",
                out(reg32) both, in(reg32) pair, options(pure, nomem, nostack));
        } else {
            asm!("{{", ".reg .b16 low, high;", "mov.b32 {{low, high}}, {1};", "mov.b32 {0}, {{low, low}};", "}}",
                out(reg32) both, in(reg32) pair, options(pure, nomem, nostack));
        }
    }
    both
}
