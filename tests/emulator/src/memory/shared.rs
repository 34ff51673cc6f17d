//! Shared memory of one block, with its shadows: which bytes are written, who accessed each granule when, and what is
//! still being copied.
//!
//! Time is a counter of the block that moves at every synchronization. Each warp has its own present, and for every warp
//! of the block what it knows of it: all that happened before some time, and at that time what some lanes did. An
//! earlier access that the accessing warp does not know of is a race. Barriers and mbarriers pass knowledge on. An
//! instruction that merely names lanes (`shfl.sync`) orders no memory; `bar.warp.sync` does.

use super::SHARED_BASE;

/// Thread index bits of an entry.
const THREAD_BITS: u32 = 10;
const THREAD: u32 = (1 << THREAD_BITS) - 1;
const MAX_TIME: u32 = u32::MAX >> THREAD_BITS;

/// What one warp knows of another: all before `time`, and at `time` the accesses of `lanes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    time: u32,
    lanes: u32,
}

impl Known {
    /// Before the block began.
    const START: Self = Self { time: 1, lanes: 0 };

    fn join(&mut self, other: Self) {
        if other.time > self.time {
            *self = other;
        } else if other.time == self.time {
            self.lanes |= other.lanes;
        }
    }
}

/// What a barrier or an mbarrier hands from those who arrive to those who leave: [`Known`] of each warp.
pub(crate) type Knowledge = Vec<Known>;

/// Why an access is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedFault {
    /// Beyond the end.
    OutOfBounds,
    /// This byte of the access was never written.
    Unwritten(usize),
    /// With this thread.
    Race(u32),
    /// A copy by this thread is under way.
    InFlight(u32),
    /// A generic store that no proxy fence made visible.
    Proxy,
}

/// Shared memory of a block.
pub(crate) struct SharedMemory {
    bytes: Vec<u8>,
    written: Vec<bool>,
    /// Last generic store was not followed by a proxy fence; only kept where a kernel uses the async proxy.
    generic: Vec<bool>,
    shift: u32,
    writers: Vec<u32>,
    readers: [Vec<u32>; 2],
    /// Last atomic access; empty until there is one.
    atomics: Vec<u32>,
    /// Thread plus 1 whose copy to this granule is under way.
    in_flight: Vec<u16>,
    copies_in_flight: u32,
    time: u32,
    /// Of each warp.
    present: Vec<u32>,
    known: Vec<Knowledge>,
    /// Of each warp, entries below this are known whoever made them.
    floor: Vec<u32>,
}

impl SharedMemory {
    /// `end` is where the block's shared memory ends in the window.
    pub(crate) fn new(end: u32, warps: usize, narrow_stores: bool) -> Self {
        let bytes = (end - SHARED_BASE) as usize;
        let shift = if narrow_stores { 0 } else { 2 };
        let granules = (bytes >> shift) + 1;
        Self {
            bytes: vec![0xE2; bytes],
            written: vec![false; bytes],
            generic: vec![false; bytes],
            shift,
            writers: vec![0; granules],
            readers: [vec![0; granules], vec![0; granules]],
            atomics: Vec::new(),
            in_flight: vec![0; granules],
            copies_in_flight: 0,
            time: 1,
            present: vec![1; warps],
            known: vec![vec![Known::START; warps]; warps],
            floor: vec![1 << THREAD_BITS; warps],
        }
    }

    fn offset(&self, address: u32, bytes: usize) -> Result<usize, SharedFault> {
        match address.checked_sub(SHARED_BASE) {
            Some(offset) if offset as usize + bytes <= self.bytes.len() => Ok(offset as usize),
            _ => Err(SharedFault::OutOfBounds),
        }
    }

    fn granules(&self, offset: usize, bytes: usize) -> std::ops::Range<usize> {
        offset >> self.shift..((offset + bytes - 1) >> self.shift) + 1
    }

    /// Whether `thread` knows of the access `entry`.
    #[inline(always)]
    fn ordered(&self, entry: u32, thread: u32) -> bool {
        let warp = (thread / 32) as usize;
        if entry < self.floor[warp] || entry & THREAD == thread {
            return true;
        }
        let (time, other) = (entry >> THREAD_BITS, entry & THREAD);
        let other_warp = (other / 32) as usize;
        if other_warp == warp {
            return time < self.present[warp];
        }
        let known = self.known[warp][other_warp];
        time < known.time || time == known.time && known.lanes >> (other % 32) & 1 == 1
    }

