//! The stages of a forward: route, quantize, first product with its activation, requantize, second product.
//! [`combine`] is the last one.

use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::block::{global_scale, is_finite_magnitude, magnitude_bits};
use nvfp4_moe_device::format::packed::{Half, MatrixLayout};
use nvfp4_moe_device::format::slots::{ExpertSlots, PANEL_SLOTS};
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use rayon::prelude::*;

use super::combine::combine;
use super::kernel::{ActBlock, PanelTile, ROWS, RowTile};
use super::split::{Part, Units, for_each_part};
use super::workspace::Panel;
use super::{MoeLayer, Workspace};
use crate::io::{HiddenRows, Inputs, OutputRows, ScaleMode};
use crate::routing::{NOT_LOCAL, Routing};

/// Blocks that one task quantizes, at least.
const QUANTIZE_GRAIN_BLOCKS: usize = 64;

/// Row tiles times slots that one task multiplies, at least; reading a weight tile counts as two slots.
const MULTIPLY_GRAIN: usize = 16;

/// Routing, with what the stages derive from it.
#[derive(Clone, Copy)]
struct Routed<'a> {
    routing: &'a Routing,
    active: &'a [u32],
    panels: &'a [Panel],
}

impl Routed<'_> {
    fn slots(&self) -> usize {
        self.routing.slots()
    }

    fn panel(&self, index: usize) -> (usize, usize, ExpertSlots) {
        let Panel { expert, index } = self.panels[index];
        (expert as usize, index as usize, self.routing.expert_slots(expert as usize))
    }
}

/// One unit is one block of 16 along K of all slots of one panel.
struct PanelBlocks<'a> {
    routed: Routed<'a>,
    blocks: usize,
}

impl Units for PanelBlocks<'_> {
    fn start(&self, unit: usize) -> usize {
        let (index, block) = (unit / self.blocks, unit % self.blocks);
        if index == self.routed.panels.len() {
            return self.routed.slots() * self.blocks;
        }
        let (_, panel, slots) = self.routed.panel(index);
        slots.panel_offset(self.blocks, panel, block)
    }

    fn is_small(&self, _units: usize, elems: usize) -> bool {
        elems <= QUANTIZE_GRAIN_BLOCKS
    }
}

/// One unit is one row tile of 16 results of all slots of one expert.
struct ExpertTiles<'a> {
    routed: Routed<'a>,
    rows: usize,
}

impl ExpertTiles<'_> {
    fn position(&self, unit: usize) -> (usize, usize) {
        let tiles = self.rows / ROWS;
        (self.routed.active[unit / tiles] as usize, unit % tiles)
    }
}

impl Units for ExpertTiles<'_> {
    fn start(&self, unit: usize) -> usize {
        if unit == self.routed.active.len() * (self.rows / ROWS) {
            return self.routed.slots() * self.rows;
        }
        let (expert, tile) = self.position(unit);
        self.routed.routing.expert_slots(expert).values_offset(self.rows, tile)
    }

    fn is_small(&self, units: usize, elems: usize) -> bool {
        elems / ROWS + 2 * units <= MULTIPLY_GRAIN
    }
}

impl MoeLayer {
    /// Runs a batch that fits the workspace's buffers.
    pub(super) fn forward_chunk(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_>,
        out: OutputRows<'_>,
        accumulate: bool,
    ) {
        let Workspace { routing, active, panels, token_scales, slot_scales, token_blocks, slot_blocks, h, y, .. } =
            workspace;
        route(self, inputs, routing, active, panels);
        let routed = Routed { routing, active, panels };
        let (slots, hidden, intermediate) = (routed.slots(), self.spec.shape.hidden, self.spec.shape.intermediate);
        if slots > 0 {
            let tokens = inputs.topk_ids.len() / inputs.topk;
            let (token_scales, slot_scales) = (&mut token_scales[..tokens], &mut slot_scales[..slots]);
            let (h, y) = (&mut h[..slots * intermediate], &mut y[..slots * hidden]);
            self.scale_tokens(&inputs.hidden, token_scales);
            self.quantize_hidden(routed, &inputs.hidden, token_scales, token_blocks, slot_blocks);
            self.multiply_l1(routed, &slot_blocks[..slots * hidden / BLOCK], token_scales, h);
            self.scale_slots(routed, h, slot_scales);
            self.quantize_h(routed, h, slot_scales, &mut slot_blocks[..slots * intermediate / BLOCK]);
            self.multiply_l2(routed, &slot_blocks[..slots * intermediate / BLOCK], slot_scales, y);
        }
        combine(self.spec.experts, routing, inputs, y, out, accumulate);
    }

