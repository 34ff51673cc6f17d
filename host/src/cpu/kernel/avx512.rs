//! AVX-512 with VNNI: one 512-bit lane set is the 16 rows of a tile, one `vpdpbusd` is four of K.

use std::arch::x86_64::*;

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::packed::TileOrder;
use nvfp4_moe_device::format::slots::PANEL_SLOTS;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::kernels::activation::ActivationParams;

use super::{ActBlock, PanelTile, ROWS, RowTile, WEIGHT_BYTES};

/// How far ahead of its use a weight tile is asked for.
const PREFETCH_BYTES: usize = 16 * CpuTile::BYTES;

/// Panels up to this width are bound by memory, wider ones by arithmetic on weights that are already near.
const PREFETCH_WIDTH: usize = 8;

/// Four vectors of unsigned weights (row = lane, four of K each) and the row scales, 2^-8 times their value.
struct Tile {
    weights: [__m512i; 4],
    scales: __m512,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn load_tile(tile: &[u8; CpuTile::BYTES], lookup: __m512i) -> Tile {
    const { assert!(CpuTile::BYTES == 144 && ROWS == 16) };
    // SAFETY: 64 + 64 + 16 bytes, all inside the array.
    let (first, second, scales) = unsafe {
        let start = tile.as_ptr();
        (
            _mm512_loadu_si512(start.cast()),
            _mm512_loadu_si512(start.add(64).cast()),
            _mm_loadu_si128(start.add(CpuTile::CODE_BYTES).cast()),
        )
    };
    let nibble = _mm512_set1_epi8(15);
    let low = |codes| _mm512_shuffle_epi8(lookup, _mm512_and_si512(codes, nibble));
    let high = |codes| _mm512_shuffle_epi8(lookup, _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble));
    // A UE4M3 byte shifted by 7 is an f16 number, 2^-8 times its value, subnormals included.
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(scales));
    Tile { weights: [low(first), high(first), low(second), high(second)], scales: _mm512_cvtph_ps(halves) }
}

/// Asks for the weights that are some tiles ahead; they may lie behind the matrix.
#[inline(always)]
fn prefetch(tile: &[u8; CpuTile::BYTES]) {
    let ahead = tile.as_ptr().wrapping_add(PREFETCH_BYTES);
    for line in [0, 64, 128] {
        // SAFETY: a prefetch of any address is allowed: it reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast()) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn panel<const W: usize>(tiles: &[u8], panel: &[ActBlock], out: &mut PanelTile) {
    let lookup = _mm512_broadcast_i32x4(bytemuck::cast(WEIGHT_BYTES));
    let mut sums = [_mm512_setzero_ps(); W];
    let tiles = tiles.as_chunks::<{ CpuTile::BYTES }>().0;
    for (tile, acts) in tiles.iter().zip(panel.as_chunks::<W>().0) {
        let Tile { weights, scales } = load_tile(tile, lookup);
        if W <= PREFETCH_WIDTH {
            prefetch(tile);
        }
        for (sum, act) in sums.iter_mut().zip(acts) {
            let mut dot = _mm512_set1_epi32(act.bias);
            for (weights, word) in weights.iter().zip(act.words) {
                dot = _mm512_dpbusd_epi32(dot, *weights, _mm512_set1_epi32(word));
            }
            let scale = _mm512_mul_ps(scales, _mm512_set1_ps(act.scale));
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *sum);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        // SAFETY: 16 floats, all inside the array.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
}

/// See [`super::Isa::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn multiply(tiles: &[u8], acts: &[ActBlock], width: usize, out: &mut PanelTile) {
    const { assert!(PANEL_SLOTS == 16) };
    match width {
        1 => panel::<1>(tiles, acts, out),
        2 => panel::<2>(tiles, acts, out),
        3 => panel::<3>(tiles, acts, out),
        4 => panel::<4>(tiles, acts, out),
        5 => panel::<5>(tiles, acts, out),
        6 => panel::<6>(tiles, acts, out),
        7 => panel::<7>(tiles, acts, out),
        8 => panel::<8>(tiles, acts, out),
        9 => panel::<9>(tiles, acts, out),
        10 => panel::<10>(tiles, acts, out),
        11 => panel::<11>(tiles, acts, out),
        12 => panel::<12>(tiles, acts, out),
        13 => panel::<13>(tiles, acts, out),
        14 => panel::<14>(tiles, acts, out),
        15 => panel::<15>(tiles, acts, out),
        _ => panel::<16>(tiles, acts, out),
    }
}

/// [`ActBlock::quantize`], compiled for wide vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn quantize(x: &[f32; BLOCK], g: f32) -> ActBlock {
    ActBlock::quantize(x, g)
}

/// [`super::activate`], compiled for wide vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn activate(
    params: &ActivationParams,
    gate: &RowTile,
    gate_alpha: f32,
    up: &RowTile,
    up_alpha: f32,
) -> RowTile {
    super::activate(params, gate, gate_alpha, up, up_alpha)
}
