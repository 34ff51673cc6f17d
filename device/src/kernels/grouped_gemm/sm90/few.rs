//! The kernel for few slots: a few lanes copy for many warps, each of which multiplies 16 rows on its own with `mma.sync`.
//!
//! A unit is two row tiles (those that have the halves of the same blocks of h) of one token tile. A block has an equal share of
//! all units and takes as many at a time as it has pairs of warps, or as share it most evenly; they may be of two token tiles.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::epilogue::{Place, write_sums};
use super::stage::{Job, Weights};
use super::*;
use crate::format::packed::TileGrid;
use crate::format::slot_groups::SlotGroups;
use crate::format::tile_mma::FRAGMENT_K;
use crate::kernels::device_rows::div_rem;
use crate::kernels::grouped_gemm::ring;
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::{ExpertScales, GroupedGemmParams};
use crate::ptx::matrix::{load_x4, mma_m16n8k16_f16};
use crate::ptx::thread::{anew, block_idx_x, grid_dim_x, sync_threads, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::Fragments;
use crate::ptx::{grid, mbarrier, shared};

const SLOTS: u32 = (FEW_SLOT_FRAGMENTS * GROUP_SLOTS) as u32;
/// Pairs of row tiles that are multiplied at once, at most.
const PAIRS: u32 = FEW_WARPS / 2;
/// Token tiles of which units are multiplied at once, at most.
const PARTS: u32 = FEW_PARTS as u32;

type Cursor = ring::Cursor<{ FEW_STAGES }, { FEW_STAGE_BYTES }>;
type Sums = Fragments<{ FEW_SLOT_FRAGMENTS }>;

/// Where what is said of the units of one turn is: how many row tiles each part has, then a job for each part.
#[inline(always)]
fn turn_place(number: u32) -> u32 {
    shared::dynamic() + FEW_TURNS_AT as u32 + number * FEW_TURN_BYTES as u32
}

#[inline(always)]
fn job_place(turn: u32, part: u32) -> u32 {
    turn_place(turn) + 16 + part * JOB_BYTES as u32
}

#[inline(always)]
fn next_turn(number: u32) -> u32 {
    if number == FEW_STAGES as u32 { 0 } else { number + 1 }
}

/// Pairs of row tiles of an expert.
#[inline(always)]
fn pairs(params: &GroupedGemmParams) -> u32 {
    params.row_tiles.div_ceil(2)
}

/// Copies of a part: weights in one or two groups of row tiles, and activations.
const COPIES: u32 = 3;

/// Row tiles of one token tile in one turn, as a copying lane needs them.
struct Part {
    job: Job,
    /// Bytes of a stage that the part's lanes copy.
    bytes: u32,
    copy: Copy,
}

/// What a lane copies: a run of bytes for each step along K.
struct Copy {
    from: *const u8,
    step: u32,
    /// Where in a stage.
    to: u32,
    /// 0: nothing.
    bytes: u32,
}

impl Part {
    /// Part `part`: row tiles `first .. first + count` of token tile `token_tile`, which the warps from `warp` on take; copy
    /// `which` of it.
    #[inline(always)]
    unsafe fn new(
        params: &GroupedGemmParams,
        token_tile: u32,
        [first, count]: [u32; 2],
        [part, warp]: [u32; 2],
        which: u32,
    ) -> Self {
        let row = first * FRAGMENT_ROWS as u32;
        // SAFETY: the token tile exists.
        let (tile, scales) = unsafe {
            let tile = Tile::of_slots(params, token_tile, row, SLOTS);
            let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
            (tile, scales)
        };
        // Only the groups that the fragments need.
        let activation_bytes = tile.slots.div_ceil(GROUP_SLOTS as u32) * TILE_BYTES as u32;
        let bytes = count * MmaTile::BYTES as u32 + activation_bytes;
        let copy = if which == 2 {
            let groups = SlotGroups::new(tile.expert as usize, tile.expert_slot as usize, tile.expert_slots as usize);
            let first_group = (tile.slot - tile.expert_slot) as usize / GROUP_SLOTS;
            Copy {
                from: (params.activations as *const u8)
                    .wrapping_add(groups.tile(params.k_tiles as usize, 0, first_group) * 2),
                step: (groups.count * TILE_BYTES) as u32,
                to: part * (FEW_SLOT_FRAGMENTS * TILE_BYTES) as u32,
                bytes: activation_bytes,
            }
        } else {
            let in_group = MmaTile::GROUP as u32 - first % MmaTile::GROUP as u32;
            let here = if count < in_group { count } else { in_group };
            let (before, count) = if which == 0 { (0, here) } else { (here, count - here) };
            let grid = TileGrid::<MmaTile>::new(params.row_tiles as usize, params.k_tiles as usize);
            let row_tile = (first + before) as usize;
            Copy {
                from: tile.weights.wrapping_add(grid.offset(row_tile, 0)),
                step: grid.step(row_tile) as u32,
                to: FEW_ACTIVATION_BYTES as u32 + (warp + before) * MmaTile::BYTES as u32,
                bytes: count * MmaTile::BYTES as u32,
            }
        };
        Self { job: Job { tile, scales }, bytes, copy }
    }
}

/// Copies what the units of a block's share need, stage after stage, and says what they are: each of the first lanes of a warp
/// has one copy, the first of each part says what it is.
#[inline(always)]
unsafe fn produce(params: &GroupedGemmParams, lane: u32) {
    let pairs = pairs(params);
    let (part, which) = (lane / COPIES, lane % COPIES);
    let mut cursor = Cursor::new(shared::dynamic());
    let mut turn = 0;
    // SAFETY: see the functions called; every unit exists.
    unsafe {
        let units = *(params.tile_offset as *const u32).add(params.experts as usize) * pairs;
        let share = |block: u32| (units as u64 * block as u64 / grid_dim_x() as u64) as u32;
        let (mut unit, end) = (share(block_idx_x()), share(block_idx_x() + 1));
        while unit < end {
            // As many turns as full ones would be, of about as many units each.
            let left = end - unit;
            let turns = left.div_ceil(PAIRS);
            let most = div_rem(left + turns - 1, turns).0;
            let (token_tile, pair) = div_rem(unit, pairs);
            let first_part = least(most, pairs - pair);
            let second_part = least(most - first_part, pairs);
            let row_tiles = |pair: u32, count: u32| [2 * pair, least(2 * (pair + count), params.row_tiles) - 2 * pair];
            let parts = [row_tiles(pair, first_part), row_tiles(0, second_part)];
            let of_lane = parts[if part == 0 { 0 } else { 1 }];
            let warp = if part == 0 { 0 } else { 2 * first_part };
            // A part without units is the first one without bytes.
            let exists = of_lane[1] > 0;
            let from_tile = if exists { token_tile + part } else { token_tile };
            let Part { job, bytes, mut copy } = Part::new(params, from_tile, of_lane, [part, warp], which);
            let (bytes, copy_bytes) = if exists { (bytes, copy.bytes) } else { (0, 0) };
            let mut k_tile = 0;
            while k_tile < params.k_tiles {
                mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                if which == 0 {
                    if k_tile == 0 {
                        // Whoever read what was said here has written its results: there is a place more than stages.
                        job.put(job_place(turn, part));
                        if part == 0 {
                            shared::store_v4(turn_place(turn), [parts[0][1], parts[1][1], 0, 0]);
                        }
                    }
                    mbarrier::arrive_expect(cursor.full(), bytes);
                }
                if copy_bytes > 0 {
                    mbarrier::copy_bulk(cursor.data() + copy.to, copy.from, copy_bytes, cursor.full());
                }
                copy.from = copy.from.wrapping_add(copy.step as usize);
                cursor = cursor.next();
                k_tile += 1;
            }
            unit += first_part + second_part;
            turn = next_turn(turn);
        }
        mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
        if which == 0 {
            if part == 0 {
                shared::store_v4(turn_place(turn), [0; 4]);
            }
            mbarrier::arrive(cursor.full());
        }
    }
}

#[inline(always)]
fn least(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

/// Where a warp finds its operands in a stage.
struct Operands {
    weights: u32,
    /// This lane's row of the first half of the activations' tile.
    activations: u32,
    lane: u32,
}

/// Multiplies a warp's row tile with `SLOT_FRAGMENTS` fragments of 8 slots.
#[inline(always)]
unsafe fn multiply<const SLOT_FRAGMENTS: usize>(
    k_tiles: u32,
    operands: &Operands,
    sums: &mut Sums,
    mut cursor: Cursor,
) -> Cursor {
    let mut k_tile = 0;
    // SAFETY: see the functions called; a stage is read when it is full, and given back behind that.
    unsafe {
        while k_tile < k_tiles {
            mbarrier::wait(cursor.full(), cursor.parity);
            let weights = Weights::load(cursor.data() + operands.weights, operands.lane);
            let mut b = [[[0; 4]; SLOT_FRAGMENTS]; 2];
            let mut half = 0;
            while half < 2 {
                // The second half of the chunks: their numbers, exchanged by the row's, differ in one bit.
                let rows = cursor.data() + (operands.activations ^ (64 * half as u32));
                let mut n = 0;
                while n < SLOT_FRAGMENTS {
                    b[half][n] = load_x4(rows + (n * TILE_BYTES) as u32);
                    n += 1;
                }
                half += 1;
            }
            let mut step = 0;
            while step < MmaTile::K / FRAGMENT_K {
                let a = weights.operand(step);
                let mut n = 0;
                while n < SLOT_FRAGMENTS {
                    let words = b[step / 2][n];
                    let first = step % 2 * 2;
                    mma_m16n8k16_f16(&mut sums[n], a, [words[first], words[first + 1]]);
                    n += 1;
                }
                step += 1;
            }
            // Each lane for what it has read itself.
            mbarrier::arrive(cursor.empty());
            cursor = cursor.next();
            k_tile += 1;
        }
    }
    cursor
}

/// Gives the stages of a turn back that a warp has no part in.
#[inline(always)]
unsafe fn skip(k_tiles: u32, mut cursor: Cursor) -> Cursor {
    let mut k_tile = 0;
    while k_tile < k_tiles {
        // SAFETY: nothing of the stage is read.
        unsafe {
            mbarrier::wait(cursor.full(), cursor.parity);
            mbarrier::arrive(cursor.empty());
        }
        cursor = cursor.next();
        k_tile += 1;
    }
    cursor
}

/// Multiplies this warp's units of every turn, and writes their results.
#[inline(always)]
unsafe fn consume(params: &GroupedGemmParams, warp: u32, lane: u32) {
    let mut cursor = Cursor::new(shared::dynamic());
    let mut turn = 0;
    // SAFETY: see the functions called.
    unsafe {
        loop {
            mbarrier::wait(cursor.full(), cursor.parity);
            let [tiles, more, _, _] = shared::load_v4(turn_place(turn));
            if tiles == 0 {
                return;
            }
            // Parts begin with a pair of warps.
            let second = tiles.next_multiple_of(2);
            let (part, first, tiles) = if warp < second { (0, 0, tiles) } else { (1, second, more) };
            if warp - first >= tiles.next_multiple_of(2) {
                cursor = skip(params.k_tiles, cursor);
            } else {
                let mut sums: Sums = [[0.0; 4]; FEW_SLOT_FRAGMENTS];
                let row_tile = warp - first;
                let exists = row_tile < tiles;
                // The second row tile of a pair that has one only is replaced by it: nobody writes its results.
                let tile = if exists { warp } else { warp - 1 };
                let (matrix, row) = (lane / 8, lane % 8);
                let operands = Operands {
                    weights: FEW_ACTIVATION_BYTES as u32 + tile * MmaTile::BYTES as u32,
                    activations: part * (FEW_SLOT_FRAGMENTS * TILE_BYTES) as u32 + row * 128 + ((matrix ^ row) * 16),
                    lane,
                };
                let [_, _, _, slots] = shared::load_v4(job_place(turn, part));
                cursor = match uniform(slots.div_ceil(GROUP_SLOTS as u32)) {
                    1 => multiply::<1>(params.k_tiles, &operands, &mut sums, cursor),
                    2 => multiply::<2>(params.k_tiles, &operands, &mut sums, cursor),
                    3 => multiply::<3>(params.k_tiles, &operands, &mut sums, cursor),
                    _ => multiply::<FEW_SLOT_FRAGMENTS>(params.k_tiles, &operands, &mut sums, cursor),
                };
                if exists {
                    let Job { tile, scales } = Job::get(job_place(turn, part));
                    let staged = shared::dynamic() + FEW_STAGED_AT as u32;
                    let row = tile.row + row_tile * FRAGMENT_ROWS as u32;
                    let place = Place { scales, lane: anew(lane), warp: anew(warp), row, staged };
                    write_sums(params, &tile, &[sums], &place);
                }
            }
            turn = next_turn(turn);
        }
    }
}

/// The grouped GEMM for few slots.
///
/// # Safety
/// The params' pointers are as documented there; any number of blocks, threads and shared memory as [`VARIANTS`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn grouped_gemm_few(params: GroupedGemmParams) {
    let (thread, shared) = (thread_idx_x(), shared::dynamic());
    let (warp, lane) = (uniform(thread / 32), thread % 32);
    // SAFETY: the barriers are inside the planned shared memory; see the functions called.
    unsafe {
        if thread == 0 {
            Cursor::init(shared, PARTS, FEW_WARPS * 32);
        }
        sync_threads();
        grid::follow();
        if warp < FEW_WARPS {
            consume(&params, warp, lane);
        } else if lane < PARTS * COPIES {
            produce(&params, lane);
        }
    }
}
