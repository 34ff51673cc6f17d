//! Splitting one buffer among threads along units of different lengths.

use std::ops::Range;

/// A range of units and the part of a buffer that they own.
pub(super) struct Part<'a, T> {
    pub(super) units: Range<usize>,
    pub(super) data: &'a mut [T],
}

/// Units that own consecutive parts of a buffer.
pub(super) trait Units: Sync {
    /// First element of a unit; for the unit behind the last, the length of the buffer. Never decreases.
    fn start(&self, unit: usize) -> usize;

    /// Whether a part is so small that one task takes it.
    fn is_small(&self, units: usize, elems: usize) -> bool;
}

/// Calls `work` for parts that together cover `part`, on the threads of the current rayon pool.
pub(super) fn for_each_part<T: Send>(units: &impl Units, part: Part<'_, T>, work: &(impl Fn(Part<'_, T>) + Sync)) {
    let count = part.units.len();
    if count == 0 {
        return;
    }
    if count == 1 || units.is_small(count, part.data.len()) {
        return work(part);
    }
    let Range { start, end } = part.units;
    let middle = start + count / 2;
    let (left, right) = part.data.split_at_mut(units.start(middle) - units.start(start));
    rayon::join(
        || for_each_part(units, Part { units: start..middle, data: left }, work),
        || for_each_part(units, Part { units: middle..end, data: right }, work),
    );
}
