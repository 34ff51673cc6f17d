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

/// `red.release.gpu.global.add.u32`: whoever [acquires](load_acquire) the sum sees what this thread wrote and saw before.
///
/// # Safety
/// As [`add_u32`], loads by [`load_acquire`] aside.
#[inline(always)]
pub unsafe fn add_release(address: *mut u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("red.release.gpu.global.add.u32 [{0}], {1};", in(reg64) address, in(reg32) value, options(nostack)) };
}

/// `ld.acquire.gpu.global.u32`.
///
/// # Safety
/// `address` is 4-byte aligned global memory that is only touched by such reductions and loads while the kernel runs.
#[inline(always)]
pub unsafe fn load_acquire(address: *const u32) -> u32 {
    let value;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("ld.acquire.gpu.global.u32 {0}, [{1}];", out(reg32) value, in(reg64) address, options(nostack));
    }
    value
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
