//! Quantization of activations: hidden rows before the first GEMM, rows of h before the second.
//!
//! One block a row, or several. `quantize` writes each element as the f16 number `code * scale`, which is exact: the operand of f16
//! tensor cores; `quantize_tiles` the same, once for each slot that the row belongs to, as `wgmma` reads them.
//! `quantize_codes` writes codes and block scales. All write the row's decode scale.

/// Threads of a block, at most; a thread takes 16 elements at a time.
pub const THREADS: u32 = 256;
/// Threads of a block where tokens are few: several blocks a row, each of which fits beside a block of the grouped GEMM that starts
/// meanwhile.
pub const FEW_THREADS: u32 = 128;
/// Registers of a thread of `quantize_tiles`, which `xtask ptxas` records.
pub const REGISTERS: u32 = 48;
/// Dynamic shared memory, in bytes: one maximum for each warp.
pub const SHARED_BYTES: u32 = THREADS / 32 * 4;

/// Dynamic shared memory of `quantize_tiles`, in bytes: also, where the slots of a token are.
#[must_use]
pub const fn tiles_shared_bytes(topk: u32) -> u32 {
    SHARED_BYTES + topk * DESTINATION_BYTES
}

/// Bytes of what is kept of a slot: expert's first group, groups, the slot's number there.
const DESTINATION_BYTES: u32 = 12;

