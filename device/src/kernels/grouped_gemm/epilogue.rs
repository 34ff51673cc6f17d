//! From accumulators to memory: alpha, activation, and where the scale is known beforehand the second quantization.

use super::ROW_FRAGMENTS;
use super::tile::Tile;
use crate::format::BLOCK;
use crate::format::block_fma::{self, Values};
use crate::format::packed::{Half, TileOrder, deinterleaved_row};
#[cfg(nvfp4_arch = "sm80")]
use crate::format::slot_groups::{GROUP_SLOTS, SlotGroups, TILE_ELEMENTS};
#[cfg(nvfp4_arch = "sm80")]
use crate::format::tile_mma::{self, FRAGMENT_ROWS, MmaTile as Order};
#[cfg(nvfp4_arch = "sm120")]
use crate::format::tile_mxf4::{FRAGMENT_ROWS, Mxf4Tile as Order};
use crate::kernels::activation::{KIND_SWIGLU, activate, activate_by};
use crate::params::{Epilogue, ExpertScales, GroupedGemmParams};
use crate::ptx::float::{Gpu, divide_moderate};
use crate::ptx::thread::opaque;
use crate::ptx::warp::shuffle_xor;

/// What the sums must be multiplied by: the power of two that the operands carry, undone.
#[cfg(nvfp4_arch = "sm80")]
pub(super) const UNSCALE: f32 = (1u32 << -tile_mma::PRODUCT_LOG2) as f32;
#[cfg(nvfp4_arch = "sm120")]
const UNSCALE: f32 = 1.0;

/// Where a warp that multiplies stands in the tile.
pub(super) struct Warp {
    pub(super) lane: u32,
    /// First row and first slot.
    pub(super) row: u32,
    pub(super) slot: u32,
}

/// Accumulators of a warp: with g = lane / 4 and q = lane % 4, `[m][n]` holds rows 16m + g (twice), 16m + g + 8 (twice) of
/// slots 8n + 2q, 8n + 2q + 1.
pub(super) type Accumulators<const SLOT_FRAGMENTS: usize> = [[[f32; 4]; SLOT_FRAGMENTS]; ROW_FRAGMENTS];

/// Applies `f` to the values of the 8 lanes with the same q, in all of them.
#[inline(always)]
fn reduce(mut value: u32, f: impl Fn(u32, u32) -> u32) -> u32 {
    let mut mask = 4;
    while mask < 32 {
        value = f(value, shuffle_xor(value, mask));
        mask *= 2;
    }
    value
}

#[inline(always)]
fn larger(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

/// One slot's row of the output; `TILES`: what is quantized goes into the tiles of its expert's [`SlotGroups`].
#[cfg_attr(nvfp4_arch = "sm120", allow(dead_code, reason = "no tiles of slots there"))]
struct OutputRow<'a, const TILES: bool> {
    params: &'a GroupedGemmParams,
    tile: &'a Tile,
    slot: usize,
    /// Its number in the tile.
    inner: usize,
    exists: bool,
    /// Decode scale of h.
    h_scale: f32,
    /// This lane's g.
    lane: u32,
}

