//! What stands behind a [`Device`](super::Device): the CUDA driver, or something that plays its part, such as an emulator.
//!
//! Everything above this, from a buffer to a whole forward, is the same code whatever the backend.

use std::fmt::Debug;
use std::ptr::NonNull;

use cust::sys::CUcontext;

use super::error::DriverError;
use crate::device_limits::DeviceLimits;

/// Something that a backend made: a stream, an event, a graph, a module or a kernel. What is in it is the backend's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub usize);

impl Handle {
    /// The handle of a driver's pointer.
    pub(super) fn of<T>(pointer: *mut T) -> Self {
        Self(pointer.expose_provenance())
    }

    /// The driver's pointer again.
    pub(super) fn pointer<T>(self) -> *mut T {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// One device: what it is, its memory, its kernels and its queues.
pub trait Backend: Memory + Kernels + Queues + Debug + Send + Sync {
    /// Number among the devices of its kind, counted from 0.
    fn ordinal(&self) -> u32;

    /// Name in reports.
    fn name(&self) -> &str;

    /// Newest CUDA version that it supports, major and minor.
    fn driver_version(&self) -> (u32, u32);

    /// Resources.
    fn limits(&self) -> DeviceLimits;

    /// Context for other CUDA code; null where there is none.
    fn raw_context(&self) -> CUcontext;

    /// Waits until everything queued has finished.
    ///
    /// # Errors
    /// The error of the queued work.
    fn synchronize(&self) -> Result<(), DriverError>;
}

/// Device memory, and host memory that a device copies from. Ranges handed in lie inside allocations of this backend: the
/// callers check that.
pub trait Memory {
    /// Free and total bytes.
    ///
    /// # Errors
    /// [`DriverError`] if the backend does not answer.
    fn free_memory(&self) -> Result<(u64, u64), DriverError>;

    /// Allocates `bytes` bytes, more than 0, aligned to 256, with unspecified content.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] with the sizes.
    fn alloc(&self, bytes: usize) -> Result<u64, DriverError>;

    /// Frees an allocation, after the work that is queued. There is nobody to report an error to.
    fn free(&self, address: u64);

    /// Copies to the device and waits for it.
    ///
    /// # Errors
    /// [`DriverError`] if the copy, or work before it, fails.
    fn write(&self, address: u64, source: &[u8]) -> Result<(), DriverError>;

    /// Copies from the device and waits for it.
    ///
    /// # Errors
    /// [`DriverError`] if the copy, or work before it, fails.
    fn read(&self, address: u64, target: &mut [u8]) -> Result<(), DriverError>;

    /// Sets bytes and waits for it.
    ///
    /// # Errors
    /// [`DriverError`] if the fill, or work before it, fails.
    fn fill(&self, address: u64, bytes: usize, value: u8) -> Result<(), DriverError>;

    /// Allocates `bytes` bytes of host memory, more than 0, which stay where they are (page-locked), so that the device
    /// copies from them by itself. The content is unspecified, but may be read.
    ///
    /// # Errors
    /// [`DriverError::HostMemory`] with the size.
    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>, DriverError>;

    /// Frees what [`Memory::alloc_host`] gave for as many bytes.
    ///
    /// # Safety
    /// The caller is its one owner, and no queued copy reads it any more.
    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize);

    /// Queues a copy to the device, and does not wait for it.
    ///
    /// # Errors
    /// [`DriverError`] if it cannot be queued.
    ///
    /// # Safety
    /// The stream is alive and is not being captured. `source` has `bytes` readable bytes of [`Memory::alloc_host`], which
    /// nobody writes or frees until the stream has passed the copy.
    unsafe fn queue_write(
        &self,
        address: u64,
        source: NonNull<u8>,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError>;
}

/// One launch of a kernel, whose one parameter is a struct by value.
#[derive(Clone, Copy, Debug)]
pub struct KernelLaunch<'a> {
    /// The kernel's name, for errors.
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// The parameter's bytes, aligned to 8.
    pub params: &'a [u8],
    /// Whether the kernel may start before the one in front of it on the stream is done: it waits for that itself.
    pub overlaps: bool,
}

/// Compiled kernels.
pub trait Kernels {
    /// Compiles a module; `target` names its architecture in errors.
    ///
    /// # Errors
    /// [`DriverError::ModuleLoad`] with the compiler's log, [`DriverError::DriverTooOld`].
    fn load_module(&self, ptx: &str, target: &str) -> Result<Handle, DriverError>;

