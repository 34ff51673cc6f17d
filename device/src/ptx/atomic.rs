//! Integer reductions on global memory. There are no float atomics in this crate: their order would not be fixed.

use core::arch::asm;

/// `red.global.max.u32`.
///
/// # Safety
/// `address` is 4-byte aligned global memory that is only touched by such reductions while the kernel runs.
#[inline(always)]
pub unsafe fn max_u32(address: *mut u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("red.global.max.u32 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack)) };
}
