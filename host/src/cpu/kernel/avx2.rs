//! AVX2 with FMA and F16C: 8 rows at a time, up to 4 slots in registers.
//!
//! Products of an unsigned weight (at most 24) and a doubled activation code (at most 12) are summed in 16 bits:
//! pairs by `vpmaddubsw`, four such pairs by additions, at most 8 * 288 = 2304 in magnitude.

use std::arch::x86_64::*;

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::packed::TileOrder;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::kernels::activation::ActivationParams;

use super::{ActBlock, PanelTile, ROWS, RowTile, WEIGHT_BYTES};

/// Rows of a vector.
const LANES: usize = 8;
/// Slots whose sums stay in registers.
const SLOTS: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_codes(tile: &[u8; CpuTile::BYTES], part: usize, half: usize) -> __m256i {
    const { assert!(CpuTile::CODE_BYTES == 128 && ROWS == 2 * LANES) };
    let bytes: &[u8; 32] = tile[..CpuTile::CODE_BYTES].as_chunks().0.get(part * 2 + half).expect("4 chunks");
    bytemuck::cast(*bytes)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_scales(tile: &[u8; CpuTile::BYTES], half: usize) -> __m256 {
    let bytes: [u8; LANES] = tile[CpuTile::CODE_BYTES..].as_chunks().0[half];
    // A UE4M3 byte shifted by 7 is an f16 number, 2^-8 times its value, subnormals included.
    let wide = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
    _mm256_cvtph_ps(_mm_slli_epi16::<7>(wide))
}

/// Sums of 8 rows for the `W` slots of the panel from `first` on.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const W: usize>(
    tiles: &[u8],
    panel: &[ActBlock],
    width: usize,
    first: usize,
    half: usize,
    out: &mut PanelTile,
) {
    let lookup = _mm256_broadcastsi128_si256(bytemuck::cast(WEIGHT_BYTES));
    let nibble = _mm256_set1_epi8(15);
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_ps(); W];
    let tiles = tiles.as_chunks::<{ CpuTile::BYTES }>().0;
    for (tile, acts) in tiles.iter().zip(panel.chunks_exact(width)) {
        let acts: &[ActBlock; W] = acts[first..].first_chunk().expect("slots of the panel");
        let low = |codes| _mm256_shuffle_epi8(lookup, _mm256_and_si256(codes, nibble));
        let high = |codes| _mm256_shuffle_epi8(lookup, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble));
        let (front, back) = (load_codes(tile, 0, half), load_codes(tile, 1, half));
        let weights = [low(front), high(front), low(back), high(back)];
        let scales = load_scales(tile, half);
        for (sum, act) in sums.iter_mut().zip(acts) {
            let pairs = |i: usize| _mm256_maddubs_epi16(weights[i], _mm256_set1_epi32(act.words[i]));
            let sixteen = _mm256_add_epi16(_mm256_add_epi16(pairs(0), pairs(1)), _mm256_add_epi16(pairs(2), pairs(3)));
            let dot = _mm256_add_epi32(_mm256_madd_epi16(sixteen, ones), _mm256_set1_epi32(act.bias));
            let scale = _mm256_mul_ps(scales, _mm256_set1_ps(act.scale));
            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *sum);
        }
    }
    for (out, sum) in out[first..].iter_mut().zip(sums) {
        out[half * LANES..][..LANES].copy_from_slice(&bytemuck::cast::<_, [f32; LANES]>(sum));
    }
}

/// See [`super::Isa::multiply`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(tiles: &[u8], panel: &[ActBlock], width: usize, out: &mut PanelTile) {
    for first in (0..width).step_by(SLOTS) {
        for half in 0..ROWS / LANES {
            match width - first {
                1 => rows::<1>(tiles, panel, width, first, half, out),
                2 => rows::<2>(tiles, panel, width, first, half, out),
                3 => rows::<3>(tiles, panel, width, first, half, out),
                _ => rows::<SLOTS>(tiles, panel, width, first, half, out),
            }
        }
    }
}

/// [`ActBlock::quantize`], compiled for wider vectors.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize(x: &[f32; BLOCK], g: f32) -> ActBlock {
    ActBlock::quantize(x, g)
}

/// [`super::activate`], compiled for wider vectors.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn activate(
    params: &ActivationParams,
    gate: &RowTile,
    gate_alpha: f32,
    up: &RowTile,
    up_alpha: f32,
) -> RowTile {
    super::activate(params, gate, gate_alpha, up, up_alpha)
}
