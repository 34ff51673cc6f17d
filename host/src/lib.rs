//! One Mixture-of-Experts expert block of a language model on NVFP4 weights, on an NVIDIA GPU or on the CPU.

#![deny(missing_docs)]

pub mod activation;
pub mod checkpoint;
pub mod cpu;
pub mod cuda;
pub mod device_limits;
pub mod driver;
pub mod harness;
pub mod io;
pub mod kernel_family;
pub mod load;
pub mod measurement;
pub mod memory;
pub mod plan;
pub mod routing;
pub mod schedule;
pub mod shape;
pub mod spec;
pub mod traffic;
pub mod weights;