    /// Global scale of each token's hidden state; not used where it is the expert's.
    fn scale_tokens(&self, rows: &HiddenRows<'_>, scales: &mut [f32]) {
        let blocks = self.spec.shape.hidden / BLOCK;
        match self.spec.scales {
            ScaleMode::Static => {}
            ScaleMode::PerToken => scales.par_iter_mut().enumerate().for_each(|(token, scale)| {
                let amax = (token * blocks..(token + 1) * blocks).map(|block| amax(&rows.block(block))).max();
                *scale = global_scale(amax.unwrap_or(0));
            }),
            ScaleMode::PerTensor => {
                let amax = (0..rows.len() / BLOCK).into_par_iter().map(|block| finite_amax(&rows.block(block))).max();
                scales.fill(global_scale(amax.unwrap_or(0)));
            }
        }
    }

    /// Global scale of the hidden state that a slot of this expert and token reads.
    fn first_scale(&self, expert: usize, token: usize, token_scales: &[f32]) -> f32 {
        match self.spec.scales {
            ScaleMode::Static => self.experts[expert].l1_input,
            ScaleMode::PerToken | ScaleMode::PerTensor => token_scales[token],
        }
    }

    /// Quantizes hidden states into the panels of their slots: once for each token where all experts share the scale.
    fn quantize_hidden(
        &self,
        routed: Routed<'_>,
        rows: &HiddenRows<'_>,
        token_scales: &[f32],
        token_blocks: &mut [ActBlock],
        slot_blocks: &mut [ActBlock],
    ) {
        let (isa, blocks) = (self.isa, self.spec.shape.hidden / BLOCK);
        let topk = self.spec.shape.topk;
        if self.spec.quantizes_tokens() {
            // All experts have the same scale, so expert 0's is everyone's.
            token_blocks[..token_scales.len() * blocks]
                .par_iter_mut()
                .with_min_len(QUANTIZE_GRAIN_BLOCKS)
                .enumerate()
                .filter(|(i, _)| {
                    routed.routing.slot_of[i / blocks * topk..][..topk].iter().any(|slot| *slot != NOT_LOCAL)
                })
                .for_each(|(i, quantized)| {
                    *quantized = isa.quantize(&rows.block(i), self.first_scale(0, i / blocks, token_scales));
                });
        }
        let token_blocks = &*token_blocks;
        fill_panels(routed, blocks, &mut slot_blocks[..routed.slots() * blocks], |expert, slot, block| {
            let token = routed.routing.slot_token[slot] as usize;
            let at = token * blocks + block;
            if self.spec.quantizes_tokens() {
                token_blocks[at]
            } else {
                isa.quantize(&rows.block(at), self.first_scale(expert, token, token_scales))
            }
        });
    }

