//! Who wrote and who read each granule of global memory in one launch: blocks against each other.
//!
//! Blocks of a launch are in no order, so any two accesses of different blocks to one granule race unless both read or
//! both are atomic. A granule is 4 bytes, or 1 where the kernel has narrower stores.
//!
//! Two words a granule. The writer's: the block plus 1 and whether the write was atomic. The reader's: the block plus 1, or
//! [`MANY`]. Each access updates one word before it looks at the other, so of two accesses at least one sees the
//! other.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

const PAGE_BYTES: usize = 1 << 14;
const MANY: u32 = u32::MAX;
const ATOMIC: u32 = 1 << 31;

/// How an access takes part in races.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A plain load.
    Read,
    /// A plain store.
    Write,
    /// An atomic, or a load or store that is relaxed, acquire, release or volatile: these do not race with each other.
    Strong,
}

struct Granule {
    writer: AtomicU32,
    reader: AtomicU32,
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

    /// Notes an access of `block` (below 2^31 - 1); the index of another block that it races with.
    pub(crate) fn access(
        &self,
        allocation: usize,
        offset: usize,
        bytes: usize,
        block: u32,
        access: Access,
    ) -> Option<Option<u32>> {
        let page = self.pages[allocation][offset / PAGE_BYTES].get_or_init(|| {
            let granule = || Granule { writer: AtomicU32::new(0), reader: AtomicU32::new(0) };
            (0..PAGE_BYTES >> self.shift).map(|_| granule()).collect()
        });
        let inside = offset % PAGE_BYTES;
        let granules = &page[inside >> self.shift..=(inside + bytes - 1) >> self.shift];
        granules.iter().find_map(|granule| granule.access(block + 1, access))
    }
}

impl Granule {
    fn access(&self, me: u32, access: Access) -> Option<Option<u32>> {
        match access {
            Access::Read => {
                let reader = self.reader.load(SeqCst);
                if reader != me && reader != MANY {
                    let new = if reader == 0 { me } else { MANY };
                    if self.reader.compare_exchange(reader, new, SeqCst, SeqCst).is_err() {
                        self.reader.store(MANY, SeqCst);
                    }
                }
                conflict(self.writer.load(SeqCst) & !ATOMIC, me)
            }
            Access::Write => {
                let writer = self.writer.swap(me, SeqCst) & !ATOMIC;
                conflict(writer, me).or_else(|| conflict(self.reader.load(SeqCst), me))
            }
            Access::Strong => {
                let writer = self.writer.load(SeqCst);
                if writer == 0 {
                    let _ = self.writer.compare_exchange(0, me | ATOMIC, SeqCst, SeqCst);
                } else if writer & ATOMIC != 0 && writer != me | ATOMIC {
                    // Several blocks: whoever reads or writes plainly races with one of them.
                    let _ = self.writer.compare_exchange(writer, MANY, SeqCst, SeqCst);
                }
                let writer = self.writer.load(SeqCst);
                let plain = if writer & ATOMIC == 0 { conflict(writer, me) } else { None };
                plain.or_else(|| conflict(self.reader.load(SeqCst), me))
            }
        }
    }
}

/// The other block, if `other` names one; none inside where it is several.
fn conflict(other: u32, me: u32) -> Option<Option<u32>> {
    if other == 0 || other == me {
        None
    } else {
        Some((other & !ATOMIC != MANY & !ATOMIC).then(|| (other & !ATOMIC) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_pairs() {
        use Access::{Read, Strong, Write};
        for (first, second, races) in [
            (Read, Read, false),
            (Read, Write, true),
            (Write, Read, true),
            (Write, Write, true),
            (Strong, Strong, false),
            (Strong, Read, true),
            (Read, Strong, true),
            (Strong, Write, true),
            (Write, Strong, true),
        ] {
            let races_of = |a, b| {
                let shadow = GlobalRaces::new([64].into_iter(), false);
                assert!(shadow.access(0, 8, 4, a, first).is_none());
                shadow.access(0, 8, 4, b, second).is_some()
            };
            assert_eq!(races_of(0, 1), races, "{first:?} {second:?}");
            assert!(!races_of(3, 3), "{first:?} {second:?}");
        }
    }

    #[test]
    fn third_parties() {
        use Access::{Read, Strong, Write};
        let shadow = GlobalRaces::new([64].into_iter(), true);
        assert_eq!(shadow.access(0, 0, 1, 0, Read), None);
        assert_eq!(shadow.access(0, 1, 1, 1, Read), None);
        assert_eq!(shadow.access(0, 0, 1, 0, Write), None);
        assert_eq!(shadow.access(0, 0, 4, 2, Read), Some(Some(0)));
        assert_eq!(shadow.access(0, 8, 1, 0, Strong), None);
        assert_eq!(shadow.access(0, 8, 1, 1, Strong), None);
        assert_eq!(shadow.access(0, 8, 1, 0, Read), Some(None));
    }
}