impl<const TILES: bool> OutputRow<'_, TILES> {
    /// Stores columns `first + g` and `first + 8 + g`, in f32 or quantized. All lanes take part.
    #[inline(always)]
    unsafe fn store(&self, first: u32, low: f32, high: f32) {
        let (params, first) = (self.params, first as usize);
        let exists = self.exists && first < params.columns as usize;
        let lane = self.lane;
        // SAFETY: the slot exists and so do all 16 columns; `columns` is a multiple of 16.
        unsafe {
            if params.quantized == 0 {
                if exists {
                    let row = (params.output as *mut f32).add(self.slot * params.columns as usize + first);
                    *row.add(lane as usize) = low;
                    *row.add(lane as usize + 8) = high;
                }
                return;
            }
            let values = [low, high];
            let amax = reduce(block_fma::largest_magnitude(&values, Gpu).to_bits(), larger);
            self.store_quantized(first, &values, f32::from_bits(amax));
        }
    }

    /// Stores the same columns quantized; `amax` is the largest magnitude of all 16.
    #[inline(always)]
    unsafe fn store_quantized(&self, first: usize, values: &[f32; 2], amax: f32) {
        let exists = self.exists && first < self.params.columns as usize;
        // What is derived of it must not be kept in registers, of which there are none left.
        let h_scale = if TILES { self.h_scale } else { f32::from_bits(opaque(self.h_scale.to_bits())) };
        let scale = block_fma::block_scale(amax, h_scale, Gpu);
        let quantized = block_fma::round(values, amax, scale, h_scale, Gpu);
        // SAFETY: the slot exists and so do all 16 columns.
        unsafe { self.store_block(first, exists, &quantized) };
    }

    /// Stores a block of 16 columns: this lane's elements of columns `first + g` and `first + 8 + g`.
    #[cfg(nvfp4_arch = "sm80")]
    #[inline(always)]
    unsafe fn store_block(&self, first: usize, exists: bool, quantized: &Values<2>) {
        if !exists {
            return;
        }
        let columns = self.params.columns as usize;
        let stride = columns.next_multiple_of(Order::K);
        let Tile { expert, expert_slot, expert_slots, .. } = *self.tile;
        let place = |column: usize| {
            if TILES {
                // What is the same for all fragments stands in front: a token tile is whole groups.
                let groups = SlotGroups::new(expert as usize, expert_slot as usize, expert_slots as usize);
                let group = ((self.tile.slot - expert_slot) as usize + self.inner) / GROUP_SLOTS;
                groups.place(stride / Order::K, self.inner % GROUP_SLOTS, column) + group * TILE_ELEMENTS
            } else {
                self.slot * stride + tile_mma::activation_place(column)
            }
        };
        let output = self.params.output as *mut u16;
        let (low, high) = (first + self.lane as usize, first + self.lane as usize + 8);
        let pair = quantized.f16_pair(0, 1);
        // SAFETY: the slot exists, and a row has `stride` columns.
        unsafe {
            *output.add(place(low)) = pair as u16;
            *output.add(place(high)) = (pair >> 16) as u16;
            if first + BLOCK == columns {
                // Behind the last block the row's padding begins; it is multiplied too.
                let mut column = columns + self.lane as usize;
                while column < stride {
                    *output.add(place(column)) = 0;
                    column += 8;
                }
            }
        }
    }

    /// Stores a block of 16 columns: this lane's elements of columns `first + g` and `first + 8 + g`.
    #[cfg(nvfp4_arch = "sm120")]
    #[inline(always)]
    unsafe fn store_block(&self, first: usize, exists: bool, quantized: &Values<2>) {
        use crate::format::tile_mxf4::row_stride;
        let lane = self.lane;
        let codes = quantized.codes(0, 1);
        let gathered = [(codes & 15) << (4 * lane), (codes >> 4) << (4 * lane)].map(|word| reduce(word, |a, b| a | b));
        if exists {
            let index = (self.slot * row_stride(self.params.columns as usize) + first) / BLOCK;
            // SAFETY: the slot exists, and the block is one of a row.
            unsafe {
                if lane == 0 {
                    crate::ptx::global::store_v2((self.params.output as *mut u32).add(2 * index), gathered);
                } else if lane == 1 {
                    *(self.params.output_scales as *mut u8).add(index) = quantized.scale_byte();
                }
            }
        }
    }
}

