//! From sums to memory: alpha, activation, and where the scale is known beforehand the second quantization.

use super::{STAGED_BYTES, STAGED_SLOTS, STAGED_STRIDE};
use crate::format::BLOCK;
use crate::format::block_fma;
use crate::format::packed::{Half, TileOrder, deinterleaved_row};
use crate::format::slot_groups::{GROUP_SLOTS, SlotGroups, TILE_ELEMENTS};
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile};
use crate::kernels::activation::{ActivationParams, KIND_SWIGLU, activate};
use crate::kernels::grouped_gemm::sm80::dequantize::UNSCALE;
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::{Epilogue, ExpertScales, GroupedGemmParams};
use crate::ptx::float::Gpu;
use crate::ptx::thread::{anew, opaque, sync_some};
use crate::ptx::warp::{shuffle_xor, sync_warp};
use crate::ptx::wgmma::Fragments;
use crate::ptx::{global, shared};

/// Where a warp's sums belong.
pub(super) struct Place {
    pub(super) scales: ExpertScales,
    pub(super) lane: u32,
    pub(super) warp: u32,
    /// First packed row.
    pub(super) row: u32,
    /// Where elements of h are staged.
    pub(super) staged: u32,
}

/// Writes a warp's results: of `M` row tiles, in each `[n]` with g = lane / 4 and q = lane % 4 rows g (twice) and g + 8 (twice) of
/// slots 8n + 2q, 8n + 2q + 1.
///
/// # Safety
/// The params' pointers are as documented there; all lanes of the warp take part, and with one row tile those of the warp that
/// has the other half of the same blocks.
#[inline(always)]
pub(super) unsafe fn write_sums<const M: usize, const N: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    sums: &[Fragments<N>; M],
    place: &Place,
) {
    // Nothing that only this needs is kept while tiles are multiplied.
    let params = &GroupedGemmParams {
        columns: anew(params.columns),
        activation: ActivationParams {
            limit: f32::from_bits(anew(params.activation.limit.to_bits())),
            ..params.activation
        },
        ..*params
    };
    // SAFETY: the caller's contract.
    unsafe {
        if params.quantized != 0 {
            write_quantized(params, tile, sums, place);
        } else if params.epilogue == Epilogue::Down as u32 {
            write_down(params, tile, sums, place);
        } else {
            write_h(params, tile, sums, place);
        }
    }
}

/// Decode scales of the activations of a lane's slots in so many fragments from this slot of the tile on; where a slot does not
/// exist, of the tile's last one.
#[inline(always)]
unsafe fn input_scales<const FRAGMENTS: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    first: u32,
    of_expert: f32,
) -> [[f32; 2]; FRAGMENTS] {
    let mut scales = [[of_expert; 2]; FRAGMENTS];
    if params.row_scales != 0 {
        let of_slots = (params.row_scales as *const f32).wrapping_add(tile.slot as usize);
        let mut n = 0;
        while n < FRAGMENTS {
            let mut j = 0;
            while j < 2 {
                let inner = first + (8 * n + j) as u32;
                let inner = if inner < tile.slots { inner } else { tile.slots - 1 };
                // SAFETY: the slot exists.
                scales[n][j] = unsafe { *of_slots.add(inner as usize) };
                j += 1;
            }
            n += 1;
        }
    }
    scales
}

/// y in f32.
#[inline(always)]
unsafe fn write_down<const M: usize, const N: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    sums: &[Fragments<N>; M],
    place: &Place,
) {
    /// Fragments whose scales are read at a time.
    const TURN: usize = 4;
    let (g, q) = (place.lane / 4, place.lane % 4);
    let columns = params.columns as usize;
    let first = (tile.slot + 2 * q) as usize * columns + (place.row + g) as usize;
    // SAFETY: only slots of the tile and columns of the matrix are touched: `columns` is a multiple of 16.
    unsafe {
        let output = (params.output as *mut f32).add(first);
        let mut turn = 0;
        // Nothing of what does not exist is even looked at.
        while turn < N && 8 * (turn as u32) < tile.slots {
            let scales = input_scales::<TURN>(params, tile, (8 * turn) as u32 + 2 * q, place.scales.l2_input);
            let mut n = 0;
            while n < TURN && turn + n < N {
                let mut j = 0;
                while j < 2 {
                    let inner = 8 * (turn + n) + j;
                    let alpha = scales[n][j] * place.scales.down;
                    let output = output.wrapping_add(inner * columns);
                    let exists = inner as u32 + 2 * q < tile.slots;
                    let mut m = 0;
                    while m < M {
                        let row = m * FRAGMENT_ROWS;
                        if exists && place.row as usize + row < columns {
                            let sums = sums[m][turn + n];
                            *output.add(row) = (sums[j] * UNSCALE) * alpha;
                            *output.add(row + 8) = (sums[j + 2] * UNSCALE) * alpha;
                        }
                        m += 1;
                    }
                    j += 1;
                }
                n += 1;
            }
            turn += TURN;
        }
    }
}

