//! One device, through its backend.

use std::fmt;
use std::sync::Arc;

use cust::sys::CUcontext;

use super::backend::Backend;
use super::cuda::{self, Cuda};
use super::error::DriverError;
use crate::device_limits::DeviceLimits;

/// Says whether the NVIDIA driver is installed and works.
///
/// # Errors
///
/// [`DriverError::NoDriver`] if it is not installed, [`DriverError::NoDevice`] if it sees no GPU, and
/// [`DriverError::Call`] if it does not start for another reason.
pub fn driver_available() -> Result<(), DriverError> {
    cuda::start_driver(0)
}

/// One device. Cloning is cheap, and a device can be used from any thread.
///
/// Everything made from a device keeps its context alive.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

impl Device {
    /// How many GPUs the driver sees. `CUDA_VISIBLE_DEVICES` can hide some.
    ///
    /// # Errors
    ///
    /// [`DriverError::NoDriver`] without a driver, [`DriverError::Call`] if it does not start. A driver
    /// that sees no GPU is not an error: the count is 0.
    pub fn count() -> Result<u32, DriverError> {
        cuda::count()
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
        Ok(Self::from_backend(Arc::new(Cuda::open(ordinal)?)))
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
        // SAFETY: the caller's promise.
        Ok(Self::from_backend(Arc::new(unsafe { Cuda::from_raw_context(context) }?)))
    }

    /// A device that something other than the CUDA driver plays.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Device {
        Device { backend }
    }

    /// The number of this GPU, counted from 0 among those that the driver sees.
    pub fn ordinal(&self) -> u32 {
        self.backend.ordinal()
    }

    /// The GPU's name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    /// The newest CUDA version that the installed driver supports, major and minor.
    pub fn driver_version(&self) -> (u32, u32) {
        self.backend.driver_version()
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
        self.backend.limits()
    }

    /// Device memory that is free now, and all of it, in bytes.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] if the driver does not answer.
    pub fn free_memory(&self) -> Result<(u64, u64), DriverError> {
        self.backend.free_memory()
    }

    /// Waits until everything queued in this context, on any stream, has finished.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.backend.synchronize()
    }

    /// The context, for other CUDA code. It lives at least as long as this device; null where there is none.
    pub fn raw_context(&self) -> CUcontext {
        self.backend.raw_context()
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal()).field("name", &self.name()).finish_non_exhaustive()
    }
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
