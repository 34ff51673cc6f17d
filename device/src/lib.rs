//! Device side of `nvfp4-moe`: number formats, layouts and kernels.
//!
//! One crate, compiled twice: to PTX for the GPU (`cargo xtask build-ptx`) and as an ordinary library for the host,
//! which shares the formats, the layouts and the kernels' argument structs.
#![no_std]
#![deny(missing_docs)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, stdarch_nvptx, asm_experimental_arch))]

pub mod format;
pub mod kernels;
