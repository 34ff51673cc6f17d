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

/// Largest [`steepness`](LastShares::steepness): from 21 to 11 sixteenths. On an H200 the multiprocessors differ by up to 9% in
/// the time for an equal share, of which this is about a fifth.
const STEEPEST: u32 = 5;

impl LastShares {
    /// Of so many units, where blocks take `most` at a time; none where a block has but one turn.
    #[inline(always)]
    pub const fn of(units: u32, blocks: u32, most: u32) -> Option<Self> {
        let each = units.div_ceil(if blocks == 0 { 1 } else { blocks });
        if each <= most {
            return None;
        }
        // As many turns as without claims. The largest claim is one turn, too.
        let (usual, least) = (most * 3 / 4, each - (each - 1) / most * most);
        let average = if least < usual { usual } else { least };
        let steepness = 16 * (most - average) / average;
        let steepness = if steepness < STEEPEST { steepness } else { STEEPEST };
        let left = average * blocks;
        Some(Self { first: units - left, left, blocks, steepness })
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
