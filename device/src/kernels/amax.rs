//! Largest finite magnitude of a matrix, for the scale mode `PerTensor`.
//!
//! Elements that are not finite are left out: they turn their own token to NaN and must change nothing else. Magnitudes
//! are compared as integers, so the order of the reduction does not matter.

/// Threads of a block; a block takes a row at a time.
pub const THREADS: u32 = 256;

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::THREADS;
    use crate::format::{BLOCK, block};
    use crate::kernels::{device_rows::row_count, quantize::device::load_block};
    use crate::params::QuantizeParams;
    use crate::ptx::atomic::max_u32;
    use crate::ptx::grid;
    use crate::ptx::thread::{block_idx_x, grid_dim_x, thread_idx_x};
    use crate::ptx::warp::reduce_max;

    /// Raises `amax_bits` to the largest finite magnitude of `input`.
    ///
    /// # Safety
    /// The params' pointers are as documented there; any number of blocks of [`THREADS`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn amax(params: QuantizeParams) {
        grid::follow();
        // SAFETY: rows and columns are below the sizes documented in QuantizeParams.
        unsafe {
            let rows = row_count(params.rows, &params.tokens, params.expert_offset, params.experts);
            let mut largest = 0;
            let mut row = block_idx_x();
            while row < rows {
                let mut first = thread_idx_x() * BLOCK as u32;
                while first < params.k {
                    let x = load_block(&params, row, first);
                    let mut i = 0;
                    while i < BLOCK {
                        let bits = block::magnitude_bits(x[i]);
                        if block::is_finite_magnitude(bits) && bits > largest {
                            largest = bits;
                        }
                        i += 1;
                    }
                    first += THREADS * BLOCK as u32;
                }
                row += grid_dim_x();
            }
            let largest = reduce_max(largest);
            if thread_idx_x() % 32 == 0 {
                max_u32(params.amax_bits as *mut u32, largest);
            }
        }
    }
}
