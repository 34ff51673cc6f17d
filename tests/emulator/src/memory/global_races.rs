//! Who wrote and who read each granule of global memory in one launch: blocks against each other.
//!
//! Accesses of different blocks to one granule race unless both read, both are strong, or the clock of the later one covers
//! the earlier one ([`super::block_clocks`]). A granule is 4 bytes, or 1 where the kernel has narrower stores.
//!
//! Two words a granule, each with a block and its epoch: of the last writer, and whether it was strong; of the last reader. An
//! access takes the place of those it is ordered behind; otherwise several strong ones, or several readers, become [`MANY`], which
//! nothing is ordered behind. Each access updates one word before it looks at the other, so of two accesses at least one
//! sees the other.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::block_clocks::{BlockClock, Order};

const PAGE_BYTES: usize = 1 << 14;

/// How an access takes part in races.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A plain load.
    Read,
    /// A plain store.
    Write,
    /// An atomic, or a load or store that is relaxed, acquire, release or volatile: these do not race with each other.
    Strong(Order),
}

/// An access: the block plus 1, above it [`STRONG`], below it the epoch. 0 is none.
type Note = u64;

const STRONG: Note = 1 << 63;
/// Several blocks.
const MANY: Note = !STRONG;

struct Granule {
    writer: AtomicU64,
    reader: AtomicU64,
}

type Page = Box<[Granule]>;

/// Shadow of all allocations, for one launch.
pub(crate) struct GlobalRaces {
    shift: u32,
    pages: Vec<Vec<OnceLock<Page>>>,
}

impl GlobalRaces {
    pub(crate) fn new(sizes: impl Iterator<Item = usize>, narrow_stores: bool) -> Self {
        let shift = if narrow_stores { 0 } else { 2 };
        let pages = sizes.map(|bytes| (0..bytes.div_ceil(PAGE_BYTES)).map(|_| OnceLock::new()).collect()).collect();
        Self { shift, pages }
    }

    /// Notes an access of a block (below 2^31 - 2); the index of another block that it races with.
    pub(crate) fn access(
        &self,
        allocation: usize,
        offset: usize,
        bytes: usize,
        clock: &BlockClock,
        access: Access,
    ) -> Option<Option<u32>> {
        let page = self.pages[allocation][offset / PAGE_BYTES].get_or_init(|| {
            let granule = || Granule { writer: AtomicU64::new(0), reader: AtomicU64::new(0) };
            (0..PAGE_BYTES >> self.shift).map(|_| granule()).collect()
        });
        let inside = offset % PAGE_BYTES;
        let granules = &page[inside >> self.shift..=(inside + bytes - 1) >> self.shift];
        let me = Note::from(clock.block() + 1) << 32 | Note::from(clock.epoch());
        granules.iter().find_map(|granule| granule.access(me, clock, access))
    }
}

impl Granule {
    fn access(&self, me: Note, clock: &BlockClock, access: Access) -> Option<Option<u32>> {
        match access {
            Access::Read => {
                let reader = self.reader.load(SeqCst);
                if reader != me && reader != MANY {
                    let new = if conflict(reader, me, clock).is_none() { me } else { MANY };
                    if self.reader.compare_exchange(reader, new, SeqCst, SeqCst).is_err() {
                        self.reader.store(MANY, SeqCst);
                    }
                }
                conflict(self.writer.load(SeqCst), me, clock)
            }
            Access::Write => {
                let writer = self.writer.swap(me, SeqCst);
                conflict(writer, me, clock).or_else(|| conflict(self.reader.load(SeqCst), me, clock))
            }
            Access::Strong(_) => {
                let update = |writer| noted_strong(writer, me, clock);
                let (Ok(writer) | Err(writer)) = self.writer.fetch_update(SeqCst, SeqCst, update);
                let plain = if writer & STRONG == 0 { conflict(writer, me, clock) } else { None };
                plain.or_else(|| conflict(self.reader.load(SeqCst), me, clock))
            }
        }
    }
}

/// What a strong access leaves as the writer; none for what is there.
fn noted_strong(writer: Note, me: Note, clock: &BlockClock) -> Option<Note> {
    let is_strong = writer & STRONG != 0;
    let new = match conflict(writer, me, clock) {
        // One's own plain store still races with strong accesses of others.
        None if !is_strong && writer != 0 && same_block(writer, me) => return None,
        None => me | STRONG,
        // Whoever reads or writes plainly races with one of several.
        Some(_) if is_strong => MANY | STRONG,
        Some(_) => return None,
    };
    (new != writer).then_some(new)
}

