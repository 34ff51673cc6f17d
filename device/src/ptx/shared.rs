//! The block's dynamic shared memory, addressed by 32-bit offsets in the shared window.

use core::arch::{asm, global_asm};

global_asm!(".extern .shared .align 1024 .b8 dynamic_shared[];");

/// Shared-window address of the first byte of dynamic shared memory, 1024-byte aligned.
#[inline(always)]
pub fn dynamic() -> u32 {
    let address;
    // SAFETY: reads an address, no memory.
    unsafe { asm!("mov.u32 {0}, dynamic_shared;", out(reg32) address, options(pure, nomem, nostack)) };
    address
}

/// `ld.shared.u32`.
///
/// # Safety
/// `address` is 4-byte aligned, inside the block's shared memory, and written.
#[inline(always)]
pub unsafe fn load_u32(address: u32) -> u32 {
    let value;
    // SAFETY: the caller's contract.
    unsafe { asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) address, options(readonly, nostack)) };
    value
}

/// `st.shared.u32`.
///
/// # Safety
/// `address` is 4-byte aligned and inside the block's shared memory.
#[inline(always)]
pub unsafe fn store_u32(address: u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("st.shared.u32 [{0}], {1};", in(reg32) address, in(reg32) value, options(nostack)) };
}

/// `st.shared.v4.u32`.
///
/// # Safety
/// `address` is 16-byte aligned and inside the block's shared memory.
#[inline(always)]
pub unsafe fn store_v4(address: u32, value: [u32; 4]) {
    let [a, b, c, d] = value;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("st.shared.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
            in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack))
    };
}

/// `st.shared.v2.u32`.
///
/// # Safety
/// `address` is 8-byte aligned and inside the block's shared memory.
#[inline(always)]
pub unsafe fn store_v2(address: u32, [a, b]: [u32; 2]) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("st.shared.v2.u32 [{0}], {{{1}, {2}}};",
            in(reg32) address, in(reg32) a, in(reg32) b, options(nostack))
    };
}

/// `ld.shared.v2.u32`.
///
/// # Safety
/// `address` is 8-byte aligned, inside the block's shared memory, and written.
#[inline(always)]
pub unsafe fn load_v2(address: u32) -> [u32; 2] {
    let (a, b);
    // SAFETY: the caller's contract.
    unsafe {
        asm!("ld.shared.v2.u32 {{{0}, {1}}}, [{2}];",
            out(reg32) a, out(reg32) b, in(reg32) address, options(readonly, nostack))
    };
    [a, b]
}

/// `ld.shared.v4.u32`.
///
/// # Safety
/// `address` is 16-byte aligned, inside the block's shared memory, and written.
#[inline(always)]
pub unsafe fn load_v4(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's contract.
    unsafe {
        asm!("ld.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `red.shared.add.u32`.
///
/// # Safety
/// `address` is 4-byte aligned shared memory that until the next barrier is only touched by such reductions.
#[inline(always)]
pub unsafe fn add_u32(address: u32, value: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("red.shared.add.u32 [{0}], {1};", in(reg32) address, in(reg32) value, options(nostack)) };
}
