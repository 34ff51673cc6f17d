//! State spaces: what is stored, and shadows of who wrote and read it.

pub(crate) mod block_clocks;
pub(crate) mod clocks;
mod device;
pub(crate) mod global_races;
mod matrix_read;
pub(crate) mod shared;

pub use device::DeviceMemory;
pub(crate) use device::Place;

/// First byte of a block's shared memory in the shared window. Not 0, so that a null address is found.
pub(crate) const SHARED_BASE: u32 = 1024;
/// Generic address of the shared window's address 0.
pub(crate) const SHARED_WINDOW: u64 = 1 << 44;
/// Generic address of the local window's address 0.
pub(crate) const LOCAL_WINDOW: u64 = 2 << 44;
/// Generic address of the kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 3 << 44;
/// Bytes of each of these windows.
pub(crate) const WINDOW_BYTES: u64 = 1 << 32;
/// Most bytes that one thread moves in one instruction.
pub(crate) const MAX_ACCESS: usize = 32;
/// Bytes of one access.
pub(crate) type AccessBytes = [u8; MAX_ACCESS];
