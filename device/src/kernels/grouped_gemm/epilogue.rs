//! From accumulators to memory: alpha, activation, and where the scale is known beforehand the second quantization.

use super::ROW_FRAGMENTS;
#[cfg(nvfp4_arch = "sm80")]
use super::sm80::dequantize::UNSCALE;
use super::tile::Tile;
use crate::format::BLOCK;
use crate::format::block_fma::{self, Values};
use crate::format::packed::{Half, TileOrder, deinterleaved_row};
#[cfg(nvfp4_arch = "sm80")]
use crate::format::tile_mma::{FRAGMENT_ROWS, MmaTile as Order, activation_place};
#[cfg(nvfp4_arch = "sm120")]
use crate::format::tile_mxf4::{FRAGMENT_ROWS, Mxf4Tile as Order};
use crate::kernels::activation::activate;
use crate::params::{Epilogue, ExpertScales, GroupedGemmParams};
use crate::ptx::float::Gpu;
use crate::ptx::thread::opaque;
use crate::ptx::warp::shuffle_xor;

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

/// One slot's row of the output.
struct OutputRow<'a> {
    params: &'a GroupedGemmParams,
    slot: usize,
    exists: bool,
    /// Decode scale of h.
    h_scale: f32,
    /// This lane's g.
    lane: u32,
}

impl OutputRow<'_> {
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
        let h_scale = f32::from_bits(opaque(self.h_scale.to_bits()));
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
        let place = |column: usize| self.slot * stride + activation_place(column);
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

/// Writes a warp's results.
///
/// # Safety
/// The params' pointers are as documented there; all lanes take part.
#[inline(always)]
pub(super) unsafe fn write_results<const SLOT_FRAGMENTS: usize>(
    params: &GroupedGemmParams,
    tile: &Tile,
    accumulators: &Accumulators<SLOT_FRAGMENTS>,
    warp: &Warp,
) {
    let (g, q) = (warp.lane / 4, warp.lane % 4);
    let row = tile.row + warp.row;
    let end = warp.slot + SLOT_FRAGMENTS as u32 * 8;
    let end = if end < tile.slots { end } else { tile.slots };
    let mut accumulators = *accumulators;
    // SAFETY: only slots of the tile and columns of the matrix are touched.
    unsafe {
        let scales = *(params.expert_scales as *const ExpertScales).add(tile.expert as usize);
        let second = params.epilogue == Epilogue::Down as u32;
        let mut fragment_slot = warp.slot;
        while fragment_slot < end {
            let mut j = 0;
            while j < 2 {
                let inner = fragment_slot + 2 * q + j as u32;
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
                let output = OutputRow { params, slot, exists, h_scale: scales.l2_input, lane: g };
                if params.epilogue == Epilogue::Gated as u32 {
                    let (gate, up) = (input_scale * scales.gate, input_scale * scales.up);
                    let h = accumulators.map(|fragment| {
                        activate(
                            &params.activation,
                            (fragment[0][j] * UNSCALE) * gate,
                            (fragment[0][j + 2] * UNSCALE) * up,
                            Gpu,
                        )
                    });
                    let (Half::Gate | Half::Up, column) = deinterleaved_row(Order::INTERLEAVE, row as usize);
                    output.store(column as u32, h[0], h[1]);
                } else {
                    let alpha = input_scale * if second { scales.down } else { scales.up };
                    let mut m = 0;
                    while m < ROW_FRAGMENTS {
                        let pair = [accumulators[m][0][j], accumulators[m][0][j + 2]].map(|sum| {
                            let sum = sum * UNSCALE;
                            if second { sum * alpha } else { activate(&params.activation, 0.0, sum * alpha, Gpu) }
                        });
                        output.store(row + (m * FRAGMENT_ROWS) as u32, pair[0], pair[1]);
                        m += 1;
                    }
                }
                j += 1;
            }
            rotate(&mut accumulators);
            fragment_slot = opaque(fragment_slot + 8);
        }
    }
}

/// The next fragments' turn. The compiler must neither unroll nor peel the loop around this (so it is a rotation, and the
/// count is opaque): a small body stays in the instruction cache.
#[inline(always)]
fn rotate<const SLOT_FRAGMENTS: usize>(accumulators: &mut Accumulators<SLOT_FRAGMENTS>) {
    let mut m = 0;
    while m < ROW_FRAGMENTS {
        let first = accumulators[m];
        let mut n = 0;
        while n < SLOT_FRAGMENTS {
            accumulators[m][n] = first[(n + 1) % SLOT_FRAGMENTS];
            n += 1;
        }
        m += 1;
    }
}
