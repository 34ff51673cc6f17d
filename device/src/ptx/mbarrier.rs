//! mbarrier objects in shared memory, and the copies that they wait for (sm_90 and newer).

use core::arch::asm;

/// `mbarrier.init`: a phase ends after `arrivals` arrivals, and after all bytes that were announced.
///
/// # Safety
/// `barrier` is 8 bytes of the block's shared memory, 8-byte aligned, that nothing else uses.
#[inline(always)]
pub unsafe fn init(barrier: u32, arrivals: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) barrier, in(reg32) arrivals, options(nostack))
    };
}

/// `fence.proxy.async.shared::cta`: what ordinary instructions did to shared memory is seen by the copy engine.
#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: orders accesses; no operand.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) };
}

/// `mbarrier.arrive`.
///
/// # Safety
/// `barrier` was initialized, and its phase lacks an arrival.
#[inline(always)]
pub unsafe fn arrive(barrier: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) barrier, options(nostack)) };
}

/// `mbarrier.arrive.expect_tx`: an arrival that announces `bytes`.
///
/// # Safety
/// As [`arrive`]; copies of so many bytes follow.
#[inline(always)]
pub unsafe fn arrive_expect(barrier: u32, bytes: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};",
            in(reg32) barrier, in(reg32) bytes, options(nostack))
    };
}

/// Nanoseconds that a thread may sleep in `mbarrier.try_wait`. Without them it comes back about every 50 cycles on an H200, and
/// in a grouped GEMM of 64 tokens a fifth of all instructions were those of warps that wait.
const SLEEP: u32 = 10_000_000;

/// `mbarrier.try_wait.parity` until the phase of this parity has ended.
///
/// # Safety
/// `barrier` was initialized and is at most one phase ahead.
#[inline(always)]
pub unsafe fn wait(barrier: u32, parity: u32) {
    let mut ended: u32;
    loop {
        // SAFETY: the caller's contract.
        unsafe {
            asm!("{{",
                ".reg .pred ended;",
                "mbarrier.try_wait.parity.shared::cta.b64 ended, [{1}], {2}, {3};",
                "selp.u32 {0}, 1, 0, ended;",
                "}}",
                out(reg32) ended, in(reg32) barrier, in(reg32) parity, const SLEEP, options(nostack))
        };
        if ended != 0 {
            return;
        }
    }
}

/// `cp.async.mbarrier.arrive.noinc`: an arrival of this thread as soon as its earlier `cp.async` copies have landed.
///
/// # Safety
/// As [`arrive`].
#[inline(always)]
pub unsafe fn arrive_after_copies(barrier: u32) {
    // SAFETY: the caller's contract.
    unsafe { asm!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{0}];", in(reg32) barrier, options(nostack)) };
}

/// `cp.async.bulk` of `bytes` from global to shared memory; the phase of `barrier` waits for them.
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16 (`bytes` not 0), the source is readable, the destination is shared
/// memory of the block that nobody touches until the phase has ended, and the bytes were announced to `barrier`.
#[inline(always)]
pub unsafe fn copy_bulk(shared: u32, global: *const u8, bytes: u32, barrier: u32) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, [{3}];",
            in(reg32) shared, in(reg64) global, in(reg32) bytes, in(reg32) barrier, options(nostack))
    };
}
