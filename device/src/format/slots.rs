//! Order of per-slot data in the CPU engine: quantized activations in panels, f32 results in row tiles.
//!
//! A slot is one (token, k) that an expert here takes. Slots are sorted by expert, so an expert's slots are a range.
//! Both orders keep the data of one expert together, at the same place for every order of the same axis length, and
//! both let a task that writes consecutive data own one contiguous part of the buffer.

use super::BLOCK;

/// Slots of a panel: those that one pass over a weight tile serves. The last panel of an expert may be narrower.
pub const PANEL_SLOTS: usize = 16;

/// The slots of one expert: `first .. first + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSlots {
    /// First slot.
    pub first: usize,
    /// How many.
    pub count: usize,
}

impl ExpertSlots {
    /// Panels, the last one possibly narrow.
    #[inline(always)]
    pub const fn panels(self) -> usize {
        self.count.div_ceil(PANEL_SLOTS)
    }

    /// Slots of a panel.
    #[inline(always)]
    pub const fn panel_width(self, panel: usize) -> usize {
        let left = self.count - panel * PANEL_SLOTS;
        if left < PANEL_SLOTS { left } else { PANEL_SLOTS }
    }

    /// First slot of a panel.
    #[inline(always)]
    pub const fn panel_first(self, panel: usize) -> usize {
        self.first + panel * PANEL_SLOTS
    }

    /// Index of the quantized block `block` of the panel's first slot; the panel's other slots follow it.
    /// `blocks` is K/16.
    #[inline(always)]
    pub const fn panel_offset(self, blocks: usize, panel: usize, block: usize) -> usize {
        self.panel_first(panel) * blocks + block * self.panel_width(panel)
    }

    /// Index of the f32 results of the expert's first slot in the row tile of 16; 16 numbers a slot follow each other.
    /// `rows` is the length of a slot's result, a multiple of 16.
    #[inline(always)]
    pub const fn values_offset(self, rows: usize, row_tile: usize) -> usize {
        self.first * rows + row_tile * self.count * BLOCK
    }

    /// Index of the quantized block of a slot (counted over all experts).
    #[inline(always)]
    pub const fn block_index(self, blocks: usize, slot: usize, block: usize) -> usize {
        let local = slot - self.first;
        self.panel_offset(blocks, local / PANEL_SLOTS, block) + local % PANEL_SLOTS
    }

    /// Inverse of [`Self::block_index`]: (slot, block).
    #[inline(always)]
    pub const fn block_position(self, blocks: usize, index: usize) -> (usize, usize) {
        let panel = (index / blocks - self.first) / PANEL_SLOTS;
        let inner = index - self.panel_offset(blocks, panel, 0);
        let width = self.panel_width(panel);
        (self.panel_first(panel) + inner % width, inner / width)
    }

    /// Index of one f32 result of a slot (counted over all experts).
    #[inline(always)]
    pub const fn value_index(self, rows: usize, slot: usize, row: usize) -> usize {
        self.values_offset(rows, row / BLOCK) + (slot - self.first) * BLOCK + row % BLOCK
    }

    /// Inverse of [`Self::value_index`]: (slot, row).
    #[inline(always)]
    pub const fn value_position(self, rows: usize, index: usize) -> (usize, usize) {
        let inner = index - self.first * rows;
        let tile = inner / (self.count * BLOCK);
        let within = inner % (self.count * BLOCK);
        (self.first + within / BLOCK, tile * BLOCK + within % BLOCK)
    }
}
