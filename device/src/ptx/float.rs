//! Floating-point arithmetic that `core` has no stable name for.

use core::arch::asm;

use crate::format::block_fma::Arithmetic;

/// The GPU's own instructions.
#[derive(Clone, Copy, Debug)]
pub struct Gpu;

impl Arithmetic for Gpu {
    #[inline(always)]
    fn fused(self, a: f32, b: f32, c: f32) -> f32 {
        fused(a, b, c)
    }

    #[inline(always)]
    fn at_most(self, x: f32, bound: f32) -> f32 {
        let d;
        // SAFETY: registers only.
        unsafe {
            asm!("min.NaN.f32 {0}, {1}, {2};", out(reg32) d, in(reg32) x, in(reg32) bound, options(pure, nomem, nostack))
        };
        d
    }

    #[inline(always)]
    fn at_least(self, x: f32, bound: f32) -> f32 {
        max_nan(x, bound)
    }

    /// The sign is changed here, where it is part of the instruction: the compiler would make an exclusive or of it.
    #[inline(always)]
    fn fused_negative(self, a: f32, b: f32, c: f32) -> f32 {
        let d;
        // SAFETY: registers only.
        unsafe {
            asm!("{{ .reg .f32 n; neg.f32 n, {1}; fma.rn.f32 {0}, n, {2}, {3}; }}", out(reg32) d, in(reg32) a, in(reg32) b,
                in(reg32) c, options(pure, nomem, nostack))
        };
        d
    }

    /// One Newton step from the approximate reciprocal, as NVIDIA's assembler makes `rcp.rn.f32` for normal numbers.
    #[inline(always)]
    fn reciprocal(self, x: f32) -> f32 {
        let approximate = approximate_reciprocal(x);
        fused(self.fused_negative(x, approximate, 1.0), approximate, approximate)
    }

    #[inline(always)]
    fn larger_magnitude(self, a: f32, x: f32) -> f32 {
        let d;
        // SAFETY: registers only.
        unsafe {
            asm!("{{ .reg .f32 m; abs.f32 m, {2}; max.NaN.f32 {0}, {1}, m; }}", out(reg32) d, in(reg32) a, in(reg32) x,
                options(pure, nomem, nostack))
        };
        d
    }

    #[inline(always)]
    fn opaque(self, value: u32) -> u32 {
        super::thread::opaque(value)
    }
}

/// `fma.rn.f32`: `a * b + c`, rounded once.
#[inline(always)]
pub fn fused(a: f32, b: f32, c: f32) -> f32 {
    let d;
    // SAFETY: registers only.
    unsafe {
        asm!("fma.rn.f32 {0}, {1}, {2}, {3};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack))
    };
    d
}

/// `rcp.approx.ftz.f32`: the reciprocal within one unit in the last place.
#[inline(always)]
pub fn approximate_reciprocal(x: f32) -> f32 {
    let d;
    // SAFETY: registers only.
    unsafe { asm!("rcp.approx.ftz.f32 {0}, {1};", out(reg32) d, in(reg32) x, options(pure, nomem, nostack)) };
    d
}

/// `max.NaN.f32`: the larger number; NaN if one is.
#[inline(always)]
pub fn max_nan(a: f32, b: f32) -> f32 {
    let d;
    // SAFETY: registers only.
    unsafe {
        asm!("max.NaN.f32 {0}, {1}, {2};", out(reg32) d, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    d
}

/// `cvt.rn.f16x2.f32`: two numbers as f16, `low` in the low half.
#[inline(always)]
pub fn convert_f16x2(low: f32, high: f32) -> u32 {
    let d;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {0}, {1}, {2};", out(reg32) d, in(reg32) high, in(reg32) low,
            options(pure, nomem, nostack))
    };
    d
}

/// `cvt.f32.f16`: the value of an f16 bit pattern; exact.
#[inline(always)]
pub fn convert_f32_f16(bits: u16) -> f32 {
    let d;
    // SAFETY: registers only.
    unsafe { asm!("cvt.f32.f16 {0}, {1};", out(reg32) d, in(reg16) bits, options(pure, nomem, nostack)) };
    d
}

/// `mul.rn.f16x2`: products of the halves.
#[inline(always)]
pub fn multiply_f16x2(a: u32, b: u32) -> u32 {
    let d;
    // SAFETY: registers only.
    unsafe {
        asm!("mul.rn.f16x2 {0}, {1}, {2};", out(reg32) d, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    d
}
