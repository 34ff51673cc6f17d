//! Non-bulk asynchronous copies from global to shared memory (`cp.async`, sm_80).

use core::arch::asm;

/// `cp.async.cg.shared.global` of 16 bytes; the last `16 - source_bytes` are written as zeros and not read.
///
/// # Safety
/// `shared` and `global` are 16-byte aligned, `shared` inside the block's shared memory, the first `source_bytes`
/// (at most 16) of `global` readable; nobody touches the 16 bytes until the group is waited for.
#[inline(always)]
pub unsafe fn copy_16(shared: u32, global: *const u8, source_bytes: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("cp.async.cg.shared.global [{0}], [{1}], 16, {2};",
            in(reg32) shared, in(reg64) global, in(reg32) source_bytes, options(nostack))
    };
}

/// Predicated `cp.async.cg.shared.global` of 16 bytes: nothing happens where `condition` does not hold.
///
/// # Safety
/// As [`copy_16`] with all 16 bytes, where the condition holds.
#[inline(always)]
pub unsafe fn copy_16_if(condition: bool, shared: u32, global: *const u8) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("{{", ".reg .pred holds;", "setp.ne.u32 holds, {2}, 0;",
            "@holds cp.async.cg.shared.global [{0}], [{1}], 16;", "}}",
            in(reg32) shared, in(reg64) global, in(reg32) condition as u32, options(nostack))
    };
}

/// `cp.async.ca.shared.global` of 8 bytes; as [`copy_16`].
///
/// # Safety
/// As [`copy_16`], with 8 for 16.
#[inline(always)]
pub unsafe fn copy_8(shared: u32, global: *const u8, source_bytes: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("cp.async.ca.shared.global [{0}], [{1}], 8, {2};",
            in(reg32) shared, in(reg64) global, in(reg32) source_bytes, options(nostack))
    };
}

/// `cp.async.commit_group`.
#[inline(always)]
pub fn commit_group() {
    // SAFETY: orders earlier copies; no operand.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

/// `cp.async.wait_group PENDING`: until at most that many of this thread's groups are under way.
#[inline(always)]
pub fn wait_group<const PENDING: u32>() {
    // SAFETY: waits; no operand touches memory of ours.
    unsafe { asm!("cp.async.wait_group {0};", const PENDING, options(nostack)) };
}
