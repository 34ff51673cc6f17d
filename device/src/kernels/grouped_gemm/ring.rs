//! A ring of stages in shared memory between a warp that copies and those that multiply, with an mbarrier of a stage that is
//! full and one of a stage that was given back. The barriers lie behind the stages: the full ones, then the empty ones.

use crate::ptx::mbarrier;

/// A place in a ring of so many stages of so many bytes, and the parity of its phases there.
#[derive(Clone, Copy)]
pub(super) struct Cursor<const STAGES: usize, const STAGE_BYTES: usize> {
    stage: u32,
    pub(super) parity: u32,
    shared: u32,
}

impl<const STAGES: usize, const STAGE_BYTES: usize> Cursor<STAGES, STAGE_BYTES> {
    /// The first stage of the ring at this address.
    #[inline(always)]
    pub(super) fn new(shared: u32) -> Self {
        Self { stage: 0, parity: 0, shared }
    }

    /// Initializes the ring's barriers: a stage is full after `filled` arrivals, and empty after `given_back`. One thread
    /// does it, and a barrier of the block follows.
    ///
    /// # Safety
    /// The ring and its barriers are inside the block's shared memory, and nothing else uses them.
    #[inline(always)]
    pub(super) unsafe fn init(shared: u32, filled: u32, given_back: u32) {
        let mut cursor = Self::new(shared);
        while cursor.stage < STAGES as u32 {
            // SAFETY: the caller's contract.
            unsafe {
                mbarrier::init(cursor.full(), filled);
                mbarrier::init(cursor.empty(), given_back);
            }
            cursor.stage += 1;
        }
        mbarrier::fence_proxy_async();
    }

    /// The stage's bytes.
    #[inline(always)]
    pub(super) fn data(&self) -> u32 {
        self.shared + self.stage * STAGE_BYTES as u32
    }

    /// Its barriers.
    #[inline(always)]
    pub(super) fn full(&self) -> u32 {
        self.shared + (STAGES * STAGE_BYTES) as u32 + self.stage * 8
    }

    #[inline(always)]
    pub(super) fn empty(&self) -> u32 {
        self.full() + STAGES as u32 * 8
    }

    /// The place behind this one.
    #[inline(always)]
    pub(super) fn next(&self) -> Self {
        let Self { stage, parity, shared } = *self;
        if stage + 1 == STAGES as u32 {
            Self { stage: 0, parity: parity ^ 1, shared }
        } else {
            Self { stage: stage + 1, parity, shared }
        }
    }
}
