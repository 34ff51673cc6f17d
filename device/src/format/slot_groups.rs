//! Activations as `wgmma` reads them from shared memory, in global memory already: so that a stage is one bulk copy.
//!
//! The slots of an expert are in groups of 8, and K is in tiles of 64. A group's tile is one atom of the 128-byte swizzle,
//! K-major (PTX ISA, "Shared Memory Matrix Layout"): a row of 128 bytes a slot, whose chunks of 16 bytes are exchanged by
//! the row's number. The tiles of all groups of an expert follow each other, then comes the next tile along K: any run of
//! groups is contiguous.

/// Slots of a group.
pub const GROUP_SLOTS: usize = 8;
/// Columns of a tile.
pub const TILE_K: usize = 64;
/// Elements (f16) of one group's tile.
pub const TILE_ELEMENTS: usize = GROUP_SLOTS * TILE_K;
/// Bytes of one group's tile.
pub const TILE_BYTES: usize = TILE_ELEMENTS * 2;
/// Elements of a chunk, which stays whole.
const CHUNK: usize = 8;

/// Groups that this many slots of this many experts take at most.
#[inline(always)]
pub const fn most_groups(slots: usize, experts: usize) -> usize {
    slots / GROUP_SLOTS + least(experts, slots)
}

const fn least(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// The groups of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotGroups {
    /// First group, counted over all experts.
    pub first: usize,
    /// How many.
    pub count: usize,
}

impl SlotGroups {
    /// The groups of an expert whose slots are `first_slot .. first_slot + slots`. Groups may be left unused, but none is
    /// shared: `a/8 + ceil(n/8) <= (a + n)/8 + 1`, and with a slot the least of expert and first slot grows by 1 at least.
    #[inline(always)]
    pub const fn new(expert: usize, first_slot: usize, slots: usize) -> Self {
        Self { first: first_slot / GROUP_SLOTS + least(expert, first_slot), count: slots.div_ceil(GROUP_SLOTS) }
    }

    /// First element of a tile: of group `group` of this expert, tile `k_tile` of `k_tiles`.
    #[inline(always)]
    pub const fn tile(self, k_tiles: usize, k_tile: usize, group: usize) -> usize {
        (self.first * k_tiles + k_tile * self.count + group) * TILE_ELEMENTS
    }

    /// Place of column `k` of this expert's slot `slot`.
    #[inline(always)]
    pub const fn place(self, k_tiles: usize, slot: usize, k: usize) -> usize {
        let (row, column) = (slot % GROUP_SLOTS, k % TILE_K);
        let chunk = (column / CHUNK) ^ row;
        self.tile(k_tiles, k / TILE_K, slot / GROUP_SLOTS) + row * TILE_K + chunk * CHUNK + column % CHUNK
    }

    /// Inverse of [`SlotGroups::place`]: (slot, k).
    #[inline(always)]
    pub const fn position(self, k_tiles: usize, place: usize) -> (usize, usize) {
        let tile = place / TILE_ELEMENTS - self.first * k_tiles;
        let (k_tile, group) = (tile / self.count, tile % self.count);
        let (row, chunk) = (place % TILE_ELEMENTS / TILE_K, place % TILE_K / CHUNK);
        (group * GROUP_SLOTS + row, k_tile * TILE_K + (chunk ^ row) * CHUNK + place % CHUNK)
    }
}