/// Writes a warp's results. `TILES`: what is quantized goes into tiles, not into rows; `TURN`: fragments of
/// 8 slots at a time, for the usual layers.
///
/// # Safety
/// The params' pointers are as documented there; all lanes take part.
#[inline(always)]
pub(super) unsafe fn write_results<const SLOT_FRAGMENTS: usize, const TURN: usize, const TILES: bool>(
    params: &GroupedGemmParams,
    tile: &Tile,
    accumulators: &Accumulators<SLOT_FRAGMENTS>,
    warp: &Warp,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if !TILES {
            return write_fragments::<SLOT_FRAGMENTS, 1>(params, tile, accumulators, warp);
        }
        // For the compiler to leave out what is not needed.
        let mut values = *params;
        if params.quantized != 0 {
            values.activation.kind = KIND_SWIGLU;
            return write_swiglu::<SLOT_FRAGMENTS, TURN>(&values, tile, accumulators, warp);
        }
        values.quantized = 0;
        if params.epilogue == Epilogue::Down as u32 {
            values.epilogue = Epilogue::Down as u32;
            write_fragments::<SLOT_FRAGMENTS, TURN>(&values, tile, accumulators, warp);
        } else {
            write_fragments::<SLOT_FRAGMENTS, 1>(&values, tile, accumulators, warp);
        }
    }
}

/// [`write_results`] of `TURN` fragments of 8 slots at a time.
#[inline(always)]
unsafe fn write_fragments<const SLOT_FRAGMENTS: usize, const TURN: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    accumulators: &Accumulators<SLOT_FRAGMENTS>,
    warp: &Warp,
) {
    let (g, q) = (warp.lane / 4, warp.lane % 4);
    let row = tile.row + warp.row;
    let end = warp.slot + SLOT_FRAGMENTS as u32 * 8;
    let end = if end < tile.slots { end } else { tile.slots };
    const { assert!(SLOT_FRAGMENTS.is_multiple_of(TURN)) };
    let mut accumulators = *accumulators;
    // SAFETY: only slots of the tile and columns of the matrix are touched.
    unsafe {
        let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
        let second = params.epilogue == Epilogue::Down as u32;
        let mut fragment_slot = warp.slot;
        while fragment_slot < end {
            let mut turn = 0;
            while turn < TURN {
                let mut j = 0;
                while j < 2 {
                    let inner = fragment_slot + 8 * turn as u32 + 2 * q + j as u32;
                    let exists = inner < tile.slots;
                    let slot = (tile.slot + inner) as usize;
                    let input_scale = if params.row_scales == 0 {
                        if second { scales.l2_input } else { scales.l1_input }
                    } else if exists {
                        let source =
                            if params.gather == 0 { slot } else { *(params.gather as *const u32).add(slot) as usize };
                        *(params.row_scales as *const f32).add(source)
                    } else {
                        0.0
                    };
                    let output = OutputRow::<false> {
                        params,
                        tile,
                        slot,
                        inner: inner as usize,
                        exists,
                        h_scale: scales.l2_input,
                        lane: g,
                    };
                    if params.epilogue == Epilogue::Gated as u32 {
                        let (gate, up) = (input_scale * scales.gate, input_scale * scales.up);
                        let h = accumulators.map(|fragment| {
                            activate(
                                &params.activation,
                                (fragment[turn][j] * UNSCALE) * gate,
                                (fragment[turn][j + 2] * UNSCALE) * up,
                            )
                        });
                        let (Half::Gate | Half::Up, column) = deinterleaved_row(Order::INTERLEAVE, row as usize);
                        output.store(column as u32, h[0], h[1]);
                    } else {
                        let alpha = input_scale * if second { scales.down } else { scales.up };
                        let mut m = 0;
                        while m < ROW_FRAGMENTS {
                            let pair = [accumulators[m][turn][j], accumulators[m][turn][j + 2]].map(|sum| {
                                let sum = sum * UNSCALE;
                                if second { sum * alpha } else { activate(&params.activation, 0.0, sum * alpha) }
                            });
                            output.store(row + (m * FRAGMENT_ROWS) as u32, pair[0], pair[1]);
                            m += 1;
                        }
                    }
                    j += 1;
                }
                turn += 1;
            }
            turn_fragments::<SLOT_FRAGMENTS, TURN>(&mut accumulators);
            fragment_slot = opaque(fragment_slot + 8 * TURN as u32);
        }
    }
}