    /// Global scale of each slot's h.
    fn scale_slots(&self, routed: Routed<'_>, h: &[f32], scales: &mut [f32]) {
        match self.spec.scales {
            ScaleMode::Static => {
                for &expert in routed.active {
                    let ExpertSlots { first, count } = routed.routing.expert_slots(expert as usize);
                    scales[first..first + count].fill(self.experts[expert as usize].l2_input);
                }
            }
            ScaleMode::PerToken => {
                let intermediate = self.spec.shape.intermediate;
                scales.par_iter_mut().enumerate().for_each(|(slot, scale)| {
                    let expert = routed.routing.expert_offset.partition_point(|first| *first as usize <= slot) - 1;
                    let slots = routed.routing.expert_slots(expert);
                    let amax = (0..intermediate / BLOCK)
                        .map(|block| amax(tile_at(h, slots.value_index(intermediate, slot, block * BLOCK))))
                        .max();
                    *scale = global_scale(amax.unwrap_or(0));
                });
            }
            ScaleMode::PerTensor => {
                let amax = h.par_chunks_exact(BLOCK).map(|block| finite_amax(tile_at(block, 0))).max();
                scales.fill(global_scale(amax.unwrap_or(0)));
            }
        }
    }

    /// Quantizes h into the panels.
    fn quantize_h(&self, routed: Routed<'_>, h: &[f32], scales: &[f32], slot_blocks: &mut [ActBlock]) {
        let (isa, intermediate) = (self.isa, self.spec.shape.intermediate);
        fill_panels(routed, intermediate / BLOCK, slot_blocks, |expert, slot, block| {
            let slots = routed.routing.expert_slots(expert);
            isa.quantize(tile_at(h, slots.value_index(intermediate, slot, block * BLOCK)), scales[slot])
        });
    }

    /// `h = activate(gate, up)`, for every slot.
    fn multiply_l1(&self, routed: Routed<'_>, blocks: &[ActBlock], token_scales: &[f32], h: &mut [f32]) {
        let (layout, matrix) = (self.layout, self.layout.l1());
        self.multiply(routed, self.spec.shape.intermediate, h, |expert, tile, slots, h| {
            let weights = &self.packed()[layout.l1_offset(expert)..][..matrix.bytes()];
            let up = row_tile(matrix, weights, layout.l1_row(Half::Up, tile * ROWS));
            let gate = layout.gated.then(|| row_tile(matrix, weights, layout.l1_row(Half::Gate, tile * ROWS)));
            let scales = &self.experts[expert];
            let mut gate_sums: PanelTile = [[0.0; ROWS]; PANEL_SLOTS];
            let mut up_sums: PanelTile = [[0.0; ROWS]; PANEL_SLOTS];
            for (panel, h) in h.chunks_mut(PANEL_SLOTS).enumerate() {
                let acts = panel_blocks(slots, panel, self.spec.shape.hidden / BLOCK, blocks);
                if let Some(gate) = gate {
                    self.isa.multiply(gate, acts, h.len(), &mut gate_sums);
                }
                self.isa.multiply(up, acts, h.len(), &mut up_sums);
                for (i, h) in h.iter_mut().enumerate() {
                    let token = routed.routing.slot_token[slots.panel_first(panel) + i] as usize;
                    let g = self.first_scale(expert, token, token_scales);
                    let (gate, up) = ((&gate_sums[i], g * scales.gate), (&up_sums[i], g * scales.up));
                    *h = self.isa.activate(&self.params, gate, up);
                }
            }
        });
    }

    /// `y = down(h)`, for every slot.
    fn multiply_l2(&self, routed: Routed<'_>, blocks: &[ActBlock], slot_scales: &[f32], y: &mut [f32]) {
        let (layout, matrix) = (self.layout, self.layout.l2());
        self.multiply(routed, self.spec.shape.hidden, y, |expert, tile, slots, y| {
            let weights = &self.packed()[layout.l2_offset(expert)..][..matrix.bytes()];
            let down = row_tile(matrix, weights, tile * ROWS);
            let mut sums: PanelTile = [[0.0; ROWS]; PANEL_SLOTS];
            for (panel, y) in y.chunks_mut(PANEL_SLOTS).enumerate() {
                let acts = panel_blocks(slots, panel, self.spec.shape.intermediate / BLOCK, blocks);
                self.isa.multiply(down, acts, y.len(), &mut sums);
                for (i, y) in y.iter_mut().enumerate() {
                    let alpha = slot_scales[slots.panel_first(panel) + i] * self.experts[expert].down;
                    *y = sums[i].map(|sum| sum * alpha);
                }
            }
        });
    }

