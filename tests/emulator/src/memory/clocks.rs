//! Which accesses of a block's threads are ordered: vector clocks.
//!
//! Time is one counter of the block. Every thread has a present; an access is noted as (present, thread). Every lane
//! has, for every lane of its warp, the last present that it knows of, and every warp has it for the threads of other
//! warps: those accesses are ordered before what it does now. `bar.warp.sync` lets lanes know of each other, barriers and
//! mbarriers pass knowledge on. An instruction that merely names lanes (`shfl.sync`) orders no memory.
//!
//! The matrix unit of each warp reads asynchronously (`wgmma`): what a warp has waited for of that is known, and passed on, as
//! for a thread of its own.
//!
//! What one lane learns of other warps from an mbarrier, its warp knows: a `bar.warp.sync` that is missing behind such a wait
//! is not found.

/// An access: when, and by whom, in the low bits. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry(u32);

impl Entry {
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
    /// Low bits of an entry that are the thread.
    thread_bits: u32,
    /// Of each thread.
    present: Vec<u32>,
    /// Of each warp: what it knows of the threads of other warps, then of each warp's matrix unit.
    known: Vec<Knowledge>,
    /// Of each warp: what each lane knows of each lane.
    lanes: Vec<[[u32; 32]; 32]>,
    /// Of each warp: entries below this are known to all lanes, whoever made them.
    floor: Vec<u32>,
}

impl Clocks {
    pub(crate) fn new(warps: usize) -> Self {
        let mut clocks = Self {
            time: 0,
            thread_bits: u32::BITS - (warps as u32 * 32).leading_zeros(),
            present: Vec::new(),
            known: vec![Vec::new(); warps],
            lanes: vec![[[0; 32]; 32]; warps],
            floor: vec![0; warps],
        };
        clocks.restart();
        clocks
    }

    /// As if nothing had happened.
    fn restart(&mut self) {
        let warps = self.known.len();
        self.time = 1;
        self.present = vec![1; warps * 32];
        self.known.iter_mut().for_each(|known| *known = vec![0; warps * 33]);
        self.lanes.fill([[0; 32]; 32]);
        self.floor.fill(1 << self.thread_bits);
    }

    const fn max_time(&self) -> u32 {
        u32::MAX >> self.thread_bits
    }

    /// The thread whose entry it is.
    pub(crate) fn thread(&self, entry: Entry) -> u32 {
        entry.0 & ((1 << self.thread_bits) - 1)
    }

    /// The entry of an access of `thread` now.
    #[inline(always)]
    pub(crate) fn entry(&self, thread: u32) -> Entry {
        Entry(self.present[thread as usize] << self.thread_bits | thread)
    }

    /// Whether an access is ordered before what `thread` does now.
    #[inline(always)]
    pub(crate) fn ordered(&self, entry: Entry, thread: u32) -> bool {
        let (warp, other) = ((thread / 32) as usize, self.thread(entry));
        let known = || match other / 32 == thread / 32 {
            true => self.lanes[warp][(thread % 32) as usize][(other % 32) as usize],
            false => self.known[warp][other as usize],
        };
        entry.0 < self.floor[warp] || other == thread || entry.0 >> self.thread_bits <= known()
    }

    /// Time moves; true when it began again.
    fn advance(&mut self) -> bool {
        let restarts = self.time == self.max_time();
        if restarts {
            // Rare: forget all that happened rather than misplace it.
            self.restart();
        }
        self.time += 1;
        restarts
    }

    /// A matrix unit begins to read: the time at which it does, and whether time began again.
    pub(crate) fn begin_matrix_read(&mut self) -> (u32, bool) {
        let restarts = self.advance();
        (self.time, restarts)
    }

    /// The warp knows that its matrix unit has read all that it began to read up to a time.
    pub(crate) fn end_matrix_read(&mut self, warp: usize, time: u32) {
        let unit = 32 * self.known.len() + warp;
        let known = &mut self.known[warp][unit];
        *known = time.max(*known);
    }

    /// Number of warps.
    pub(crate) fn warps(&self) -> usize {
        self.known.len()
    }

    /// Up to which time of each warp's matrix unit a warp knows the reads.
    pub(crate) fn matrix_reads_known(&self, warp: usize) -> &[u32] {
        &self.known[warp][32 * self.known.len()..]
    }

    /// Whether an access is ordered before what any lane of a warp does now.
    pub(crate) fn ordered_for_any(&self, entry: Entry, warp: u32) -> bool {
        (0..32).any(|lane| self.ordered(entry, 32 * warp + lane))
    }

    /// Entries below this are ordered before what the warp's lanes do now.
    pub(crate) fn floor(&self, warp: usize) -> Entry {
        Entry(self.floor[warp])
    }

