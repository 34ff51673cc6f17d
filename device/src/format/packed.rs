//! Packed weights: which tile order, which row goes where, and how many bytes a layer takes.

use core::marker::PhantomData;

use super::BLOCK;

/// Place of one E2M1 code: a byte and which half of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NibbleOffset {
    /// Byte.
    pub byte: usize,
    /// Bits 4..7 rather than 0..3.
    pub high: bool,
}

/// Order of codes and scales inside one tile: a contiguous chunk of codes followed by scales.
pub trait TileOrder {
    /// Rows (of the weight matrix, N of the checkpoint) of a tile.
    const ROWS: usize;
    /// Elements of K of a tile.
    const K: usize;
    /// Bytes of codes of a tile.
    const CODE_BYTES: usize;
    /// Bytes of scales of a tile.
    const SCALE_BYTES: usize;
    /// Consecutive gate rows before as many up rows in the first GEMM's matrix.
    const INTERLEAVE: usize;
    /// Bytes of a tile.
    const BYTES: usize = Self::CODE_BYTES + Self::SCALE_BYTES;
    /// Row tiles that lie side by side: their tiles follow each other before the next ones along K, so that a block's share
    /// of K is one run of bytes.
    const GROUP: usize = 1;

    /// Place of a code inside the tile.
    fn code_offset(row: usize, k: usize) -> NibbleOffset;
    /// Inverse of [`TileOrder::code_offset`].
    fn code_position(offset: NibbleOffset) -> (usize, usize);
    /// Place of a scale inside the tile's scales (which follow its codes); `block` is in units of 16 of K.
    fn scale_offset(row: usize, block: usize) -> usize;
    /// Inverse of [`TileOrder::scale_offset`].
    fn scale_position(offset: usize) -> (usize, usize);

    /// How a word of 8 codes is stored; as it is, unless an order says otherwise.
    #[inline(always)]
    fn stored(nibbles: u32) -> u32 {
        nibbles
    }

    /// Inverse of [`TileOrder::stored`].
    #[inline(always)]
    fn nibbles(stored: u32) -> u32 {
        stored
    }

    /// How a word of 4 scale bytes is stored; as it is, unless an order says otherwise. Zeros stay zeros.
    #[inline(always)]
    fn stored_scales(bytes: u32) -> u32 {
        bytes
    }

    /// Inverse of [`TileOrder::stored_scales`].
    #[inline(always)]
    fn scales(stored: u32) -> u32 {
        stored
    }
}

/// The tiles of a matrix: groups of [`TileOrder::GROUP`] row tiles (the last one perhaps of fewer), in each the tiles along K,
/// and side by side the group's row tiles.
#[derive(Debug)]
pub struct TileGrid<T> {
    /// Tiles along the rows.
    pub row_tiles: usize,
    /// Tiles along K.
    pub k_tiles: usize,
    order: PhantomData<T>,
}

impl<T: TileOrder> TileGrid<T> {
    /// The grid of so many tiles.
    #[inline(always)]
    pub const fn new(row_tiles: usize, k_tiles: usize) -> Self {
        Self { row_tiles, k_tiles, order: PhantomData }
    }

    /// Row tiles of the group that a row tile is in.
    #[inline(always)]
    pub const fn width(&self, row_tile: usize) -> usize {
        let left = self.row_tiles - row_tile / T::GROUP * T::GROUP;
        if left < T::GROUP { left } else { T::GROUP }
    }

    /// Bytes from a tile of a row tile to the next one along K.
    #[inline(always)]
    pub const fn step(&self, row_tile: usize) -> usize {
        self.width(row_tile) * T::BYTES
    }

    /// First byte of a tile.
    #[inline(always)]
    pub const fn offset(&self, row_tile: usize, k_tile: usize) -> usize {
        let inner = row_tile % T::GROUP;
        ((row_tile - inner) * self.k_tiles + k_tile * self.width(row_tile) + inner) * T::BYTES
    }

    /// Inverse of [`TileGrid::offset`]: (row tile, tile along K) of a tile, counted in the order of memory. There is a tile
    /// along K.
    #[inline(always)]
    pub const fn position(&self, tile: usize) -> (usize, usize) {
        // Device code has no panic to branch to.
        let k_tiles = if self.k_tiles == 0 { 1 } else { self.k_tiles };
        let first = tile / (k_tiles * T::GROUP) * T::GROUP;
        let width = self.width(first);
        let width = if width == 0 { 1 } else { width };
        let inner = tile - first * k_tiles;
        (first + inner % width, inner / width)
    }
}

/// A packed matrix of `rows` x `k`, padded to whole tiles with zeros, which lie as [`TileGrid`] says.
#[derive(Debug)]
pub struct MatrixLayout<T> {
    /// Rows that mean something.
    pub rows: usize,
    /// K, a multiple of 16.
    pub k: usize,
    order: PhantomData<T>,
}

