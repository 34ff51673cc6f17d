//! One function per PTX instruction, no policy. Names follow the PTX ISA; thread, warp and shared are grouped as in
//! `cuda_std`.

pub mod asynchronous;
pub mod atomic;
pub mod float;
pub mod global;
pub mod grid;
pub mod integer;
pub mod matrix;
pub mod matrix_fp4;
pub mod mbarrier;
pub mod shared;
pub mod thread;
pub mod warp;
#[cfg(nvfp4_arch = "sm90")]
pub mod wgmma;
