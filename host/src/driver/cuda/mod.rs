//! The CUDA driver as a backend.

mod context;
mod memory;
mod module;
mod queue;

pub(super) use context::{Cuda, count, start_driver};
