//! Shared memory of one block, with its shadows: which bytes are written, who accessed each granule when, and what is
//! still being copied. An earlier access that is not ordered before ([`super::clocks`]) and conflicts is a race.

use super::SHARED_BASE;
use super::clocks::{Clocks, Entry, Knowledge};
use super::matrix_read::{MatrixReads, PAGE};

/// Bits of an address inside of one block's shared memory; above them is the number of the block in its cluster.
pub(crate) const BLOCK_SHIFT: u32 = 24;
/// In place of a copy's thread: an mbarrier object.
const OBJECT: u16 = u16::MAX;
/// Why an access is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedFault {
    /// Beyond the end.
    OutOfBounds,
    /// This byte of the access was never written.
    Unwritten(usize),
    /// With this thread.
    Race(u32),
    /// With the matrix unit, which reads for this warp.
    MatrixRace(u32),
    /// A copy by this thread is under way.
    InFlight(u32),
    /// A generic store that no proxy fence made visible.
    Proxy,
    /// An mbarrier object lies there.
    Object,
}

/// Shared memory of the blocks of a cluster.
pub(crate) struct SharedMemory {
    /// Bytes of each block, and from one block's to the next's.
    bytes_of_block: usize,
    pitch: usize,
    pub(super) bytes: Vec<u8>,
    pub(super) written: Vec<bool>,
    /// Last generic store (or `cp.async`) was not followed by a proxy fence; only kept where a kernel uses the async proxy.
    pub(super) generic: Vec<bool>,
    /// Pages with any such byte.
    generic_pages: Vec<bool>,
    shift: u32,
    pub(super) writers: Vec<Entry>,
    readers: [Vec<Entry>; 2],
    pub(super) matrix_reads: MatrixReads,
    /// Last atomic access; empty until there is one.
    atomics: Vec<Entry>,
    /// Thread plus 1 whose copy to this granule is under way.
    in_flight: Vec<u16>,
    copies_in_flight: u32,
    pub(super) clocks: Clocks,
}

impl SharedMemory {
    /// `end` is where a block's shared memory ends in the window; `warps` are those of all blocks.
    pub(crate) fn new(end: u32, blocks: u32, warps: usize, narrow_stores: bool) -> Self {
        let bytes_of_block = (end - SHARED_BASE) as usize;
        let pitch = bytes_of_block.next_multiple_of(PAGE);
        let bytes = pitch * (blocks as usize - 1) + bytes_of_block;
        let shift = if narrow_stores { 0 } else { 2 };
        let granules = (bytes >> shift) + 1;
        Self {
            bytes_of_block,
            pitch,
            bytes: vec![0xE2; bytes],
            written: vec![false; bytes],
            generic: vec![false; bytes],
            generic_pages: vec![false; bytes.div_ceil(PAGE)],
            shift,
            writers: vec![Entry::default(); granules],
            readers: [vec![Entry::default(); granules], vec![Entry::default(); granules]],
            matrix_reads: MatrixReads::default(),
            atomics: Vec::new(),
            in_flight: vec![0; granules],
            copies_in_flight: 0,
            clocks: Clocks::new(warps),
        }
    }

    #[inline(always)]
    pub(super) fn offset(&self, address: u32, bytes: usize) -> Result<usize, SharedFault> {
        let (block, inner) = ((address >> BLOCK_SHIFT) as usize, address & ((1 << BLOCK_SHIFT) - 1));
        match inner.checked_sub(SHARED_BASE) {
            Some(offset) if offset as usize + bytes <= self.bytes_of_block => Ok(block * self.pitch + offset as usize),
            _ => Err(SharedFault::OutOfBounds),
        }
    }

    /// The offset of bytes that are known to be inside.
    pub(super) fn known_offset(&self, address: u32) -> usize {
        let (block, inner) = (address >> BLOCK_SHIFT, address & ((1 << BLOCK_SHIFT) - 1));
        block as usize * self.pitch + (inner - SHARED_BASE) as usize
    }

    pub(super) fn granules(&self, offset: usize, bytes: usize) -> std::ops::Range<usize> {
        offset >> self.shift..((offset + bytes - 1) >> self.shift) + 1
    }

    pub(super) fn check_in_flight(&self, granules: std::ops::Range<usize>) -> Result<(), SharedFault> {
        if self.copies_in_flight > 0
            && let Some(&thread) = self.in_flight[granules].iter().find(|&&thread| thread != 0)
        {
            let object = thread == OBJECT;
            return Err(if object { SharedFault::Object } else { SharedFault::InFlight(u32::from(thread) - 1) });
        }
        Ok(())
    }

