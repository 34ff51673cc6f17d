//! Quantization of activations: hidden rows before the first GEMM, rows of h before the second.
//!
//! One block a row. `quantize` writes each element as the f16 number `code * scale`, which is exact: the operand of f16
//! tensor cores. `quantize_codes` writes codes and block scales. Both write the row's decode scale.

/// Threads of a block; a thread takes 16 elements at a time.
pub const THREADS: u32 = 256;
/// Dynamic shared memory, in bytes: one maximum for each warp.
pub const SHARED_BYTES: u32 = THREADS / 32 * 4;

#[cfg(target_arch = "nvptx64")]
pub(crate) mod device {
    use super::THREADS;
    use crate::format::tile_mma::activation_place;
    use crate::format::{BLOCK, block, float16};
    use crate::kernels::device_rows::{find_expert, row_count};
    use crate::params::{Element, ExpertScales, QuantizeParams, RowScale, Rows};
    use crate::ptx::thread::{block_idx_x, sync_threads, thread_idx_x};
    use crate::ptx::warp::reduce_max;
    use crate::ptx::{global, shared};

    /// Sixteen elements of an input row as f32.
    ///
    /// # Safety
    /// `first` is a multiple of 16 below `k`, `row` an input row; rows are 16-byte aligned.
    #[inline(always)]
    pub(crate) unsafe fn load_block(params: &QuantizeParams, row: u32, first: u32) -> [f32; BLOCK] {
        let offset = row as usize * params.k as usize + first as usize;
        let mut x = [0.0; BLOCK];
        // SAFETY: the caller's contract; 16 elements are 32 or 64 bytes.
        unsafe {
            if params.element == Element::F32 as u32 {
                let source = (params.input as *const u32).add(offset);
                let mut quarter = 0;
                while quarter < 4 {
                    let words = global::load_v4(source.add(quarter * 4));
                    let mut i = 0;
                    while i < 4 {
                        x[quarter * 4 + i] = f32::from_bits(words[i]);
                        i += 1;
                    }
                    quarter += 1;
                }
            } else {
                let source = (params.input as *const u16).add(offset) as *const u32;
                let bf16 = params.element == Element::Bf16 as u32;
                let mut half = 0;
                while half < 2 {
                    let words = global::load_v4(source.add(half * 4));
                    let mut i = 0;
                    while i < 8 {
                        let bits = (words[i / 2] >> (16 * (i % 2))) as u16;
                        x[half * 8 + i] = if bf16 { float16::bf16_to_f32(bits) } else { float16::f16_to_f32(bits) };
                        i += 1;
                    }
                    half += 1;
                }
            }
        }
        x
    }

    /// Bits of the largest magnitude of the row, the same in all threads; not finite if an element is not.
    #[inline(always)]
    unsafe fn row_amax(params: &QuantizeParams, row: u32) -> u32 {
        let mut largest = 0;
        let mut first = thread_idx_x() * BLOCK as u32;
        // SAFETY: first < k; shared memory holds a word for each warp.
        unsafe {
            while first < params.k {
                let x = load_block(params, row, first);
                let mut i = 0;
                while i < BLOCK {
                    let bits = block::magnitude_bits(x[i]);
                    if bits > largest {
                        largest = bits;
                    }
                    i += 1;
                }
                first += THREADS * BLOCK as u32;
            }
            let largest = reduce_max(largest);
            if thread_idx_x() % 32 == 0 {
                shared::store_u32(shared::dynamic() + thread_idx_x() / 32 * 4, largest);
            }
            sync_threads();
            let mut all = 0;
            let mut warp = 0;
            while warp < THREADS / 32 {
                let bits = shared::load_u32(shared::dynamic() + warp * 4);
                if bits > all {
                    all = bits;
                }
                warp += 1;
            }
            all
        }
    }

    /// Decode scale of output row `row`, whose input is `input_row`.
    #[inline(always)]
    unsafe fn row_scale(params: &QuantizeParams, row: u32, input_row: u32) -> f32 {
        // SAFETY: pointers as documented in QuantizeParams.
        unsafe {
            if params.row_scale == RowScale::PerToken as u32 {
                return block::global_scale(row_amax(params, input_row));
            }
            if params.row_scale == RowScale::PerTensor as u32 {
                return block::global_scale(*(params.amax_bits as *const u32));
            }
            let expert = if params.rows == Rows::Slot as u32 {
                find_expert(params.expert_offset as *const u32, params.experts, row)
            } else {
                0
            };
            let scales = (params.expert_scales as *const ExpertScales).add(expert as usize);
            if params.second == 0 { (*scales).l1_input } else { (*scales).l2_input }
        }
    }

    /// Quantizes row `row`; `write` stores one block.
    #[inline(always)]
    unsafe fn quantize_row(params: &QuantizeParams, write: impl Fn(u32, u32, block::Block)) {
        let row = block_idx_x();
        // SAFETY: pointers as documented in QuantizeParams, row below the number of rows.
        unsafe {
            if row >= row_count(params.rows, &params.tokens, params.expert_offset, params.experts) {
                return;
            }
            let input_row = if params.gather == 0 { row } else { *(params.gather as *const u32).add(row as usize) };
            let g = row_scale(params, row, input_row);
            if thread_idx_x() == 0 {
                *(params.row_scales as *mut f32).add(row as usize) = g;
            }
            let mut first = thread_idx_x() * BLOCK as u32;
            while first < params.stride {
                let quantized = if first < params.k {
                    block::quantize(&load_block(params, input_row, first), g)
                } else {
                    block::Block { codes: 0, scale: 0 }
                };
                write(row, first, quantized);
                first += THREADS * BLOCK as u32;
            }
        }
    }

    /// Rows to f16 products of code and scale, in the order of [`activation_place`].
    ///
    /// # Safety
    /// The params' pointers are as documented there; a block of [`THREADS`] for each row, `SHARED_BYTES`.
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn quantize(params: QuantizeParams) {
        // SAFETY: the output has `stride` columns; a block of 16 is 32 bytes.
        unsafe {
            quantize_row(&params, |row, first, quantized| {
                let output = (params.output as *mut u16).add(row as usize * params.stride as usize);
                let pair = |i: usize| quantized.f16(i) as u32 | ((quantized.f16(i + 1) as u32) << 16);
                // A lane's two registers of the block lie side by side.
                let mut i = 0;
                while i < 8 {
                    let place = activation_place(first as usize + i);
                    global::store_v2(output.add(place) as *mut u32, [pair(i), pair(i + 8)]);
                    i += 2;
                }
            });
        }
    }

    /// Rows to codes and block scales.
    ///
    /// # Safety
    /// As [`quantize`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn quantize_codes(params: QuantizeParams) {
        // SAFETY: the outputs have stride/2 and stride/16 bytes a row.
        unsafe {
            quantize_row(&params, |row, first, quantized| {
                let index = (row as usize * params.stride as usize + first as usize) / BLOCK;
                let codes = (params.output as *mut u32).add(index * 2);
                global::store_v2(codes, [quantized.codes as u32, (quantized.codes >> 32) as u32]);
                *(params.block_scales as *mut u8).add(index) = quantized.scale;
            });
        }
    }
}