/// h in f32, of any activation; one fragment of 8 slots at a time.
#[inline(always)]
unsafe fn write_h<const M: usize, const N: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    sums: &[Fragments<N>; M],
    place: &Place,
) {
    let (g, q) = (place.lane / 4, place.lane % 4);
    let mut sums = *sums;
    // SAFETY: only slots of the tile and columns of the matrix are touched: `columns` is a multiple of 16.
    unsafe {
        let scales = &place.scales;
        let columns = params.columns as usize;
        let gated = params.epilogue == Epilogue::Gated as u32;
        let mut fragment_slot = 0;
        while fragment_slot < tile.slots {
            let [of_slots] = input_scales::<1>(params, tile, fragment_slot + 2 * q, scales.l1_input);
            let mut j = 0;
            while j < 2 {
                let inner = fragment_slot + 2 * q + j as u32;
                let exists = inner < tile.slots;
                let slot = (tile.slot + inner) as usize;
                let scale = of_slots[j];
                let (gate, up) = (scale * scales.gate, scale * scales.up);
                let output = (params.output as *mut f32).wrapping_add(slot * columns + g as usize);
                let mut m = 0;
                while m < M {
                    let row = place.row as usize + m * FRAGMENT_ROWS;
                    let (low, high) = (sums[m][0][j] * UNSCALE, sums[m][0][j + 2] * UNSCALE);
                    if gated {
                        let h = activate(&params.activation, low * gate, high * up, Gpu);
                        let (Half::Gate | Half::Up, column) = deinterleaved_row(MmaTile::INTERLEAVE, row);
                        if exists && column < columns {
                            *output.add(column) = h;
                        }
                    } else {
                        let h = [low, high].map(|sum| activate(&params.activation, 0.0, sum * up, Gpu));
                        if exists && row < columns {
                            *output.add(row) = h[0];
                            *output.add(row + 8) = h[1];
                        }
                    }
                    m += 1;
                }
                j += 1;
            }
            shift::<M, N, 1>(&mut sums);
            fragment_slot = opaque(fragment_slot + 8);
        }
    }
}

/// The next fragments' turn; of several, those behind the last keep their places. The compiler must neither unroll nor peel
/// the loop around this (so one is a rotation, and the count is opaque): a small body stays in the instruction cache.
#[inline(always)]
fn shift<const M: usize, const N: usize, const TURN: usize>(sums: &mut [Fragments<N>; M]) {
    let mut m = 0;
    while m < M {
        let first = sums[m][0];
        let mut n = 0;
        while n + TURN < N {
            sums[m][n] = sums[m][n + TURN];
            n += 1;
        }
        if TURN == 1 {
            sums[m][n] = first;
        }
        m += 1;
    }
}

/// SwiGLU, quantized into tiles of slots under a scale that is known.
///
/// A lane has elements of h that are 8 columns or a slot apart. They go through shared memory, from where a lane takes half a
/// block of one slot: so that what a block costs is done by two lanes, and its halves leave in one store.
#[inline(always)]
unsafe fn write_quantized<const M: usize, const N: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    sums: &[Fragments<N>; M],
    place: &Place,
) {
    let turns = QuantizedTurns::<M>::new(params, tile, place);
    let mut sums = *sums;
    let mut first_slot = 0;
    // SAFETY: the caller's contract.
    unsafe {
        // Two turns where there are many: each round moves all sums.
        if N > 2 * TURN {
            while first_slot < tile.slots {
                turns.write::<N, 0>(params, tile, &sums, first_slot);
                first_slot += STAGED_SLOTS as u32;
                if first_slot < tile.slots {
                    turns.write::<N, TURN>(params, tile, &sums, first_slot);
                }
                shift::<M, N, { 2 * TURN }>(&mut sums);
                first_slot = opaque(first_slot + STAGED_SLOTS as u32);
            }
        } else {
            while first_slot < tile.slots {
                turns.write::<N, 0>(params, tile, &sums, first_slot);
                shift::<M, N, TURN>(&mut sums);
                first_slot = opaque(first_slot + STAGED_SLOTS as u32);
            }
        }
    }
}

/// Fragments of 8 slots that are quantized at a time.
const TURN: usize = STAGED_SLOTS / GROUP_SLOTS;

/// What is the same for all turns of a tile.
struct QuantizedTurns<const M: usize> {
    /// For the compiler to leave out what is not needed.
    activation: ActivationParams,
    gate: f32,
    up: f32,
    h_scale: f32,
    /// The barrier of the warps that have the same blocks.
    barrier: u32,
    /// Where the lane stages its elements, and from where it takes half a block.
    put: u32,
    take: u32,
    /// First column of the block, and of the lane's half; the lane's slot of a turn, and where its half block belongs.
    column: usize,
    half_column: usize,
    slot: u32,
    groups: SlotGroups,
    first_group: usize,
    stride: usize,
    output: *mut u16,
    /// [`output_of`](Self::output_of) the block.
    block: *mut u16,
}

impl<const M: usize> QuantizedTurns<M> {
    /// Bytes of a staged slot.
    const SLOT_BYTES: u32 = STAGED_STRIDE as u32 * 4;
    /// With one row tile a warp, two warps have the halves of the same blocks.
    const WARPS: u32 = 2 / M as u32;

