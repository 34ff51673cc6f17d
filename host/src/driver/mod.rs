//! The CUDA driver: devices, memory, streams, graphs and kernels.
//!
//! This is the only module that calls foreign functions. The driver library is loaded on first use, so a
//! program that contains this module starts on a machine without a GPU, and asking for one there is an
//! ordinary [`DriverError`].
//!
//! ```
//! use nvfp4_moe::driver::{Device, DeviceBuffer, DriverError};
//!
//! fn round_trip() -> Result<Vec<u8>, DriverError> {
//!     let device = Device::open(0)?;
//!     let buffer = DeviceBuffer::alloc(&device, 4)?;
//!     buffer.write(0, &[1, 2, 3, 4])?;
//!     let mut back = vec![0; 4];
//!     buffer.read(0, &mut back)?;
//!     Ok(back)
//! }
//!
//! match round_trip() {
//!     Ok(back) => assert_eq!(back, [1, 2, 3, 4]),
//!     Err(error) => eprintln!("{error}"),
//! }
//! ```
//!
//! A [`Device`] is a context, its own or one that a server already has. Every call makes that context
//! current on the calling thread for as long as the call lasts, and then puts back what was current
//! before; so any thread may use any device, and other CUDA code in the process is not disturbed.
//!
//! What is queued on a stream runs later. Errors of a kernel (an illegal address, say) are therefore
//! reported by a later call, usually the one that waits for the stream.

pub mod backend;
mod buffer;
mod cuda;
mod device;
mod error;
mod loader;
mod module;
mod stream;
mod symbols;
mod upload;

pub use buffer::DeviceBuffer;
pub use cust::sys::{CUcontext, CUstream};
pub use device::{Device, driver_available};
pub use error::DriverError;
pub use module::{Function, Module};
pub use stream::{Event, Graph, Stream, StreamHandle, capture};
pub use upload::UploadRing;
