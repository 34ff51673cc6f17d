//! A CUDA context.

use std::fmt;
use std::marker::PhantomData;
use std::ptr;

use cust::context::{Context, CurrentContext};
use cust::device::Device as CustDevice;
use cust::sys::{CUcontext, CUdevice_attribute_enum as Attribute};

use super::super::backend::Backend;
use super::super::error::DriverError;
use super::super::loader::Failed;
use super::super::symbols::api;
use crate::device_limits::DeviceLimits;

/// Initialises the driver; doing so again is harmless. `requested` is only for the error.
pub(in super::super) fn start_driver(requested: u32) -> Result<(), DriverError> {
    // SAFETY: no precondition; the flags must be 0 and are.
    unsafe { api::cuInit(0) }.map_err(|failed| match failed {
        Failed::Code { code: 100, .. } => DriverError::NoDevice { requested, found: 0 },
        other => other.into(),
    })
}

/// One GPU, through one context.
pub(in super::super) struct Cuda {
    context: Owned,
    ordinal: u32,
    name: String,
    driver_version: (u32, u32),
    limits: DeviceLimits,
}

enum Owned {
    /// The device's primary context, which the CUDA runtime and most libraries use too.
    Primary(Context),
    /// A context that somebody else owns.
    Borrowed(CUcontext),
}

// SAFETY: the only field that is not Send and Sync by itself is a borrowed context handle. The driver
// allows a context to be current on several threads at once, and its calls take their own locks.
unsafe impl Send for Cuda {}
// SAFETY: as above; nothing in it is ever modified.
unsafe impl Sync for Cuda {}

/// How many GPUs the driver sees.
pub(in super::super) fn count() -> Result<u32, DriverError> {
    match start_driver(0) {
        Ok(()) => CustDevice::num_devices().map_err(|error| DriverError::of_cust("cuDeviceGetCount", error)),
        Err(DriverError::NoDevice { .. }) => Ok(0),
        Err(error) => Err(error),
    }
}

impl Cuda {
    /// GPU number `ordinal`, by its primary context.
    pub(in super::super) fn open(ordinal: u32) -> Result<Self, DriverError> {
        start_driver(ordinal)?;
        let found = count()?;
        if ordinal >= found {
            return Err(DriverError::NoDevice { requested: ordinal, found });
        }
        let device = CustDevice::get_device(ordinal).map_err(|error| DriverError::of_cust("cuDeviceGet", error))?;
        let mut before: CUcontext = ptr::null_mut();
        // SAFETY: `before` is a live variable.
        unsafe { api::cuCtxGetCurrent(&mut before) }?;
        let context = Context::new(device).map_err(|error| DriverError::of_cust("cuDevicePrimaryCtxRetain", error));
        // `cust` has made the new context current; put back what was.
        // SAFETY: `before` was current a moment ago, or is null, which means none.
        let restored = unsafe { api::cuCtxSetCurrent(before) };
        let context = context?;
        restored?;
        Self::assemble(Owned::Primary(context), device, ordinal)
    }

    /// A context that somebody else owns.
    ///
    /// # Safety
    ///
    /// `context` is a live context, and stays alive as long as this.
    pub(in super::super) unsafe fn from_raw_context(context: CUcontext) -> Result<Self, DriverError> {
        start_driver(0)?;
        let device = {
            let _current = Current::enter(context)?;
            CurrentContext::get_device().map_err(|error| DriverError::of_cust("cuCtxGetDevice", error))?
        };
        let found = count()?;
        let ordinal = (0..found)
            .find(|ordinal| CustDevice::get_device(*ordinal).is_ok_and(|each| each.as_raw() == device.as_raw()))
            // A context on a device that is not in the list: its handle still says which one it is.
            .unwrap_or(device.as_raw() as u32);
        Self::assemble(Owned::Borrowed(context), device, ordinal)
    }

    fn assemble(context: Owned, device: CustDevice, ordinal: u32) -> Result<Self, DriverError> {
        let mut version = 0;
        // SAFETY: `version` is a live variable.
        unsafe { api::cuDriverGetVersion(&mut version) }?;
        let version = version as u32;
        let name = device.name().map_err(|error| DriverError::of_cust("cuDeviceGetName", error))?;
        Ok(Self {
            context,
            ordinal,
            name,
            driver_version: (version / 1000, version % 1000 / 10),
            limits: read_limits(device)?,
        })
    }

    /// Makes the context current on this thread until the returned value is dropped.
    pub(super) fn enter(&self) -> Result<Current, DriverError> {
        Current::enter(self.raw_context())
    }
}

impl Backend for Cuda {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn driver_version(&self) -> (u32, u32) {
        self.driver_version
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn raw_context(&self) -> CUcontext {
        match &self.context {
            Owned::Primary(context) => context.as_raw(),
            Owned::Borrowed(context) => *context,
        }
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { api::cuCtxSynchronize() }?;
        Ok(())
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("ordinal", &self.ordinal).field("name", &self.name).finish_non_exhaustive()
    }
}

/// While this lives, one context is current on this thread. Dropping it puts the previous one back.
pub(super) struct Current {
    pushed: bool,
    /// What is current is a property of the thread, so this must not leave it.
    _this_thread: PhantomData<*mut ()>,
}

impl Current {
    fn enter(context: CUcontext) -> Result<Current, DriverError> {
        let mut current: CUcontext = ptr::null_mut();
        // SAFETY: `current` is a live variable.
        unsafe { api::cuCtxGetCurrent(&mut current) }?;
        let pushed = current != context;
        if pushed {
            // SAFETY: the context is alive: retained by a `Cuda`, or promised by the caller of
            // `Device::from_raw_context`.
            unsafe { api::cuCtxPushCurrent_v2(context) }?;
        }
        Ok(Current { pushed, _this_thread: PhantomData })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: this thread pushed a context, and every later push was popped before this.
            // An error cannot be reported from here, and leaves nothing to undo.
            let _ = unsafe { api::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

fn read_limits(device: CustDevice) -> Result<DeviceLimits, DriverError> {
    let get = |attribute| -> Result<u32, DriverError> {
        let mut value = 0;
        // SAFETY: `value` is a live variable, and the device was given out by the driver.
        unsafe { api::cuDeviceGetAttribute(&mut value, attribute, device.as_raw()) }?;
        Ok(value as u32)
    };
    let total = device.total_memory().map_err(|error| DriverError::of_cust("cuDeviceTotalMem", error))?;
    Ok(DeviceLimits {
        compute_capability: (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_bytes_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        registers_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        max_threads_per_multiprocessor: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        l2_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        total_memory_bytes: total as u64,
    })
}
