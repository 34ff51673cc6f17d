//! 16-byte loads and stores of global memory.

use core::arch::asm;

/// `ld.global.v4.u32`.
///
/// # Safety
/// `address` is 16-byte aligned and its 16 bytes are readable global memory.
#[inline(always)]
pub unsafe fn load_v4(address: *const u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller's contract.
    unsafe {
        asm!("ld.global.v4.u32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `st.global.v4.u32`.
///
/// # Safety
/// `address` is 16-byte aligned and its 16 bytes are writable global memory that no other thread uses.
#[inline(always)]
pub unsafe fn store_v4(address: *mut u32, value: [u32; 4]) {
    let [a, b, c, d] = value;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("st.global.v4.u32 [{0}], {{{1}, {2}, {3}, {4}}};",
            in(reg64) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack))
    };
}

/// `st.global.v2.u32`.
///
/// # Safety
/// `address` is 8-byte aligned and its 8 bytes are writable global memory that no other thread uses.
#[inline(always)]
pub unsafe fn store_v2(address: *mut u32, value: [u32; 2]) {
    let [a, b] = value;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("st.global.v2.u32 [{0}], {{{1}, {2}}};", in(reg64) address, in(reg32) a, in(reg32) b, options(nostack))
    };
}
