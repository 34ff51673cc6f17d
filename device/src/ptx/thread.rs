//! Special registers and the block barrier.

use core::arch::{asm, nvptx};

/// `%tid.x`.
#[inline(always)]
pub fn thread_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_thread_idx_x() as u32 }
}

/// `%ctaid.x`.
#[inline(always)]
pub fn block_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_x() as u32 }
}

/// `%ctaid.y`.
#[inline(always)]
pub fn block_idx_y() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_y() as u32 }
}

/// `%nctaid.y`.
#[inline(always)]
pub fn grid_dim_y() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_grid_dim_y() as u32 }
}

/// `%ntid.x`.
#[inline(always)]
pub fn block_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_dim_x() as u32 }
}

/// `%nctaid.x`.
#[inline(always)]
pub fn grid_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_grid_dim_x() as u32 }
}

/// `bar.sync 0`: every thread of the block, and what they wrote to shared and global memory before.
#[inline(always)]
pub fn sync_threads() {
    // SAFETY: a barrier touches no memory of ours; that all threads arrive is the kernels' structure.
    unsafe { nvptx::_syncthreads() }
}

/// `bar.sync` of so many threads, all of whole warps.
#[inline(always)]
pub fn sync_some(barrier: u32, threads: u32) {
    // SAFETY: a barrier touches no memory of ours; that all threads arrive is the kernels' structure.
    unsafe { asm!("bar.sync {0}, {1};", in(reg32) barrier, in(reg32) threads, options(nostack)) };
}

/// `value`, of which the compiler then knows nothing: a loop that counts with it is not unrolled.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same;
    // SAFETY: registers only.
    unsafe { asm!("mov.b32 {0}, {1};", out(reg32) same, in(reg32) value, options(pure, nomem, nostack)) };
    same
}

/// `value`, of which the compiler then knows nothing: what follows from it is computed behind this, and not kept from before
/// in registers that are scarce.
#[inline(always)]
pub fn anew(value: u32) -> u32 {
    let same;
    // SAFETY: registers only.
    unsafe { asm!("mov.b32 {0}, {1};", out(reg32) same, in(reg32) value, options(nomem, nostack)) };
    same
}

/// `setmaxnreg.dec.sync.aligned.u32`: a thread of this warpgroup keeps so many registers (sm_90a).
#[cfg(nvfp4_arch = "sm90")]
#[inline(always)]
pub fn leave_registers<const KEPT: u32>() {
    // SAFETY: the compiler of PTX keeps to the number.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {0};", const KEPT, options(nostack)) };
}

/// `setmaxnreg.inc.sync.aligned.u32`: waits until a thread of this warpgroup has so many registers (sm_90a).
#[cfg(nvfp4_arch = "sm90")]
#[inline(always)]
pub fn take_registers<const TAKEN: u32>() {
    // SAFETY: as above.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {0};", const TAKEN, options(nostack)) };
}