    /// Time moves for the lanes of a warp; true when all notes must be dropped because time began again.
    fn tick(&mut self, warp: usize, lanes: u32) -> bool {
        let restarts = self.advance();
        for lane in crate::execute::each(lanes) {
            self.present[warp * 32 + lane] = self.time;
        }
        restarts
    }

    /// What any of `lanes` knows of the lanes of its warp, their own presents included.
    fn known_lanes(&self, warp: usize, lanes: u32) -> [u32; 32] {
        let mut known = [0; 32];
        for lane in crate::execute::each(lanes) {
            for (known, &new) in known.iter_mut().zip(&self.lanes[warp][lane]) {
                *known = new.max(*known);
            }
        }
        for lane in crate::execute::each(lanes) {
            known[lane] = self.present[warp * 32 + lane];
        }
        known
    }

    /// `bar.warp.sync`: the lanes know of each other.
    pub(crate) fn sync_warp(&mut self, warp: usize, lanes: u32) -> bool {
        let known = self.known_lanes(warp, lanes);
        crate::execute::each(lanes).for_each(|lane| self.lanes[warp][lane] = known);
        self.tick(warp, lanes)
    }

    /// What `lanes` of a warp pass on when they arrive somewhere, added to `to`: what they know, and what they did.
    pub(crate) fn release(&mut self, warp: usize, lanes: u32, to: &mut Knowledge) -> bool {
        join(to, &self.known[warp]);
        for (known, new) in to[warp * 32..].iter_mut().zip(self.known_lanes(warp, lanes)) {
            *known = new.max(*known);
        }
        self.tick(warp, lanes)
    }

    /// `lanes` of a warp learn `from`; of other warps all its lanes do.
    pub(crate) fn acquire(&mut self, warp: usize, lanes: u32, from: &Knowledge) {
        let own = warp * 32..warp * 32 + 32;
        let known = &mut self.known[warp];
        join(known, from);
        known[own.clone()].fill(0);
        let others = known.iter().take(self.present.len()).enumerate();
        let others = others.filter(|(thread, _)| !own.contains(thread)).map(|(_, &known)| known);
        let mut lowest = others.min().unwrap_or(u32::MAX);
        for (lane, known) in self.lanes[warp].iter_mut().enumerate() {
            if lanes >> lane & 1 == 1 {
                for (known, &new) in known.iter_mut().zip(from.get(own.clone()).unwrap_or(&[])) {
                    *known = new.max(*known);
                }
            }
            let others = known.iter().enumerate().filter(|(other, _)| *other != lane).map(|(_, &known)| known);
            lowest = others.fold(lowest, u32::min);
        }
        self.floor[warp] = (lowest + 1) << self.thread_bits;
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
        clocks.acquire(1, u32::MAX, &knowledge);
        assert!(clocks.ordered(before, 32));
        assert!(!clocks.ordered(other, 32) && !clocks.ordered(after, 32));
        // Arriving does not order the lanes of a warp.
        assert!(!clocks.ordered(before, 1) && !clocks.ordered(other, 0));
        clocks.sync_warp(0, u32::MAX);
        assert!(clocks.ordered(after, 1) && clocks.ordered(other, 0));
        assert!(!clocks.ordered(after, 33));
    }

    #[test]
    fn lanes_that_do_not_meet_do_not_know_of_each_other() {
        let mut clocks = Clocks::new(1);
        let (even, odd) = (clocks.entry(2), clocks.entry(3));
        clocks.sync_warp(0, 0x5555_5555);
        clocks.sync_warp(0, 0xAAAA_AAAA);
        assert!(clocks.ordered(even, 0) && clocks.ordered(odd, 1));
        assert!(!clocks.ordered(even, 1) && !clocks.ordered(odd, 0));
        // What lane 2 knows, lane 3 learns from it, and so does who meets lane 3.
        clocks.sync_warp(0, 0b1100);
        clocks.sync_warp(0, 0b1010);
        assert!(clocks.ordered(even, 1));
    }

    #[test]
    fn time_begins_again() {
        let mut clocks = Clocks::new(1);
        let restarts = (0..clocks.max_time()).filter(|_| clocks.sync_warp(0, 1)).count();
        assert_eq!(restarts, 1);
    }

    #[test]
    fn reads_of_the_matrix_unit_are_passed_on() {
        let mut clocks = Clocks::new(2);
        let (first, _) = clocks.begin_matrix_read();
        clocks.begin_matrix_read();
        clocks.end_matrix_read(1, first);
        assert_eq!(clocks.matrix_reads_known(1), [0, first]);
        // By any lane of the warp.
        let mut knowledge = Knowledge::new();
        clocks.release(1, 1 << 9, &mut knowledge);
        clocks.acquire(0, 1, &knowledge);
        assert_eq!(clocks.matrix_reads_known(0), [0, first]);
    }
}
