//! Routing: from `topk_ids` to slots sorted by expert, then by (token, k).
//!
//! A stable counting sort over chunks of entries (an entry is one (token, k)): `route_count` counts each chunk's
//! entries for each expert, `route_scan` turns the counts into first slots, `route_place` gives every entry its slot.
//! Only integer arithmetic, and what is added atomically is only added: so the order is fixed.
//!
//! `route_single` does all three in one launch where there are not so many entries: few tokens wait for launches more than for
//! work. A block places the entries of its own chunk, one a thread, and counts those of all others itself.
//!
//! Inside a chunk a warp owns consecutive entries in groups of 32: [`GROUPS`], or in `route_single` one. Shared memory: one counter for each
//! warp and expert.

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

/// Most warps of a block of `route_single`.
const SINGLE_WARPS: u32 = 32;

/// Threads of a block of `route_single` at most, and their registers: all that a multiprocessor has.
pub const SINGLE_THREADS: u32 = SINGLE_WARPS * 32;
/// See [`SINGLE_THREADS`].
pub const SINGLE_REGISTERS: u32 = 65536 / SINGLE_THREADS;

/// Entries up to which `route_single` routes: each of its blocks reads them all.
const SINGLE_ENTRIES: u32 = 32768;

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

/// A launch of `route_single`.
#[derive(Clone, Copy, Debug)]
pub struct Single {
    /// Blocks: one for each chunk.
    pub blocks: u32,
    /// Threads of a block, and entries of a chunk.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// The launch of `route_single` for so many entries, if it can take them.
pub const fn single(entries: u32, experts: u32) -> Option<Single> {
    // Counters of entries before and behind the chunk.
    const OTHERS: u32 = 2;
    let mut warps = WARPS;
    while warps < SINGLE_WARPS
        && warps * 32 < entries
        && shared_bytes_of(warps + WARPS + OTHERS, experts) <= DEFAULT_SHARED_BYTES
    {
        warps += WARPS;
    }
    let (threads, shared_bytes) = (warps * 32, shared_bytes_of(warps + OTHERS, experts));
    if entries > SINGLE_ENTRIES || shared_bytes > DEFAULT_SHARED_BYTES {
        return None;
    }
    let blocks = entries.div_ceil(threads);
    Some(Single { blocks: if blocks == 0 { 1 } else { blocks }, threads, shared_bytes })
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

    /// A lane's entries: one of each group.
    struct Entries<const GROUPS: usize> {
        /// The first one; the others lie 32 apart.
        first: u32,
        /// Entries of the whole batch.
        all: u32,
        /// Local experts, `NO_SLOT` where an entry is not here or beyond the end.
        experts: [u32; GROUPS],
        /// How many entries of the warp before this one have the same expert.
        earlier: [u32; GROUPS],
    }

    impl<const GROUPS: usize> Entries<GROUPS> {
        /// Those of this lane of a warp whose first entry this is, counted into the warp's counters, which are zeros.
        #[inline(always)]
        unsafe fn count(params: &RouteParams, all: u32, first: u32, warp: u32, lane: u32) -> Self {
            let (mut experts, mut earlier) = ([NO_SLOT; GROUPS], [0; GROUPS]);
            let first = first + lane;
            // SAFETY: counters lie in the planned shared memory; each warp touches only its own.
            unsafe {
                // All are read before the first one is needed.
                let mut group = 0;
                while group < GROUPS {
                    experts[group] = expert_of(params, first + group as u32 * 32, all);
                    group += 1;
                }
                let mut group = 0;
                while group < GROUPS {
                    let expert = experts[group];
                    let peers = match_any(expert);
                    let before = (peers & ((1 << lane) - 1)).count_ones();
                    let address = counter(warp, if expert == NO_SLOT { 0 } else { expert }, params.experts);
                    let mut counted = 0;
                    if expert != NO_SLOT {
                        counted = shared::load_u32(address);
                        earlier[group] = counted + before;
                    }
                    sync_warp();
                    if expert != NO_SLOT && before == 0 {
                        shared::store_u32(address, counted + peers.count_ones());
                    }
                    sync_warp();
                    group += 1;
                }
            }
            Self { first, all, experts, earlier }
        }

        /// Gives them their slots, from those that the warp's counters now say.
        #[inline(always)]
        unsafe fn place(&self, params: &RouteParams, warp: u32) {
            let mut group = 0;
            while group < GROUPS {
                let entry = self.first + group as u32 * 32;
                let expert = self.experts[group];
                // SAFETY: entries and slots are below the sizes documented in RouteParams; counters as in `count`.
                unsafe {
                    let mut slot = NO_SLOT;
                    if expert != NO_SLOT {
                        slot = shared::load_u32(counter(warp, expert, params.experts)) + self.earlier[group];
                        *(params.slot_token as *mut u32).add(slot as usize) = div_rem(entry, params.topk).0;
                    }
                    if entry < self.all {
                        *(params.entry_slot as *mut u32).add(entry as usize) = slot;
                    }
                }
                group += 1;
            }
        }
    }

    /// Counts all entries but those of this block's chunk, before it and behind it.
    #[inline(always)]
    unsafe fn count_others(params: &RouteParams, entries: u32) {
        /// Entries of a thread that are read before the first one is needed.
        const READ: usize = 4;
        let (threads, own) = (block_dim_x(), block_idx_x());
        let warps = threads / 32;
        let mut chunk = 0;
        while chunk * threads < entries {
            // SAFETY: the entries exist; the two rows of counters lie behind those of the warps.
            unsafe {
                let mut experts = [NO_SLOT; READ];
                let mut i = 0;
                while i < READ {
                    let of = chunk + i as u32;
                    if of != own {
                        experts[i] = expert_of(params, of * threads + thread_idx_x(), entries);
                    }
                    i += 1;
                }
                let mut i = 0;
                while i < READ {
                    if experts[i] != NO_SLOT {
                        let row = if chunk + (i as u32) < own { warps } else { warps + 1 };
                        shared::add_u32(counter(row, experts[i], params.experts), 1);
                    }
                    i += 1;
                }
            }
            chunk += READ as u32;
        }
    }

    /// Zeros in so many rows of counters.
    #[inline(always)]
    unsafe fn clear_counters(params: &RouteParams, rows: u32) {
        let mut index = thread_idx_x();
        while index < rows * params.experts {
            // SAFETY: counters lie in the planned shared memory.
            unsafe { shared::store_u32(counter(0, index, params.experts), 0) };
            index += block_dim_x();
        }
        sync_threads();
    }

    /// Counters of an expert that are read before the first one is needed.
    const COUNTERS: u32 = WARPS;

    /// The counters of an expert, each warp's in turn, and what becomes of each.
    #[inline(always)]
    unsafe fn each_counter(expert: u32, experts: u32, mut of: impl FnMut(u32) -> Option<u32>) {
        let mut first = 0;
        // There are as many warps or a multiple.
        while first < block_dim_x() / 32 {
            // SAFETY: counters lie in the planned shared memory and have been written by all warps; one thread an expert.
            unsafe {
                let mut counts = [0; COUNTERS as usize];
                let mut i = 0;
                while i < COUNTERS {
                    counts[i as usize] = shared::load_u32(counter(first + i, expert, experts));
                    i += 1;
                }
                let mut i = 0;
                while i < COUNTERS {
                    if let Some(value) = of(counts[i as usize]) {
                        shared::store_u32(counter(first + i, expert, experts), value);
                    }
                    i += 1;
                }
            }
            first += COUNTERS;
        }
    }

    /// Entries of the block's chunk for an expert.
    #[inline(always)]
    unsafe fn counted(expert: u32, experts: u32) -> u32 {
        let mut sum = 0;
        // SAFETY: as there.
        unsafe {
            each_counter(expert, experts, |count| {
                sum += count;
                None
            })
        };
        sum
    }

    /// Turns an expert's counters into the first slot of each warp, from `next` on.
    #[inline(always)]
    unsafe fn counters_to_slots(expert: u32, experts: u32, mut next: u32) {
        // SAFETY: as there.
        unsafe {
            each_counter(expert, experts, |count| {
                let first = next;
                next += count;
                Some(first)
            })
        };
    }

    /// First slot and token tile of each expert, from the number of its slots, written by the first block; `slots` is asked once
    /// an expert, `first_slot` told.
    #[inline(always)]
    unsafe fn scan_experts(params: &RouteParams, slots: impl Fn(u32) -> u32, first_slot: impl Fn(u32, u32)) {
        let thread = thread_idx_x();
        let expert_offset = params.expert_offset as *mut u32;
        let tile_offset = params.tile_offset as *mut u32;
        // SAFETY: experts + 1 offsets each; two amax cells.
        unsafe {
            let writes = block_idx_x() == 0;
            if writes && thread < 2 {
                *(params.amax_bits as *mut u32).add(thread as usize) = 0;
                *(params.claims as *mut u32).add(thread as usize) = 0;
            }
            let mut carry = [0; 2];
            let mut first = 0;
            while first < params.experts {
                let expert = first + thread;
                let slots = if expert < params.experts { slots(expert) } else { 0 };
                let tiles = div_rem(slots + params.token_tile - 1, params.token_tile).0;
                let (before, total) = block_exclusive_sums([slots, tiles], thread, params.experts - first);
                if expert < params.experts {
                    if writes {
                        *expert_offset.add(expert as usize) = carry[0] + before[0];
                        *tile_offset.add(expert as usize) = carry[1] + before[1];
                    }
                    first_slot(expert, carry[0] + before[0]);
                }
                carry = [carry[0] + total[0], carry[1] + total[1]];
                first += block_dim_x();
            }
            if writes && thread == 0 {
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
            clear_counters(&params, WARPS);
            Entries::<{ GROUPS as usize }>::count(&params, entries, first, thread / 32, thread % 32);
            sync_threads();
            let counts = params.chunk_counts as *mut u32;
            let mut expert = thread;
            while expert < params.experts {
                *counts.add((chunk * params.experts + expert) as usize) = counted(expert, params.experts);
                expert += block_dim_x();
            }
        }
    }

    /// Exclusive sums over the block of two values at once, and their totals; threads from `used` on have zeros.
    #[inline(always)]
    unsafe fn block_exclusive_sums(values: [u32; 2], thread: u32, used: u32) -> ([u32; 2], [u32; 2]) {
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
            let warps = if used < block_dim_x() { used.div_ceil(32) } else { block_dim_x() / 32 };
            while other < warps {
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
                /// Counts that are read before the first one is needed.
                const CHUNKS: usize = 16;
                let (mut slots, mut chunk) = (0, 0);
                while chunk < params.chunks {
                    let count = |i: usize| counts.add(((chunk + i as u32) * params.experts + expert) as usize);
                    let exists = |i: usize| chunk + (i as u32) < params.chunks;
                    let mut of_chunks = [0; CHUNKS];
                    let mut i = 0;
                    while i < CHUNKS {
                        if exists(i) {
                            of_chunks[i] = *count(i);
                        }
                        i += 1;
                    }
                    let mut i = 0;
                    while i < CHUNKS {
                        if exists(i) {
                            *count(i) = slots;
                        }
                        slots += of_chunks[i];
                        i += 1;
                    }
                    chunk += CHUNKS as u32;
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
            clear_counters(&params, WARPS);
            let of_lane = Entries::<{ GROUPS as usize }>::count(&params, entries, first, warp, lane);
            sync_threads();

            let mut expert = thread;
            while expert < params.experts {
                let next = *(params.expert_offset as *const u32).add(expert as usize)
                    + *(params.chunk_counts as *const u32).add((chunk * params.experts + expert) as usize);
                counters_to_slots(expert, params.experts, next);
                expert += block_dim_x();
            }
            sync_threads();
            of_lane.place(&params, warp);
        }
    }

    /// The whole of routing.
    ///
    /// # Safety
    /// The params' pointers are as documented there; blocks, threads and shared memory of [`single`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn route_single(params: RouteParams) {
        if params.unread != 0 {
            grid::launch_dependents();
        }
        grid::follow_closely();
        // SAFETY: every index is below the sizes documented in RouteParams.
        unsafe {
            let (thread, experts) = (thread_idx_x(), params.experts);
            let (warp, warps) = (thread / 32, block_dim_x() / 32);
            let entries = params.tokens.get() * params.topk;
            let own = block_idx_x() * block_dim_x();
            if own >= entries && own != 0 {
                return;
            }
            clear_counters(&params, warps + 2);
            let of_lane = Entries::<1>::count(&params, entries, own + warp * 32, warp, thread % 32);
            count_others(&params, entries);
            sync_threads();
            let of_others = |row: u32, expert: u32| shared::load_u32(counter(warps + row, expert, experts));
            scan_experts(
                &params,
                |expert| of_others(0, expert) + counted(expert, experts) + of_others(1, expert),
                |expert, first_slot| counters_to_slots(expert, experts, first_slot + of_others(0, expert)),
            );
            sync_threads();
            of_lane.place(&params, warp);
        }
    }
}
