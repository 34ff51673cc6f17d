//! Device memory.

use std::fmt;

use super::device::Device;
use super::error::DriverError;
use super::stream::StreamHandle;

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
        let address = if len_bytes > 0 { device.backend().alloc(len_bytes)? } else { 0 };
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
        self.device.backend().write(address, source)
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
        self.device.backend().read(address, target)
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
        self.device.backend().fill(address, len_bytes, value)
    }

    /// Queues copying `len_bytes` bytes from one place of the buffer to another one behind it or before it.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if a range leaves the buffer, [`DriverError::Overlap`] if the two share a byte,
    /// [`DriverError::Call`] if the driver fails.
    pub fn copy_within(
        &self,
        from_bytes: usize,
        to_bytes: usize,
        len_bytes: usize,
        stream: StreamHandle<'_>,
    ) -> Result<(), DriverError> {
        let from = self.range("a copy", from_bytes, len_bytes)?;
        let to = self.range("a copy", to_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        if from_bytes.abs_diff(to_bytes) < len_bytes {
            return Err(DriverError::Overlap { from_bytes, to_bytes, len_bytes });
        }
        self.device.backend().copy(from, to, len_bytes, stream.handle())
    }

    /// The device address of a range, after checking that the buffer contains it.
    fn range(&self, operation: &'static str, offset_bytes: usize, len_bytes: usize) -> Result<u64, DriverError> {
        check_range(operation, offset_bytes, len_bytes, self.len_bytes)?;
        Ok(self.address + offset_bytes as u64)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 {
            self.device.backend().free(self.address);
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
