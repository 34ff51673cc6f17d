//! Kernels: loaded from PTX, and launched.

use std::sync::Arc;
use std::{fmt, mem};

use super::backend::{Handle, KernelLaunch};
use super::device::Device;
use super::error::DriverError;
use super::stream::StreamHandle;

/// Kernels that are loaded on one device, unloaded when the last clone and [`Function`] is dropped.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    module: Handle,
    target: String,
}

impl Module {
    /// Compiles `ptx` for the device and loads it. `target` names the architecture that the PTX was built
    /// for, such as `sm_90a`, and is only used in errors.
    ///
    /// # Errors
    ///
    /// [`DriverError::DriverTooOld`] if the PTX is of a newer version than the driver knows,
    /// [`DriverError::ModuleLoad`] with the compiler's log if the driver does not accept it for any other
    /// reason.
    pub fn load(device: &Device, ptx: &str, target: &str) -> Result<Module, DriverError> {
        let module = device.backend().load_module(ptx, target)?;
        Ok(Module { inner: Arc::new(Inner { device: device.clone(), module, target: target.to_owned() }) })
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the module has no such kernel.
    pub fn function(&self, name: &'static str) -> Result<Function, DriverError> {
        let (kernel, parameter_bytes) = self.inner.device.backend().kernel(self.inner.module, name)?;
        Ok(Function { module: self.clone(), kernel, name, parameter_bytes })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Every `Function` holds a share of this, so none is left.
        self.device.backend().unload_module(self.module);
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("target", &self.inner.target).finish_non_exhaustive()
    }
}

/// One kernel. It keeps its module loaded.
#[derive(Clone)]
pub struct Function {
    module: Module,
    kernel: Handle,
    name: &'static str,
    /// The size of the parameter that the kernel declares, where the backend tells.
    parameter_bytes: Option<usize>,
}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Allows launches with up to `bytes` of dynamic shared memory a block. Without it, 48 KiB are.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the GPU has less.
    pub fn set_max_dynamic_shared(&self, bytes: u32) -> Result<(), DriverError> {
        self.module.inner.device.backend().set_max_dynamic_shared(self.kernel, self.name, bytes)
    }

    /// Asks that multiprocessors that run the kernel give all they can to shared memory and the rest to the L1 cache. One that
    /// runs a kernel must be empty before it can run another one that divides them differently.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver refuses.
    pub fn prefer_shared_memory(&self) -> Result<(), DriverError> {
        self.module.inner.device.backend().prefer_shared_memory(self.kernel, self.name)
    }

    /// Queues one run of the kernel: `grid` blocks of `block` threads (x, y, z), with `shared_bytes` of
    /// dynamic shared memory a block. `params` is copied before this returns.
    ///
    /// # Errors
    ///
    /// [`DriverError::ParameterSize`] if the kernel declares a parameter of another size than `P`, where
    /// the driver tells (CUDA 12.4 and newer), [`DriverError::Kernel`] if the launch fails. What goes
    /// wrong while the kernel runs is reported by a later call.
    ///
    /// # Safety
    ///
    /// - The kernel has exactly one parameter, the `#[repr(C)]` struct `P`, by value.
    /// - Every address in `params` is valid, for what the kernel does with it, until the run has finished;
    ///   in a captured graph, until the last replay has.
    /// - Nothing else accesses that memory in a conflicting way meanwhile.
    pub unsafe fn launch<P: bytemuck::NoUninit>(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: StreamHandle<'_>,
        params: &P,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.launch_after(false, grid, block, shared_bytes, stream, params) }
    }

    /// [`Function::launch`]; where it `overlaps`, the kernel may start before the one in front of it on the stream is
    /// done (programmatic dependent launch, compute capability 9.0 and newer).
    ///
    /// # Errors
    ///
    /// As [`Function::launch`].
    ///
    /// # Safety
    ///
    /// As [`Function::launch`]; a kernel that overlaps waits for the one in front of it before it accesses memory that
    /// either writes.
    pub unsafe fn launch_after<P: bytemuck::NoUninit>(
        &self,
        overlaps: bool,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: StreamHandle<'_>,
        params: &P,
    ) -> Result<(), DriverError> {
        let found_bytes = mem::size_of::<P>();
        if let Some(expected_bytes) = self.parameter_bytes
            && expected_bytes != found_bytes
        {
            return Err(DriverError::ParameterSize { kernel: self.name, found_bytes, expected_bytes });
        }
        let params = bytemuck::bytes_of(params);
        let launch = KernelLaunch { name: self.name, grid, block, shared_bytes, params, overlaps };
        // SAFETY: the kernel is alive with its module, the stream for as long as its handle; the rest is the caller's
        // promise.
        unsafe { self.module.inner.device.backend().launch(self.kernel, stream.handle(), &launch) }
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").field("name", &self.name).finish_non_exhaustive()
    }
}
