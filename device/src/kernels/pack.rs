//! Packing: the matrices of one expert from the checkpoint's order into the tiles of the module's GPUs.
//!
//! One thread a 32-bit word of the output, found by the layout's inverse map, so every byte is written exactly once,
//! the padding with zeros.

/// Threads of a block.
pub const THREADS: u32 = 256;

#[cfg(target_arch = "nvptx64")]
mod device {
    #![allow(unreachable_pub, reason = "kernels are exported by name")]

    use super::THREADS;
    use crate::format::BLOCK;
    use crate::format::packed::{Half, MatrixLayout, NibbleOffset, TileOrder, deinterleaved_row};
    #[cfg(nvfp4_arch = "sm80")]
    use crate::format::tile_mma::MmaTile as Tile;
    #[cfg(nvfp4_arch = "sm120")]
    use crate::format::tile_mxf4::Mxf4Tile as Tile;
    use crate::params::PackParams;
    use crate::ptx::thread::{block_idx_x, thread_idx_x};

    /// Source pointers and row of a packed row; the row may be padding.
    #[inline(always)]
    fn source(params: &PackParams, packed_row: usize) -> (*const u8, *const u8, usize) {
        if params.up_codes == 0 {
            return (params.codes as *const u8, params.scales as *const u8, packed_row);
        }
        match deinterleaved_row(Tile::INTERLEAVE, packed_row) {
            (Half::Gate, row) => (params.codes as *const u8, params.scales as *const u8, row),
            (Half::Up, row) => (params.up_codes as *const u8, params.up_scales as *const u8, row),
        }
    }

    /// Code of an element of the packed matrix, 0 in the padding.
    #[inline(always)]
    unsafe fn code(params: &PackParams, packed_row: usize, k: usize) -> u32 {
        let (codes, _, row) = source(params, packed_row);
        if row >= params.rows as usize || k >= params.k as usize {
            return 0;
        }
        // SAFETY: row and k are inside the matrix.
        let byte = unsafe { *codes.add(row * (params.k as usize / 2) + k / 2) };
        ((byte >> (4 * (k % 2))) & 15) as u32
    }

    /// Scale byte of a block of the packed matrix, 0 in the padding.
    #[inline(always)]
    unsafe fn scale(params: &PackParams, packed_row: usize, block: usize) -> u32 {
        let (_, scales, row) = source(params, packed_row);
        let blocks = params.k as usize / BLOCK;
        if row >= params.rows as usize || block >= blocks {
            return 0;
        }
        // SAFETY: row and block are inside the matrix.
        unsafe { *scales.add(row * blocks + block) as u32 }
    }

    /// Packs one matrix (or gate and up, interleaved).
    ///
    /// # Safety
    /// The params' pointers are as documented there; blocks of [`THREADS`] cover the words of the packed matrix.
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn pack(params: PackParams) {
        let halves = if params.up_codes == 0 { 1 } else { 2 };
        let layout = MatrixLayout::<Tile>::new(params.rows as usize * halves, params.k as usize);
        let offset = (block_idx_x() as usize * THREADS as usize + thread_idx_x() as usize) * 4;
        if offset >= layout.bytes() {
            return;
        }
        let (tile, inner) = (offset / Tile::BYTES, offset % Tile::BYTES);
        let (row_tile, k_tile) = layout.grid().position(tile);
        let (row_base, k_base) = (row_tile * Tile::ROWS, k_tile * Tile::K);
        let mut word = 0;
        // SAFETY: positions are checked against the matrix; the word is inside the output.
        unsafe {
            if inner < Tile::CODE_BYTES {
                let mut nibble = 0;
                while nibble < 8 {
                    let at = NibbleOffset { byte: inner + nibble / 2, high: nibble % 2 == 1 };
                    let (row, k) = Tile::code_position(at);
                    word |= code(&params, row_base + row, k_base + k) << (4 * nibble);
                    nibble += 1;
                }
                word = Tile::stored(word);
            } else {
                let mut byte = 0;
                while byte < 4 {
                    let (row, block) = Tile::scale_position(inner - Tile::CODE_BYTES + byte);
                    word |= scale(&params, row_base + row, k_base / BLOCK + block) << (8 * byte);
                    byte += 1;
                }
                word = Tile::stored_scales(word);
            }
            *((params.output as usize + offset) as *mut u32) = word;
        }
    }
}
