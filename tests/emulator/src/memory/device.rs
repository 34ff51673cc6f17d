//! Global memory: allocations with gaps between them, and a bit for each byte that was written.
//!
//! Blocks run on several host threads, so memory is made of relaxed atomics; a kernel's races then give some value, as on
//! a GPU, and are found by [`super::global_races`].

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::error::{EmulatorError, FindingKind};

/// Every allocation begins in a region of its own, [`ALIGN`] behind the region's start, and at least one
/// region's rest is free behind it.
const REGION_SHIFT: u32 = 16;
const BASE: u64 = 0x7000_0000_0000;
const ALIGN: u64 = 256;
/// What fresh memory holds: as f32 and f16 large negative numbers, as an index far out of bounds.
const FRESH: u64 = 0xF1E2_F1E2_F1E2_F1E2;

/// Why an access to global memory is not possible.
pub(crate) struct GlobalFault {
    pub(crate) kind: FindingKind,
    pub(crate) detail: String,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    base: u64,
    bytes: usize,
    /// Constants, which kernels must not write.
    read_only: bool,
    words: Box<[AtomicU64]>,
    /// A bit for each byte.
    written: Box<[AtomicU32]>,
}

/// Emulated device memory.
#[derive(Debug, Default)]
pub struct DeviceMemory {
    allocations: Vec<Option<Allocation>>,
    /// Allocation of each region, plus 1; 0 where there is none.
    regions: Vec<u32>,
}

