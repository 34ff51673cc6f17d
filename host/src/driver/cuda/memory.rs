//! Device memory.

use std::ptr::{self, NonNull};

use super::super::backend::{Handle, Memory};
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

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        let refused = DriverError::HostMemory { requested_bytes: bytes as u64 };
        let mut memory = ptr::null_mut();
        let _current = self.enter()?;
        // SAFETY: `memory` is a live variable, and the context is current.
        match unsafe { api::cuMemAllocHost_v2(&mut memory, bytes) } {
            Ok(()) => NonNull::new(memory.cast()).ok_or(refused),
            Err(Failed::Code { code: 2, .. }) => Err(refused),
            Err(other) => Err(other.into()),
        }
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, _bytes: usize) {
        // As for `free`: an error cannot be reported, and means that the memory is gone with the context.
        if let Ok(_current) = self.enter() {
            // SAFETY: the one owner of the allocation gives it up, and no copy reads it: the caller's promise.
            let _ = unsafe { api::cuMemFreeHost(memory.as_ptr().cast()) };
        }
    }

    unsafe fn queue_write(
        &self,
        address: u64,
        source: NonNull<u8>,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the device range is inside a live allocation, and the stream is alive; that the source stays as it is
        // until the copy is done is the caller's promise.
        unsafe { api::cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), bytes, stream.pointer()) }?;
        Ok(())
    }
}
