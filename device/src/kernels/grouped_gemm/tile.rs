//! Which part of which expert's GEMM a tile is.

#[cfg(nvfp4_arch = "sm80")]
use crate::format::packed::{TileGrid, TileOrder};
use crate::format::slot_groups::GROUP_SLOTS;
#[cfg(nvfp4_arch = "sm90")]
use crate::format::slot_groups::{SlotGroups, TILE_BYTES};
#[cfg(nvfp4_arch = "sm80")]
use crate::format::tile_mma::MmaTile;
use crate::kernels::device_rows::{div_rem, find_expert};
use crate::params::GroupedGemmParams;

/// What one tile is about.
pub(super) struct Tile {
    pub(super) weights: *const u8,
    pub(super) expert: u32,
    /// First packed row.
    pub(super) row: u32,
    /// First slot, and how many of the tile's slots exist.
    pub(super) slot: u32,
    pub(super) slots: u32,
    /// First slot of the expert, and how many it has: for tiles of slots.
    #[cfg_attr(not(nvfp4_arch = "sm90"), allow(dead_code))]
    pub(super) expert_slot: u32,
    #[cfg_attr(not(nvfp4_arch = "sm90"), allow(dead_code))]
    pub(super) expert_slots: u32,
}

impl Tile {
    /// Tile `index` of all tiles of `rows` x `slots`, in the order expert, row tile, token tile; `block_rows` row tiles
    /// an expert. With `EVEN`, an expert's groups of 8 slots are shared evenly among its token tiles; else each but the
    /// last has `slots`.
    ///
    /// # Safety
    /// The params' offsets are as documented there, `index` is below the number of tiles.
    #[inline(always)]
    pub(super) unsafe fn find<const EVEN: bool>(
        params: &GroupedGemmParams,
        index: u32,
        block_rows: u32,
        [rows, slots]: [u32; 2],
    ) -> Self {
        // SAFETY: the caller's contract.
        unsafe {
            let tile_offset = params.tile_offset as *const u32;
            let expert = find_expert(tile_offset, params.experts, div_rem(index, block_rows).0);
            let first = *tile_offset.add(expert as usize);
            let token_tiles = *tile_offset.add(expert as usize + 1) - first;
            let (row_tile, token_tile) = div_rem(index - first * block_rows, token_tiles);
            let of_expert = [0, 1].map(|i| *(params.expert_offset as *const u32).add(expert as usize + i));
            Self::of_expert::<EVEN>(params, expert, row_tile * rows, [token_tile, token_tiles], of_expert, slots)
        }
    }

    /// Token tile `token_tile` of `token_tiles` of an expert with these slots, from this packed row on.
    ///
    /// # Safety
    /// The expert has a token tile.
    #[inline(always)]
    pub(super) unsafe fn of_expert<const EVEN: bool>(
        params: &GroupedGemmParams,
        expert: u32,
        row: u32,
        [token_tile, token_tiles]: [u32; 2],
        [expert_slot, expert_end]: [u32; 2],
        slots: u32,
    ) -> Self {
        // SAFETY: the caller's contract.
        unsafe {
            let expert_slots = expert_end - expert_slot;
            let (from, to) = if EVEN {
                let groups = expert_slots.div_ceil(GROUP_SLOTS as u32);
                let share = |tile: u32| div_rem(groups * tile, token_tiles).0 * GROUP_SLOTS as u32;
                (share(token_tile), share(token_tile + 1))
            } else {
                (token_tile * slots, (token_tile + 1) * slots)
            };
            let to = if to < expert_slots { to } else { expert_slots };
            Self {
                weights: (params.weights + expert as u64 * params.expert_bytes) as *const u8,
                expert,
                row,
                slot: expert_slot + from,
                slots: to - from,
                expert_slot,
                expert_slots,
            }
        }
    }

    /// Where the tile's activations are, in the tiles of [`SlotGroups`]: its first group.
    #[cfg(nvfp4_arch = "sm90")]
    #[inline(always)]
    pub(super) fn activation_run(&self, params: &GroupedGemmParams) -> Run {
        let (groups, first_group) = self.slot_groups();
        let offset = groups.tile(params.k_tiles as usize, 0, first_group) * 2;
        Run { first: (params.activations as *const u8).wrapping_add(offset), step: (groups.count * TILE_BYTES) as u32 }
    }

    /// Groups of the tile's expert, and which of them is the tile's first.
    #[cfg(nvfp4_arch = "sm90")]
    #[inline(always)]
    pub(super) fn slot_groups(&self) -> (SlotGroups, usize) {
        let groups = SlotGroups::new(self.expert as usize, self.expert_slot as usize, self.expert_slots as usize);
        (groups, (self.slot - self.expert_slot) as usize / GROUP_SLOTS)
    }

    /// Where the tile's weights are, from this row tile of it on.
    #[cfg(nvfp4_arch = "sm80")]
    #[inline(always)]
    pub(super) fn weight_run(&self, params: &GroupedGemmParams, further: u32) -> Run {
        let grid = TileGrid::<MmaTile>::new(params.row_tiles as usize, params.k_tiles as usize);
        let row_tile = self.row as usize / MmaTile::ROWS + further as usize;
        Run { first: self.weights.wrapping_add(grid.offset(row_tile, 0)), step: grid.step(row_tile) as u32 }
    }
}

/// The weights of a row tile and of those beside it, or the activations of a group of slots and of those beside it.
#[cfg(nvfp4_arch = "sm80")]
pub(super) struct Run {
    /// The first tile along K.
    pub(super) first: *const u8,
    /// Bytes to the next one: of all that lie side by side.
    pub(super) step: u32,
}