/// The next fragments' turn. The compiler must neither unroll nor peel the loop around this (so it is a rotation, and the
/// count is opaque): a small body stays in the instruction cache.
#[inline(always)]
fn turn_fragments<const SLOT_FRAGMENTS: usize, const TURN: usize>(accumulators: &mut Accumulators<SLOT_FRAGMENTS>) {
    let mut m = 0;
    while m < ROW_FRAGMENTS {
        let first = accumulators[m];
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            accumulators[m][n] = first[(n + TURN) % SLOT_FRAGMENTS];
            n += 1;
        }
        m += 1;
    }
}

/// [`write_results`] of SwiGLU that is quantized into tiles under a scale that is known, `TURN` fragments of 8 slots at a
/// time: as few branches as possible, so that instructions of different elements stand between dependent ones.
#[inline(always)]
unsafe fn write_swiglu<const SLOT_FRAGMENTS: usize, const TURN: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    accumulators: &Accumulators<SLOT_FRAGMENTS>,
    warp: &Warp,
) {
    let (g, q) = (warp.lane / 4, warp.lane % 4);
    let (Half::Gate | Half::Up, column) = deinterleaved_row(Order::INTERLEAVE, (tile.row + warp.row) as usize);
    let mut accumulators = *accumulators;
    // SAFETY: only slots of the tile and columns of the matrix are touched.
    unsafe {
        let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
        let (gate, up) = (scales.l1_input * scales.gate, scales.l1_input * scales.up);
        let mut fragment_slot = 0;
        while fragment_slot < tile.slots {
            let mut h = [[[0.0; ROW_FRAGMENTS]; 2]; TURN];
            let (mut least, mut largest) = (u32::MAX, 0);
            let sums = |turn: usize, j: usize, m: usize| {
                let fragment = accumulators[m][turn];
                [fragment[j] * UNSCALE * gate, fragment[j + 2] * UNSCALE * up]
            };
            each::<TURN>(|turn, j, m| {
                let [gate, up] = sums(turn, j, m);
                h[turn][j][m] = activate_by(&params.activation, gate, up, |x, y| {
                    let magnitude = x.to_bits() & 0x7FFF_FFFF;
                    least = if magnitude < least { magnitude } else { least };
                    // y is 1 at least.
                    largest = larger(larger(magnitude, y.to_bits()), largest);
                    divide_moderate(x, y)
                });
            });
            if least < *block_fma::MODERATE.start() || largest > *block_fma::MODERATE.end() {
                each::<TURN>(|turn, j, m| {
                    let [gate, up] = sums(turn, j, m);
                    h[turn][j][m] = activate(&params.activation, gate, up);
                });
            }
            let mut amax = h.map(|h| h.map(|h| block_fma::largest_magnitude(&h, Gpu).to_bits()));
            let mut mask = 4;
            while mask < 32 {
                amax = amax.map(|amax| amax.map(|amax| larger(amax, shuffle_xor(amax, mask))));
                mask *= 2;
            }
            let mut turn = 0;
            while turn < TURN {
                let mut j = 0;
                while j < 2 {
                    let inner = fragment_slot + 8 * turn as u32 + 2 * q + j as u32;
                    let output = OutputRow::<true> {
                        params,
                        tile,
                        slot: (tile.slot + inner) as usize,
                        inner: inner as usize,
                        exists: inner < tile.slots,
                        h_scale: scales.l2_input,
                        lane: g,
                    };
                    output.store_quantized(column, &h[turn][j], f32::from_bits(amax[turn][j]));
                    j += 1;
                }
                turn += 1;
            }
            turn_fragments::<SLOT_FRAGMENTS, TURN>(&mut accumulators);
            fragment_slot = opaque(fragment_slot + 8 * TURN as u32);
        }
    }
}

/// Calls `f` with every fragment of a turn, slot of a lane's two, and row fragment.
#[inline(always)]
fn each<const TURN: usize>(mut f: impl FnMut(usize, usize, usize)) {
    let mut turn = 0;
    while turn < TURN {
        let mut j = 0;
        while j < 2 {
            let mut m = 0;
            while m < ROW_FRAGMENTS {
                f(turn, j, m);
                m += 1;
            }
            j += 1;
        }
        turn += 1;
    }
}
