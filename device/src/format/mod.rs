//! Number formats and memory layouts: the only place where either is defined.
//!
//! Everything here is a pure function, compiled for the GPU and for the host alike. Every layout has its
//! forward map and its inverse, and `device/tests/layouts.rs` proves that they are bijections.

pub mod block;
pub mod block_fma;
pub mod e2m1;
pub mod float16;
pub mod packed;
pub mod scale_atom;
pub mod slot_groups;
pub mod slots;
pub mod tile_cpu;
pub mod tile_mma;
pub mod tile_mxf4;
pub mod ue4m3;

/// Elements that share one UE4M3 scale: a block, along K.
pub const BLOCK: usize = 16;
