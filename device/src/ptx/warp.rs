//! Instructions among the 32 lanes of a warp; all lanes take part.

use core::arch::asm;

const ALL: u32 = 0xFFFF_FFFF;

/// `match.any.sync.b32`: the lanes whose `value` equals this lane's.
#[inline(always)]
pub fn match_any(value: u32) -> u32 {
    let mask;
    // SAFETY: registers only.
    unsafe {
        asm!("match.any.sync.b32 {0}, {1}, {2};", out(reg32) mask, in(reg32) value, in(reg32) ALL, options(nomem, nostack))
    };
    mask
}

/// `redux.sync.max.u32` (sm_80).
#[inline(always)]
pub fn reduce_max(value: u32) -> u32 {
    let max;
    // SAFETY: registers only.
    unsafe {
        asm!("redux.sync.max.u32 {0}, {1}, {2};", out(reg32) max, in(reg32) value, in(reg32) ALL, options(nomem, nostack))
    };
    max
}

/// `redux.sync.add.u32` (sm_80).
#[inline(always)]
pub fn reduce_add(value: u32) -> u32 {
    let sum;
    // SAFETY: registers only.
    unsafe {
        asm!("redux.sync.add.u32 {0}, {1}, {2};", out(reg32) sum, in(reg32) value, in(reg32) ALL, options(nomem, nostack))
    };
    sum
}

/// `shfl.sync.up.b32`: the value of the lane `delta` below; lanes below `delta` keep their own.
#[inline(always)]
pub fn shuffle_up(value: u32, delta: u32) -> u32 {
    let shuffled;
    // SAFETY: registers only.
    unsafe {
        asm!("shfl.sync.up.b32 {0}, {1}, {2}, 0, {3};",
            out(reg32) shuffled, in(reg32) value, in(reg32) delta, in(reg32) ALL, options(nomem, nostack))
    };
    shuffled
}

/// `shfl.sync.bfly.b32`: the value of the lane whose number differs in the bits of `mask`.
#[inline(always)]
pub fn shuffle_xor(value: u32, mask: u32) -> u32 {
    let shuffled;
    // SAFETY: registers only.
    unsafe {
        asm!("shfl.sync.bfly.b32 {0}, {1}, {2}, 31, {3};",
            out(reg32) shuffled, in(reg32) value, in(reg32) mask, in(reg32) ALL, options(nomem, nostack))
    };
    shuffled
}

/// `shfl.sync.idx.b32` of lane 0: a value that all lanes have, in a form in which the compiler of PTX knows that.
#[inline(always)]
pub fn uniform(value: u32) -> u32 {
    let same;
    // SAFETY: registers only.
    unsafe {
        asm!("shfl.sync.idx.b32 {0}, {1}, 0, 31, {2};",
            out(reg32) same, in(reg32) value, in(reg32) ALL, options(nomem, nostack))
    };
    same
}

/// `bar.warp.sync`: the lanes of a warp, and what they wrote before.
#[inline(always)]
pub fn sync_warp() {
    // SAFETY: a barrier; no operand touches memory.
    unsafe { asm!("bar.warp.sync {0};", in(reg32) ALL, options(nostack)) };
}