    pub(super) fn race(&self, with: Entry) -> SharedFault {
        SharedFault::Race(self.clocks.thread(with))
    }

    /// Checks that `thread` knows of the atomics.
    pub(super) fn check_atomics(&self, granules: std::ops::Range<usize>, thread: u32) -> Result<(), SharedFault> {
        let atomics = if self.atomics.is_empty() { &[] } else { &self.atomics[granules] };
        match atomics.iter().find(|&&entry| !self.clocks.ordered(entry, thread)) {
            Some(entry) => Err(self.race(*entry)),
            None => Ok(()),
        }
    }

    /// Checks and notes a read.
    fn note_read(&mut self, offset: usize, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let granules = self.granules(offset, bytes);
        self.check_in_flight(granules.clone())?;
        self.check_atomics(granules.clone(), thread)?;
        let entry = self.clocks.entry(thread);
        for granule in granules {
            let writer = self.writers[granule];
            if !self.clocks.ordered(writer, thread) {
                return Err(self.race(writer));
            }
            let [first, second] = [self.readers[0][granule], self.readers[1][granule]];
            // Two readers of different threads are kept, so that one of them is not the next writer.
            let is_mine = |entry| self.clocks.thread(entry) == thread;
            let slot = if first.is_none() || is_mine(first) {
                0
            } else if is_mine(second) {
                1
            } else {
                usize::from(!self.clocks.ordered(first, thread))
            };
            self.readers[slot][granule] = entry;
        }
        Ok(())
    }

    /// Checks and notes a write.
    fn note_write(&mut self, offset: usize, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let granules = self.granules(offset, bytes);
        self.check_in_flight(granules.clone())?;
        self.check_atomics(granules.clone(), thread)?;
        self.check_matrix_reads(offset, bytes, thread)?;
        let entry = self.clocks.entry(thread);
        for granule in granules {
            for earlier in [self.writers[granule], self.readers[0][granule], self.readers[1][granule]] {
                if !self.clocks.ordered(earlier, thread) {
                    return Err(self.race(earlier));
                }
            }
            self.writers[granule] = entry;
        }
        Ok(())
    }

