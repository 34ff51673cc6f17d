//! The routing as the warps that copy need it: first slots and first token tiles of the experts, in shared memory.

use super::OFFSETS_BYTES;
use crate::kernels::device_rows::{div_rem, local_expert, warp_inclusive_sum};
use crate::params::{GroupedGemmParams, NO_SLOT};
use crate::ptx::shared;
use crate::ptx::warp::{match_any, reduce_add, sync_warp};

/// Numbers that a lane reads at a time.
const TURN: usize = 5;

/// Where the numbers are, of each expert and behind the last.
#[derive(Clone, Copy)]
pub(super) struct Offsets(pub(super) u32);

impl Offsets {
    fn place(self, expert: u32) -> u32 {
        self.0 + expert * OFFSETS_BYTES as u32
    }

    /// First slot and first token tile of an expert.
    ///
    /// # Safety
    /// They were filled in, and seen by this thread.
    #[inline(always)]
    pub(super) unsafe fn of(self, expert: u32) -> [u32; 2] {
        // SAFETY: the caller's contract.
        unsafe { shared::load_v2(self.place(expert)) }
    }

    #[inline(always)]
    unsafe fn put(self, expert: u32, offsets: [u32; 2]) {
        // SAFETY: the caller's contract: there is room.
        unsafe { shared::store_v2(self.place(expert), offsets) };
    }

    /// Fills them in, by all lanes of one warp: from the routing, or where `topk_ids` are given from those, so that what makes
    /// the routing need not be waited for. `most` are the slots of a token tile.
    ///
    /// # Safety
    /// There is room for one expert more than there are; the params' pointers are as documented there.
    #[inline(always)]
    pub(super) unsafe fn fill(self, params: &GroupedGemmParams, lane: u32, most: u32) {
        // SAFETY: the caller's contract.
        unsafe {
            if params.topk_ids == 0 {
                let offsets = [params.expert_offset, params.tile_offset].map(|offsets| offsets as *const u32);
                let mut first = lane;
                while first <= params.experts {
                    // Several at a time, so that memory is waited for once.
                    let mut read = [[0; 2]; TURN];
                    let mut i = 0;
                    while i < TURN {
                        let expert = first + i as u32 * 32;
                        if expert <= params.experts {
                            read[i] = offsets.map(|offsets| *offsets.add(expert as usize));
                        }
                        i += 1;
                    }
                    i = 0;
                    while i < TURN {
                        let expert = first + i as u32 * 32;
                        if expert <= params.experts {
                            self.put(expert, read[i]);
                        }
                        i += 1;
                    }
                    first += TURN as u32 * 32;
                }
            } else {
                self.count(params, lane);
                self.sum(params, lane, most);
            }
            sync_warp();
        }
    }

    /// Entries of each expert, where its first slot belongs.
    #[inline(always)]
    unsafe fn count(self, params: &GroupedGemmParams, lane: u32) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut expert = lane;
            while expert <= params.experts {
                self.put(expert, [0; 2]);
                expert += 32;
            }
            sync_warp();
            let entries = params.tokens.get() * params.topk;
            let mut first = 0;
            while first < entries {
                let mut experts = [NO_SLOT; TURN];
                let mut i = 0;
                while i < TURN {
                    let entry = first + i as u32 * 32 + lane;
                    if entry < entries {
                        experts[i] = local_expert(params.topk_ids, entry, params.first_expert, params.experts);
                    }
                    i += 1;
                }
                i = 0;
                while i < TURN {
                    let expert = experts[i];
                    let peers = match_any(expert);
                    if expert != NO_SLOT && peers & ((1 << lane) - 1) == 0 {
                        let [count, _] = self.of(expert);
                        self.put(expert, [count + peers.count_ones(), 0]);
                    }
                    sync_warp();
                    i += 1;
                }
                first += TURN as u32 * 32;
            }
        }
    }

    /// From numbers of entries to first slots and first token tiles.
    #[inline(always)]
    unsafe fn sum(self, params: &GroupedGemmParams, lane: u32, most: u32) {
        let (mut before, mut first) = ([0; 2], 0);
        while first < params.experts {
            let expert = first + lane;
            // SAFETY: the caller's contract; a lane has its own experts, and the one behind the last has no entries.
            unsafe {
                let slots = if expert < params.experts { self.of(expert)[0] } else { 0 };
                // Both sums at once: there are few entries.
                let both = slots << 16 | div_rem(slots + most - 1, most).0;
                let sums = warp_inclusive_sum(both, lane) - both;
                if expert < params.experts {
                    self.put(expert, [before[0] + (sums >> 16), before[1] + (sums & 0xffff)]);
                }
                let all = reduce_add(both);
                before = [before[0] + (all >> 16), before[1] + (all & 0xffff)];
            }
            first += 32;
        }
        if lane == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.put(params.experts, before) };
        }
    }
}
