//! What one GPU offers, as plain numbers.
//!
//! A plan is made from these numbers alone, so it can be made and tested on a machine without a GPU.
//! The `driver` module fills the struct from a real device.

/// The resources of one GPU that decide tile sizes, grid sizes and memory use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceLimits {
    /// Compute capability, major and minor: `(9, 0)` is `sm_90`.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors on the device.
    pub multiprocessors: u32,
    /// The most shared memory that one block can use after opting in, in bytes.
    pub shared_bytes_per_block: u32,
    /// Shared memory of one multiprocessor, in bytes. Every resident block also takes some of it for
    /// the system (1024 bytes on current devices).
    pub shared_bytes_per_multiprocessor: u32,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// Threads that can be resident on one multiprocessor.
    pub max_threads_per_multiprocessor: u32,
    /// Level-2 cache, in bytes.
    pub l2_bytes: u32,
    /// Device memory, in bytes, free or not.
    pub total_memory_bytes: u64,
}

impl DeviceLimits {
    /// An NVIDIA H200 with 141 GB of memory, as its driver reports it.
    pub const H200: DeviceLimits = DeviceLimits {
        compute_capability: (9, 0),
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        shared_bytes_per_multiprocessor: 233_472,
        registers_per_multiprocessor: 65_536,
        max_threads_per_multiprocessor: 2048,
        l2_bytes: 60 << 20,
        total_memory_bytes: 150_754_820_096,
    };
}
