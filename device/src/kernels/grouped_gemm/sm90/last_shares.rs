//! Work that blocks claim, the first ones more of it.

/// The units that are left when each block has done its equal share of the first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastShares {
    /// Units in front of them.
    pub first: u32,
    left: u32,
    blocks: u32,
    /// How much larger the first claim is than the average one, and the last one smaller, in sixteenths of it.
    steepness: u32,
}

/// Largest [`steepness`](LastShares::steepness): from 25 to 7 sixteenths of the average claim, which is then 10 of 70 units. On an
/// H200 multiprocessors differ by 9% in the time for an equal share of those.
const STEEPEST: u32 = 9;

/// Least K, in tiles, for which there are claims: one takes two microseconds, which shorter turns do not win back.
const LEAST_K_TILES: u32 = 40;

impl LastShares {
    /// Whether turns of so many tiles of K are long enough for claims.
    #[inline(always)]
    pub const fn pay(k_tiles: u32) -> bool {
        k_tiles >= LEAST_K_TILES
    }

    /// Of so many units, where blocks take `most` at a time, best a multiple of `even`; none where a block has but one turn.
    #[inline(always)]
    pub const fn of(units: u32, blocks: u32, [most, even]: [u32; 2]) -> Option<Self> {
        let blocks = if blocks == 0 { 1 } else { blocks };
        let each = units / blocks;
        if each < most {
            return None;
        }
        // As many turns as without claims. The largest claim is one turn, too.
        let turns = units.div_ceil(most).div_ceil(blocks);
        let (own, most_own) = ((each - most * 5 / 8) / even * even, most * (turns - 1));
        let own = if own < most_own { own } else { most_own };
        let left = units - own * blocks;
        if left == 0 {
            return None;
        }
        let steepness = (16 * most * blocks - 16 * left) / left;
        let steepness = if steepness < STEEPEST { steepness } else { STEEPEST };
        Some(Self { first: own * blocks, left, blocks, steepness })
    }

    /// Where the units of claim `number` begin, and those of the one before it end.
    #[inline(always)]
    pub const fn end_of(&self, number: u32) -> u32 {
        let (number, blocks) = (number as u64, self.blocks as u64);
        let (sixteenths, steepness) = (16 * blocks * blocks, self.steepness as u64);
        // x + steepness / 16 (x - x^2), x = number / blocks, in sixteenths: of average size 1, and falling evenly.
        let shares = number * (blocks * (16 + steepness) - steepness * number);
        // SAFETY: there is a block.
        unsafe { core::hint::assert_unchecked(sixteenths != 0) };
        self.first + (self.left as u64 * shares / sixteenths) as u32
    }
}
