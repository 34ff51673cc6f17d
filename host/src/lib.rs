//! One Mixture-of-Experts expert block on NVFP4 weights.

pub mod activation;
pub mod checkpoint;
pub mod cpu;
pub mod io;
pub mod routing;
pub mod shape;
pub mod weights;
