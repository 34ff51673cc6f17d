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

    /// Slots that are read at a time, so that memory is waited for once.
    const TURN: usize = 8;

    /// Slots of a token from this one on, [`NO_SLOT`] behind the last, and their weights.
    #[inline(always)]
    unsafe fn read_slots(params: &CombineParams, token: u32, k: u32) -> ([u32; TURN], [f32; TURN]) {
        let (mut slots, mut weights) = ([NO_SLOT; TURN], [0.0; TURN]);
        let mut i = 0;
        while i < TURN {
            if k + (i as u32) < params.topk {
                let entry = (token * params.topk + k) as usize + i;
                // SAFETY: the entry exists.
                unsafe {
                    slots[i] = *(params.entry_slot as *const u32).add(entry);
                    weights[i] = *(params.topk_weights as *const f32).add(entry);
                }
            }
            i += 1;
        }
        (slots, weights)
    }

    /// One block of columns of one token.
    ///
    /// # Safety
    /// The params' pointers are as documented there; `(tokens, columns / BLOCK_COLUMNS)` blocks of [`THREADS`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn combine(params: CombineParams) {
        // What routing made is there before (`grid::follow_closely`), unless no GEMM is in between.
        grid::launch_dependents();
        if params.slots == 0 {
            grid::wait();
        }
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
                let (slots, weights) = read_slots(&params, token, k);
                // Behind the first time, it is done.
                grid::wait();
                let mut y = [[0; 4]; TURN];
                let mut i = 0;
                while i < TURN {
                    if slots[i] != NO_SLOT {
                        let offset = slots[i] as usize * params.hidden as usize + column as usize;
                        y[i] = global::load_v4((params.slots as *const u32).add(offset));
                    }
                    i += 1;
                }
                i = 0;
                while i < TURN {
                    if slots[i] != NO_SLOT {
                        let mut j = 0;
                        while j < 4 {
                            sum[j] += weights[i] * f32::from_bits(y[i][j]);
                            j += 1;
                        }
                        local = true;
                    }
                    i += 1;
                }
                k += TURN as u32;
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