    #[inline(always)]
    fn new(params: &GroupedGemmParams, tile: &Tile, place: &Place) -> Self {
        let (g, q) = (place.lane / 4, place.lane % 4);
        let (pair, member) = (place.warp / Self::WARPS, place.warp % Self::WARPS);
        let staged = place.staged + pair * STAGED_BYTES as u32;
        let (Half::Gate | Half::Up, column) =
            deinterleaved_row(MmaTile::INTERLEAVE, (place.row - member * FRAGMENT_ROWS as u32) as usize);
        let half = place.lane % 2;
        let slot = member * 16 + place.lane / 2;
        let (groups, first_group) = tile.slot_groups();
        let turns = Self {
            activation: ActivationParams { kind: KIND_SWIGLU, ..params.activation },
            gate: place.scales.l1_input * place.scales.gate,
            up: place.scales.l1_input * place.scales.up,
            h_scale: place.scales.l2_input,
            barrier: 1 + pair,
            put: staged + 2 * q * Self::SLOT_BYTES + (g + 8 * member) * 4,
            take: staged + slot * Self::SLOT_BYTES + half * 32,
            column,
            half_column: 8 * half as usize,
            slot,
            groups,
            first_group,
            stride: (params.columns as usize).next_multiple_of(MmaTile::K),
            output: params.output as *mut u16,
            block: core::ptr::null_mut(),
        };
        Self { block: turns.output_of(column), ..turns }
    }

    /// Where the lane's half of the block at this column belongs, in the first turn. A turn has whole groups, so a lane's slots
    /// have the same place in theirs.
    #[inline(always)]
    fn output_of(&self, column: usize) -> *mut u16 {
        let slot = self.slot as usize;
        let place = self.groups.place(self.stride / MmaTile::K, slot % GROUP_SLOTS, column + self.half_column);
        self.output.wrapping_add(place + (self.first_group + slot / GROUP_SLOTS) * TILE_ELEMENTS)
    }

    #[inline(always)]
    fn synchronize(&self) {
        if Self::WARPS == 1 { sync_warp() } else { sync_some(self.barrier, 64) }
    }

    /// The turn of the fragments from `FIRST` on, which have these slots of the tile.
    #[inline(always)]
    unsafe fn write<const N: usize, const FIRST: usize>(
        &self,
        params: &GroupedGemmParams,
        tile: &Tile,
        sums: &[Fragments<N>; M],
        first_slot: u32,
    ) {
        // SAFETY: what is staged is inside the planned shared memory, and only slots of the tile and columns of the matrix are
        // touched.
        unsafe {
            let mut turn = 0;
            while turn < TURN {
                let mut j = 0;
                while j < 2 {
                    let mut m = 0;
                    while m < M {
                        let fragment = sums[m][(FIRST + turn) % N];
                        let (gate, up) = (fragment[j] * UNSCALE * self.gate, fragment[j + 2] * UNSCALE * self.up);
                        let at = (turn * 8 + j) as u32 * Self::SLOT_BYTES + m as u32 * 32;
                        shared::store_u32(self.put + at, activate(&self.activation, gate, up, Gpu).to_bits());
                        m += 1;
                    }
                    j += 1;
                }
                turn += 1;
            }
            self.synchronize();
            let mut i = 0;
            while i < M as u32 {
                let at = self.take + i * 16 * Self::SLOT_BYTES;
                let (low, high) = (shared::load_v4(at), shared::load_v4(at + 16));
                let [a, b, c, d] = low.map(f32::from_bits);
                let [e, f, g, h] = high.map(f32::from_bits);
                let x = [a, b, c, d, e, f, g, h];
                let amax = block_fma::largest_magnitude(&x, Gpu).to_bits();
                let amax = f32::from_bits(larger(amax, shuffle_xor(amax, 1)));
                let scale = block_fma::block_scale(amax, self.h_scale, Gpu);
                let values = block_fma::round(&x, amax, scale, self.h_scale, Gpu);
                let further = first_slot + i * 16;
                if self.slot + further < tile.slots {
                    let further = (further / GROUP_SLOTS as u32) as usize * TILE_ELEMENTS;
                    let pair = |i: usize| values.f16_pair(2 * i, 2 * i + 1);
                    let output = self.block.add(further);
                    global::store_v4(output as *mut u32, [pair(0), pair(1), pair(2), pair(3)]);
                    let columns = params.columns as usize;
                    if self.column + BLOCK == columns {
                        // Behind the last block the row's padding begins; it is multiplied too.
                        let mut column = columns;
                        while column < self.stride {
                            global::store_v4(self.output_of(column).add(further) as *mut u32, [0; 4]);
                            // Unrolled, this would be most of the code.
                            column = opaque((column + BLOCK) as u32) as usize;
                        }
                    }
                }
                i += 1;
            }
            // What is staged next may not overtake the reads.
            self.synchronize();
        }
    }
}

#[inline(always)]
fn larger(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}