/// Where an access goes.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    allocation: &'a Allocation,
    pub(crate) index: usize,
    pub(crate) offset: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` unwritten bytes, 256-byte aligned and no more.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        let first = self.regions.len();
        let base = BASE + ((first as u64) << REGION_SHIFT) + ALIGN;
        let regions = ((ALIGN + bytes as u64) >> REGION_SHIFT) as usize + 2;
        self.allocations.push(Some(Allocation {
            base,
            bytes,
            read_only: false,
            words: (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(FRESH)).collect(),
            written: (0..bytes.div_ceil(32)).map(|_| AtomicU32::new(0)).collect(),
        }));
        self.regions.resize(first + regions, self.allocations.len() as u32);
        base
    }

    /// Frees an allocation; its address is never given out again.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when `address` is not what [`Self::alloc`] returned.
    pub fn free(&mut self, address: u64) -> Result<(), EmulatorError> {
        match self.index(address) {
            Some(index) if self.allocations[index].as_ref().is_some_and(|a| a.base == address) => {
                self.allocations[index] = None;
                Ok(())
            }
            _ => Err(EmulatorError::Address { address, bytes: 0 }),
        }
    }

    /// Keeps kernels from writing the allocation at this address.
    pub(crate) fn protect(&mut self, address: u64) {
        if let Ok((allocation, _)) = self.host(address, 0) {
            allocation.read_only = true;
        }
    }

    /// Copies `bytes` to `address`.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when they are not inside one allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), EmulatorError> {
        let (allocation, offset) = self.host(address, bytes.len())?;
        for (i, &byte) in bytes.iter().enumerate() {
            let at = offset + i;
            let word = allocation.words[at / 8].get_mut();
            *word = *word & !(0xFF << (at % 8 * 8)) | u64::from(byte) << (at % 8 * 8);
            *allocation.written[at / 32].get_mut() |= 1 << (at % 32);
        }
        Ok(())
    }

    /// Sets `count` bytes to `byte`.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when they are not inside one allocation.
    pub fn fill(&mut self, address: u64, byte: u8, count: usize) -> Result<(), EmulatorError> {
        self.write(address, &vec![byte; count])
    }

    /// Makes `count` bytes unwritten again.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when they are not inside one allocation.
    pub fn forget(&mut self, address: u64, count: usize) -> Result<(), EmulatorError> {
        self.fill(address, FRESH as u8, count)?;
        let (allocation, offset) = self.host(address, count)?;
        for at in offset..offset + count {
            *allocation.written[at / 32].get_mut() &= !(1 << (at % 32));
        }
        Ok(())
    }

    /// `count` bytes from `address`, written or not.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when they are not inside one allocation.
    pub fn read(&self, address: u64, count: usize) -> Result<Vec<u8>, EmulatorError> {
        let place = self.place(address, count).map_err(|_| EmulatorError::Address { address, bytes: count })?;
        Ok((place.offset..place.offset + count)
            .map(|at| (place.allocation.words[at / 8].load(Relaxed) >> (at % 8 * 8)) as u8)
            .collect())
    }

    /// Whether each of `count` bytes from `address` was written.
    ///
    /// # Errors
    /// [`EmulatorError::Address`] when they are not inside one allocation.
    pub fn written(&self, address: u64, count: usize) -> Result<Vec<bool>, EmulatorError> {
        let place = self.place(address, count).map_err(|_| EmulatorError::Address { address, bytes: count })?;
        Ok((place.offset..place.offset + count)
            .map(|at| place.allocation.written[at / 32].load(Relaxed) >> (at % 32) & 1 == 1)
            .collect())
    }

    fn index(&self, address: u64) -> Option<usize> {
        let region = (address.checked_sub(BASE)? >> REGION_SHIFT) as usize;
        self.regions.get(region).map(|&index| index as usize - 1)
    }

    fn host(&mut self, address: u64, bytes: usize) -> Result<(&mut Allocation, usize), EmulatorError> {
        let error = EmulatorError::Address { address, bytes };
        let Ok(place) = self.place(address, bytes) else { return Err(error) };
        let (index, offset) = (place.index, place.offset);
        self.allocations[index].as_mut().map(|allocation| (allocation, offset)).ok_or(error)
    }

    /// Bytes of each allocation.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.allocations.iter().map(|allocation| allocation.as_ref().map_or(0, |a| a.bytes))
    }

    /// The allocation that holds all of `bytes` bytes from `address`.
    pub(crate) fn place(&self, address: u64, bytes: usize) -> Result<Place<'_>, GlobalFault> {
        let fault = |detail| GlobalFault { kind: FindingKind::OutOfBounds, detail };
        let index = self.index(address).ok_or_else(|| fault(format!("{bytes} bytes outside of every allocation")))?;
        let allocation =
            self.allocations[index].as_ref().ok_or_else(|| fault(format!("{bytes} bytes in memory that was freed")))?;
        let offset = address.wrapping_sub(allocation.base);
        if offset.checked_add(bytes as u64).is_none_or(|end| end > allocation.bytes as u64) {
            let (size, base) = (allocation.bytes, allocation.base);
            let offset = offset as i64;
            return Err(fault(format!("{bytes} bytes at offset {offset} of the {size} bytes at {base:#x}")));
        }
        Ok(Place { allocation, index, offset: offset as usize })
    }
}

impl Place<'_> {
    /// Whether kernels may only read here.
    pub(crate) fn is_read_only(&self) -> bool {
        self.allocation.read_only
    }

    /// Bits of the bytes from the offset on in their word of `written`; an aligned access stays in one word.
    fn written_bits(&self, at: usize, bytes: usize) -> u32 {
        (((1u64 << bytes) - 1) as u32) << (at % 32)
    }

    /// The first of `bytes` bytes that nobody wrote.
    pub(crate) fn first_unwritten(&self, bytes: usize) -> Option<usize> {
        let bits = self.written_bits(self.offset, bytes);
        let missing = bits & !self.allocation.written[self.offset / 32].load(Relaxed);
        (missing != 0).then(|| self.offset / 32 * 32 + missing.trailing_zeros() as usize - self.offset)
    }

    fn mark_written(&self, bytes: usize) {
        let bits = self.written_bits(self.offset, bytes);
        let word = &self.allocation.written[self.offset / 32];
        if word.load(Relaxed) & bits != bits {
            word.fetch_or(bits, Relaxed);
        }
    }

    /// Reads a power of two of bytes, aligned.
    #[inline(always)]
    pub(crate) fn load(&self, out: &mut [u8]) {
        let words = &self.allocation.words;
        if out.len() < 8 {
            let word = words[self.offset / 8].load(Relaxed) >> (self.offset % 8 * 8);
            out.copy_from_slice(&word.to_le_bytes()[..out.len()]);
        } else {
            for (word, out) in words[self.offset / 8..].iter().zip(out.chunks_exact_mut(8)) {
                out.copy_from_slice(&word.load(Relaxed).to_le_bytes());
            }
        }
    }

    /// Writes a power of two of bytes, aligned.
    pub(crate) fn store(&self, bytes: &[u8]) {
        let words = &self.allocation.words;
        if bytes.len() < 8 {
            let (mask, shift) = self.field(bytes.len());
            let mut new = [0; 8];
            new[..bytes.len()].copy_from_slice(bytes);
            let new = u64::from_le_bytes(new) << shift;
            let update = |old| Some(old & !mask | new);
            let _ = words[self.offset / 8].fetch_update(Relaxed, Relaxed, update);
        } else {
            for (word, bytes) in words[self.offset / 8..].iter().zip(bytes.chunks_exact(8)) {
                word.store(u64::from_le_bytes(bytes.try_into().expect("chunks of 8")), Relaxed);
            }
        }
        self.mark_written(bytes.len());
    }

    fn field(&self, bytes: usize) -> (u64, usize) {
        let shift = self.offset % 8 * 8;
        (if bytes == 8 { u64::MAX } else { ((1 << (8 * bytes)) - 1) << shift }, shift)
    }

    /// Replaces 2, 4 or 8 aligned bytes by `update` of them at once; returns what was there.
    pub(crate) fn update(&self, bytes: usize, update: impl Fn(u64) -> u64) -> u64 {
        let (mask, shift) = self.field(bytes);
        let word = &self.allocation.words[self.offset / 8];
        let change = |old: u64| Some(old & !mask | (update((old & mask) >> shift) << shift) & mask);
        let (Ok(old) | Err(old)) = word.fetch_update(Relaxed, Relaxed, change);
        self.mark_written(bytes);
        (old & mask) >> shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_gaps() {
        let mut memory = DeviceMemory::default();
        let sizes = [1, 256, 65_280, 65_536, 0, 12];
        let bases: Vec<_> = sizes.iter().map(|&size| memory.alloc(size)).collect();
        for (&size, &base) in sizes.iter().zip(&bases) {
            assert_eq!(base % 512, 256);
            assert!(memory.place(base, size).is_ok());
            assert!(memory.place(base, size + 1).is_err());
            assert!(memory.place(base - 1, 1).is_err());
            assert!(memory.place(base + size as u64 + 60_000, 1).is_err());
        }
        assert!(memory.place(0, 1).is_err());
        assert!(memory.place(u64::MAX, 2).is_err());
        memory.free(bases[1]).unwrap();
        assert!(memory.place(bases[1], 1).is_err());
        assert!(memory.free(bases[1] + 1).is_err());
    }

    #[test]
    fn written_bytes() {
        let mut memory = DeviceMemory::default();
        let base = memory.alloc(64);
        memory.write(base + 3, &[1, 2, 3]).unwrap();
        assert_eq!(memory.read(base + 3, 3).unwrap(), [1, 2, 3]);
        let place = memory.place(base, 8).ok().unwrap();
        assert_eq!(place.first_unwritten(8), Some(0));
        let place = memory.place(base + 4, 4).ok().unwrap();
        assert_eq!(place.first_unwritten(2), None);
        assert_eq!(place.first_unwritten(4), Some(2));
        place.store(&[9, 8, 7, 6]);
        assert_eq!(place.first_unwritten(4), None);
        assert_eq!(place.update(2, |old| old + 1), 0x0809);
        assert_eq!(memory.read(base + 3, 5).unwrap(), [1, 10, 8, 7, 6]);
        memory.forget(base + 4, 1).unwrap();
        assert_eq!(memory.written(base + 2, 4).unwrap(), [false, true, false, true]);
    }
}
