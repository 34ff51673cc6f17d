//! The loops in plain Rust: also the definition that the others are compared with.
//!
//! Rows are the inner axis, so that compilers find vectors. A doubled dot product of 16 is at most 16 * 144 = 2304 in
//! magnitude: 16 bits hold it.

use nvfp4_moe_device::format::packed::TileOrder;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::format::{e2m1, ue4m3};

use super::{ActBlock, PanelTile, ROWS, RowTile, WEIGHT_SCALE};

const K: usize = CpuTile::K;

/// See [`super::Isa::multiply`].
pub(super) fn multiply(tiles: &[u8], panel: &[ActBlock], width: usize, out: &mut PanelTile) {
    out[..width].fill([0.0; ROWS]);
    for (tile, acts) in tiles.chunks_exact(CpuTile::BYTES).zip(panel.chunks_exact(width)) {
        let (codes, scales) = tile.split_at(CpuTile::CODE_BYTES);
        let mut weights = [[0i16; ROWS]; K];
        for (k, weights) in weights.iter_mut().enumerate() {
            for (row, weight) in weights.iter_mut().enumerate() {
                let at = CpuTile::code_offset(row, k);
                *weight = e2m1::decode_doubled(codes[at.byte] >> (4 * at.high as u32)) as i16;
            }
        }
        let scales: RowTile =
            std::array::from_fn(|row| ue4m3::decode(scales[CpuTile::scale_offset(row, 0)]) * WEIGHT_SCALE);
        for (act, sums) in acts.iter().zip(out.iter_mut()) {
            let bytes: [[i8; 4]; K / 4] = bytemuck::cast(act.words.map(i32::to_le_bytes));
            let mut dots = [0i16; ROWS];
            for (weights, byte) in weights.iter().zip(bytes.as_flattened()) {
                for (dot, weight) in dots.iter_mut().zip(weights) {
                    *dot += weight * *byte as i16;
                }
            }
            for ((sum, dot), scale) in sums.iter_mut().zip(dots).zip(&scales) {
                *sum += dot as f32 * (scale * act.scale);
            }
        }
    }
}
