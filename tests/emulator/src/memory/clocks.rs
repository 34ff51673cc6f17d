//! Which accesses of a block's threads are ordered: vector clocks.
//!
//! Time is one counter of the block. Every thread has a present; an access is noted as (present, thread). Every warp
//! has, for every thread of the block, the last present of that thread that it knows of: those accesses are ordered before
//! what the warp does now. `bar.warp.sync` lets lanes know of each other, barriers and mbarriers pass knowledge on. An
//! instruction that merely names lanes (`shfl.sync`) orders no memory.
//!
//! What one lane learns from an mbarrier, its warp knows: a missing `bar.warp.sync` behind a wait is not found.

/// Thread index bits of an entry.
const THREAD_BITS: u32 = 10;
const THREAD: u32 = (1 << THREAD_BITS) - 1;
const MAX_TIME: u32 = u32::MAX >> THREAD_BITS;

/// An access: when, and by whom. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry(u32);

impl Entry {
    /// The thread.
    pub(crate) fn thread(self) -> u32 {
        self.0 & THREAD
    }

    /// Whether there was an access.
    pub(crate) fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// What a barrier or an mbarrier hands from those who arrive to those who leave: of each thread, the last present.
pub(crate) type Knowledge = Vec<u32>;

/// Adds what `from` knows to `to`.
pub(crate) fn join(to: &mut Knowledge, from: &[u32]) {
    to.resize(to.len().max(from.len()), 0);
    for (known, &new) in to.iter_mut().zip(from) {
        *known = new.max(*known);
    }
}

/// Clocks of a block.
pub(crate) struct Clocks {
    time: u32,
    /// Of each thread.
    present: Vec<u32>,
    /// Of each warp.
    known: Vec<Knowledge>,
    /// Of each warp: entries below this are known, whoever made them.
    floor: Vec<u32>,
}

impl Clocks {
    pub(crate) fn new(warps: usize) -> Self {
        let mut clocks = Self { time: 0, present: Vec::new(), known: vec![Vec::new(); warps], floor: vec![0; warps] };
        clocks.restart();
        clocks
    }

    /// As if nothing had happened.
    fn restart(&mut self) {
        let warps = self.known.len();
        self.time = 1;
        self.present = vec![1; warps * 32];
        self.known.iter_mut().for_each(|known| *known = vec![0; warps * 32]);
        self.floor.fill(1 << THREAD_BITS);
    }

    /// The entry of an access of `thread` now.
    #[inline(always)]
    pub(crate) fn entry(&self, thread: u32) -> Entry {
        Entry(self.present[thread as usize] << THREAD_BITS | thread)
    }

    /// Whether an access is ordered before what `thread` does now.
    #[inline(always)]
    pub(crate) fn ordered(&self, entry: Entry, thread: u32) -> bool {
        let warp = (thread / 32) as usize;
        entry.0 < self.floor[warp]
            || entry.thread() == thread
            || entry.0 >> THREAD_BITS <= self.known[warp][entry.thread() as usize]
    }

    /// Time moves for the lanes of a warp; true when all notes must be dropped because time began again.
    fn tick(&mut self, warp: usize, lanes: u32) -> bool {
        let restarts = self.time == MAX_TIME;
        if restarts {
            // Rare: forget all that happened rather than misplace it.
            self.restart();
        }
        self.time += 1;
        for lane in crate::execute::each(lanes) {
            self.present[warp * 32 + lane] = self.time;
        }
        restarts
    }

    /// `bar.warp.sync`: the lanes know of each other.
    pub(crate) fn sync_warp(&mut self, warp: usize, lanes: u32) -> bool {
        for thread in crate::execute::each(lanes).map(|lane| warp * 32 + lane) {
            self.known[warp][thread] = self.present[thread];
        }
        self.tick(warp, lanes)
    }

    /// What `lanes` of a warp pass on when they arrive somewhere, added to `to`: what the warp knows, and what they did.
    pub(crate) fn release(&mut self, warp: usize, lanes: u32, to: &mut Knowledge) -> bool {
        join(to, &self.known[warp]);
        for thread in crate::execute::each(lanes).map(|lane| warp * 32 + lane) {
            to[thread] = self.present[thread];
        }
        self.tick(warp, lanes)
    }

    /// A warp learns `from`.
    pub(crate) fn acquire(&mut self, warp: usize, from: &Knowledge) {
        join(&mut self.known[warp], from);
        let lowest = self.known[warp].iter().copied().min().unwrap_or(0);
        self.floor[warp] = (lowest + 1) << THREAD_BITS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_lane_does_after_it_arrived_is_not_passed_on() {
        let mut clocks = Clocks::new(2);
        let (before, other) = (clocks.entry(0), clocks.entry(1));
        let mut knowledge = Knowledge::new();
        clocks.release(0, 1, &mut knowledge);
        let after = clocks.entry(0);
        clocks.acquire(1, &knowledge);
        assert!(clocks.ordered(before, 32));
        assert!(!clocks.ordered(other, 32) && !clocks.ordered(after, 32));
        // Arriving does not order the lanes of a warp.
        assert!(!clocks.ordered(before, 1) && !clocks.ordered(other, 0));
        clocks.sync_warp(0, u32::MAX);
        assert!(clocks.ordered(after, 1) && clocks.ordered(other, 0));
        assert!(!clocks.ordered(after, 33));
    }

    #[test]
    fn time_begins_again() {
        let mut clocks = Clocks::new(1);
        let restarts = (0..MAX_TIME).filter(|_| clocks.sync_warp(0, 1)).count();
        assert_eq!(restarts, 1);
    }
}
