//! One GPU and the context through which it is used.

use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cust::context::{Context, CurrentContext};
use cust::device::Device as CustDevice;
use cust::sys::{CUcontext, CUdevice_attribute_enum as Attribute};

use super::error::DriverError;
use super::loader::Failed;
use super::symbols::api;
use crate::device_limits::DeviceLimits;

/// Says whether the NVIDIA driver is installed and works.
///
/// # Errors
///
/// [`DriverError::NoDriver`] if it is not installed, [`DriverError::NoDevice`] if it sees no GPU, and
/// [`DriverError::Call`] if it does not start for another reason.
pub fn driver_available() -> Result<(), DriverError> {
    start_driver(0)
}

/// Initialises the driver; doing so again is harmless. `requested` is only for the error.
fn start_driver(requested: u32) -> Result<(), DriverError> {
    // SAFETY: no precondition; the flags must be 0 and are.
    unsafe { api::cuInit(0) }.map_err(|failed| match failed {
        Failed::Code { code: 100, .. } => DriverError::NoDevice { requested, found: 0 },
        other => other.into(),
    })
}

/// One GPU. Cloning is cheap, and a device can be used from any thread.
///
/// Everything made from a device keeps its context alive.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    context: Handle,
    ordinal: u32,
    name: String,
    driver_version: (u32, u32),
    limits: DeviceLimits,
}

enum Handle {
    /// The device's primary context, which the CUDA runtime and most libraries use too.
    Primary(Context),
    /// A context that somebody else owns.
    Borrowed(CUcontext),
}

// SAFETY: the only field that is not Send and Sync by itself is a borrowed context handle. The driver
// allows a context to be current on several threads at once, and its calls take their own locks.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it is ever modified.
unsafe impl Sync for Inner {}

impl Device {
    /// How many GPUs the driver sees. `CUDA_VISIBLE_DEVICES` can hide some.
    ///
    /// # Errors
    ///
    /// [`DriverError::NoDriver`] without a driver, [`DriverError::Call`] if it does not start. A driver
    /// that sees no GPU is not an error: the count is 0.
    pub fn count() -> Result<u32, DriverError> {
        match start_driver(0) {
            Ok(()) => CustDevice::num_devices().map_err(|error| DriverError::of_cust("cuDeviceGetCount", error)),
            Err(DriverError::NoDevice { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Opens GPU number `ordinal`, counted from 0, by its primary context.
    ///
    /// The primary context is shared with every other user of the CUDA runtime in this process. What is
    /// current on the calling thread stays current.
    ///
    /// # Errors
    ///
    /// [`DriverError::NoDriver`] without a driver, [`DriverError::NoDevice`] without such a GPU, and
    /// [`DriverError::Call`] if the driver or the GPU does not start.
    pub fn open(ordinal: u32) -> Result<Device, DriverError> {
        start_driver(ordinal)?;
        let found = Self::count()?;
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
        Self::assemble(Handle::Primary(context), device, ordinal)
    }

    /// Uses a context that already exists, and does not take ownership of it.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver does not accept the context.
    ///
    /// # Safety
    ///
    /// `context` is a live context, and stays alive until this device, its clones and everything made
    /// from them are dropped.
    pub unsafe fn from_raw_context(context: CUcontext) -> Result<Device, DriverError> {
        start_driver(0)?;
        let device = {
            let _current = Current::enter(context)?;
            CurrentContext::get_device().map_err(|error| DriverError::of_cust("cuCtxGetDevice", error))?
        };
        let found = Self::count()?;
        let ordinal = (0..found)
            .find(|ordinal| CustDevice::get_device(*ordinal).is_ok_and(|each| each.as_raw() == device.as_raw()))
            // A context on a device that is not in the list: its handle still says which one it is.
            .unwrap_or(device.as_raw() as u32);
        Self::assemble(Handle::Borrowed(context), device, ordinal)
    }

    fn assemble(context: Handle, device: CustDevice, ordinal: u32) -> Result<Device, DriverError> {
        let mut version = 0;
        // SAFETY: `version` is a live variable.
        unsafe { api::cuDriverGetVersion(&mut version) }?;
        let version = version as u32;
        let name = device.name().map_err(|error| DriverError::of_cust("cuDeviceGetName", error))?;
        Ok(Device {
            inner: Arc::new(Inner {
                context,
                ordinal,
                name,
                driver_version: (version / 1000, version % 1000 / 10),
                limits: read_limits(device)?,
            }),
        })
    }

    /// The number of this GPU, counted from 0 among those that the driver sees.
    pub fn ordinal(&self) -> u32 {
        self.inner.ordinal
    }

    /// The GPU's name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The newest CUDA version that the installed driver supports, major and minor.
    pub fn driver_version(&self) -> (u32, u32) {
        self.inner.driver_version
    }

    /// Checks that the installed driver supports at least the CUDA version `needed`, major and minor.
    ///
    /// # Errors
    ///
    /// [`DriverError::DriverTooOld`] with both versions if it does not.
    pub fn require_driver(&self, needed: (u32, u32)) -> Result<(), DriverError> {
        let driver_cuda = self.driver_version();
        if driver_cuda < needed {
            return Err(DriverError::DriverTooOld { driver_cuda, needed });
        }
        Ok(())
    }

    /// The GPU's resources, read once when the device was opened.
    pub fn limits(&self) -> DeviceLimits {
        self.inner.limits
    }

    /// Device memory that is free now, and all of it, in bytes.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver does not answer.
    pub fn free_memory(&self) -> Result<(u64, u64), DriverError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live variables, and the context is current.
        unsafe { api::cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    /// Waits until everything queued in this context, on any stream, has finished.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { api::cuCtxSynchronize() }?;
        Ok(())
    }

    /// The context, for other CUDA code. It lives at least as long as this device.
    pub fn raw_context(&self) -> CUcontext {
        match &self.inner.context {
            Handle::Primary(context) => context.as_raw(),
            Handle::Borrowed(context) => *context,
        }
    }

    /// Makes the context current on this thread until the returned value is dropped.
    pub(super) fn enter(&self) -> Result<Current, DriverError> {
        Current::enter(self.raw_context())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.inner.ordinal)
            .field("name", &self.inner.name)
            .finish_non_exhaustive()
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
            // SAFETY: the context is alive: retained by a `Device`, or promised by the caller of
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

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU these calls succeed; without one they fail in words.
    #[test]
    fn a_machine_without_a_driver_is_an_ordinary_error() {
        let Err(error) = driver_available() else {
            assert!(Device::count().unwrap() > 0);
            return;
        };
        let opened = Device::open(3).unwrap_err();
        if let DriverError::NoDriver { detail } = &error {
            assert!(detail.contains("libcuda.so.1"), "{detail}");
            assert_eq!(opened, error);
            assert_eq!(Device::count().unwrap_err(), error);
            let sentence = error.to_string();
            assert!(sentence.contains("no NVIDIA driver is installed"));
            assert!(sentence.contains("--device cpu"));
        }
    }

    #[test]
    fn a_device_that_does_not_exist_is_an_error() {
        let error = Device::open(u32::MAX).unwrap_err();
        assert!(!error.to_string().is_empty());
    }

    #[test]
    fn a_device_can_be_shared_between_threads() {
        fn shareable<T: Send + Sync>() {}
        shareable::<Device>();
        shareable::<DriverError>();
    }
}
