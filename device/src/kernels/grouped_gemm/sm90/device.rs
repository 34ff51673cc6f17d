//! The kernel: the warp that copies and the warpgroups that multiply.

#![allow(unreachable_pub, reason = "kernels are exported by name")]

use super::epilogue::{Place, write_sums};
use super::job::Job;
use super::*;
use crate::format::tile_mma::FRAGMENT_K;
use crate::kernels::grouped_gemm::ring;
use crate::kernels::grouped_gemm::sm80::dequantize::Weights;
use crate::kernels::grouped_gemm::tile::{Run, Tile};
use crate::params::{ExpertScales, GroupedGemmParams};
use crate::ptx::thread::{anew, block_idx_x, grid_dim_x, leave_registers, sync_threads, take_registers, thread_idx_x};
use crate::ptx::warp::uniform;
use crate::ptx::wgmma::{self, Descriptor, Fragments, Multiply};
use crate::ptx::{grid, mbarrier, shared};

/// Steps of the instruction in a stage.
const STEPS: usize = MmaTile::K / FRAGMENT_K;

/// Fragments of 8 slots that are multiplied for a tile of so many slots.
#[inline(always)]
fn slot_fragments(slots: u32) -> u32 {
    slots.div_ceil(GROUP_SLOTS as u32)
}

/// Matrix descriptor of a stage's activations (PTX ISA, "Matrix Descriptor Format"): the address, the distance from one
/// group to the next, and the 128-byte swizzle, all in units of 16 bytes. The address has 18 bits, as all of shared memory.
#[inline(always)]
fn descriptor(address: u32) -> Descriptor {
    const SWIZZLE_128: u32 = 1 << 30;
    Descriptor { low: uniform((address >> 4) + (1 << 16)), high: TILE_BYTES as u32 >> 4 | SWIZZLE_128 }
}

/// What a warp multiplies: `M` row tiles and `N` fragments of 8 slots at most.
struct Product<const M: usize, const N: usize> {
    sums: [Fragments<N>; M],
    /// A operands of this step and the next one.
    a: [[[u32; 4]; M]; 2],
    weights: [Weights; M],
    /// Where the weights are in a stage.
    places: [u32; M],
    lane: u32,
}

impl<const M: usize, const N: usize> Product<M, N> {
    /// Reads the weights of a stage.
    #[inline(always)]
    unsafe fn load(&self, stage: u32) -> [Weights; M] {
        // SAFETY: the caller's contract: the stage is full.
        self.places.map(|place| unsafe { Weights::load(stage + place, self.lane) })
    }
}

/// One variant: [`TileShape`] `SHAPE` of [`TILES`], whose numbers the types need again.
struct Kernel<const SHAPE: usize, const M: usize, const N: usize, const STAGES: usize, const STAGE_BYTES: usize>;