    /// Reads, for a load of `thread`.
    #[inline]
    pub(crate) fn load(&mut self, address: u32, out: &mut [u8], thread: u32) -> Result<(), SharedFault> {
        let offset = self.offset(address, out.len())?;
        let range = offset..offset + out.len();
        self.note_read(offset, out.len(), thread)?;
        if let Some(byte) = self.written[range.clone()].iter().position(|&written| !written) {
            return Err(SharedFault::Unwritten(byte));
        }
        out.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    /// Writes, for a store of `thread`.
    pub(crate) fn store(&mut self, address: u32, bytes: &[u8], thread: u32) -> Result<(), SharedFault> {
        let offset = self.offset(address, bytes.len())?;
        self.note_write(offset, bytes.len(), thread)?;
        let range = offset..offset + bytes.len();
        self.bytes[range.clone()].copy_from_slice(bytes);
        self.written[range.clone()].fill(true);
        self.note_generic(range);
        self.matrix_reads.changed(offset, bytes.len());
        Ok(())
    }

    /// Reads and writes at once; atomics of a block do not race with each other, and plain accesses are checked.
    pub(crate) fn update(
        &mut self,
        address: u32,
        bytes: usize,
        thread: u32,
        update: impl Fn(u64) -> u64,
    ) -> Result<u64, SharedFault> {
        let offset = self.offset(address, bytes)?;
        let granules = self.granules(offset, bytes);
        self.check_in_flight(granules.clone())?;
        self.check_matrix_reads(offset, bytes, thread)?;
        if self.atomics.is_empty() {
            self.atomics = vec![Entry::default(); self.writers.len()];
        }
        for granule in granules {
            for earlier in [self.writers[granule], self.readers[0][granule], self.readers[1][granule]] {
                if !self.clocks.ordered(earlier, thread) {
                    return Err(self.race(earlier));
                }
            }
            self.atomics[granule] = self.clocks.entry(thread);
        }
        let range = offset..offset + bytes;
        if let Some(byte) = self.written[range.clone()].iter().position(|&written| !written) {
            return Err(SharedFault::Unwritten(byte));
        }
        let mut old = [0; 8];
        old[..bytes].copy_from_slice(&self.bytes[range.clone()]);
        let old = u64::from_le_bytes(old);
        self.bytes[range.clone()].copy_from_slice(&update(old).to_le_bytes()[..bytes]);
        self.note_generic(range);
        self.matrix_reads.changed(offset, bytes);
        Ok(old)
    }

    /// A copy of `thread` to these bytes begins: nobody may touch them until it ends.
    pub(crate) fn begin_copy(&mut self, address: u32, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let offset = self.offset(address, bytes)?;
        self.note_write(offset, bytes, thread)?;
        let granules = self.granules(offset, bytes);
        self.in_flight[granules].fill(thread as u16 + 1);
        self.copies_in_flight += 1;
        Ok(())
    }

    /// A copy by the async proxy ends: its bytes appear, written by `thread` now. It was begun, so it is in bounds.
    pub(crate) fn end_async_copy(&mut self, address: u32, bytes: &[u8], thread: u32) {
        self.end_copy(address, bytes, thread);
        let offset = self.known_offset(address);
        self.generic[offset..offset + bytes.len()].fill(false);
    }

    /// As [`Self::end_async_copy`], of a copy that writes like an ordinary store (`cp.async`).
    pub(crate) fn end_copy(&mut self, address: u32, bytes: &[u8], thread: u32) {
        let offset = self.known_offset(address);
        let granules = self.granules(offset, bytes.len());
        let entry = self.clocks.entry(thread);
        self.in_flight[granules.clone()].fill(0);
        self.writers[granules].fill(entry);
        self.copies_in_flight -= 1;
        let range = offset..offset + bytes.len();
        self.bytes[range.clone()].copy_from_slice(bytes);
        self.written[range.clone()].fill(true);
        self.note_generic(range);
        self.matrix_reads.changed(offset, bytes.len());
    }

    /// As [`Self::begin_copy`], by the async proxy: what ordinary stores wrote there must be fenced.
    pub(crate) fn begin_async_copy(&mut self, address: u32, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let offset = self.offset(address, bytes)?;
        if self.generic[offset..offset + bytes].contains(&true) {
            return Err(SharedFault::Proxy);
        }
        self.begin_copy(address, bytes, thread)
    }

    /// An mbarrier object begins: only [`Self::use_object`] may touch its 8 bytes.
    pub(crate) fn begin_object(&mut self, address: u32, thread: u32) -> Result<(), SharedFault> {
        self.begin_copy(address, 8, thread)?;
        let offset = self.known_offset(address);
        let granules = self.granules(offset, 8);
        self.in_flight[granules].fill(OBJECT);
        self.note_generic(offset..offset + 8);
        Ok(())
    }

    /// Whether `thread` knows of the beginning of the mbarrier object.
    pub(crate) fn use_object(&self, address: u32, thread: u32) -> Result<(), SharedFault> {
        let writer = self.writers[self.offset(address, 8)? >> self.shift];
        if self.clocks.ordered(writer, thread) { Ok(()) } else { Err(self.race(writer)) }
    }

    /// An mbarrier object ends.
    pub(crate) fn end_object(&mut self, address: u32) {
        let granules = self.granules(self.known_offset(address), 8);
        self.in_flight[granules].fill(0);
        self.copies_in_flight -= 1;
    }

    /// Whether an ordinary access wrote any of the bytes and no proxy fence followed.
    pub(crate) fn is_generic(&self, address: u32, bytes: usize) -> bool {
        self.offset(address, bytes).is_ok_and(|offset| self.generic[offset..offset + bytes].contains(&true))
    }

    fn note_generic(&mut self, range: std::ops::Range<usize>) {
        self.generic_pages[range.start / PAGE..=(range.end - 1) / PAGE].fill(true);
        self.generic[range].fill(true);
    }

    /// `fence.proxy.async` of the `lanes` of `warp`: generic stores that one of them knows of are visible to the async
    /// proxy.
    pub(crate) fn proxy_fence(&mut self, warp: u32, lanes: u32) {
        let (floor, step) = (self.clocks.floor(warp as usize), 1 << self.shift);
        for (page, is_generic) in self.generic_pages.iter_mut().enumerate().filter(|(_, is_generic)| **is_generic) {
            *is_generic = false;
            let end = self.generic.len().min((page + 1) * PAGE);
            for offset in (page * PAGE..end).step_by(step) {
                let bytes = &mut self.generic[offset..end.min(offset + step)];
                if bytes.contains(&true) {
                    let writer = self.writers[offset >> self.shift];
                    let mut lanes = super::super::execute::each(lanes);
                    let is_known =
                        writer < floor || lanes.any(|lane| self.clocks.ordered(writer, warp * 32 + lane as u32));
                    if is_known {
                        bytes.fill(false);
                    } else {
                        *is_generic = true;
                    }
                }
            }
        }
    }

    /// Bytes as the async proxy reads them for `thread`.
    pub(crate) fn load_async(&mut self, address: u32, out: &mut [u8], thread: u32) -> Result<(), SharedFault> {
        if self.is_generic(address, out.len()) {
            return Err(SharedFault::Proxy);
        }
        self.load(address, out, thread)
    }

    /// Drops all notes if time began again.
    pub(super) fn forget(&mut self, restarts: bool) {
        if restarts {
            self.writers.fill(Entry::default());
            self.atomics.fill(Entry::default());
            self.readers.iter_mut().for_each(|readers| readers.fill(Entry::default()));
            self.matrix_reads.forget();
        }
    }

    /// `bar.warp.sync`: `lanes` of `warp` know of each other.
    pub(crate) fn sync_warp(&mut self, warp: u32, lanes: u32) {
        let restarts = self.clocks.sync_warp(warp as usize, lanes);
        self.forget(restarts);
    }

    /// What `lanes` of `warp` pass on when they arrive somewhere, added to `to`.
    pub(crate) fn release(&mut self, warp: u32, lanes: u32, to: &mut Knowledge) {
        let restarts = self.clocks.release(warp as usize, lanes, to);
        self.forget(restarts);
    }

    /// `lanes` of `warp` learn `from`.
    pub(crate) fn acquire(&mut self, warp: u32, lanes: u32, from: &Knowledge) {
        self.clocks.acquire(warp as usize, lanes, from);
    }
}

impl SharedFault {
    /// The rest of the sentence.
    pub(crate) fn detail(self) -> String {
        match self {
            Self::OutOfBounds => "outside of the block's shared memory".into(),
            Self::Unwritten(byte) => format!("byte {byte} of the access"),
            Self::Race(thread) => format!("with thread {thread}, no barrier in between"),
            Self::MatrixRace(warp) => format!("a wgmma of warp {warp} reads it, and nobody waited for that"),
            Self::InFlight(thread) => format!("the copy was started by thread {thread}"),
            Self::Proxy => "an ordinary store or cp.async wrote it last".into(),
            Self::Object => "an mbarrier object lies there".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_barrier(shared: &mut SharedMemory, warps: u32) {
        let mut knowledge = Knowledge::new();
        (0..warps).for_each(|warp| shared.release(warp, u32::MAX, &mut knowledge));
        (0..warps).for_each(|warp| shared.acquire(warp, u32::MAX, &knowledge));
    }

    #[test]
    fn barriers_order_accesses() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 1, 2, false);
        let mut out = [0; 4];
        assert_eq!(shared.load(SHARED_BASE, &mut out, 0), Err(SharedFault::Unwritten(0)));
        shared.store(SHARED_BASE, &[1, 2, 3, 4], 0).unwrap();
        shared.load(SHARED_BASE, &mut out, 0).unwrap();
        assert_eq!(shared.load(SHARED_BASE, &mut out, 1), Err(SharedFault::Race(0)));
        shared.sync_warp(0, u32::MAX);
        shared.load(SHARED_BASE, &mut out, 1).unwrap();
        assert_eq!(shared.load(SHARED_BASE, &mut out, 32), Err(SharedFault::Race(0)));
        block_barrier(&mut shared, 2);
        shared.load(SHARED_BASE, &mut out, 32).unwrap();
        assert_eq!(shared.store(SHARED_BASE, &out, 33), Err(SharedFault::Race(32)));
        assert_eq!(shared.store(SHARED_BASE, &out, 0), Err(SharedFault::Race(32)));
        block_barrier(&mut shared, 2);
        shared.store(SHARED_BASE, &out, 33).unwrap();
    }

    #[test]
    fn one_lane_passes_on_what_it_did_itself() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 1, 2, false);
        shared.store(SHARED_BASE, &[0; 4], 0).unwrap();
        shared.store(SHARED_BASE + 4, &[0; 4], 1).unwrap();
        let mut knowledge = Knowledge::new();
        shared.release(0, 1, &mut knowledge);
        shared.acquire(1, u32::MAX, &knowledge);
        shared.load(SHARED_BASE, &mut [0; 4], 32).unwrap();
        assert_eq!(shared.load(SHARED_BASE + 4, &mut [0; 4], 32), Err(SharedFault::Race(1)));
    }

    #[test]
    fn copies_in_flight() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 1, 1, false);
        shared.begin_copy(SHARED_BASE, 16, 3).unwrap();
        assert_eq!(shared.load(SHARED_BASE + 12, &mut [0; 4], 3), Err(SharedFault::InFlight(3)));
        shared.end_copy(SHARED_BASE, &[7; 16], 3);
        let mut out = [0; 4];
        shared.load(SHARED_BASE + 12, &mut out, 3).unwrap();
        assert_eq!(out, [7; 4]);
        assert_eq!(shared.load(SHARED_BASE, &mut out, 4), Err(SharedFault::Race(3)));
    }
}