fn same_block(a: Note, b: Note) -> bool {
    (a ^ b) & !STRONG < 1 << 32
}

/// The other block, if `other` names one that is not ordered before; none inside where it is several.
fn conflict(other: Note, me: Note, clock: &BlockClock) -> Option<Option<u32>> {
    if other == 0 || same_block(other, me) {
        return None;
    }
    let other = other & !STRONG;
    if other == MANY {
        return Some(None);
    }
    let block = (other >> 32) as u32 - 1;
    (!clock.covers(block, other as u32)).then_some(Some(block))
}

#[cfg(test)]
mod tests {
    use super::Access::{Read, Write};
    use super::*;

    const STRONGLY: Access = Access::Strong(Order::RELAXED);

    #[test]
    fn conflicting_pairs() {
        for (first, second, races) in [
            (Read, Read, false),
            (Read, Write, true),
            (Write, Read, true),
            (Write, Write, true),
            (STRONGLY, STRONGLY, false),
            (STRONGLY, Read, true),
            (Read, STRONGLY, true),
            (STRONGLY, Write, true),
            (Write, STRONGLY, true),
        ] {
            let races_of = |a, b| {
                let shadow = GlobalRaces::new([64].into_iter(), false);
                assert!(shadow.access(0, 8, 4, &BlockClock::new(a), first).is_none());
                shadow.access(0, 8, 4, &BlockClock::new(b), second).is_some()
            };
            assert_eq!(races_of(0, 1), races, "{first:?} {second:?}");
            assert!(!races_of(3, 3), "{first:?} {second:?}");
        }
    }

    #[test]
    fn third_parties() {
        let shadow = GlobalRaces::new([64].into_iter(), true);
        let clocks = [0, 1, 2].map(BlockClock::new);
        let access = |offset, bytes, block: usize, access| shadow.access(0, offset, bytes, &clocks[block], access);
        assert_eq!(access(0, 1, 0, Read), None);
        assert_eq!(access(1, 1, 1, Read), None);
        assert_eq!(access(0, 1, 0, Write), None);
        assert_eq!(access(0, 4, 2, Read), Some(Some(0)));
        assert_eq!(access(8, 1, 0, STRONGLY), None);
        assert_eq!(access(8, 1, 1, STRONGLY), None);
        assert_eq!(access(8, 1, 0, Read), Some(None));
    }

    #[test]
    fn pairs_in_order() {
        for first in [Read, Write, STRONGLY] {
            for second in [Read, Write, STRONGLY] {
                let shadow = GlobalRaces::new([64].into_iter(), false);
                let (mut a, mut b) = (BlockClock::new(0), BlockClock::new(1));
                assert_eq!(shadow.access(0, 0, 4, &a, first), None);
                b.acquire(&a.release());
                assert_eq!(shadow.access(0, 4, 4, &a, first), None);
                assert_eq!(shadow.access(0, 0, 4, &b, second), None, "{first:?} {second:?}");
                // After the release.
                let races = first != second || first == Write;
                assert_eq!(shadow.access(0, 4, 4, &b, second).is_some(), races, "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn who_comes_later_takes_the_place_of_those_before() {
        for first in [Read, STRONGLY] {
            let shadow = GlobalRaces::new([64].into_iter(), false);
            let mut clocks = [0, 1, 2, 3].map(BlockClock::new);
            for block in 0..3 {
                assert_eq!(shadow.access(0, 0, 4, &clocks[block], first), None);
                let passed = clocks[block].release();
                clocks[block + 1].acquire(&passed);
            }
            assert_eq!(shadow.access(0, 0, 4, &BlockClock::new(4), Write), Some(Some(2)));
            let shadow = GlobalRaces::new([64].into_iter(), false);
            for clock in &clocks[..3] {
                assert_eq!(shadow.access(0, 0, 4, clock, first), None);
            }
            assert_eq!(shadow.access(0, 0, 4, &clocks[3], Write), Some(None), "of releases before the accesses");
        }
    }

    #[test]
    fn reads_again_in_a_later_epoch() {
        let shadow = GlobalRaces::new([64].into_iter(), false);
        let (mut a, mut b) = (BlockClock::new(0), BlockClock::new(1));
        assert_eq!(shadow.access(0, 0, 4, &a, Read), None);
        b.acquire(&a.release());
        assert_eq!(shadow.access(0, 0, 4, &a, Read), None);
        assert_eq!(shadow.access(0, 0, 4, &b, Write), Some(Some(0)));
    }
}
