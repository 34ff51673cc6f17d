//! Instructions of the FP4 tensor cores (sm_120).

use core::arch::asm;

/// `mma.sync.m16n8k64` on NVFP4: `accumulator += (a * scales of its rows) * (b * scales of its columns)`.
///
/// The scale words of `a` come from lanes 4g + 2 `thread_a` and 4g + 2 `thread_a` + 1 (rows g and g + 8), those of `b`
/// from lanes 4n + `thread_b`. Both selectors are constants.
#[inline(always)]
pub fn mma_m16n8k64_mxf4nvf4(
    accumulator: &mut [f32; 4],
    a: [u32; 4],
    b: [u32; 2],
    (scales_a, thread_a): (u32, u16),
    (scales_b, thread_b): (u32, u16),
) {
    let [c0, c1, c2, c3] = *accumulator;
    let (d0, d1, d2, d3): (f32, f32, f32, f32);
    // SAFETY: registers only.
    unsafe {
        asm!("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}}, {10}, {{{14}, {11}}}, {12}, {{{14}, {13}}};",
            inout(reg32) c0 => d0, inout(reg32) c1 => d1, inout(reg32) c2 => d2, inout(reg32) c3 => d3,
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            in(reg32) scales_a, in(reg16) thread_a, in(reg32) scales_b, in(reg16) thread_b, in(reg16) 0u16,
            options(pure, nomem, nostack))
    };
    *accumulator = [d0, d1, d2, d3];
}

/// `cvt.rn.satfinite.e2m1x2.f32`: the codes of two numbers, `low` in bits 0..3, `high` in bits 4..7.
#[inline(always)]
pub fn convert_e2m1x2(low: f32, high: f32) -> u32 {
    let codes;
    // SAFETY: registers only.
    unsafe {
        asm!("{{",
            ".reg .b8 codes;",
            "cvt.rn.satfinite.e2m1x2.f32 codes, {2}, {1};",
            "cvt.u32.u8 {0}, codes;",
            "}}",
            out(reg32) codes, in(reg32) low, in(reg32) high, options(pure, nomem, nostack))
    };
    codes
}