impl<const SHAPE: usize, const M: usize, const N: usize, const STAGES: usize, const STAGE_BYTES: usize>
    Kernel<SHAPE, M, N, STAGES, STAGE_BYTES>
{
    const TILE: TileShape = TILES[SHAPE];

    /// Where a stage's weights are, behind its activations.
    #[inline(always)]
    fn weights_of(cursor: &ring::Cursor<STAGES, STAGE_BYTES>) -> u32 {
        cursor.data() + Self::TILE.activation_bytes() as u32
    }

    /// Row tiles that exist of a tile from this row on.
    #[inline(always)]
    fn row_tiles(params: &GroupedGemmParams, row: u32) -> u32 {
        let left = params.row_tiles - row / FRAGMENT_ROWS as u32;
        let most = Self::TILE.row_tiles() as u32;
        if left < most { left } else { most }
    }

    /// Where the job of a tile is, and its number's successor: one place after the other.
    #[inline(always)]
    fn job_place(number: u32) -> u32 {
        shared::dynamic() + Self::TILE.jobs_at() as u32 + number * JOB_BYTES as u32
    }

    #[inline(always)]
    fn next_job(number: u32) -> u32 {
        if number == STAGES as u32 { 0 } else { number + 1 }
    }

    /// Copies the weights of one tile, stage after stage, and says what the tile is.
    #[inline(always)]
    unsafe fn copy_weights(
        params: &GroupedGemmParams,
        tile: Tile,
        number: u32,
        mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) -> ring::Cursor<STAGES, STAGE_BYTES> {
        // SAFETY: there are scales of each expert.
        let scales = unsafe { *(params.expert_scales as *const ExpertScales).add(tile.expert as usize) };
        let Run { first: mut weights, step } = tile.weight_run(params, 0);
        let bytes = Self::row_tiles(params, tile.row) * MmaTile::BYTES as u32;
        let job = Job { tile, scales };
        let mut k_tile = 0;
        while k_tile < params.k_tiles {
            // SAFETY: the tiles exist, and the stage is written after its readers gave it back.
            unsafe {
                mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                if k_tile == 0 {
                    job.put(Self::job_place(number));
                }
                mbarrier::arrive_expect(cursor.full(), bytes);
                mbarrier::copy_bulk(Self::weights_of(&cursor), weights, bytes, cursor.full());
            }
            weights = weights.wrapping_add(step as usize);
            cursor = cursor.next();
            k_tile += 1;
        }
        cursor
    }

    /// Copies the activations of one tile, stage after stage.
    #[inline(always)]
    unsafe fn copy_activations(
        params: &GroupedGemmParams,
        tile: &Tile,
        mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) -> ring::Cursor<STAGES, STAGE_BYTES> {
        // Groups behind the expert's last one are read and multiplied too: they exist, and nobody writes their results.
        let Run { first: mut activations, step } = tile.activation_run(params);
        let bytes = slot_fragments(tile.slots) * TILE_BYTES as u32;
        let mut k_tile = 0;
        while k_tile < params.k_tiles {
            // SAFETY: as above.
            unsafe {
                mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
                mbarrier::arrive_expect(cursor.full(), bytes);
                mbarrier::copy_bulk(cursor.data(), activations, bytes, cursor.full());
            }
            activations = activations.wrapping_add(step as usize);
            cursor = cursor.next();
            k_tile += 1;
        }
        cursor
    }

    /// Copies weights or activations of all tiles of a block; one lane each.
    #[inline(always)]
    unsafe fn produce<const OF_WEIGHTS: bool>(
        params: &GroupedGemmParams,
        mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) {
        let mut job = 0;
        // SAFETY: see the functions called; only tiles that exist are copied.
        unsafe {
            let block_rows = params.row_tiles.div_ceil(Self::TILE.row_tiles() as u32);
            let tiles = *(params.tile_offset as *const u32).add(params.experts as usize) * block_rows;
            let mut index = block_idx_x();
            while index < tiles {
                let shape = [Self::TILE.rows() as u32, Self::TILE.slots() as u32];
                let tile = Tile::find::<true>(params, index, block_rows, shape);
                cursor = if OF_WEIGHTS {
                    Self::copy_weights(params, tile, job, cursor)
                } else {
                    // Behind the first tile, it is done.
                    grid::wait();
                    Self::copy_activations(params, &tile, cursor)
                };
                job = Self::next_job(job);
                index += grid_dim_x();
            }
            mbarrier::wait(cursor.empty(), cursor.parity ^ 1);
            if OF_WEIGHTS {
                shared::store_v4(Self::job_place(job), [0; 4]);
            }
            mbarrier::arrive(cursor.full());
        }
    }

    /// Multiplies one tile, of `SLOT_FRAGMENTS` fragments of 8 slots. While a step is multiplied, the operands of the next one
    /// are dequantized.
    #[inline(always)]
    unsafe fn multiply<const SLOT_FRAGMENTS: usize>(
        k_tiles: u32,
        product: &mut Product<M, N>,
        mut cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) -> ring::Cursor<STAGES, STAGE_BYTES>
    where
        Fragments<N>: Multiply<SLOT_FRAGMENTS>,
    {
        // SAFETY: see the functions called.
        unsafe {
            let mut k_tile = 0;
            loop {
                let b = descriptor(cursor.data());
                let next = cursor.next();
                // Behind the last stage, the last again.
                let ahead = if k_tile + 1 < k_tiles { next } else { cursor };
                let mut following = product.weights;
                let mut step = 0;
                while step < STEPS {
                    let b = b.further((step * FRAGMENT_K * 2 / 16) as u32);
                    wgmma::fence();
                    let mut m = 0;
                    while m < M {
                        product.sums[m].multiply(product.a[step % 2][m], b);
                        m += 1;
                    }
                    wgmma::commit_group();
                    if step == STEPS / 2 {
                        mbarrier::wait(ahead.full(), ahead.parity);
                        following = product.load(Self::weights_of(&ahead));
                    }
                    // All but this step: so the operands of the last one may be overwritten.
                    wgmma::wait_group::<1>();
                    step += 1;
                    let (weights, of) = if step < STEPS { (&product.weights, step) } else { (&following, 0) };
                    product.a[step % 2] = weights.map(|weights| weights.operand(of));
                }
                wgmma::wait_group::<0>();
                // Each lane for what it has read itself: one for all would do, but then no tool that does not follow the
                // order among the lanes of a warp could check it.
                mbarrier::arrive(cursor.empty());
                product.weights = following;
                cursor = next;
                k_tile += 1;
                // There is one at least.
                if k_tile >= k_tiles {
                    break;
                }
            }
            // The other sums' registers are free for operands meanwhile.
            for sums in &mut product.sums {
                wgmma::clear(sums.split_at_mut(SLOT_FRAGMENTS).1);
            }
            cursor
        }
    }

    /// Multiplies one tile of so many slots, from this row on, whose first stage is full, and writes its results.
    #[inline(always)]
    unsafe fn consume(
        params: &GroupedGemmParams,
        job: u32,
        [row, slots]: [u32; 2],
        cursor: ring::Cursor<STAGES, STAGE_BYTES>,
        warp: u32,
        lane: u32,
    ) -> ring::Cursor<STAGES, STAGE_BYTES>
    where
        Self: MultiplyFragments<M, N, STAGES, STAGE_BYTES>,
    {
        let none = Weights { codes: [0; 4], scales: [0; 2] };
        let mut product =
            Product { sums: [[[0.0; 4]; N]; M], a: [[[0; 4]; M]; 2], weights: [none; M], places: [0; M], lane };
        // A row tile that does not exist is replaced by one that does: nobody writes its results.
        let (count, first) = (Self::row_tiles(params, row), warp * M as u32);
        let mut m = 0;
        while m < M {
            let row_tile = first + m as u32;
            product.places[m] = if row_tile < count { row_tile } else { count - 1 } * MmaTile::BYTES as u32;
            m += 1;
        }
        // SAFETY: see the functions called.
        unsafe {
            product.weights = product.load(Self::weights_of(&cursor));
            product.a[0] = product.weights.map(|weights| weights.operand(0));
            let fragments = uniform(slot_fragments(slots));
            let cursor = Self::multiply_fragments(fragments, params.k_tiles, &mut product, cursor);
            let mut m = 0;
            while m < M {
                let mut operands = product.a.map(|a| a[m]);
                wgmma::settle(&mut product.sums[m], &mut operands);
                m += 1;
            }
            if first < count {
                // Read again, rather than kept.
                let Job { tile, scales } = Job::get(Self::job_place(job));
                let staged = shared::dynamic() + Self::TILE.staged_at() as u32;
                let row = tile.row + first * FRAGMENT_ROWS as u32;
                let place = Place { scales, lane: anew(lane), warp: anew(warp), row, staged };
                write_sums(params, &tile, &product.sums, &place);
            }
            cursor
        }
    }

    /// The kernel.
    #[inline(always)]
    unsafe fn run(params: &GroupedGemmParams)
    where
        Self: MultiplyFragments<M, N, STAGES, STAGE_BYTES>,
    {
        let (thread, shared) = (thread_idx_x(), shared::dynamic());
        let (warp, lane) = (uniform(thread / 32), thread % 32);
        let (mut cursor, mut job) = (ring::Cursor::<STAGES, STAGE_BYTES>::new(shared), 0);
        // SAFETY: see the functions called; the barriers are inside the planned shared memory.
        unsafe {
            if thread == 0 {
                ring::Cursor::<STAGES, STAGE_BYTES>::init(shared, 2, CONSUMER_WARPS * 32);
            }
            sync_threads();
            if warp >= CONSUMER_WARPS {
                leave_registers::<PRODUCER_REGISTERS>();
                if warp == CONSUMER_WARPS {
                    if lane == 0 {
                        // Before what it does not need is there: the routing is (`grid::follow_closely`).
                        Self::produce::<true>(params, cursor);
                    }
                } else if warp == CONSUMER_WARPS + 1 && lane == 0 {
                    Self::produce::<false>(params, cursor);
                }
            } else {
                take_registers::<CONSUMER_REGISTERS>();
                grid::follow_closely();
                loop {
                    mbarrier::wait(cursor.full(), cursor.parity);
                    let [_, row, _, slots] = shared::load_v4(Self::job_place(job));
                    if slots == 0 {
                        return;
                    }
                    cursor = Self::consume(params, job, [row, slots], cursor, warp, lane);
                    job = Self::next_job(job);
                }
            }
        }
    }
}

