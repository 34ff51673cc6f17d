//! A kernel and the one before it on the stream (`griddepcontrol`, sm_90 and newer).

/// Lets the next kernel's blocks start, and waits until the earlier kernels are done and what they wrote is seen. Nothing that
/// an earlier kernel writes may be read before, and nothing that one reads may be written. On GPUs without the instructions,
/// and in a launch that did not ask to overlap, a kernel starts when the earlier ones are done.
#[inline(always)]
pub fn follow() {
    #[cfg(nvfp4_arch = "sm90")]
    // SAFETY: orders accesses; no operand.
    unsafe {
        core::arch::asm!("griddepcontrol.launch_dependents;", "griddepcontrol.wait;", options(nostack));
    }
}
