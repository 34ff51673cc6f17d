//! Packing: raw tensors, expert by expert, into the order of the kernels.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::packed::{Half, LayerLayout, MatrixLayout, TileOrder, deinterleaved_row};
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::kernels::activation::ActivationParams;
use rayon::prelude::*;

use super::{Isa, Line, MoeLayer};
use crate::checkpoint::{RawExpert, RawMatrix};
use crate::load::{LoadError, check_expert};
use crate::memory;
use crate::shape::{MoeShape, ShapeError};
use crate::spec::LayerSpec;
use crate::weights::ExpertSource;

impl MoeLayer {
    /// Loads and packs the experts `spec.experts` from `source`, one after the other.
    ///
    /// `progress` is called with the number of experts done and of all, after each one.
    ///
    /// # Errors
    /// [`LoadError`] naming the expert and what is wrong with it, or the memory that is not there.
    pub fn load(
        spec: &LayerSpec,
        source: &(impl ExpertSource + ?Sized),
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        spec.shape.validate()?;
        if spec.experts.end() > spec.shape.experts {
            let must = "be at most the number of experts of the layer";
            return Err(ShapeError { axis: "experts", got: spec.experts.end(), must }.into());
        }
        let activation = spec.activation.validated()?;
        let MoeShape { hidden, intermediate, .. } = spec.shape;
        let layout = LayerLayout::<CpuTile>::new(hidden, intermediate, spec.experts.count, activation.is_gated());
        let mut weights: Vec<Line> = memory::zeros("packed weights", layout.bytes().div_ceil(size_of::<Line>()))?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut weights);
        let mut experts = Vec::with_capacity(spec.experts.count);
        for (local, expert) in spec.experts.ids().enumerate() {
            let raw = source.expert(expert).map_err(|source| LoadError::Source { expert, source })?;
            experts.push(check_expert(spec, expert, &raw, experts.first())?);
            pack_l1(&layout, &raw, &mut bytes[layout.l1_offset(local)..][..layout.l1().bytes()]);
            pack_l2(&layout, &raw, &mut bytes[layout.l2_offset(local)..][..layout.l2().bytes()]);
            progress(local + 1, spec.experts.count);
        }
        let params = ActivationParams::from(activation);
        Ok(Self { spec: *spec, params, layout, experts, weights, isa: Isa::best() })
    }
}

fn pack_l1(layout: &LayerLayout<CpuTile>, raw: &RawExpert<'_>, packed: &mut [u8]) {
    pack_matrix(layout.l1(), packed, |row| match &raw.gate {
        None => (&raw.up, row),
        Some(gate) => match deinterleaved_row(CpuTile::INTERLEAVE, row) {
            (Half::Gate, j) => (gate, j),
            (Half::Up, j) => (&raw.up, j),
        },
    });
}

fn pack_l2(layout: &LayerLayout<CpuTile>, raw: &RawExpert<'_>, packed: &mut [u8]) {
    pack_matrix(layout.l2(), packed, |row| (&raw.down, row));
}

/// Packs a matrix whose row `i` is the row `source(i)` of a raw one; row tiles in parallel.
fn pack_matrix<'a>(
    layout: MatrixLayout<CpuTile>,
    packed: &mut [u8],
    source: impl Fn(usize) -> (&'a RawMatrix<'a>, usize) + Sync,
) {
    const { assert!(CpuTile::K == BLOCK) };
    packed.par_chunks_mut(layout.tile_offset(1, 0)).enumerate().for_each(|(row_tile, packed)| {
        for row in 0..CpuTile::ROWS {
            let (raw, raw_row) = source(row_tile * CpuTile::ROWS + row);
            let blocks = raw.cols / BLOCK;
            let codes = &raw.codes[raw_row * blocks * (BLOCK / 2)..][..blocks * (BLOCK / 2)];
            let scales = &raw.scales[raw_row * blocks..][..blocks];
            for (k_tile, (codes, scale)) in codes.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(scales).enumerate() {
                let tile = &mut packed[layout.tile_offset(0, k_tile)..][..CpuTile::BYTES];
                let codes = u64::from_le_bytes(*codes);
                for k in 0..BLOCK {
                    let at = CpuTile::code_offset(row, k);
                    tile[at.byte] |= (((codes >> (4 * k)) & 15) as u8) << (4 * at.high as u32);
                }
                tile[CpuTile::CODE_BYTES + CpuTile::scale_offset(row, 0)] = *scale;
            }
        }
    });
}