impl<T> Clone for MatrixLayout<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for MatrixLayout<T> {}

impl<T: TileOrder> MatrixLayout<T> {
    /// Layout of a matrix.
    #[inline(always)]
    pub const fn new(rows: usize, k: usize) -> Self {
        Self { rows, k, order: PhantomData }
    }

    /// Tiles along the rows.
    #[inline(always)]
    pub const fn row_tiles(&self) -> usize {
        self.rows.div_ceil(T::ROWS)
    }

    /// Tiles along K.
    #[inline(always)]
    pub const fn k_tiles(&self) -> usize {
        self.k.div_ceil(T::K)
    }

    /// Bytes, padding included.
    #[inline(always)]
    pub const fn bytes(&self) -> usize {
        self.row_tiles() * self.k_tiles() * T::BYTES
    }

    /// First byte of a tile.
    #[inline(always)]
    pub const fn tile_offset(&self, row_tile: usize, k_tile: usize) -> usize {
        self.grid().offset(row_tile, k_tile)
    }

    /// Where its tiles are.
    #[inline(always)]
    pub const fn grid(&self) -> TileGrid<T> {
        TileGrid::new(self.row_tiles(), self.k_tiles())
    }

    /// Place of the code of (row, k).
    #[inline(always)]
    pub fn code_offset(&self, row: usize, k: usize) -> NibbleOffset {
        let tile = self.tile_offset(row / T::ROWS, k / T::K);
        let inner = T::code_offset(row % T::ROWS, k % T::K);
        NibbleOffset { byte: tile + inner.byte, high: inner.high }
    }

    /// Place of the scale of (row, block of 16).
    #[inline(always)]
    pub fn scale_offset(&self, row: usize, block: usize) -> usize {
        let blocks = T::K / BLOCK;
        self.tile_offset(row / T::ROWS, block / blocks) + T::CODE_BYTES + T::scale_offset(row % T::ROWS, block % blocks)
    }
}

/// The two halves of the first GEMM's matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Half {
    /// Rows of gate_proj.
    Gate = 0,
    /// Rows of up_proj.
    Up = 1,
}

/// Row of the first GEMM's matrix where row `j` of gate or up goes.
#[inline(always)]
pub const fn interleaved_row(interleave: usize, half: Half, j: usize) -> usize {
    (j / interleave) * 2 * interleave + (half as usize) * interleave + j % interleave
}

/// Inverse of [`interleaved_row`].
#[inline(always)]
pub const fn deinterleaved_row(interleave: usize, row: usize) -> (Half, usize) {
    let half = if (row / interleave).is_multiple_of(2) { Half::Gate } else { Half::Up };
    (half, (row / (2 * interleave)) * interleave + row % interleave)
}

/// Packed weights of the experts of one layer: all first matrices, then all second ones.
#[derive(Debug)]
pub struct LayerLayout<T> {
    /// Width of the model.
    pub hidden: usize,
    /// Width of an expert.
    pub intermediate: usize,
    /// Experts here.
    pub experts: usize,
    /// Whether there is a gate matrix.
    pub gated: bool,
    order: PhantomData<T>,
}

impl<T> Clone for LayerLayout<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for LayerLayout<T> {}

impl<T: TileOrder> LayerLayout<T> {
    /// Layout of a layer.
    pub const fn new(hidden: usize, intermediate: usize, experts: usize, gated: bool) -> Self {
        Self { hidden, intermediate, experts, gated, order: PhantomData }
    }

    /// First GEMM (gate and up, or up alone): rows interleaved, K = hidden.
    pub const fn l1(&self) -> MatrixLayout<T> {
        MatrixLayout::new(self.intermediate * if self.gated { 2 } else { 1 }, self.hidden)
    }

    /// Second GEMM (down): rows = hidden, K = intermediate.
    pub const fn l2(&self) -> MatrixLayout<T> {
        MatrixLayout::new(self.hidden, self.intermediate)
    }

    /// Row of the first GEMM's matrix of row `j` of gate or up.
    pub const fn l1_row(&self, half: Half, j: usize) -> usize {
        if self.gated { interleaved_row(T::INTERLEAVE, half, j) } else { j }
    }

    /// First byte of an expert's first matrix.
    pub const fn l1_offset(&self, expert: usize) -> usize {
        expert * self.l1().bytes()
    }

    /// First byte of an expert's second matrix.
    pub const fn l2_offset(&self, expert: usize) -> usize {
        self.experts * self.l1().bytes() + expert * self.l2().bytes()
    }

    /// Bytes of all.
    pub const fn bytes(&self) -> usize {
        self.experts * (self.l1().bytes() + self.l2().bytes())
    }
}
