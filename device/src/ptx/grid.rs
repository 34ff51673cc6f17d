//! A kernel and the one before it on the stream (`griddepcontrol`, sm_90 and newer).

/// Lets the next kernel's blocks start as soon as all of this one's have said so, or are done.
#[inline(always)]
pub fn launch_dependents() {
    #[cfg(nvfp4_arch = "sm90")]
    // SAFETY: no operand.
    unsafe {
        core::arch::asm!("griddepcontrol.launch_dependents;", options(nostack));
    }
}

/// Waits until the earlier kernels are done and what they wrote is seen by all of this one. Nothing that an earlier kernel writes
/// may be read before, and nothing that one reads may be written. On GPUs without the instructions, and in a launch that did
/// not ask to overlap, a kernel starts when the earlier ones are done.
#[inline(always)]
pub fn wait() {
    #[cfg(nvfp4_arch = "sm90")]
    // SAFETY: orders accesses; no operand.
    unsafe {
        core::arch::asm!("griddepcontrol.wait;", options(nostack));
    }
}

/// Both: the next kernel may start at once, and also has to wait for what this one waits for.
#[inline(always)]
pub fn follow() {
    launch_dependents();
    wait();
}

/// Both, in the other order: what the kernels in front of this one wrote is there for the next one before that waits. The grouped
/// GEMMs read the routing so, quantization the hidden rows.
#[inline(always)]
pub fn follow_closely() {
    wait();
    launch_dependents();
}