    /// Calls `work(expert, row tile, its slots, their results in the tile)` for all, in parallel.
    fn multiply(
        &self,
        routed: Routed<'_>,
        rows: usize,
        values: &mut [f32],
        work: impl Fn(usize, usize, ExpertSlots, &mut [RowTile]) + Sync,
    ) {
        let units = ExpertTiles { routed, rows };
        let all = Part { units: 0..routed.active.len() * (rows / ROWS), data: values };
        for_each_part(&units, all, &|part: Part<'_, f32>| {
            let mut rest: &mut [RowTile] = bytemuck::cast_slice_mut(part.data);
            for unit in part.units {
                let (expert, tile) = units.position(unit);
                let slots = routed.routing.expert_slots(expert);
                let (values, after) = rest.split_at_mut(slots.count);
                work(expert, tile, slots, values);
                rest = after;
            }
        });
    }
}

/// Routes, and lists the experts that have slots and their panels.
fn route(layer: &MoeLayer, inputs: &Inputs<'_>, routing: &mut Routing, active: &mut Vec<u32>, panels: &mut Vec<Panel>) {
    routing.rebuild(inputs.topk_ids, inputs.topk, layer.spec.experts);
    active.clear();
    panels.clear();
    for expert in 0..layer.spec.experts.count {
        let slots = routing.expert_slots(expert);
        if slots.count > 0 {
            active.push(expert as u32);
        }
        panels.extend((0..slots.panels()).map(|index| Panel { expert: expert as u32, index: index as u32 }));
    }
}

/// Fills the panels with `block_of(expert, slot, block)`.
fn fill_panels(
    routed: Routed<'_>,
    blocks: usize,
    slot_blocks: &mut [ActBlock],
    block_of: impl Fn(usize, usize, usize) -> ActBlock + Sync,
) {
    let units = PanelBlocks { routed, blocks };
    let all = Part { units: 0..routed.panels.len() * blocks, data: slot_blocks };
    for_each_part(&units, all, &|part: Part<'_, ActBlock>| {
        let mut data = part.data.iter_mut();
        for unit in part.units {
            let (expert, panel, slots) = routed.panel(unit / blocks);
            let first = slots.panel_first(panel);
            for (slot, quantized) in (first..first + slots.panel_width(panel)).zip(data.by_ref()) {
                *quantized = block_of(expert, slot, unit % blocks);
            }
        }
    });
}

/// Quantized blocks of one panel.
fn panel_blocks(slots: ExpertSlots, panel: usize, blocks: usize, all: &[ActBlock]) -> &[ActBlock] {
    &all[slots.panel_offset(blocks, panel, 0)..][..slots.panel_width(panel) * blocks]
}

/// The tiles along K of the row tile that begins with this row.
fn row_tile(layout: MatrixLayout<CpuTile>, matrix: &[u8], row: usize) -> &[u8] {
    let tile = row / ROWS;
    &matrix[layout.tile_offset(tile, 0)..layout.tile_offset(tile + 1, 0)]
}

/// The 16 values from `at` on.
#[inline(always)]
pub(super) fn tile_at(values: &[f32], at: usize) -> &RowTile {
    values[at..].first_chunk().expect("16 values")
}

/// Bits of the largest magnitude; not those of a finite number when one is not finite.
#[inline(always)]
fn amax(x: &RowTile) -> u32 {
    x.iter().fold(0, |amax, x| amax.max(magnitude_bits(*x)))
}

/// Bits of the largest finite magnitude.
#[inline(always)]
fn finite_amax(x: &RowTile) -> u32 {
    let finite = |x: &f32| Some(magnitude_bits(*x)).filter(|bits| is_finite_magnitude(*bits)).unwrap_or(0);
    x.iter().fold(0, |amax, x| amax.max(finite(x)))
}