    fn entry(&self, thread: u32) -> u32 {
        self.present[(thread / 32) as usize] << THREAD_BITS | thread
    }

    fn check_in_flight(&self, granules: std::ops::Range<usize>) -> Result<(), SharedFault> {
        if self.copies_in_flight > 0
            && let Some(&thread) = self.in_flight[granules].iter().find(|&&thread| thread != 0)
        {
            return Err(SharedFault::InFlight(u32::from(thread) - 1));
        }
        Ok(())
    }

    /// Checks that `thread` knows of the atomics.
    fn check_atomics(&self, granules: std::ops::Range<usize>, thread: u32) -> Result<(), SharedFault> {
        let atomics = if self.atomics.is_empty() { &[] } else { &self.atomics[granules] };
        match atomics.iter().find(|&&entry| !self.ordered(entry, thread)) {
            Some(entry) => Err(SharedFault::Race(entry & THREAD)),
            None => Ok(()),
        }
    }

    /// Checks and notes a read.
    fn note_read(&mut self, offset: usize, bytes: usize, thread: u32) -> Result<(), SharedFault> {
        let granules = self.granules(offset, bytes);
        self.check_in_flight(granules.clone())?;
        self.check_atomics(granules.clone(), thread)?;
        let entry = self.entry(thread);
        for granule in granules {
            let writer = self.writers[granule];
            if !self.ordered(writer, thread) {
                return Err(SharedFault::Race(writer & THREAD));
            }
            let [first, second] = [self.readers[0][granule], self.readers[1][granule]];
            // Two readers of different threads are kept, so that one of them is not the next writer.
            let slot = if first & THREAD == thread || first == 0 {
                0
            } else if second & THREAD == thread {
                1
            } else {
                usize::from(!self.ordered(first, thread))
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
        let entry = self.entry(thread);
        for granule in granules {
            for earlier in [self.writers[granule], self.readers[0][granule], self.readers[1][granule]] {
                if !self.ordered(earlier, thread) {
                    return Err(SharedFault::Race(earlier & THREAD));
                }
            }
            self.writers[granule] = entry;
        }
        Ok(())
    }

    /// Reads, for a load of `thread`.
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
        self.generic[range].fill(true);
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
        if self.atomics.is_empty() {
            self.atomics = vec![0; self.writers.len()];
        }
        for granule in granules {
            for earlier in [self.writers[granule], self.readers[0][granule], self.readers[1][granule]] {
                if !self.ordered(earlier, thread) {
                    return Err(SharedFault::Race(earlier & THREAD));
                }
            }
            self.atomics[granule] = self.entry(thread);
        }
        let range = offset..offset + bytes;
        if let Some(byte) = self.written[range.clone()].iter().position(|&written| !written) {
            return Err(SharedFault::Unwritten(byte));
        }
        let mut old = [0; 8];
        old[..bytes].copy_from_slice(&self.bytes[range.clone()]);
        let old = u64::from_le_bytes(old);
        self.bytes[range.clone()].copy_from_slice(&update(old).to_le_bytes()[..bytes]);
        self.generic[range].fill(true);
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

    /// A copy ends: its bytes appear, written by `thread` now. It was begun, so it is in bounds.
    pub(crate) fn end_copy(&mut self, address: u32, bytes: &[u8], thread: u32) {
        let offset = (address - SHARED_BASE) as usize;
        let granules = self.granules(offset, bytes.len());
        let entry = self.entry(thread);
        self.in_flight[granules.clone()].fill(0);
        self.writers[granules].fill(entry);
        self.copies_in_flight -= 1;
        let range = offset..offset + bytes.len();
        self.bytes[range.clone()].copy_from_slice(bytes);
        self.written[range.clone()].fill(true);
        self.generic[range].fill(false);
    }

    /// `fence.proxy.async`: earlier generic stores are visible to the async proxy.
    pub(crate) fn proxy_fence(&mut self) {
        self.generic.fill(false);
    }

    /// Bytes as the async proxy reads them for `thread`.
    pub(crate) fn load_async(&mut self, address: u32, out: &mut [u8], thread: u32) -> Result<(), SharedFault> {
        self.load(address, out, thread)?;
        let offset = (address - SHARED_BASE) as usize;
        if self.generic[offset..offset + out.len()].contains(&true) { Err(SharedFault::Proxy) } else { Ok(()) }
    }

    fn tick(&mut self) -> u32 {
        if self.time == MAX_TIME {
            // Rare: forget all that happened rather than misplace it.
            self.time = 1;
            self.writers.fill(0);
            self.atomics.fill(0);
            self.readers.iter_mut().for_each(|readers| readers.fill(0));
            self.present.fill(1);
            self.known.iter_mut().for_each(|known| known.fill(Known::START));
            self.floor.fill(1 << THREAD_BITS);
        }
        self.time += 1;
        self.time
    }

    /// What `warp` does from now on is not part of what it passed on.
    pub(crate) fn sync_warp_time(&mut self, warp: usize) {
        // The lanes' own order is kept: only another warp tells these times apart.
        let _ = warp;
    }

    /// `bar.warp.sync`: the lanes of `warp` know of each other.
    pub(crate) fn sync_warp(&mut self, warp: usize) {
        self.present[warp] = self.tick();
    }

    /// What `lanes` of `warp` pass on when they arrive somewhere, added to `to`.
    pub(crate) fn release(&mut self, warp: usize, lanes: u32, to: &mut Knowledge) {
        to.resize(self.present.len(), Known::default());
        for (other, known) in to.iter_mut().enumerate() {
            if other != warp {
                known.join(self.known[warp][other]);
            }
        }
        to[warp].join(Known { time: self.present[warp], lanes });
    }

    /// `warp` learns `from`.
    pub(crate) fn acquire(&mut self, warp: usize, from: &Knowledge) {
        for (known, &new) in self.known[warp].iter_mut().zip(from) {
            known.join(new);
        }
        self.present[warp] = self.tick();
        let present = self.present[warp];
        let times = self.known[warp].iter().enumerate();
        let floor = times.map(|(other, known)| if other == warp { present } else { known.time }).min();
        self.floor[warp] = floor.unwrap_or(0) << THREAD_BITS;
    }
}

impl SharedFault {
    /// The rest of the sentence.
    pub(crate) fn detail(self) -> String {
        match self {
            Self::OutOfBounds => "outside of the block's shared memory".into(),
            Self::Unwritten(byte) => format!("byte {byte} of the access"),
            Self::Race(thread) => format!("with thread {thread}, no barrier in between"),
            Self::InFlight(thread) => format!("the copy was started by thread {thread}"),
            Self::Proxy => "an ordinary store wrote it last".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_barrier(shared: &mut SharedMemory, warps: usize) {
        let mut knowledge = Knowledge::new();
        (0..warps).for_each(|warp| shared.release(warp, u32::MAX, &mut knowledge));
        (0..warps).for_each(|warp| shared.acquire(warp, &knowledge));
    }

    #[test]
    fn barriers_order_accesses() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 2, false);
        let mut out = [0; 4];
        assert_eq!(shared.load(SHARED_BASE, &mut out, 0), Err(SharedFault::Unwritten(0)));
        shared.store(SHARED_BASE, &[1, 2, 3, 4], 0).unwrap();
        shared.load(SHARED_BASE, &mut out, 0).unwrap();
        assert_eq!(shared.load(SHARED_BASE, &mut out, 1), Err(SharedFault::Race(0)));
        shared.sync_warp(0);
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
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 2, false);
        shared.store(SHARED_BASE, &[0; 4], 0).unwrap();
        shared.store(SHARED_BASE + 4, &[0; 4], 1).unwrap();
        let mut knowledge = Knowledge::new();
        shared.release(0, 1, &mut knowledge);
        shared.acquire(1, &knowledge);
        shared.load(SHARED_BASE, &mut [0; 4], 32).unwrap();
        assert_eq!(shared.load(SHARED_BASE + 4, &mut [0; 4], 32), Err(SharedFault::Race(1)));
    }

    #[test]
    fn copies_in_flight() {
        let mut shared = SharedMemory::new(SHARED_BASE + 64, 1, false);
        shared.begin_copy(SHARED_BASE, 16, 3).unwrap();
        assert_eq!(shared.load(SHARED_BASE + 12, &mut [0; 4], 3), Err(SharedFault::InFlight(3)));
        shared.end_copy(SHARED_BASE, &[7; 16], 3);
        let mut out = [0; 4];
        shared.load(SHARED_BASE + 12, &mut out, 3).unwrap();
        assert_eq!(out, [7; 4]);
        assert_eq!(shared.load(SHARED_BASE, &mut out, 4), Err(SharedFault::Race(3)));
    }
}
