//! Routing: from `topk_ids` to slots sorted by expert, then by (token, k).
//!
//! A stable counting sort over chunks of entries (an entry is one (token, k)): `route_count` counts each chunk's
//! entries for each expert, `route_scan` turns the counts into first slots, `route_place` gives every entry its slot.
//! Only integer arithmetic and no atomics, so the order is fixed.
//!
//! `route_single` does all three in one block, of as many warps as there are entries for, where that is possible: few tokens wait
//! for launches more than for work.
//!
//! Inside a chunk a warp owns consecutive entries in groups of 32: 8, or in `route_single` as many as share them evenly. Shared
//! memory: one counter for each warp and expert.

/// Warps of `route_count` and `route_place`.
pub const WARPS: u32 = 8;
/// Threads of a block, of all route kernels.
pub const THREADS: u32 = WARPS * 32;
/// Groups of 32 entries of a warp.
pub const GROUPS: u32 = 8;
/// Entries of a chunk: of one block.
pub const CHUNK_ENTRIES: u32 = WARPS * GROUPS * 32;

/// Dynamic shared memory that a block gets without asking, in bytes.
pub const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// Most warps of `route_single`: of one block.
const SINGLE_WARPS: u32 = 32;

/// Shared memory of a block's two partial sums for each warp, in bytes.
const SUMS_BYTES: u32 = SINGLE_WARPS * 8;

/// Dynamic shared memory of each kernel, in bytes: the sums, then the counters.
pub const fn shared_bytes(experts: u32) -> u32 {
    shared_bytes_of(WARPS, experts)
}

/// Most experts of a rank: of one block's counters.
pub const MOST_EXPERTS: u32 = (DEFAULT_SHARED_BYTES - SUMS_BYTES) / (WARPS * 4);

const fn shared_bytes_of(warps: u32, experts: u32) -> u32 {
    SUMS_BYTES + warps * experts * 4
}