    /// Unloads a module whose kernels are not used any more.
    fn unload_module(&self, module: Handle);

    /// A kernel of a module, and the size of its parameter where that is known.
    ///
    /// # Errors
    /// [`DriverError::Kernel`] if there is none of this name.
    fn kernel(&self, module: Handle, name: &'static str) -> Result<(Handle, Option<usize>), DriverError>;

    /// Allows launches with this much dynamic shared memory a block.
    ///
    /// # Errors
    /// [`DriverError::Kernel`] if the device has less.
    fn set_max_dynamic_shared(&self, kernel: Handle, name: &'static str, bytes: u32) -> Result<(), DriverError>;

    /// Asks for the most shared memory and the least L1 cache while the kernel runs.
    ///
    /// # Errors
    /// [`DriverError::Kernel`] if the driver refuses.
    fn prefer_shared_memory(&self, kernel: Handle, name: &'static str) -> Result<(), DriverError>;

    /// Queues one run.
    ///
    /// # Errors
    /// [`DriverError::Kernel`] if it cannot be started.
    ///
    /// # Safety
    /// Kernel and stream are alive; `params` are what the kernel takes; every address in them is valid for what the
    /// kernel does with it until the run, or the last replay of a graph that captured it, has finished, and is not used
    /// in a conflicting way meanwhile.
    unsafe fn launch(&self, kernel: Handle, stream: Handle, launch: &KernelLaunch<'_>) -> Result<(), DriverError>;
}

/// Streams, time stamps in them, and graphs captured from them.
pub trait Queues {
    /// A new stream, which does not wait for the default one.
    ///
    /// # Errors
    /// [`DriverError`] if the backend fails.
    fn new_stream(&self) -> Result<Handle, DriverError>;

    /// Destroys a stream; queued work still finishes.
    fn destroy_stream(&self, stream: Handle);

    /// Waits for a stream.
    ///
    /// # Errors
    /// The error of the queued work.
    fn synchronize_stream(&self, stream: Handle) -> Result<(), DriverError>;

    /// Queues copying `bytes` bytes from one address to another. Both ranges lie inside allocations of this backend and
    /// do not overlap: the callers check that.
    ///
    /// # Errors
    /// [`DriverError`] if the copy cannot be queued.
    fn copy(&self, from: u64, to: u64, bytes: usize, stream: Handle) -> Result<(), DriverError>;

    /// A new time stamp.
    ///
    /// # Errors
    /// [`DriverError`] if the backend fails.
    fn new_event(&self) -> Result<Handle, DriverError>;

    /// Destroys a time stamp.
    fn destroy_event(&self, event: Handle);

    /// Queues taking a time stamp.
    ///
    /// # Errors
    /// [`DriverError`] if the backend fails.
    fn record_event(&self, event: Handle, stream: Handle) -> Result<(), DriverError>;

    /// Waits for a time stamp.
    ///
    /// # Errors
    /// The error of the work queued before it.
    fn synchronize_event(&self, event: Handle) -> Result<(), DriverError>;

    /// Milliseconds from one time stamp to a later one.
    ///
    /// # Errors
    /// [`DriverError`] if one has not been taken.
    fn elapsed_ms(&self, earlier: Handle, later: Handle) -> Result<f32, DriverError>;

    /// Starts keeping what this thread queues on a stream, instead of running it.
    ///
    /// # Errors
    /// [`DriverError`] if the stream is being captured already.
    fn begin_capture(&self, stream: Handle) -> Result<(), DriverError>;

    /// Ends a capture, in any case, and makes a graph of it.
    ///
    /// # Errors
    /// [`DriverError`] if something was queued that cannot be captured.
    fn end_capture(&self, stream: Handle) -> Result<Handle, DriverError>;

    /// Queues a run of a graph.
    ///
    /// # Errors
    /// [`DriverError`] if the backend fails.
    fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<(), DriverError>;

    /// Destroys a graph; queued runs still finish.
    fn destroy_graph(&self, graph: Handle);
}
