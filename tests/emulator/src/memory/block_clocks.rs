//! Which accesses of a launch's blocks to global memory are ordered: a vector clock for each block.
//!
//! A block counts epochs: one ends with each of its releases, which leaves what the block did until then, and what it knew of
//! others, at the address. An acquire there adds that to what the acquiring block knows. Who of a block releases or
//! acquires does not matter: that its threads are ordered among each other is not checked here.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clocks::{Knowledge, join};

/// How a strong access is ordered with accesses of other blocks to other addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) acquires: bool,
    pub(crate) releases: bool,
}

impl Order {
    pub(crate) const RELAXED: Self = Self { acquires: false, releases: false };

    /// Of a modifier of the memory model.
    pub(crate) fn named(name: &str) -> Self {
        Self {
            acquires: matches!(name, "acquire" | "acq_rel" | "sc"),
            releases: matches!(name, "release" | "acq_rel" | "sc"),
        }
    }
}

/// Clock of a block.
#[derive(Debug)]
pub(crate) struct BlockClock {
    block: u32,
    epoch: u32,
    /// Of each block, the last epoch whose accesses are ordered before what this block does now.
    known: Knowledge,
}

impl BlockClock {
    pub(crate) fn new(block: u32) -> Self {
        Self { block, epoch: 1, known: Knowledge::new() }
    }

    pub(crate) fn block(&self) -> u32 {
        self.block
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether what another block did in an epoch is ordered before what this one does now.
    pub(crate) fn covers(&self, block: u32, epoch: u32) -> bool {
        self.known.get(block as usize).is_some_and(|&known| epoch <= known)
    }

    /// What a release passes on; what the block does from now on is not part of it.
    pub(crate) fn release(&mut self) -> Knowledge {
        let block = self.block as usize;
        let mut passed = self.known.clone();
        passed.resize(passed.len().max(block + 1), 0);
        passed[block] = self.epoch;
        self.epoch += 1;
        passed
    }

    pub(crate) fn acquire(&mut self, passed: &Knowledge) {
        join(&mut self.known, passed);
    }
}

/// What the fences of a warp make of its relaxed accesses.
#[derive(Debug, Default)]
pub(crate) struct Fenced {
    /// What was released where relaxed loads and atomics read: a fence behind them acquires it.
    seen: Knowledge,
    /// Lanes that executed a fence, and what relaxed stores and atomics behind it release.
    lanes: u32,
    released: Knowledge,
}

impl Fenced {
    /// A fence of some lanes.
    pub(crate) fn fence(&mut self, lanes: u32, order: Order, clock: &mut BlockClock) {
        if order.acquires {
            clock.acquire(&self.seen);
        }
        if order.releases {
            self.lanes |= lanes;
            self.released = clock.release();
        }
    }
}

/// What a strong access writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// What was there is replaced: a store.
    Replaces,
    /// The new value comes from the old one, so whoever reads it sees earlier releases too.
    Continues,
}

/// An address of global memory and a number of bytes there.
pub(crate) type Word = (u64, usize);

/// What was released at each address of global memory.
#[derive(Debug, Default)]
pub(crate) struct Releases(Mutex<Records>);

#[derive(Debug, Default)]
pub(crate) struct Records(HashMap<Word, Knowledge>);

impl Releases {
    /// Held while a strong access is performed and noted, so that nobody sees its value without the record or the other way
    /// round.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    /// Before a strong access that reads.
    pub(crate) fn read(&self, word: Word, order: Order, clock: &mut BlockClock, fenced: &mut Fenced) {
        if let Some(passed) = self.0.get(&word) {
            if order.acquires {
                clock.acquire(passed);
            }
            join(&mut fenced.seen, passed);
        }
    }

