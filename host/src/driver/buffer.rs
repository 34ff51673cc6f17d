//! Device memory and page-locked host memory.

use std::ptr::NonNull;
use std::{fmt, ptr, slice};

use super::device::Device;
use super::error::DriverError;
use super::loader::Failed;
use super::stream::StreamHandle;
use super::symbols::api;

/// Untyped device memory, freed when dropped.
///
/// No Rust reference ever points into device memory: it is read and written by the driver, in the order
/// of the streams. That is why writing takes `&self`, so that the inputs of a captured graph can be
/// replaced while the graph borrows their buffer. The order of such writes is the caller's to arrange.
///
/// Freeing waits for the work that is queued on the device, so dropping a buffer that a kernel still
/// uses is slow, not wrong.
pub struct DeviceBuffer {
    device: Device,
    /// 0 for a buffer of no bytes, which has no allocation.
    address: u64,
    len_bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `len_bytes` bytes, aligned to 256, with unspecified content. 0 bytes are allowed.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfMemory`] with the sizes if they are not free, [`DriverError::Call`] for
    /// anything else that the driver reports.
    pub fn alloc(device: &Device, len_bytes: usize) -> Result<DeviceBuffer, DriverError> {
        let mut address = 0;
        if len_bytes > 0 {
            let _current = device.enter()?;
            // SAFETY: `address` is a live variable, and the context is current.
            if let Err(failed) = unsafe { api::cuMemAlloc_v2(&mut address, len_bytes) } {
                return Err(match failed {
                    Failed::Code { code: 2, .. } => {
                        let (free_bytes, total_bytes) = device.free_memory()?;
                        DriverError::OutOfMemory { requested_bytes: len_bytes as u64, free_bytes, total_bytes }
                    }
                    other => other.into(),
                });
            }
        }
        Ok(DeviceBuffer { device: device.clone(), address, len_bytes })
    }

    /// The buffer's length, in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The buffer's device address, for kernel arguments. It is 0 for a buffer of no bytes.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The device that the memory is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `source` into the buffer, starting `offset_bytes` into it, and waits until it has arrived.
    /// Work on a [`Stream`] is not waited for: synchronise one whose kernels use this range first.
    ///
    /// [`Stream`]: super::Stream
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if it does not fit, [`DriverError::Call`] if the driver fails.
    pub fn write(&self, offset_bytes: usize, source: &[u8]) -> Result<(), DriverError> {
        let address = self.range("a write", offset_bytes, source.len())?;
        if source.is_empty() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: the device range is inside this live allocation, the source is a live slice of the
        // same length, and the call returns after the source has been read. The data may still be on its
        // way from a staging buffer then, so wait for the default stream: other streams do not.
        unsafe {
            api::cuMemcpyHtoD_v2(address, source.as_ptr().cast(), source.len())?;
            api::cuStreamSynchronize(ptr::null_mut())?;
        }
        Ok(())
    }

    /// Copies from the buffer, starting `offset_bytes` into it, until `target` is full, and waits for the
    /// copy. Work on a [`Stream`] is not waited for: synchronise one whose kernels write this range first.
    ///
    /// [`Stream`]: super::Stream
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if the buffer is too short, [`DriverError::Call`] if the driver fails.
    pub fn read(&self, offset_bytes: usize, target: &mut [u8]) -> Result<(), DriverError> {
        let address = self.range("a read", offset_bytes, target.len())?;
        if target.is_empty() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: the device range is inside this live allocation, the target is a live, exclusive slice
        // of the same length, and the call returns after the target has been written.
        unsafe { api::cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), address, target.len()) }?;
        Ok(())
    }

    /// Queues a copy of `len_bytes` bytes from `source_offset_bytes` in `source` to `offset_bytes` in this
    /// buffer. The copy runs when `stream` gets to it.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if either range leaves its buffer, [`DriverError::Call`] if the driver
    /// fails.
    ///
    /// # Safety
    ///
    /// Until the copy has run, and in a captured graph until the last replay has, `source` is neither
    /// dropped nor written to, and this buffer is not dropped.
    pub unsafe fn write_async(
        &self,
        offset_bytes: usize,
        source: &PinnedBuffer,
        source_offset_bytes: usize,
        len_bytes: usize,
        stream: StreamHandle<'_>,
    ) -> Result<(), DriverError> {
        let address = self.range("a write", offset_bytes, len_bytes)?;
        let source = source.range(source_offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: both ranges are inside live allocations, which the caller keeps alive and unchanged.
        unsafe { api::cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), len_bytes, stream.as_raw()) }?;
        Ok(())
    }

    /// Queues a copy of `len_bytes` bytes from `offset_bytes` in this buffer to `target_offset_bytes` in
    /// `target`. The copy runs when `stream` gets to it.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if either range leaves its buffer, [`DriverError::Call`] if the driver
    /// fails.
    ///
    /// # Safety
    ///
    /// Until the copy has run, and in a captured graph until the last replay has, `target` is neither
    /// dropped, read nor written to, and this buffer is not dropped.
    pub unsafe fn read_async(
        &self,
        offset_bytes: usize,
        target: &mut PinnedBuffer,
        target_offset_bytes: usize,
        len_bytes: usize,
        stream: StreamHandle<'_>,
    ) -> Result<(), DriverError> {
        let address = self.range("a read", offset_bytes, len_bytes)?;
        let target = target.range(target_offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: both ranges are inside live allocations, which the caller keeps alive and untouched.
        unsafe { api::cuMemcpyDtoHAsync_v2(target.as_ptr().cast(), address, len_bytes, stream.as_raw()) }?;
        Ok(())
    }

    /// Sets `len_bytes` bytes, starting at `offset_bytes`, to `value`, and waits until they are. Work on a
    /// [`Stream`](super::Stream) is not waited for.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if the range leaves the buffer, [`DriverError::Call`] if the driver
    /// fails.
    pub fn fill(&self, offset_bytes: usize, len_bytes: usize, value: u8) -> Result<(), DriverError> {
        let address = self.range("a fill", offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: the range is inside this live allocation. The driver may queue a fill of device memory
        // on the default stream and return, so wait for it: other streams do not.
        unsafe {
            api::cuMemsetD8_v2(address, value, len_bytes)?;
            api::cuStreamSynchronize(ptr::null_mut())?;
        }
        Ok(())
    }

    /// Queues setting `len_bytes` bytes, starting at `offset_bytes`, to `value` on `stream`.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if the range leaves the buffer, [`DriverError::Call`] if the driver
    /// fails.
    ///
    /// # Safety
    ///
    /// In a captured graph, this buffer is not dropped before the last replay has run. (A fill that is not
    /// captured has no further condition: freeing the buffer waits for it.)
    pub unsafe fn fill_async(
        &self,
        offset_bytes: usize,
        len_bytes: usize,
        value: u8,
        stream: StreamHandle<'_>,
    ) -> Result<(), DriverError> {
        let address = self.range("a fill", offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: the range is inside this allocation, which stays alive as the caller promises.
        unsafe { api::cuMemsetD8Async(address, value, len_bytes, stream.as_raw()) }?;
        Ok(())
    }

    /// The device address of a range, after checking that the buffer contains it.
    fn range(&self, operation: &'static str, offset_bytes: usize, len_bytes: usize) -> Result<u64, DriverError> {
        check_range(operation, offset_bytes, len_bytes, self.len_bytes)?;
        Ok(self.address + offset_bytes as u64)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // An error cannot be reported from here; it means that the context, and the memory with it, is
        // already gone, or that earlier work failed, which the next call reports too.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the allocation, and nothing uses the address afterwards.
            let _ = unsafe { api::cuMemFree_v2(self.address) };
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

/// Page-locked host memory, which the GPU can copy from and to while the CPU goes on.
pub struct PinnedBuffer {
    device: Device,
    /// Aligned to at least 256 bytes. Dangling if the length is 0.
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: this owns its memory as a `Vec<u8>` does, and hands out references by the same rules.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `len_bytes` zero bytes. 0 bytes are allowed.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfPinnedMemory`] if they cannot be had, [`DriverError::Call`] for anything else
    /// that the driver reports.
    pub fn zeroed(device: &Device, len_bytes: usize) -> Result<PinnedBuffer, DriverError> {
        let mut start = ptr::without_provenance_mut(256);
        if len_bytes > 0 {
            let _current = device.enter()?;
            // SAFETY: `start` is a live variable, and the context is current.
            unsafe { api::cuMemAllocHost_v2(&mut start, len_bytes) }.map_err(|failed| match failed {
                Failed::Code { code: 2, .. } => DriverError::OutOfPinnedMemory { requested_bytes: len_bytes as u64 },
                other => other.into(),
            })?;
            // SAFETY: the driver reported success, so `start` points to that many writable bytes.
            unsafe { ptr::write_bytes(start.cast::<u8>(), 0, len_bytes) };
        }
        Ok(PinnedBuffer {
            device: device.clone(),
            // The driver never reports success with a null pointer; if it did, refusing is safe.
            start: NonNull::new(start.cast())
                .ok_or(DriverError::OutOfPinnedMemory { requested_bytes: len_bytes as u64 })?,
            len_bytes,
        })
    }

    /// The buffer's length, in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` points to `len_bytes` initialised bytes that this owns, or is a non-null
        // pointer for 0 bytes; the borrow is shared, as the slice is.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; the borrow is exclusive, as the slice is.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }

    /// The start of a range, after checking that the buffer contains it.
    fn range(&self, offset_bytes: usize, len_bytes: usize) -> Result<NonNull<u8>, DriverError> {
        check_range("a copy", offset_bytes, len_bytes, self.len_bytes)?;
        // SAFETY: the offset is at most the length, so the result is in the allocation or at its end.
        Ok(unsafe { self.start.add(offset_bytes) })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.len_bytes == 0 {
            return;
        }
        // As for `DeviceBuffer`: there is nobody to report an error to.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the allocation, and nothing uses the pointer afterwards.
            let _ = unsafe { api::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

/// Checks that a range lies in a buffer, without overflow.
fn check_range(
    operation: &'static str,
    offset_bytes: usize,
    len_bytes: usize,
    buffer_bytes: usize,
) -> Result<(), DriverError> {
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= buffer_bytes => Ok(()),
        _ => Err(DriverError::OutOfRange { operation, offset_bytes, len_bytes, buffer_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_without_overflow() {
        assert!(check_range("a read", 0, 0, 0).is_ok());
        assert!(check_range("a read", 8, 0, 8).is_ok());
        assert!(check_range("a read", 3, 5, 8).is_ok());
        for (offset, len) in [(9, 0), (4, 5), (usize::MAX, 1), (1, usize::MAX)] {
            let error = check_range("a read", offset, len, 8).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "a read of {len} bytes at offset {offset} does not fit into a buffer of 8 bytes; use a \
                     smaller range, or a larger buffer"
                )
            );
        }
    }
}
