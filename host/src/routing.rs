//! Which slots (token, k) each expert of a rank takes, in one fixed order.

use std::ops::Range;

use nvfp4_moe_device::format::slots::ExpertSlots;

use crate::memory::{self, OutOfMemory};
use crate::shape::ExpertRange;

/// In [`Routing::slot_of`]: the expert is not here.
pub const NOT_LOCAL: u32 = u32::MAX;

/// Slots sorted by expert, then by (token, k). Ids outside the range, -1 among them, have no slot; an expert that a
/// token names twice gets two.
///
/// ```
/// use nvfp4_moe::{routing::{NOT_LOCAL, Routing}, shape::ExpertRange};
/// let routing = Routing::new(&[5, 4, -1, 5], 2, ExpertRange { first: 4, count: 2 });
/// assert_eq!(routing.expert_offset, [0, 1, 3]);
/// assert_eq!(routing.slot_token, [0, 0, 1]);
/// assert_eq!(routing.slot_k, [1, 0, 1]);
/// assert_eq!(routing.slot_of, [1, 0, NOT_LOCAL, 2]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// Token of each slot, `[slots]`.
    pub slot_token: Vec<u32>,
    /// Position among the token's picks of each slot, `[slots]`.
    pub slot_k: Vec<u32>,
    /// First slot of each expert, then the number of slots, `[experts here + 1]`.
    pub expert_offset: Vec<u32>,
    /// Slot of each pick, `[tokens, topk]`; [`NOT_LOCAL`] where there is none.
    pub slot_of: Vec<u32>,
}

impl Routing {
    /// Routes `topk_ids`, `[tokens, topk]`, to the experts in `range`.
    ///
    /// # Panics
    /// When `topk` is 0 or there are 2^32 - 1 ids or more.
    #[must_use]
    pub fn new(topk_ids: &[i32], topk: usize, range: ExpertRange) -> Self {
        let mut routing = Self::default();
        routing.rebuild(topk_ids, topk, range);
        routing
    }

    /// Empty, with room for `picks` ids and `experts` experts.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn with_capacity(picks: usize, experts: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            slot_token: memory::room("the slots' tokens", picks)?,
            slot_k: memory::room("the slots' choices", picks)?,
            expert_offset: memory::room("the experts' offsets", experts.saturating_add(1))?,
            slot_of: memory::room("the tokens' slots", picks)?,
        })
    }

    /// As [`Self::new`], in the same memory; allocates only when the capacity is too small.
    ///
    /// # Panics
    /// When `topk` is 0 or there are 2^32 - 1 ids or more.
    pub fn rebuild(&mut self, topk_ids: &[i32], topk: usize, range: ExpertRange) {
        assert!(topk > 0, "topk is 0");
        assert!(topk_ids.len() < NOT_LOCAL as usize, "slots are counted in 32 bits");
        self.expert_offset.clear();
        self.expert_offset.resize(range.count + 1, 0);
        for &id in topk_ids {
            if let Some(expert) = local_expert(id, range) {
                self.expert_offset[expert] += 1;
            }
        }
        // Counts become the slot behind each expert's last; filling from the back leaves its first.
        let mut slots = 0;
        for offset in &mut self.expert_offset {
            slots += *offset;
            *offset = slots;
        }
        self.slot_token.clear();
        self.slot_token.resize(slots as usize, 0);
        self.slot_k.clear();
        self.slot_k.resize(slots as usize, 0);
        self.slot_of.clear();
        self.slot_of.resize(topk_ids.len(), NOT_LOCAL);
        for (pick, &id) in topk_ids.iter().enumerate().rev() {
            if let Some(expert) = local_expert(id, range) {
                self.expert_offset[expert] -= 1;
                let slot = self.expert_offset[expert];
                self.slot_token[slot as usize] = (pick / topk) as u32;
                self.slot_k[slot as usize] = (pick % topk) as u32;
                self.slot_of[pick] = slot;
            }
        }
    }

    /// Number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slot_token.len()
    }

    /// The slots of one expert, counted from the first one here.
    ///
    /// # Panics
    /// When there is no such expert.
    #[inline]
    #[must_use]
    pub fn expert_slots(&self, expert: usize) -> ExpertSlots {
        let Range { start, end } = self.expert_offset[expert] as usize..self.expert_offset[expert + 1] as usize;
        ExpertSlots { first: start, count: end - start }
    }
}

/// Index among the experts here of a global id; `None` when it is not here.
#[inline]
#[must_use]
pub fn local_expert(id: i32, range: ExpertRange) -> Option<usize> {
    let id = usize::try_from(id).ok()?;
    range.contains(id).then(|| id - range.first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_by_expert_then_token_then_k() {
        let ids = [3, 3, 2, 9, 1, -1, 0, 3, i32::MIN, i32::MAX, 2, 3];
        let routing = Routing::new(&ids, 3, ExpertRange { first: 1, count: 3 });
        assert_eq!(routing.expert_offset, [0, 1, 3, 7]);
        assert_eq!(routing.slot_token, [1, 0, 3, 0, 0, 2, 3]);
        assert_eq!(routing.slot_k, [1, 2, 1, 0, 1, 1, 2]);
        for (pick, &slot) in routing.slot_of.iter().enumerate() {
            let local = local_expert(ids[pick], ExpertRange { first: 1, count: 3 });
            assert_eq!(slot != NOT_LOCAL, local.is_some());
            if let Some(expert) = local {
                let slots = routing.expert_slots(expert);
                assert!((slots.first..slots.first + slots.count).contains(&(slot as usize)));
                assert_eq!(
                    routing.slot_token[slot as usize] as usize * 3 + routing.slot_k[slot as usize] as usize,
                    pick
                );
            }
        }
    }

    #[test]
    fn nothing_local() {
        let routing = Routing::new(&[0, 1, 2, 3], 2, ExpertRange { first: 2, count: 0 });
        assert_eq!((routing.slots(), routing.expert_offset.as_slice()), (0, [0].as_slice()));
        assert_eq!(routing.slot_of, [NOT_LOCAL; 4]);
        assert_eq!(Routing::new(&[], 2, ExpertRange { first: 0, count: 5 }).expert_offset, [0; 6]);
    }
}
