//! What the lane that copies weights says of a tile.

use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::ExpertScales;
use crate::ptx::shared;

/// What those who multiply must know of a tile.
pub(super) struct Job {
    /// Without the place of its weights.
    pub(super) tile: Tile,
    pub(super) scales: ExpertScales,
}

impl Job {
    /// Writes it; no slots mean that there are no more.
    #[inline(always)]
    pub(super) unsafe fn put(&self, place: u32) {
        let Tile { expert, row, slot, slots, expert_slot, expert_slots, .. } = self.tile;
        let ExpertScales { gate, up, down, l1_input, l2_input } = self.scales;
        // SAFETY: inside the planned shared memory, and nobody reads it any more.
        unsafe {
            shared::store_v4(place, [expert, row, slot, slots]);
            shared::store_v4(place + 16, [expert_slot, expert_slots, gate.to_bits(), up.to_bits()]);
            shared::store_v4(place + 32, [down.to_bits(), l1_input.to_bits(), l2_input.to_bits(), 0]);
        }
    }

    /// Reads it.
    #[inline(always)]
    pub(super) unsafe fn get(place: u32) -> Self {
        // SAFETY: inside the planned shared memory; the tile's first stage was full.
        unsafe {
            let [expert, row, slot, slots] = shared::load_v4(place);
            let [expert_slot, expert_slots, gate, up] = shared::load_v4(place + 16);
            let [down, l1_input, l2_input, _] = shared::load_v4(place + 32);
            let [gate, up, down, l1_input, l2_input] = [gate, up, down, l1_input, l2_input].map(f32::from_bits);
            let tile = Tile { weights: core::ptr::null(), expert, row, slot, slots, expert_slot, expert_slots };
            Self { tile, scales: ExpertScales { gate, up, down, l1_input, l2_input } }
        }
    }
}