    /// Before a strong access that writes, after [`Self::read`] and the check for races.
    pub(crate) fn write(
        &mut self,
        word: Word,
        lane: usize,
        order: Order,
        update: Update,
        clock: &mut BlockClock,
        fenced: &Fenced,
    ) {
        if update == Update::Replaces {
            self.0.remove(&word);
        }
        if order.releases {
            join(self.0.entry(word).or_default(), &clock.release());
        } else if fenced.lanes >> lane & 1 == 1 {
            join(self.0.entry(word).or_default(), &fenced.released);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACQUIRE: Order = Order { acquires: true, releases: false };
    const RELEASE: Order = Order { acquires: false, releases: true };
    const WORD: Word = (64, 4);

    fn write(records: &mut Records, order: Order, update: Update, clock: &mut BlockClock) {
        records.write(WORD, 0, order, update, clock, &Fenced::default());
    }

    fn read(records: &Records, order: Order, block: u32) -> BlockClock {
        let mut clock = BlockClock::new(block);
        records.read(WORD, order, &mut clock, &mut Fenced::default());
        clock
    }

    #[test]
    fn what_a_block_does_after_its_release_is_not_passed_on() {
        let (mut clock, mut records) = (BlockClock::new(3), Records::default());
        write(&mut records, RELEASE, Update::Replaces, &mut clock);
        let other = read(&records, ACQUIRE, 0);
        assert!(other.covers(3, 1) && !other.covers(3, clock.epoch()) && !other.covers(2, 1));
        assert!(!read(&records, Order::RELAXED, 0).covers(3, 1));
        let mut elsewhere = BlockClock::new(0);
        records.read((68, 4), ACQUIRE, &mut elsewhere, &mut Fenced::default());
        assert!(!elsewhere.covers(3, 1));
    }

    #[test]
    fn what_was_acquired_is_passed_on() {
        let (mut first, mut records) = (BlockClock::new(0), Records::default());
        write(&mut records, RELEASE, Update::Replaces, &mut first);
        let mut second = read(&records, ACQUIRE, 1);
        write(&mut records, RELEASE, Update::Replaces, &mut second);
        let third = read(&records, ACQUIRE, 2);
        assert!(third.covers(0, 1) && third.covers(1, 1));
    }

    #[test]
    fn atomics_continue_what_stores_end() {
        for (update, covers) in [(Update::Continues, true), (Update::Replaces, false)] {
            for order in [Order::RELAXED, RELEASE] {
                let mut records = Records::default();
                write(&mut records, RELEASE, Update::Replaces, &mut BlockClock::new(0));
                write(&mut records, order, update, &mut BlockClock::new(1));
                let clock = read(&records, ACQUIRE, 2);
                assert_eq!((clock.covers(0, 1), clock.covers(1, 1)), (covers, order.releases), "{update:?} {order:?}");
            }
        }
    }

    #[test]
    fn fences_order_relaxed_accesses_of_their_lanes() {
        let (mut writer, mut fenced, mut records) = (BlockClock::new(0), Fenced::default(), Records::default());
        fenced.fence(1 << 4, Order::named("acq_rel"), &mut writer);
        records.write(WORD, 5, Order::RELAXED, Update::Replaces, &mut writer, &fenced);
        assert!(!read(&records, ACQUIRE, 1).covers(0, 1));
        records.write(WORD, 4, Order::RELAXED, Update::Replaces, &mut writer, &fenced);
        // Behind the fence is not released, though it is before the store.
        let other = read(&records, ACQUIRE, 1);
        assert!(other.covers(0, 1) && !other.covers(0, 2));

        let (mut reader, mut fenced) = (BlockClock::new(1), Fenced::default());
        fenced.fence(1, Order::named("sc"), &mut reader);
        records.read(WORD, Order::RELAXED, &mut reader, &mut fenced);
        fenced.fence(1, Order::named("release"), &mut reader);
        assert!(!reader.covers(0, 1));
        fenced.fence(1, Order::named("acquire"), &mut reader);
        assert!(reader.covers(0, 1));
    }
}