/// [`Kernel::multiply`] of a number of fragments that is known at run time only.
trait MultiplyFragments<const M: usize, const N: usize, const STAGES: usize, const STAGE_BYTES: usize> {
    /// # Safety
    /// All warps of the warpgroup take part, with the same number.
    unsafe fn multiply_fragments(
        fragments: u32,
        k_tiles: u32,
        product: &mut Product<M, N>,
        cursor: ring::Cursor<STAGES, STAGE_BYTES>,
    ) -> ring::Cursor<STAGES, STAGE_BYTES>;
}

/// One kernel, and the numbers of fragments for which it has instructions.
macro_rules! kernel {
    ($name:ident, $shape:literal, $tile:ident: $($fragments:literal)*, $most:literal) => {
        const $tile: TileShape = TILES[$shape];

        impl MultiplyFragments<
            { $tile.row_fragments }, { $tile.slot_fragments }, { $tile.stages }, { $tile.stage_bytes() },
        > for Kernel<
            $shape, { $tile.row_fragments }, { $tile.slot_fragments }, { $tile.stages }, { $tile.stage_bytes() },
        > {
            #[inline(always)]
            unsafe fn multiply_fragments(
                fragments: u32,
                k_tiles: u32,
                product: &mut Product<{ $tile.row_fragments }, { $tile.slot_fragments }>,
                cursor: ring::Cursor<{ $tile.stages }, { $tile.stage_bytes() }>,
            ) -> ring::Cursor<{ $tile.stages }, { $tile.stage_bytes() }> {
                // SAFETY: the caller's contract.
                unsafe {
                    match fragments {
                        $($fragments => Self::multiply::<$fragments>(k_tiles, product, cursor),)*
                        _ => Self::multiply::<$most>(k_tiles, product, cursor),
                    }
                }
            }
        }

        /// The grouped GEMM for many slots.
        ///
        /// # Safety
        /// The params' pointers are as documented there; any number of blocks, threads and shared memory as [`VARIANTS`] says.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(params: GroupedGemmParams) {
            // SAFETY: the caller's contract.
            unsafe {
                Kernel::<
                    $shape, { $tile.row_fragments }, { $tile.slot_fragments }, { $tile.stages }, { $tile.stage_bytes() },
                >::run(&params);
            }
        }
    };
}
kernel!(grouped_gemm_wgmma_n96, 0, TALL: 1 2 3 4 5 6 7 8 9 10 11, 12);
kernel!(grouped_gemm_wgmma_n192, 1, WIDE: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23, 24);
