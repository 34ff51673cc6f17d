//! The weighted sum of a token's slots: router weights applied after the second GEMM, in f32, in ascending k, rounded
//! once.

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Columns of a thread.
pub const THREAD_COLUMNS: u32 = 4;
/// Columns of a block; blocks are (token, column group).
pub const BLOCK_COLUMNS: u32 = THREADS * THREAD_COLUMNS;

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::*;
    use crate::format::float16;
    use crate::params::{CombineParams, Element, NO_SLOT};
    use crate::ptx::thread::{block_idx_x, block_idx_y, thread_idx_x};
    use crate::ptx::{global, grid};

    /// One block of columns of one token.
    ///
    /// # Safety
    /// The params' pointers are as documented there; `(tokens, columns / BLOCK_COLUMNS)` blocks of [`THREADS`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn combine(params: CombineParams) {
        grid::follow();
        // SAFETY: token and column are below the sizes documented in CombineParams; 4 columns are 8 or 16 bytes.
        unsafe {
            let token = block_idx_x();
            let column = (block_idx_y() * THREADS + thread_idx_x()) * THREAD_COLUMNS;
            if token >= params.tokens.get() || column >= params.hidden {
                return;
            }
            let (mut sum, mut local) = ([0f32; 4], false);
            let mut k = 0;
            while k < params.topk {
                let entry = (token * params.topk + k) as usize;
                let slot = *(params.entry_slot as *const u32).add(entry);
                if slot != NO_SLOT {
                    let weight = *(params.topk_weights as *const f32).add(entry);
                    let offset = slot as usize * params.hidden as usize + column as usize;
                    let y = global::load_v4((params.slots as *const u32).add(offset));
                    let mut i = 0;
                    while i < 4 {
                        sum[i] += weight * f32::from_bits(y[i]);
                        i += 1;
                    }
                    local = true;
                }
                k += 1;
            }
            if params.accumulate != 0 && !local {
                return;
            }
            let offset = token as usize * params.hidden as usize + column as usize;
            if params.element == Element::F32 as u32 {
                let output = (params.output as *mut u32).add(offset);
                if params.accumulate != 0 {
                    let held = global::load_v4(output);
                    let mut i = 0;
                    while i < 4 {
                        sum[i] += f32::from_bits(held[i]);
                        i += 1;
                    }
                }
                global::store_v4(output, [sum[0].to_bits(), sum[1].to_bits(), sum[2].to_bits(), sum[3].to_bits()]);
            } else {
                let output = (params.output as *mut u16).add(offset);
                let mut bits = [0u16; 4];
                let mut i = 0;
                while i < 4 {
                    if params.accumulate != 0 {
                        sum[i] += float16::bf16_to_f32(*output.add(i));
                    }
                    bits[i] = float16::f32_to_bf16(sum[i]);
                    i += 1;
                }
                let pair = |i: usize| bits[i] as u32 | ((bits[i + 1] as u32) << 16);
                global::store_v2(output as *mut u32, [pair(0), pair(2)]);
            }
        }
    }
}
