//! Device side of `nvfp4-moe`: number formats, layouts and kernels.
//!
//! One crate, compiled twice: to PTX for the GPU (`cargo xtask build-ptx`) and as an ordinary library for the host,
//! which shares the formats, the layouts and the kernels' argument structs.
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, stdarch_nvptx, asm_experimental_arch))]
// There the kernels and the instructions are in private modules: nothing links against the module's Rust items.
#![cfg_attr(target_arch = "nvptx64", allow(unreachable_pub))]

// For `f32::mul_add` only.
#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

pub mod format;
pub mod kernels;
pub mod params;
#[cfg(target_arch = "nvptx64")]
#[allow(dead_code, reason = "no module's kernels use every instruction")]
mod ptx;

/// Device code never panics: every bound is checked by construction, and this must be unreachable.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the grid with an error that the driver reports.
    unsafe { core::arch::nvptx::trap() }
}
