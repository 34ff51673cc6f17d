//! Shared memory as the matrix unit reads it, asynchronously, for a warp (`wgmma`): in chunks of 16 bytes.
//!
//! Of each chunk it is kept when the unit last read it for each warp, so that whoever writes must know of the warp's wait.

use super::shared::{SharedFault, SharedMemory};

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 16;
/// Bytes that are watched for changes together.
pub(super) const PAGE: usize = 1024;

/// When chunks were read; empty before the first time.
#[derive(Default)]
pub(super) struct MatrixReads {
    /// Of each chunk, the last time by any warp.
    latest: Vec<u32>,
    /// Of each warp and chunk.
    times: Vec<Vec<u32>>,
    /// How often each page was written.
    changes: Vec<u64>,
}

impl MatrixReads {
    fn prepare(&mut self, bytes: usize, warps: usize) {
        if self.latest.is_empty() {
            let chunks = bytes.div_ceil(CHUNK);
            self.latest = vec![0; chunks];
            self.times = vec![vec![0; chunks]; warps];
            self.changes = vec![0; bytes.div_ceil(PAGE)];
        }
    }

    /// Bytes were written.
    #[inline(always)]
    pub(super) fn changed(&mut self, offset: usize, bytes: usize) {
        if !self.changes.is_empty() {
            self.changes[offset / PAGE..=(offset + bytes - 1) / PAGE].iter_mut().for_each(|changes| *changes += 1);
        }
    }

    /// Time began again.
    pub(super) fn forget(&mut self) {
        self.latest.fill(0);
        self.times.iter_mut().for_each(|times| times.fill(0));
    }
}

impl SharedMemory {
    /// The matrix unit begins to read for `warp`; the time that [`Self::end_matrix_read`] wants.
    pub(crate) fn begin_matrix_read(&mut self) -> u32 {
        let (time, restarts) = self.clocks.begin_matrix_read();
        self.forget(restarts);
        let (bytes, warps) = (self.bytes.len(), self.clocks.warps());
        self.matrix_reads.prepare(bytes, warps);
        time
    }

    /// `warp` has waited for what its matrix unit began to read up to a time.
    pub(crate) fn end_matrix_read(&mut self, warp: u32, time: u32) {
        self.clocks.end_matrix_read(warp as usize, time);
    }

    /// Checks and notes that the matrix unit reads chunks for `warp` from a time on; the first that it may not.
    pub(crate) fn note_matrix_reads(&mut self, chunks: &[u32], warp: u32, time: u32) -> Result<(), (u32, SharedFault)> {
        for &address in chunks {
            let offset = self.check_matrix_read(address, warp).map_err(|fault| (address, fault))?;
            self.matrix_reads.latest[offset / CHUNK] = time;
            self.matrix_reads.times[warp as usize][offset / CHUNK] = time;
        }
        Ok(())
    }

    /// The offset of a chunk that may be read.
    fn check_matrix_read(&self, address: u32, warp: u32) -> Result<usize, SharedFault> {
        let offset = self.offset(address, CHUNK)?;
        let range = offset..offset + CHUNK;
        if self.generic[range.clone()].iter().fold(false, |any, &generic| any | generic) {
            return Err(SharedFault::Proxy);
        }
        let granules = self.granules(offset, CHUNK);
        self.check_in_flight(granules.clone())?;
        self.check_atomics(granules.clone(), 32 * warp)?;
        let floor = self.clocks.floor(warp as usize);
        if self.writers[granules.clone()].iter().fold(false, |any, &writer| any | (writer >= floor)) {
            let writers = self.writers[granules].iter();
            if let Some(&writer) = writers.clone().find(|&&writer| !self.clocks.ordered_for_any(writer, warp)) {
                return Err(self.race(writer));
            }
        }
        if self.written[range.clone()].iter().fold(true, |all, &written| all & written) {
            return Ok(offset);
        }
        let byte = self.written[range].iter().position(|&written| !written);
        Err(SharedFault::Unwritten(byte.unwrap_or_default()))
    }

    /// Checks that `thread`, which writes, knows that what the matrix unit read was waited for.
    #[inline(always)]
    pub(super) fn check_matrix_reads(&self, offset: usize, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let reads = &self.matrix_reads;
        if reads.latest.is_empty() {
            return Ok(());
        }
        for chunk in offset / CHUNK..=(offset + bytes - 1) / CHUNK {
            if reads.latest[chunk] == 0 {
                continue;
            }
            let known = self.clocks.matrix_reads_known(thread as usize / 32);
            if let Some(warp) = reads.times.iter().zip(known).position(|(times, &known)| times[chunk] > known) {
                return Err(SharedFault::MatrixRace(warp as u32));
            }
        }
        Ok(())
    }

    /// A number that is another one when any byte between two chunks, both inside and included, was written since.
    pub(crate) fn changes(&self, first: u32, last: u32) -> u64 {
        let page = |address| self.known_offset(address) / PAGE;
        self.matrix_reads.changes[page(first)..=page(last)].iter().sum()
    }

    /// A chunk as 16-bit elements.
    pub(crate) fn elements(&self, address: u32) -> Result<[u16; CHUNK / 2], SharedFault> {
        let offset = self.offset(address, CHUNK)?;
        let bytes = &self.bytes[offset..offset + CHUNK];
        Ok(std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SHARED_BASE;
    use super::*;

    #[test]
    fn reads_are_ordered_like_those_of_threads() {
        const AT: u32 = SHARED_BASE + 16;
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 1, 2, false);
        let time = shared.begin_matrix_read();
        let read = |shared: &mut SharedMemory, address, warp| {
            shared.note_matrix_reads(&[address], warp, time).map_err(|(_, fault)| fault)
        };
        assert_eq!(read(&mut shared, SHARED_BASE, 0), Err(SharedFault::Unwritten(0)));
        shared.begin_async_copy(AT, 16, 40).unwrap();
        assert_eq!(read(&mut shared, AT, 1), Err(SharedFault::InFlight(40)));
        let changes = shared.changes(SHARED_BASE, AT);
        shared.end_async_copy(AT, &[1; 16], 40);
        assert_ne!(shared.changes(SHARED_BASE, AT), changes);
        assert_eq!(read(&mut shared, AT, 0), Err(SharedFault::Race(40)));
        read(&mut shared, AT, 1).unwrap();
        assert_eq!(shared.elements(AT), Ok([0x0101; 8]));
        assert_eq!(shared.store(AT + 12, &[0; 4], 40), Err(SharedFault::MatrixRace(1)));
        assert_eq!(shared.begin_async_copy(AT, 16, 40), Err(SharedFault::MatrixRace(1)));
        shared.end_matrix_read(1, time);
        shared.store(AT + 12, &[0; 4], 40).unwrap();
        assert_eq!(read(&mut shared, AT, 1), Err(SharedFault::Proxy));
        assert_eq!(read(&mut shared, AT + 48, 1), Err(SharedFault::OutOfBounds));
    }
}