/// Threads and dynamic shared memory of a launch of `route_single` for so many entries, if one block can take them.
pub const fn single(entries: u32, experts: u32) -> Option<(u32, u32)> {
    let needed = entries.div_ceil(GROUPS * 32);
    let warps = if needed < WARPS { WARPS } else { needed };
    let bytes = shared_bytes_of(warps, experts);
    if warps <= SINGLE_WARPS && bytes <= DEFAULT_SHARED_BYTES { Some((warps * 32, bytes)) } else { None }
}

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::*;
    use crate::kernels::device_rows::{div_rem, local_expert, warp_inclusive_sum};
    use crate::params::{NO_SLOT, RouteParams};
    use crate::ptx::thread::{block_dim_x, block_idx_x, sync_threads, thread_idx_x};
    use crate::ptx::warp::{match_any, sync_warp};
    use crate::ptx::{grid, shared};

    /// Local expert of an entry, `NO_SLOT` where it is not here or the entry is beyond the end.
    #[inline(always)]
    unsafe fn expert_of(params: &RouteParams, entry: u32, entries: u32) -> u32 {
        if entry >= entries {
            return NO_SLOT;
        }
        // SAFETY: entry < T * topk.
        unsafe { local_expert(params.topk_ids, entry, params.first_expert, params.experts) }
    }

    #[inline(always)]
    fn counter(warp: u32, expert: u32, experts: u32) -> u32 {
        shared::dynamic() + SUMS_BYTES + (warp * experts + expert) * 4
    }

    /// Counts this warp's entries into its counters.
    #[inline(always)]
    unsafe fn count_entries(params: &RouteParams, entries: u32, groups: u32, first: u32, warp: u32, lane: u32) {
        // SAFETY: counters lie in the planned shared memory; each warp touches only its own.
        unsafe {
            let mut expert = lane;
            while expert < params.experts {
                shared::store_u32(counter(warp, expert, params.experts), 0);
                expert += 32;
            }
            sync_warp();
            let mut group = 0;
            while group < groups {
                let expert = expert_of(params, first + group * 32 + lane, entries);
                let peers = match_any(expert);
                if expert != NO_SLOT && peers & ((1 << lane) - 1) == 0 {
                    let address = counter(warp, expert, params.experts);
                    shared::store_u32(address, shared::load_u32(address) + peers.count_ones());
                }
                sync_warp();
                group += 1;
            }
        }
    }

    /// Entries of the block's chunk for an expert.
    #[inline(always)]
    unsafe fn counted(expert: u32, experts: u32) -> u32 {
        let (mut sum, mut warp) = (0, 0);
        while warp < block_dim_x() / 32 {
            // SAFETY: counters lie in the planned shared memory and have been written by all warps.
            sum += unsafe { shared::load_u32(counter(warp, expert, experts)) };
            warp += 1;
        }
        sum
    }

    /// Turns an expert's counters into the next free slot of each warp, from `next` on.
    #[inline(always)]
    unsafe fn counters_to_slots(expert: u32, experts: u32, mut next: u32) {
        let mut warp = 0;
        while warp < block_dim_x() / 32 {
            let address = counter(warp, expert, experts);
            // SAFETY: as in `counted`; one thread an expert.
            unsafe {
                let count = shared::load_u32(address);
                shared::store_u32(address, next);
                next += count;
            }
            warp += 1;
        }
    }

    /// Gives this warp's entries their slots.
    #[inline(always)]
    unsafe fn place_entries(params: &RouteParams, entries: u32, groups: u32, first: u32, warp: u32, lane: u32) {
        let mut group = 0;
        while group < groups {
            let entry = first + group * 32 + lane;
            // SAFETY: entries and slots are below the sizes documented in RouteParams; each warp has its own counters.
            unsafe {
                let expert = expert_of(params, entry, entries);
                let peers = match_any(expert);
                let earlier = (peers & ((1 << lane) - 1)).count_ones();
                let address = counter(warp, expert, params.experts);
                let (mut next, mut slot) = (0, NO_SLOT);
                if expert != NO_SLOT {
                    next = shared::load_u32(address);
                    slot = next + earlier;
                    *(params.slot_token as *mut u32).add(slot as usize) = div_rem(entry, params.topk).0;
                }
                if entry < entries {
                    *(params.entry_slot as *mut u32).add(entry as usize) = slot;
                }
                sync_warp();
                if expert != NO_SLOT && earlier == 0 {
                    shared::store_u32(address, next + peers.count_ones());
                }
                sync_warp();
            }
            group += 1;
        }
    }

    /// First slot and token tile of each expert, from the number of its slots; `slots` is asked once an expert, `first_slot`
    /// told.
    #[inline(always)]
    unsafe fn scan_experts(params: &RouteParams, slots: impl Fn(u32) -> u32, first_slot: impl Fn(u32, u32)) {
        let thread = thread_idx_x();
        let expert_offset = params.expert_offset as *mut u32;
        let tile_offset = params.tile_offset as *mut u32;
        // SAFETY: experts + 1 offsets each; two amax cells.
        unsafe {
            if thread < 2 {
                *(params.amax_bits as *mut u32).add(thread as usize) = 0;
            }
            let mut carry = [0; 2];
            let mut first = 0;
            while first < params.experts {
                let expert = first + thread;
                let slots = if expert < params.experts { slots(expert) } else { 0 };
                let tiles = div_rem(slots + params.token_tile - 1, params.token_tile).0;
                let (before, total) = block_exclusive_sums([slots, tiles], thread);
                if expert < params.experts {
                    *expert_offset.add(expert as usize) = carry[0] + before[0];
                    *tile_offset.add(expert as usize) = carry[1] + before[1];
                    first_slot(expert, carry[0] + before[0]);
                }
                carry = [carry[0] + total[0], carry[1] + total[1]];
                first += block_dim_x();
            }
            if thread == 0 {
                *expert_offset.add(params.experts as usize) = carry[0];
                *tile_offset.add(params.experts as usize) = carry[1];
            }
        }
    }

    /// Counts the entries of each chunk for each expert.
    ///
    /// # Safety
    /// The params' pointers are as documented there; `chunks` blocks of [`THREADS`], [`shared_bytes`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn route_count(params: RouteParams) {
        grid::follow();
        // SAFETY: every index is below the sizes documented in RouteParams.
        unsafe {
            let (thread, chunk) = (thread_idx_x(), block_idx_x());
            let entries = params.tokens.get() * params.topk;
            let first = chunk * CHUNK_ENTRIES + thread / 32 * GROUPS * 32;
            count_entries(&params, entries, GROUPS, first, thread / 32, thread % 32);
            sync_threads();
            let counts = params.chunk_counts as *mut u32;
            let mut expert = thread;
            while expert < params.experts {
                *counts.add((chunk * params.experts + expert) as usize) = counted(expert, params.experts);
                expert += block_dim_x();
            }
        }
    }

    /// Exclusive sums over the block of two values at once, and their totals.
    #[inline(always)]
    unsafe fn block_exclusive_sums(values: [u32; 2], thread: u32) -> ([u32; 2], [u32; 2]) {
        let (warp, lane) = (thread / 32, thread % 32);
        let inclusive = [warp_inclusive_sum(values[0], lane), warp_inclusive_sum(values[1], lane)];
        // SAFETY: SUMS_BYTES hold two sums for each warp.
        unsafe {
            if lane == 31 {
                shared::store_u32(shared::dynamic() + warp * 8, inclusive[0]);
                shared::store_u32(shared::dynamic() + warp * 8 + 4, inclusive[1]);
            }
            sync_threads();
            let (mut before, mut total) = ([0; 2], [0; 2]);
            let mut other = 0;
            while other < block_dim_x() / 32 {
                let sums = shared::load_v2(shared::dynamic() + other * 8);
                if other < warp {
                    before = [before[0] + sums[0], before[1] + sums[1]];
                }
                total = [total[0] + sums[0], total[1] + sums[1]];
                other += 1;
            }
            sync_threads();
            ([before[0] + inclusive[0] - values[0], before[1] + inclusive[1] - values[1]], total)
        }
    }

    /// First slot and first token tile of each expert; each chunk's counts become the sums over earlier chunks.
    ///
    /// # Safety
    /// The params' pointers are as documented there; one block of [`THREADS`], [`shared_bytes`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn route_scan(params: RouteParams) {
        grid::follow();
        let counts = params.chunk_counts as *mut u32;
        // SAFETY: every index is below the sizes documented in RouteParams.
        unsafe {
            let accumulate_chunks = |expert| {
                let (mut slots, mut chunk) = (0, 0);
                while chunk < params.chunks {
                    let count = counts.add((chunk * params.experts + expert) as usize);
                    let earlier = slots;
                    slots += *count;
                    *count = earlier;
                    chunk += 1;
                }
                slots
            };
            scan_experts(&params, accumulate_chunks, |_, _| {});
        }
    }

    /// Gives every entry its slot.
    ///
    /// # Safety
    /// The params' pointers are as documented there; `chunks` blocks of [`THREADS`], [`shared_bytes`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn route_place(params: RouteParams) {
        grid::follow_closely();
        // SAFETY: every index is below the sizes documented in RouteParams.
        unsafe {
            let (thread, chunk) = (thread_idx_x(), block_idx_x());
            let (warp, lane) = (thread / 32, thread % 32);
            let entries = params.tokens.get() * params.topk;
            let first = chunk * CHUNK_ENTRIES + warp * GROUPS * 32;
            count_entries(&params, entries, GROUPS, first, warp, lane);
            sync_threads();

            let mut expert = thread;
            while expert < params.experts {
                let next = *(params.expert_offset as *const u32).add(expert as usize)
                    + *(params.chunk_counts as *const u32).add((chunk * params.experts + expert) as usize);
                counters_to_slots(expert, params.experts, next);
                expert += block_dim_x();
            }
            sync_threads();
            place_entries(&params, entries, GROUPS, first, warp, lane);
        }
    }

    /// The whole of routing.
    ///
    /// # Safety
    /// The params' pointers are as documented there; one block of the threads and the shared memory of [`single`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn route_single(params: RouteParams) {
        if params.unread != 0 {
            grid::launch_dependents();
        }
        grid::follow_closely();
        // SAFETY: every index is below the sizes documented in RouteParams.
        unsafe {
            let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
            let entries = params.tokens.get() * params.topk;
            // Shared among all warps.
            let groups = entries.div_ceil(block_dim_x());
            let first = warp * groups * 32;
            count_entries(&params, entries, groups, first, warp, lane);
            sync_threads();
            scan_experts(
                &params,
                |expert| counted(expert, params.experts),
                |expert, first_slot| counters_to_slots(expert, params.experts, first_slot),
            );
            sync_threads();
            place_entries(&params, entries, groups, first, warp, lane);
        }
    }
}
