//! Reads memory as fast as the device can: the ceiling that measurements of the other kernels are compared with.
//!
//! Every thread reads 16 bytes at a time, [`IN_FLIGHT`] times before it looks at the first, all threads side by side.
//! Memory budget: registers only.

/// Threads of a block.
pub const THREADS: u32 = 512;

/// Blocks on each multiprocessor.
pub const BLOCKS_PER_MULTIPROCESSOR: u32 = 2;

/// Loads of a thread that do not wait for each other.
pub const IN_FLIGHT: u64 = 4;

/// A thread whose words xor to this writes it, so that no compiler can drop the loads. A buffer of equal words never
/// gives it: their xor is 0 or the word.
pub const UNLIKELY: u32 = 0x9E37_79B9;

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::{IN_FLIGHT, THREADS, UNLIKELY};
    use crate::params::ReadParams;
    use crate::ptx::global::load_v4;
    use crate::ptx::thread::{block_idx_x, grid_dim_x, thread_idx_x};

    /// Bytes of a load.
    const LOAD_BYTES: u64 = 16;

    #[inline(always)]
    fn fold(words: [u32; 4]) -> u32 {
        words[0] ^ words[1] ^ words[2] ^ words[3]
    }

    /// Reads `bytes` bytes from `data` on, once.
    ///
    /// # Safety
    /// The params' pointers are as documented there; any number of blocks of [`THREADS`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn read_all(params: ReadParams) {
        let stride = grid_dim_x() as u64 * THREADS as u64 * LOAD_BYTES;
        let mut offset = (block_idx_x() as u64 * THREADS as u64 + thread_idx_x() as u64) * LOAD_BYTES;
        let mut folded = 0;
        // SAFETY: every load ends at or before `bytes`, and offsets are multiples of 16.
        unsafe {
            while offset + (IN_FLIGHT - 1) * stride + LOAD_BYTES <= params.bytes {
                let first = load_v4((params.data + offset) as *const u32);
                let second = load_v4((params.data + offset + stride) as *const u32);
                let third = load_v4((params.data + offset + 2 * stride) as *const u32);
                let fourth = load_v4((params.data + offset + 3 * stride) as *const u32);
                folded ^= fold(first) ^ fold(second) ^ fold(third) ^ fold(fourth);
                offset += IN_FLIGHT * stride;
            }
            while offset + LOAD_BYTES <= params.bytes {
                folded ^= fold(load_v4((params.data + offset) as *const u32));
                offset += stride;
            }
            if folded == UNLIKELY {
                *(params.sums as *mut u32) = folded;
            }
        }
    }
}
