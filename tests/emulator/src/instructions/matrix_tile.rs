//! Matrices B in shared memory as `wgmma` multiplies them: in f64, kept while memory does not change, as the warps of a group
//! (and others) read the same one after the other.

use super::matrix_descriptor::Descriptor;
use super::product::{DEPTH, Element};
use crate::memory::shared::{SharedFault, SharedMemory};

/// The matrices that a block's warps read lately.
#[derive(Default)]
pub(crate) struct Tiles {
    tiles: Vec<Tile>,
    /// The one that makes room next.
    next: usize,
}

/// What a matrix is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TileKey {
    pub(super) descriptor: Descriptor,
    pub(super) n: usize,
    pub(super) n_major: bool,
    pub(super) element: Element,
}

struct Tile {
    key: TileKey,
    /// Of its memory, when it was read; none before.
    changes: Option<u64>,
    chunks: Vec<u32>,
    /// K first.
    values: Vec<f64>,
}

/// Who reads from when on.
#[derive(Clone, Copy)]
pub(super) struct Reader {
    pub(super) warp: u32,
    pub(super) time: u32,
}

impl Tiles {
    const MOST: usize = 16;

    /// The matrix as memory is now, K first; noted as read.
    pub(super) fn read(
        &mut self,
        shared: &mut SharedMemory,
        key: TileKey,
        reader: Reader,
    ) -> Result<&[f64], (u32, SharedFault)> {
        let index = self.tiles.iter().position(|tile| tile.key == key).unwrap_or_else(|| self.add(key));
        let tile = &mut self.tiles[index];
        shared.note_matrix_reads(&tile.chunks, reader.warp, reader.time)?;
        tile.refresh(shared)?;
        Ok(&tile.values)
    }

    fn add(&mut self, key: TileKey) -> usize {
        let (index, tile) = (self.next, Tile::new(key));
        if self.tiles.len() < Self::MOST {
            self.tiles.push(tile);
        } else {
            self.tiles[index] = tile;
        }
        self.next = (index + 1) % Self::MOST;
        index
    }
}

impl Tile {
    fn new(key: TileKey) -> Self {
        let TileKey { descriptor, n_major, .. } = key;
        let (n, depth) = (key.n as u32, DEPTH as u32);
        let chunk = |outer, inner| if n_major { (inner, outer) } else { (outer, inner) };
        let (outer, inner) = if n_major { (depth, n / 8) } else { (n, depth / 8) };
        let places = (0..outer).flat_map(|outer| (0..inner).map(move |inner| chunk(outer, inner)));
        let chunks = places.map(|(mn, k)| descriptor.chunk(n_major, mn, k)).collect();
        Self { key, changes: None, chunks, values: vec![0.0; DEPTH * key.n] }
    }

    /// Reads again if memory has changed.
    fn refresh(&mut self, shared: &SharedMemory) -> Result<(), (u32, SharedFault)> {
        let TileKey { n, n_major, element, .. } = self.key;
        let ends = self.chunks.iter().fold((u32::MAX, 0), |(low, high), &chunk| (low.min(chunk), high.max(chunk)));
        let changes = Some(shared.changes(ends.0, ends.1));
        if changes == self.changes {
            return Ok(());
        }
        for (i, &chunk) in self.chunks.iter().enumerate() {
            let elements = element.widen(shared.elements(chunk).map_err(|fault| (chunk, fault))?);
            if n_major {
                self.values[8 * i..8 * i + 8].copy_from_slice(&elements);
            } else {
                let (column, k) = (i / 2, 8 * (i % 2));
                elements.iter().enumerate().for_each(|(inner, &value)| self.values[(k + inner) * n + column] = value);
            }
        }
        self.changes = changes;
        Ok(())
    }
}
