//! Integer reductions on global memory. There are no float atomics in this crate: their order would not be fixed.

use core::arch::asm;

/// `atom.global.add.u32`: what was there before.
///
/// # Safety
/// `address` is 4-byte aligned global memory that is only touched by such additions while the kernel runs.
#[inline(always)]
pub unsafe fn add_u32(address: *mut u32, value: u32) -> u32 {
    let before;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("atom.global.add.u32 {0}, [{1}], {2};", out(reg32) before, in(reg64) address, in(reg32) value,
            options(nostack))
    };
    before
}

/// `red.global.max.u32`.
///
/// # Safety
/// `address` is 4-byte aligned global memory that is only touched by such reductions while the kernel runs.
#[inline(always)]
pub unsafe fn max_u32(address: *mut u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("red.global.max.u32 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack)) };
}
