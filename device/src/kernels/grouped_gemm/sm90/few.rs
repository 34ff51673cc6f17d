//! The kernels for few slots: two warps copy for many, each of which multiplies 32 or 16 rows on its own with `mma.sync`.
//!
//! A unit is two row tiles (those that have the halves of the same blocks of h) of one token tile: of one warp, or of two. A block
//! has an equal share of all units and takes as many at a time as it has warps for, or as share it most evenly; they may be of
//! two token tiles. Where that are several turns, the last one is claimed by whoever comes first ([`LastShares`]): memory does
//! not serve all multiprocessors alike.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::epilogue::{Place, write_sums};
use super::job::Job;
use super::offsets::Offsets;
use super::turns::{PARTS, Part, SLOTS, Turns};
use super::*;
use crate::format::tile_mma::FRAGMENT_K;
use crate::kernels::grouped_gemm::sm80::dequantize::Weights;
use crate::kernels::grouped_gemm::tile::Run;
use crate::kernels::grouped_gemm::{ROW_FRAGMENTS, ring};
use crate::params::{ExpertScales, GroupedGemmParams};
use crate::ptx::matrix::{load_x4, mma_m16n8k16_f16};
use crate::ptx::thread::{anew, sync_threads, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::Fragments;
use crate::ptx::{atomic, grid, mbarrier, shared};

/// Bytes of a part's activations in a stage.
const PART_BYTES: u32 = (FEW_SLOT_FRAGMENTS * TILE_BYTES) as u32;

/// What a warp multiplies.
type Sums<const M: usize> = [Fragments<FEW_SLOT_FRAGMENTS>; M];

/// Lanes that copy a part's weights: of one group of row tiles each.
const WEIGHT_COPIES: u32 = 2;

/// One variant: [`FewShape`] `NUMBER` of [`FEW_SHAPES`], whose numbers the types need again.
struct Kernel<const NUMBER: usize, const M: usize, const STAGES: usize, const STAGE_BYTES: usize>;

impl<const NUMBER: usize, const M: usize, const STAGES: usize, const STAGE_BYTES: usize>
    Kernel<NUMBER, M, STAGES, STAGE_BYTES>
{
    const SHAPE: FewShape = FEW_SHAPES[NUMBER];
    const WARPS: u32 = Self::SHAPE.warps;
    /// Warps of a unit.
    const UNIT_WARPS: u32 = (ROW_FRAGMENTS / M) as u32;

    /// Where what is said of the units of one turn is: how many row tiles each part has, then a job for each part.
    #[inline(always)]
    fn turn_place(number: u32) -> u32 {
        shared::dynamic() + Self::SHAPE.turns_at() as u32 + number * FEW_TURN_BYTES as u32
    }

    #[inline(always)]
    fn job_place(turn: u32, part: u32) -> u32 {
        Self::turn_place(turn) + 16 + part * JOB_BYTES as u32
    }

    #[inline(always)]
    fn next_turn(number: u32) -> u32 {
        if number == STAGES as u32 { 0 } else { number + 1 }
    }

    /// Where a row tile's weights are in a stage.
    #[inline(always)]
    fn weights_place(row_tile: u32) -> u32 {
        FEW_ACTIVATION_BYTES as u32 + row_tile * MmaTile::BYTES as u32
    }

    /// The barrier behind which the routing can be read.
    #[inline(always)]
    fn offsets_barrier() -> u32 {
        shared::dynamic() + Self::SHAPE.offsets_at() as u32
    }

    /// The barrier behind which the number of the block's claim can be read, and the number.
    #[inline(always)]
    fn claim_barrier() -> u32 {
        Self::offsets_barrier() + 8
    }

    /// See [`claim_barrier`](Self::claim_barrier).
    #[inline(always)]
    fn claim_place() -> u32 {
        Self::claim_barrier() + 8
    }

    /// The routing, for the warps that copy.
    #[inline(always)]
    fn offsets() -> Offsets {
        Offsets(Self::offsets_barrier() + OFFSETS_BARRIER_BYTES as u32)
    }

    /// Copies the weights of a block's share, stage after stage, and says what is multiplied. Nothing that the kernel before
    /// this one makes is read.
    #[inline(always)]
    unsafe fn copy_weights<const CLAIMS: bool>(params: &GroupedGemmParams, lane: u32) {
        let (part, second) = (lane / WEIGHT_COPIES, lane % WEIGHT_COPIES != 0);
        let copies = part < PARTS;
        // Lanes that copy nothing ask for nothing of their own.
        let part = if copies { part } else { 0 };
        let mut cursor = ring::Cursor::<STAGES, STAGE_BYTES>::new(shared::dynamic());
        let mut turn = 0;
        // SAFETY: the tiles exist, and a stage is written after its readers gave it back.
        unsafe {
            Self::offsets().fill(params, lane, SLOTS);
            mbarrier::arrive(Self::offsets_barrier());
            let mut turns = Turns::<CLAIMS>::new(params, Self::offsets(), &Self::SHAPE);
            let claim = || {
                // The routing made it 0.
                grid::wait();
                let mut number = 0;
                if lane == 0 {
                    number = atomic::add_u32(params.claims as *mut u32, 1);
                    shared::store_u32(Self::claim_place(), number);
                    mbarrier::arrive(Self::claim_barrier());
                }
                uniform(number)
            };
            while turns.more(claim) {
                let (Part { tile, count, units_before }, counts) = turns.next(params, lane, part);
                let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
                let job = Job { tile, scales };
                let in_group = job.tile.row / FRAGMENT_ROWS as u32 % MmaTile::GROUP as u32;
                let here = count.min(MmaTile::GROUP as u32 - in_group);
                let (before, copied) = if second { (here, count - here) } else { (0, here) };
                let Run { first: mut from, step } = job.tile.weight_run(params, before);
                let to = Self::weights_place(units_before * ROW_FRAGMENTS as u32 + before);
                let bytes = copied * MmaTile::BYTES as u32;
                let mut k_tile = 0;
                while copies && k_tile < params.k_tiles {
                    mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                    if !second && k_tile == 0 {
                        // Whoever read what was said here has written its results: there is a place more than stages.
                        job.put(Self::job_place(turn, part));
                        if part == 0 {
                            shared::store_v4(Self::turn_place(turn), [counts[0], counts[1], 0, 0]);
                        }
                    }
                    mbarrier::arrive_expect(cursor.full(), bytes);
                    if bytes > 0 {
                        mbarrier::copy_bulk(cursor.data() + to, from, bytes, cursor.full());
                    }
                    from = from.wrapping_add(step as usize);
                    cursor = cursor.next();
                    k_tile += 1;
                }
                turn = Self::next_turn(turn);
            }
            if !copies {
                return;
            }
            mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
            if lane == 0 {
                shared::store_v4(Self::turn_place(turn), [0; 4]);
            }
            mbarrier::arrive(cursor.full());
        }
    }

    /// Copies the activations of a block's share, stage after stage; a lane those of a part.
    #[inline(always)]
    unsafe fn copy_activations<const CLAIMS: bool>(params: &GroupedGemmParams, lane: u32) {
        let copies = lane < PARTS;
        let part = if copies { lane } else { 0 };
        let mut cursor = ring::Cursor::<STAGES, STAGE_BYTES>::new(shared::dynamic());
        // SAFETY: as above.
        unsafe {
            mbarrier::wait(Self::offsets_barrier(), 0);
            let mut turns = Turns::<CLAIMS>::new(params, Self::offsets(), &Self::SHAPE);
            let claim = || {
                mbarrier::wait(Self::claim_barrier(), 0);
                shared::load_u32(Self::claim_place())
            };
            while turns.more(claim) {
                let (Part { tile, count, .. }, _) = turns.next(params, lane, part);
                // Only the groups that the fragments need.
                let needed = tile.slots.div_ceil(GROUP_SLOTS as u32) * TILE_BYTES as u32;
                let bytes = if count > 0 { needed } else { 0 };
                let Run { first: mut from, step } = tile.activation_run(params);
                // Behind the first turn, it is done.
                grid::wait();
                let mut k_tile = 0;
                while copies && k_tile < params.k_tiles {
                    mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                    mbarrier::arrive_expect(cursor.full(), bytes);
                    if bytes > 0 {
                        mbarrier::copy_bulk(cursor.data() + part * PART_BYTES, from, bytes, cursor.full());
                    }
                    from = from.wrapping_add(step as usize);
                    cursor = cursor.next();
                    k_tile += 1;
                }
            }
            if copies {
                mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                mbarrier::arrive(cursor.full());
            }
        }
    }

    /// What the warps behind those that multiply do.
    #[inline(always)]
    unsafe fn copy<const CLAIMS: bool>(params: &GroupedGemmParams, warp: u32, lane: u32) {
        // SAFETY: see the functions called.
        unsafe {
            if warp == Self::WARPS {
                Self::copy_weights::<CLAIMS>(params, lane);
            } else {
                Self::copy_activations::<CLAIMS>(params, lane);
            }
        }
    }

    /// Multiplies this warp's row tiles of every turn, and writes their results.
    #[inline(always)]
    unsafe fn consume(params: &GroupedGemmParams, warp: u32, lane: u32) {
        let mut cursor = ring::Cursor::<STAGES, STAGE_BYTES>::new(shared::dynamic());
        let mut turn = 0;
        // SAFETY: see the functions called.
        unsafe {
            loop {
                mbarrier::wait(cursor.full(), cursor.parity);
                let [tiles, more, _, _] = shared::load_v4(Self::turn_place(turn));
                if tiles == 0 {
                    return;
                }
                let second = tiles.div_ceil(ROW_FRAGMENTS as u32) * Self::UNIT_WARPS;
                let (part, first, tiles) = if warp < second { (0, 0, tiles) } else { (1, second, more) };
                let row_tile = (warp - first) * M as u32;
                if row_tile >= tiles {
                    cursor = skip(params.k_tiles, cursor);
                } else {
                    let mut sums: Sums<M> = [[[0.0; 4]; FEW_SLOT_FRAGMENTS]; M];
                    // A row tile that does not exist is replaced by the one before it: nobody writes its results.
                    let mut weights = [Self::weights_place(warp * M as u32); M];
                    let mut m = 1;
                    while m < M {
                        let exists = row_tile + (m as u32) < tiles;
                        weights[m] = weights[m - 1] + if exists { MmaTile::BYTES as u32 } else { 0 };
                        m += 1;
                    }
                    let (matrix, row) = (lane / 8, lane % 8);
                    let operands =
                        Operands { weights, activations: part * PART_BYTES + row * 128 + ((matrix ^ row) * 16), lane };
                    let [_, _, _, slots] = shared::load_v4(Self::job_place(turn, part));
                    cursor = match uniform(slots.div_ceil(GROUP_SLOTS as u32)) {
                        1 => operands.multiply::<1, _, _>(params.k_tiles, &mut sums, cursor),
                        2 => operands.multiply::<2, _, _>(params.k_tiles, &mut sums, cursor),
                        _ => operands.multiply::<FEW_SLOT_FRAGMENTS, _, _>(params.k_tiles, &mut sums, cursor),
                    };
                    let Job { tile, scales } = Job::get(Self::job_place(turn, part));
                    let staged = shared::dynamic() + Self::SHAPE.staged_at() as u32;
                    let row = tile.row + row_tile * FRAGMENT_ROWS as u32;
                    let place = Place { scales, lane: anew(lane), warp: anew(warp), row, staged };
                    write_sums(params, &tile, &sums, &place);
                }
                turn = Self::next_turn(turn);
            }
        }
    }

    /// The kernel.
    #[inline(always)]
    unsafe fn run(params: &GroupedGemmParams) {
        let (thread, shared) = (thread_idx_x(), shared::dynamic());
        let (warp, lane) = (uniform(thread / 32), thread % 32);
        // SAFETY: the barriers are inside the planned shared memory; see the functions called.
        unsafe {
            if thread == 0 {
                mbarrier::init(Self::offsets_barrier(), 32);
                mbarrier::init(Self::claim_barrier(), 1);
                let filled = PARTS * (WEIGHT_COPIES + 1);
                ring::Cursor::<STAGES, STAGE_BYTES>::init(shared, filled, Self::WARPS * 32);
            }
            sync_threads();
            // The copying warps begin before what the last kernel makes is there: the routing is (`grid::follow_closely`).
            if warp < Self::WARPS {
                grid::follow_closely();
                Self::consume(params, warp, lane);
            } else if LastShares::pay(params.k_tiles) {
                Self::copy::<true>(params, warp, lane);
            } else {
                // Claims make the loops longer, which shorter turns feel.
                Self::copy::<false>(params, warp, lane);
            }
        }
    }
}

/// Where a warp finds its operands in a stage.
struct Operands<const M: usize> {
    weights: [u32; M],
    /// This lane's row of the first half of the activations' tile.
    activations: u32,
    lane: u32,
}

impl<const M: usize> Operands<M> {
    /// Reads the weights of the stage with these bytes.
    #[inline(always)]
    unsafe fn weights(&self, stage: u32) -> [Weights; M] {
        // SAFETY: the caller's contract: the stage is full.
        self.weights.map(|place| unsafe { Weights::load(stage + place, self.lane) })
    }

    /// Reads the activations of two steps of a stage.
    #[inline(always)]
    unsafe fn activations<const SLOT_FRAGMENTS: usize>(&self, stage: u32, half: u32) -> [[u32; 4]; SLOT_FRAGMENTS] {
        // The second half of the chunks: their numbers, exchanged by the row's, differ in one bit.
        let rows = stage + (self.activations ^ (64 * half));
        let mut b = [[0; 4]; SLOT_FRAGMENTS];
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            // SAFETY: the caller's contract: the stage is full.
            b[n] = unsafe { load_x4(rows + (n * TILE_BYTES) as u32) };
            n += 1;
        }
        b
    }

    /// Multiplies a warp's row tiles with `SLOT_FRAGMENTS` fragments of 8 slots.
    #[inline(always)]
    unsafe fn multiply<const SLOT_FRAGMENTS: usize, const STAGES: usize, const STAGE_BYTES: usize>(
        &self,
        k_tiles: u32,
        sums: &mut Sums<M>,
        mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) -> ring::Cursor<STAGES, STAGE_BYTES> {
        const STEPS: usize = MmaTile::K / FRAGMENT_K;
        // SAFETY: see the functions called; a stage is read when it is full, and given back behind that.
        unsafe {
            mbarrier::wait(cursor.full(), cursor.parity);
            let mut weights = self.weights(cursor.data());
            let mut k_tile = 0;
            loop {
                k_tile += 1;
                let next = cursor.next();
                let mut b = self.activations::<SLOT_FRAGMENTS>(cursor.data(), 0);
                let mut following = weights;
                let mut step = 0;
                while step < STEPS {
                    if step == STEPS / 2 {
                        b = self.activations::<SLOT_FRAGMENTS>(cursor.data(), 1);
                        // Each lane for what it has read itself.
                        mbarrier::arrive(cursor.empty());
                    }
                    if step == STEPS - 1 && k_tile < k_tiles {
                        mbarrier::wait(next.full(), next.parity);
                        following = self.weights(next.data());
                    }
                    let a = weights.map(|weights| weights.operand(step));
                    let mut n = 0;
                    while n < SLOT_FRAGMENTS {
                        let first = step % 2 * 2;
                        let b = [b[n][first], b[n][first + 1]];
                        let mut m = 0;
                        while m < M {
                            mma_m16n8k16_f16(&mut sums[m][n], a[m], b);
                            m += 1;
                        }
                        n += 1;
                    }
                    step += 1;
                }
                weights = following;
                cursor = next;
                if k_tile >= k_tiles {
                    return cursor;
                }
            }
        }
    }
}

/// Gives the stages of a turn back that a warp has no part in.
#[inline(always)]
unsafe fn skip<const STAGES: usize, const STAGE_BYTES: usize>(
    k_tiles: u32,
    mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
) -> ring::Cursor<STAGES, STAGE_BYTES> {
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

/// One kernel.
macro_rules! kernel {
    ($name:ident, $number:literal, $shape:ident) => {
        const $shape: FewShape = FEW_SHAPES[$number];

        /// The grouped GEMM for few slots.
        ///
        /// # Safety
        /// The params' pointers are as documented there; any number of blocks, threads and shared memory as [`VARIANTS`] says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(params: GroupedGemmParams) {
            // SAFETY: the caller's contract.
            unsafe {
                Kernel::<$number, { $shape.row_fragments }, { $shape.stages }, { $shape.stage_bytes() }>::run(&params);
            }
        }
    };
}
kernel!(grouped_gemm_few_m16, 0, M16);
kernel!(grouped_gemm_few_m32, 1, M32);
