//! The loops in plain Rust: also the definition that the others are compared with.

use nvfp4_moe_device::format::packed::TileOrder;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::format::{e2m1, ue4m3};

use super::{ActBlock, PanelTile, ROWS, WEIGHT_SCALE};

const K: usize = CpuTile::K;

/// See [`super::Isa::multiply`].
pub(super) fn multiply(tiles: &[u8], panel: &[ActBlock], width: usize, out: &mut PanelTile) {
    out[..width].fill([0.0; ROWS]);
    for (tile, acts) in tiles.chunks_exact(CpuTile::BYTES).zip(panel.chunks_exact(width)) {
        let (codes, scales) = tile.split_at(CpuTile::CODE_BYTES);
        let mut weights = [[0i32; K]; ROWS];
        for (row, weights) in weights.iter_mut().enumerate() {
            for (k, weight) in weights.iter_mut().enumerate() {
                let at = CpuTile::code_offset(row, k);
                *weight = e2m1::decode_doubled(codes[at.byte] >> (4 * at.high as u32)) as i32;
            }
        }
        for (act, sums) in acts.iter().zip(out.iter_mut()) {
            let bytes: [[i8; 4]; K / 4] = bytemuck::cast(act.words.map(i32::to_le_bytes));
            for (row, (weights, sum)) in weights.iter().zip(sums).enumerate() {
                let dot: i32 = weights.iter().zip(bytes.as_flattened()).map(|(w, a)| w * *a as i32).sum();
                let weight_scale = ue4m3::decode(scales[CpuTile::scale_offset(row, 0)]) * WEIGHT_SCALE;
                *sum += dot as f32 * (weight_scale * act.scale);
            }
        }
    }
}
