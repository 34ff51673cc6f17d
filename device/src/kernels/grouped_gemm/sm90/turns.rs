//! What a block multiplies, turn after turn.

use super::offsets::Offsets;
use super::*;
use crate::kernels::device_rows::div_rem;
use crate::kernels::grouped_gemm::ROW_FRAGMENTS;
use crate::kernels::grouped_gemm::tile::Tile;
use crate::params::GroupedGemmParams;
use crate::ptx::thread::{block_idx_x, grid_dim_x};
use crate::ptx::warp::{reduce_add, uniform};

/// Slots of a token tile.
pub(super) const SLOTS: u32 = (FEW_SLOT_FRAGMENTS * GROUP_SLOTS) as u32;
/// Token tiles of which units are multiplied at once, at most.
pub(super) const PARTS: u32 = FEW_PARTS as u32;

/// Row tiles of one token tile in one turn.
pub(super) struct Part {
    pub(super) tile: Tile,
    /// Row tiles; 0: the part is none.
    pub(super) count: u32,
    /// How many units of the turn are in front of its own.
    pub(super) units_before: u32,
}

/// Units of a block's share, turn after turn; with `CLAIMS`, the last turn is claimed.
pub(super) struct Turns<const CLAIMS: bool> {
    offsets: Offsets,
    pairs: u32,
    unit: u32,
    end: u32,
    /// What is still to be claimed.
    last: Option<LastShares>,
    /// Units of a turn, at most.
    most: u32,
    /// Units of as many warps as a multiprocessor has schedulers.
    even: u32,
}

impl<const CLAIMS: bool> Turns<CLAIMS> {
    /// The share of this block.
    #[inline(always)]
    pub(super) unsafe fn new(params: &GroupedGemmParams, offsets: Offsets, shape: &FewShape) -> Self {
        let pairs = params.row_tiles.div_ceil(ROW_FRAGMENTS as u32);
        // SAFETY: there is a number of token tiles behind the experts' first ones.
        let units = unsafe { offsets.of(params.experts)[1] * pairs };
        let (blocks, block) = (grid_dim_x(), block_idx_x());
        let last = if CLAIMS { LastShares::of(units, blocks, [shape.units(), shape.even()]) } else { None };
        // SAFETY: there is a block.
        let (whole, rest) = unsafe { div_rem(if let Some(last) = last { last.first } else { units }, blocks) };
        // SAFETY: there is a block.
        let share = |block: u32| unsafe { whole * block + div_rem(rest * block, blocks).0 };
        let [unit, end] = [0, 1].map(|i| share(block + i));
        Self { offsets, pairs, unit, end, last, most: shape.units(), even: shape.even() }
    }

    /// Whether there is another turn; `claim` is asked behind the block's own share, how many blocks were there before this
    /// one.
    #[inline(always)]
    pub(super) fn more(&mut self, claim: impl FnOnce() -> u32) -> bool {
        if self.unit == self.end
            && let Some(last) = self.last.take()
        {
            let number = claim();
            [self.unit, self.end] = [0, 1].map(|i| last.end_of(number + i));
        }
        self.unit < self.end
    }

    /// Part `part` of the next turn, and how many row tiles each part has. There is one; all lanes of the warp ask, of which the
    /// first ask for part 0.
    #[inline(always)]
    pub(super) unsafe fn next(
        &mut self,
        params: &GroupedGemmParams,
        lane: u32,
        part: u32,
    ) -> (Part, [u32; PARTS as usize]) {
        // SAFETY: every unit exists.
        unsafe {
            // As many turns as full ones would be, of about as many units each: of as many as keep all schedulers busy, since
            // a turn takes as long as the one that has most warps.
            let left = self.end - self.unit;
            let turns = left.div_ceil(self.most);
            let most = div_rem(left.div_ceil(self.even) + turns - 1, turns).0 * self.even;
            let most = most.min(self.most).min(left);
            let (token_tile, pair) = div_rem(self.unit, self.pairs);
            let first_part = most.min(self.pairs - pair);
            let second_part = (most - first_part).min(self.pairs);
            self.unit += first_part + second_part;
            let row_tiles = |pair: u32, count: u32| (2 * (pair + count)).min(params.row_tiles) - 2 * pair;
            let counts = [row_tiles(pair, first_part), row_tiles(0, second_part)];
            let (first, units_before, count) =
                if part == 0 { (2 * pair, 0, counts[0]) } else { (0, first_part, counts[1]) };
            // Of a part that is none, the tile is the first one's.
            let token_tile = if count > 0 { token_tile + part } else { token_tile };
            let expert = self.find_expert(params.experts, token_tile, lane);
            let [[first_slot, first_tile], [end_slot, end_tile]] = [0, 1].map(|i| self.offsets.of(expert + i));
            let (row, of_tiles) = (first * FRAGMENT_ROWS as u32, [token_tile - first_tile, end_tile - first_tile]);
            let tile = Tile::of_expert::<true>(params, expert, row, of_tiles, [first_slot, end_slot], SLOTS);
            (Part { tile, count, units_before }, counts)
        }
    }

    /// The expert whose range of token tiles holds `token_tile`, which is the first lane's or the one behind it. All lanes of the
    /// warp take part: each looks at some of the experts.
    #[inline(always)]
    unsafe fn find_expert(&self, experts: u32, token_tile: u32, lane: u32) -> u32 {
        let first = uniform(token_tile);
        // Experts in front of the one that has the first token tile, and of the one that has the next.
        let mut before = [0; PARTS as usize];
        let mut expert = lane;
        while expert < experts {
            // SAFETY: there is an offset behind the last expert's.
            let [_, end] = unsafe { self.offsets.of(expert + 1) };
            let mut i = 0;
            while i < before.len() {
                before[i] += (end <= first + i as u32) as u32;
                i += 1;
            }
            expert += 32;
        }
        let [of_first, of_next] = before.map(reduce_add);
        if token_tile == first { of_first } else { of_next }
    }
}
