//! Shared memory as the matrix unit reads it, asynchronously, for a warp (`wgmma`).

use super::clocks::{Accessor, Entry};
use super::shared::{SharedFault, SharedMemory};

impl SharedMemory {
    /// The matrix unit begins to read for `warp`; the time that [`Self::end_matrix_read`] wants.
    pub(crate) fn begin_matrix_read(&mut self, warp: u32) -> u32 {
        let (time, restarts) = self.clocks.begin_matrix_read(warp as usize);
        self.forget(restarts);
        time
    }

    /// `warp` has waited for what its matrix unit began to read up to a time.
    pub(crate) fn end_matrix_read(&mut self, warp: u32, time: u32) {
        self.clocks.end_matrix_read(warp as usize, time);
    }

    /// Checks and notes that the matrix unit reads 16 aligned bytes for `warp`.
    pub(crate) fn note_matrix_read(&mut self, address: u32, warp: u32) -> Result<(), SharedFault> {
        const BYTES: usize = 16;
        let offset = self.offset(address, BYTES)?;
        let range = offset..offset + BYTES;
        if self.generic[range.clone()].contains(&true) {
            return Err(SharedFault::Proxy);
        }
        let granules = self.granules(offset, BYTES);
        self.check_in_flight(granules.clone())?;
        self.check_atomics(granules.clone(), 32 * warp)?;
        let entry = self.clocks.matrix_entry(warp as usize);
        let unit = Accessor::MatrixUnit(warp);
        let floor = self.clocks.floor(warp as usize);
        for granule in granules {
            let writer = self.writers[granule];
            if writer >= floor && !self.clocks.ordered_for_any(writer, warp) {
                return Err(self.race(writer));
            }
            let is_free = |old: Entry| old.is_none() || self.clocks.accessor(old) == unit;
            let [first, second] = [self.readers[0][granule], self.readers[1][granule]];
            let slot = match (is_free(first), is_free(second)) {
                (true, _) => 0,
                (false, true) => 1,
                // As for ordinary reads: one that is not ordered before is kept.
                (false, false) => usize::from(first >= floor && !self.clocks.ordered(first, 32 * warp)),
            };
            self.readers[slot][granule] = entry;
        }
        match self.written[range].iter().position(|&written| !written) {
            Some(byte) => Err(SharedFault::Unwritten(byte)),
            None => Ok(()),
        }
    }

    /// 16 bytes that [`Self::note_matrix_read`] has let pass, as 16-bit elements.
    pub(crate) fn elements(&self, address: u32) -> Result<[u16; 8], SharedFault> {
        let offset = self.offset(address, 16)?;
        let bytes = &self.bytes[offset..offset + 16];
        Ok(std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SHARED_BASE;
    use super::*;

    #[test]
    fn reads_are_ordered_like_those_of_threads() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 2, false);
        assert_eq!(shared.note_matrix_read(SHARED_BASE, 0), Err(SharedFault::Unwritten(0)));
        shared.begin_async_copy(SHARED_BASE + 16, 16, 40).unwrap();
        assert_eq!(shared.note_matrix_read(SHARED_BASE + 16, 1), Err(SharedFault::InFlight(40)));
        shared.end_copy(SHARED_BASE + 16, &[1; 16], 40);
        assert_eq!(shared.note_matrix_read(SHARED_BASE + 16, 0), Err(SharedFault::Race(40)));
        let time = shared.begin_matrix_read(1);
        shared.note_matrix_read(SHARED_BASE + 16, 1).unwrap();
        assert_eq!(shared.elements(SHARED_BASE + 16), Ok([0x0101; 8]));
        assert_eq!(shared.store(SHARED_BASE + 28, &[0; 4], 40), Err(SharedFault::MatrixRace(1)));
        shared.end_matrix_read(1, time);
        shared.store(SHARED_BASE + 28, &[0; 4], 40).unwrap();
        assert_eq!(shared.note_matrix_read(SHARED_BASE + 16, 1), Err(SharedFault::Proxy));
        assert_eq!(shared.note_matrix_read(SHARED_BASE + 64, 1), Err(SharedFault::OutOfBounds));
    }
}
