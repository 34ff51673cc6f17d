//! Device memory.

use std::ptr;

use super::super::backend::Memory;
use super::super::error::DriverError;
use super::super::loader::Failed;
use super::super::symbols::api;
use super::Cuda;

impl Memory for Cuda {
    fn free_memory(&self) -> Result<(u64, u64), DriverError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live variables, and the context is current.
        unsafe { api::cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    fn alloc(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut address = 0;
        let _current = self.enter()?;
        // SAFETY: `address` is a live variable, and the context is current.
        match unsafe { api::cuMemAlloc_v2(&mut address, bytes) } {
            Ok(()) => Ok(address),
            Err(Failed::Code { code: 2, .. }) => {
                let (free_bytes, total_bytes) = self.free_memory()?;
                Err(DriverError::OutOfMemory { requested_bytes: bytes as u64, free_bytes, total_bytes })
            }
            Err(other) => Err(other.into()),
        }
    }

    fn free(&self, address: u64) {
        // An error cannot be reported from here; it means that the context, and the memory with it, is
        // already gone, or that earlier work failed, which the next call reports too.
        if let Ok(_current) = self.enter() {
            // SAFETY: the one owner of the allocation gives it up.
            let _ = unsafe { api::cuMemFree_v2(address) };
        }
    }

    fn write(&self, address: u64, source: &[u8]) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the device range is inside a live allocation, the source is a live slice of the same
        // length, and the call returns after the source has been read. The data may still be on its way from
        // a staging buffer then, so wait for the default stream: other streams do not.
        unsafe {
            api::cuMemcpyHtoD_v2(address, source.as_ptr().cast(), source.len())?;
            api::cuStreamSynchronize(ptr::null_mut())?;
        }
        Ok(())
    }

    fn read(&self, address: u64, target: &mut [u8]) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the device range is inside a live allocation, the target is a live, exclusive slice of the
        // same length, and the call returns after the target has been written.
        unsafe { api::cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), address, target.len()) }?;
        Ok(())
    }

    fn fill(&self, address: u64, bytes: usize, value: u8) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the range is inside a live allocation. The driver may queue a fill of device memory on the
        // default stream and return, so wait for it: other streams do not.
        unsafe {
            api::cuMemsetD8_v2(address, value, bytes)?;
            api::cuStreamSynchronize(ptr::null_mut())?;
        }
        Ok(())
    }
}
