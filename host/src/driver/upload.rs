//! Page-locked host memory that one side fills while the other copies from it.

use std::fmt;
use std::ptr::NonNull;
use std::slice;

use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::DriverError;
use super::stream::{Event, Stream};

/// Slots of page-locked host memory, used in turn: the device copies from the last ones while the next one is filled.
///
/// Dropping it waits for the copies that are still queued.
pub struct UploadRing {
    device: Device,
    memory: NonNull<u8>,
    slot_bytes: usize,
    /// One a slot: passed when the copy from it is done.
    copied: Vec<Event>,
    /// The slot that is filled next.
    next: usize,
}

impl UploadRing {
    /// Allocates `slots` slots of `slot_bytes` bytes, at least one of each.
    ///
    /// # Errors
    ///
    /// [`DriverError::HostMemory`] with the size if the machine does not give the memory, [`DriverError::Call`] if the
    /// driver fails otherwise.
    pub fn new(device: &Device, slots: usize, slot_bytes: usize) -> Result<UploadRing, DriverError> {
        let (slots, slot_bytes) = (slots.max(1), slot_bytes.max(1));
        let copied = (0..slots).map(|_| Event::new(device)).collect::<Result<Vec<_>, _>>()?;
        let bytes = slots.saturating_mul(slot_bytes);
        let memory = device.backend().alloc_host(bytes)?;
        // SAFETY: the allocation has as many bytes, and nobody else knows it.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(UploadRing { device: device.clone(), memory, slot_bytes, copied, next: 0 })
    }

    /// Page-locked bytes of all slots.
    pub fn len_bytes(&self) -> usize {
        self.copied.len() * self.slot_bytes
    }

    /// The next slot, to be filled, after waiting until the device has copied what it held before.
    ///
    /// # Errors
    ///
    /// [`DriverError::Call`] with the error of the queued work, if that failed.
    pub fn slot(&mut self) -> Result<&mut [u8], DriverError> {
        self.copied[self.next].synchronize()?;
        // SAFETY: the slot lies in the allocation, whose bytes have all been written; the device is done with it, and the
        // slice borrows `self`, without which no other copy from it can be queued.
        Ok(unsafe { slice::from_raw_parts_mut(self.place().as_ptr(), self.slot_bytes) })
    }

    /// Queues copying the first `len_bytes` bytes of the slot that [`UploadRing::slot`] gave last to `target`, starting
    /// `offset_bytes` into it, and returns without waiting; the next slot is another one.
    ///
    /// # Errors
    ///
    /// [`DriverError::OutOfRange`] if the slot or the target has fewer bytes, [`DriverError::Call`] if the driver fails.
    ///
    /// # Safety
    ///
    /// The stream is not being captured: a graph would read the slot whatever became of it.
    pub unsafe fn upload(
        &mut self,
        len_bytes: usize,
        target: &DeviceBuffer,
        offset_bytes: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let operation = "an upload";
        let address = target.range(operation, offset_bytes, len_bytes)?;
        if len_bytes > self.slot_bytes {
            let buffer_bytes = self.slot_bytes;
            return Err(DriverError::OutOfRange { operation, offset_bytes: 0, len_bytes, buffer_bytes });
        }
        if len_bytes == 0 {
            return Ok(());
        }
        let handle = stream.handle();
        // The slot may have been left unfilled, and so not waited for.
        self.copied[self.next].synchronize()?;
        // SAFETY: the range was checked, and freeing the target waits for the copy; the stream is alive and not being
        // captured. The slot is written again, or freed, only behind its event, which follows the copy (or, should that fail, behind the
        // stream).
        let queued = unsafe { self.device.backend().queue_write(address, self.place(), len_bytes, handle.handle()) };
        if let Err(error) = queued.and_then(|()| self.copied[self.next].record(handle)) {
            // If waiting fails too, the context is lost, and with it whatever would copy.
            let _ = stream.synchronize();
            return Err(error);
        }
        self.next = (self.next + 1) % self.copied.len();
        Ok(())
    }

    /// Where the next slot begins.
    fn place(&self) -> NonNull<u8> {
        // SAFETY: the slot is one of those that the allocation has.
        unsafe { self.memory.add(self.next * self.slot_bytes) }
    }
}

impl Drop for UploadRing {
    fn drop(&mut self) {
        for copied in &self.copied {
            // An error is one of queued work, which then copies nothing any more.
            let _ = copied.synchronize();
        }
        // SAFETY: this owns the allocation of this size, and the copies from it are done.
        unsafe { self.device.backend().free_host(self.memory, self.len_bytes()) };
    }
}

impl fmt::Debug for UploadRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UploadRing")
            .field("slots", &self.copied.len())
            .field("slot_bytes", &self.slot_bytes)
            .finish_non_exhaustive()
    }
}
