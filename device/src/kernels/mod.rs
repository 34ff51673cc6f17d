//! The stages of the expert block, one file each. What both engines compute alike lives in [`activation`].
//!
//! Constants that the host needs (threads, tile sizes, shared memory) are compiled on both sides; the kernels
//! themselves only for the GPU.

pub mod activation;
pub mod amax;
pub mod combine;
pub mod grouped_gemm;
pub mod measure;
pub mod pack;
pub mod quantize;
pub mod route;

#[cfg(target_arch = "nvptx64")]
mod device_rows {
    use crate::params::{NO_SLOT, Rows, TokenCount};
    use crate::ptx::warp::shuffle_up;

    impl TokenCount {
        /// Tokens of this launch.
        ///
        /// # Safety
        /// `device` is 0 or the address of a readable u32.
        #[inline(always)]
        pub(crate) unsafe fn get(&self) -> u32 {
            if self.device == 0 {
                return self.bound;
            }
            // SAFETY: the caller's contract.
            let tokens = unsafe { *(self.device as *const u32) };
            if tokens < self.bound { tokens } else { self.bound }
        }
    }

    /// Quotient and remainder; `b` is never 0 (device code has no panic to branch to).
    #[inline(always)]
    pub(crate) unsafe fn div_rem(a: u32, b: u32) -> (u32, u32) {
        // SAFETY: the caller's contract.
        unsafe { core::hint::assert_unchecked(b != 0) };
        (a / b, a % b)
    }

    /// Local expert of an entry, [`NO_SLOT`] where it is not here.
    ///
    /// # Safety
    /// `topk_ids` holds more i32 than `entry`.
    #[inline(always)]
    pub(crate) unsafe fn local_expert(topk_ids: u64, entry: u32, first_expert: u32, experts: u32) -> u32 {
        // SAFETY: the caller's contract.
        let id = unsafe { *(topk_ids as *const i32).add(entry as usize) };
        // Ids below first_expert wrap to large numbers.
        let local = (id as u32).wrapping_sub(first_expert);
        if id >= 0 && local < experts { local } else { NO_SLOT }
    }

    /// Inclusive sum over the lanes up to this one.
    #[inline(always)]
    pub(crate) fn warp_inclusive_sum(mut value: u32, lane: u32) -> u32 {
        let mut delta = 1;
        while delta < 32 {
            let below = shuffle_up(value, delta);
            if lane >= delta {
                value += below;
            }
            delta *= 2;
        }
        value
    }

    /// Rows of a matrix of tokens or slots.
    ///
    /// # Safety
    /// As [`TokenCount::get`]; `expert_offset` holds `experts + 1` u32.
    #[inline(always)]
    pub(crate) unsafe fn row_count(rows: u32, tokens: &TokenCount, expert_offset: u64, experts: u32) -> u32 {
        // SAFETY: the caller's contract.
        unsafe {
            if rows == Rows::Token as u32 { tokens.get() } else { *(expert_offset as *const u32).add(experts as usize) }
        }
    }

    /// The expert whose range `offsets[e]..offsets[e + 1]` holds `index`, which is below `offsets[experts]`.
    ///
    /// # Safety
    /// `offsets` holds `experts + 1` ascending u32.
    #[inline(always)]
    pub(crate) unsafe fn find_expert(offsets: *const u32, experts: u32, index: u32) -> u32 {
        let (mut low, mut high) = (0, experts);
        while high - low > 1 {
            let middle = (low + high) / 2;
            // SAFETY: middle < experts.
            if unsafe { *offsets.add(middle as usize) } <= index {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }
}