#[cfg(target_arch = "nvptx64")]
pub(crate) mod device {
    use super::{DESTINATION_BYTES, SHARED_BYTES};
    use crate::format::slot_groups::{SlotGroups, TILE_K};
    use crate::format::tile_mma::activation_place;
    use crate::format::{BLOCK, block, block_fma, float16};
    use crate::kernels::device_rows::{find_expert, local_expert, row_count};
    use crate::params::{Element, ExpertScales, NO_SLOT, QuantizeParams, RowScale, Rows};
    use crate::ptx::float::{self, Gpu};
    use crate::ptx::thread::{block_dim_x, block_idx_x, block_idx_y, grid_dim_y, sync_threads, thread_idx_x};
    use crate::ptx::warp::{reduce_max, shuffle_xor};
    use crate::ptx::{global, grid, shared};

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
                let words = [global::load_v4(source), global::load_v4(source.add(4))];
                // One branch for all elements.
                if params.element == Element::Bf16 as u32 {
                    let mut i = 0;
                    while i < BLOCK {
                        x[i] = float16::bf16_to_f32((words[i / 8][i % 8 / 2] >> (16 * (i % 2))) as u16);
                        i += 1;
                    }
                } else {
                    let mut i = 0;
                    while i < BLOCK {
                        x[i] = float::convert_f32_f16((words[i / 8][i % 8 / 2] >> (16 * (i % 2))) as u16);
                        i += 1;
                    }
                }
            }
        }
        x
    }

    /// Bits of the largest magnitude of the row, the same in all threads; not finite if an element is not.
    #[inline(always)]
    unsafe fn row_amax(params: &QuantizeParams, row: u32) -> u32 {
        let mut largest = 0.0;
        let mut first = thread_idx_x() * BLOCK as u32;
        // SAFETY: first < k; shared memory holds a word for each warp.
        unsafe {
            while first < params.k {
                let x = load_block(params, row, first);
                largest = float::max_nan(largest, block_fma::largest_magnitude(&x, Gpu));
                first += block_dim_x() * BLOCK as u32;
            }
            let largest = reduce_max(largest.to_bits());
            if thread_idx_x() % 32 == 0 {
                shared::store_u32(shared::dynamic() + thread_idx_x() / 32 * 4, largest);
            }
            sync_threads();
            let mut all = 0;
            let mut warp = 0;
            while warp < block_dim_x() / 32 {
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

    /// Quantizes a row; `write` stores one block, if it begins in front of the stride, `write_scale` the row's scale in one
    /// thread. All threads call `before` once, in front of what is stored.
    #[inline(always)]
    unsafe fn quantize_row(
        params: &QuantizeParams,
        before: impl Fn(),
        write_scale: impl Fn(u32, f32),
        write: impl Fn(u32, u32, block_fma::Values<BLOCK>),
    ) {
        let row = block_idx_x();
        // SAFETY: pointers as documented in QuantizeParams, row below the number of rows.
        unsafe {
            if row >= row_count(params.rows, &params.tokens, params.expert_offset, params.experts) {
                return;
            }
            let input_row = if params.gather == 0 { row } else { *(params.gather as *const u32).add(row as usize) };
            let g = row_scale(params, row, input_row);
            // The lanes of a warp take part together, also behind the row's end.
            let lane_first = thread_idx_x() % 32 * BLOCK as u32;
            let mut warp_first = (block_idx_y() * block_dim_x() + thread_idx_x() / 32 * 32) * BLOCK as u32;
            let mut stored = false;
            loop {
                let first = warp_first + lane_first;
                let quantized = if first < params.k {
                    block_fma::quantize(&load_block(params, input_row, first), g, Gpu)
                } else {
                    block_fma::Values { values: [0.0; BLOCK], scale: 0.0 }
                };
                if !stored {
                    stored = true;
                    before();
                    if thread_idx_x() == 0 && block_idx_y() == 0 {
                        write_scale(row, g);
                    }
                }
                if warp_first < params.stride {
                    write(row, first, quantized);
                }
                warp_first += grid_dim_y() * block_dim_x() * BLOCK as u32;
                if warp_first >= params.stride {
                    return;
                }
            }
        }
    }

    /// [`quantize_row`] to places of the row's own; `write` stores one block.
    #[inline(always)]
    unsafe fn quantize_own_row(params: &QuantizeParams, write: impl Fn(u32, u32, block_fma::Values<BLOCK>)) {
        // SAFETY: the caller's contract.
        unsafe {
            let write_existing = |row, first, quantized| {
                if first < params.stride {
                    write(row, first, quantized);
                }
            };
            quantize_row(params, || {}, |row, g| write_scale(params, row, g), write_existing);
        }
    }

    /// The scale of a row goes to the row's place.
    #[inline(always)]
    unsafe fn write_scale(params: &QuantizeParams, row: u32, g: f32) {
        // SAFETY: there is a scale for each row.
        unsafe { *(params.row_scales as *mut f32).add(row as usize) = g };
    }

    /// Rows to f16 products of code and scale, in the order of [`activation_place`].
    ///
    /// # Safety
    /// The params' pointers are as documented there; up to [`THREADS`] a block, one or more for each row, `SHARED_BYTES`.
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn quantize(params: QuantizeParams) {
        grid::follow();
        // SAFETY: the output has `stride` columns; a block of 16 is 32 bytes.
        unsafe {
            quantize_own_row(&params, |row, first, quantized| {
                let output = (params.output as *mut u16).add(row as usize * params.stride as usize);
                let pair = |i: usize| quantized.f16_pair(i, i + 1);
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
            quantize_own_row(&params, |row, first, quantized| {
                let quantized = quantized.block();
                let index = (row as usize * params.stride as usize + first as usize) / BLOCK;
                let codes = (params.output as *mut u32).add(index * 2);
                global::store_v2(codes, [quantized.codes as u32, (quantized.codes >> 32) as u32]);
                *(params.block_scales as *mut u8).add(index) = quantized.scale;
            });
        }
    }

    /// The place of a slot, from shared memory.
    #[inline(always)]
    unsafe fn destination(index: u32) -> (SlotGroups, usize) {
        let address = shared::dynamic() + SHARED_BYTES + index * DESTINATION_BYTES;
        // SAFETY: written before the barrier.
        let word = |i: u32| unsafe { shared::load_u32(address + 4 * i) as usize };
        (SlotGroups { first: word(0), count: word(1) }, word(2))
    }

    /// Rows to f16 products of code and scale, into the tiles of [`SlotGroups`] of every slot of the row: a token's
    /// slots here, or where rows are slots the slot itself. Scales are written for slots.
    ///
    /// # Safety
    /// As [`quantize`], with [`super::tiles_shared_bytes`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn quantize_tiles(params: QuantizeParams) {
        if params.unread != 0 {
            grid::launch_dependents();
        }
        let by_token = params.rows == Rows::Token as u32;
        // Tokens, and scales that no kernel makes, are there before: this kernel starts when all that is in front of the
        // routing is done.
        let early = by_token && params.row_scale != RowScale::PerTensor as u32;
        // SAFETY: pointers as documented in QuantizeParams.
        let rows = || unsafe { row_count(params.rows, &params.tokens, params.expert_offset, params.experts) };
        // Whoever has no row waits too: what follows may not start earlier.
        if !early || block_idx_x() >= rows() {
            grid::follow_closely();
        }
        let slots = if by_token { params.topk } else { 1 };
        let k_tiles = params.stride as usize / TILE_K;
        // SAFETY: rows and entries below the sizes documented in QuantizeParams; a slot's place is in its expert's tiles.
        unsafe {
            let entry = |row: u32, index: u32| (row * slots + index) as usize;
            let slot_of = |row: u32, index: u32| {
                if by_token { *(params.entry_slot as *const u32).add(entry(row, index)) } else { row }
            };
            let destinations = || {
                let (row, mut index) = (block_idx_x(), thread_idx_x());
                // A token's, found before the wait; a slot's is found behind it.
                let token_expert = |index: u32| {
                    if by_token && index < slots {
                        local_expert(params.topk_ids, entry(row, index) as u32, params.first_expert, params.experts)
                    } else {
                        NO_SLOT
                    }
                };
                let mut expert = token_expert(index);
                if early {
                    grid::follow_closely();
                }
                while index < slots {
                    let slot = slot_of(row, index);
                    let address = shared::dynamic() + SHARED_BYTES + index * DESTINATION_BYTES;
                    let mut place = [0; 3];
                    let offsets = params.expert_offset as *const u32;
                    if !by_token {
                        expert = find_expert(offsets, params.experts, slot);
                    }
                    if expert != NO_SLOT {
                        let expert = expert as usize;
                        let (first, end) = (*offsets.add(expert), *offsets.add(expert + 1));
                        let groups = SlotGroups::new(expert, first as usize, (end - first) as usize);
                        place = [groups.first as u32, groups.count as u32, slot - first];
                    }
                    let mut i = 0;
                    while i < 3 {
                        shared::store_u32(address + 4 * i as u32, place[i]);
                        i += 1;
                    }
                    index += block_dim_x();
                    expert = token_expert(index);
                }
                sync_threads();
            };
            let write_scales = |row: u32, g: f32| {
                let mut index = 0;
                while index < slots {
                    let slot = slot_of(row, index);
                    if slot != NO_SLOT {
                        write_scale(&params, slot, g);
                    }
                    index += 1;
                }
            };
            quantize_row(&params, destinations, write_scales, |_, first, quantized| {
                let pair = |i: usize| quantized.f16_pair(i, i + 1);
                // Two lanes exchange halves, so that both halves of 32 bytes are written at once.
                let odd = thread_idx_x() % 2 != 0;
                let (mut low, mut high) = ([0; 4], [0; 4]);
                let mut i = 0;
                while i < 4 {
                    let [own, other] = [pair(2 * i), pair(2 * i + 8)];
                    let received = shuffle_xor(if odd { own } else { other }, 1);
                    (low[i], high[i]) = if odd { (received, other) } else { (own, received) };
                    i += 1;
                }
                if first >= params.stride {
                    return;
                }
                // An even lane's chunks are the first of its own and of its neighbour's block, an odd lane's the second ones.
                let chunks = if odd { [first - 8, first + 8] } else { [first, first + 16] };
                let mut index = 0;
                while index < slots {
                    let (groups, slot) = destination(index);
                    if groups.count != 0 {
                        let output = params.output as *mut u16;
                        let place = |chunk: usize| groups.place(k_tiles, slot, chunks[chunk] as usize);
                        global::store_v4(output.add(place(0)) as *mut u32, low);
                        global::store_v4(output.add(place(1)) as *mut u32, high);
                    }
                    index += 1;
                }
            });
        }
    }
}
