//! Integer instructions that the compiler does not choose by itself.

use core::arch::asm;

/// `lop3.b32` of `(a ^ b) & mask`.
#[inline(always)]
pub fn xor_and(a: u32, b: u32, mask: u32) -> u32 {
    // PTX ISA, "lop3": the function of the operands' truth tables.
    const TABLE: u32 = (0xF0 ^ 0xCC) & 0xAA;
    let d;
    // SAFETY: registers only.
    unsafe {
        asm!("lop3.b32 {0}, {1}, {2}, {3}, {4};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) mask, const TABLE,
            options(pure, nomem, nostack))
    };
    d
}
