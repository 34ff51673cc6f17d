//! Every layout is a bijection: the inverse undoes the forward map, and every byte or nibble is used exactly once.

use nvfp4_moe_device::format::packed::{
    Half, LayerLayout, MatrixLayout, NibbleOffset, TileGrid, TileOrder, deinterleaved_row, interleaved_row,
};
use nvfp4_moe_device::format::scale_atom;
use nvfp4_moe_device::format::slot_groups::{GROUP_SLOTS, SlotGroups, TILE_K, most_groups};
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::format::tile_mma::{MmaTile, activation_column, activation_place};
use nvfp4_moe_device::format::tile_mxf4::{ActivationStage, Mxf4Tile, weight_scale_lane, weight_scale_row};

fn tile_is_a_bijection<T: TileOrder>() {
    let mut nibbles = vec![false; T::CODE_BYTES * 2];
    for row in 0..T::ROWS {
        for k in 0..T::K {
            let at = T::code_offset(row, k);
            assert_eq!(T::code_position(at), (row, k));
            let index = at.byte * 2 + at.high as usize;
            assert!(!std::mem::replace(&mut nibbles[index], true), "({row}, {k}) shares a nibble");
        }
    }
    assert!(nibbles.iter().all(|used| *used));
    let mut scales = vec![false; T::SCALE_BYTES];
    for row in 0..T::ROWS {
        for block in 0..T::K / 16 {
            let at = T::scale_offset(row, block);
            assert_eq!(T::scale_position(at), (row, block));
            assert!(!std::mem::replace(&mut scales[at], true), "({row}, {block}) shares a byte");
        }
    }
    assert!(scales.iter().all(|used| *used));
    assert_eq!(T::BYTES % 16, 0, "tiles are copied 16 bytes at a time");
}

#[test]
fn tiles_are_bijections() {
    tile_is_a_bijection::<MmaTile>();
    tile_is_a_bijection::<CpuTile>();
    tile_is_a_bijection::<Mxf4Tile>();
}

#[test]
fn stored_words_keep_what_they_hold() {
    fn check<T: TileOrder>() {
        for nibbles in [0, 0x7654_3210, 0xFEDC_BA98, 0x0F0F_F0F0, u32::MAX] {
            assert_eq!(T::nibbles(T::stored(nibbles)), nibbles);
        }
        for bytes in [0, 0x0102_0304, 0x7F7E_0800, 0x3807_7F09] {
            assert_eq!(T::scales(T::stored_scales(bytes)), bytes);
        }
        assert_eq!(T::stored_scales(0), 0);
    }
    check::<MmaTile>();
    check::<CpuTile>();
    check::<Mxf4Tile>();
}

#[test]
fn activation_rows_are_a_bijection() {
    let mut places: Vec<usize> = (0..192).map(activation_place).collect();
    assert!((0..192).all(|k| activation_column(activation_place(k)) == k));
    places.sort_unstable();
    assert!(places.into_iter().eq(0..192));
    // Hand-derived: column 32 + 16 + 8 + 5 is the second of the pair of lane 2, register 1, step 1 of the second load.
    assert_eq!(activation_place(32 + 16 + 8 + 5), 32 + 2 * 8 + 4 + 2 + 1);
}

#[test]
fn activation_stages_are_bijections() {
    let rows = 128;
    let mut chunks: Vec<usize> = (0..rows * ActivationStage::CHUNKS)
        .map(|i| {
            let (row, chunk) = (i / ActivationStage::CHUNKS, i % ActivationStage::CHUNKS);
            let offset = ActivationStage::chunk_offset(row, chunk);
            assert_eq!(ActivationStage::chunk_position(offset), (row, chunk));
            offset
        })
        .collect();
    chunks.sort_unstable();
    assert!(chunks.into_iter().eq((0..rows * ActivationStage::CHUNKS).map(|i| i * 16)));
    let mut scales: Vec<usize> = (0..rows)
        .map(|row| {
            let offset = ActivationStage::scale_offset(row);
            assert_eq!(ActivationStage::scale_row(offset), row);
            offset
        })
        .collect();
    scales.sort_unstable();
    assert!(scales.into_iter().eq((0..rows).map(|i| i * ActivationStage::ROW_SCALE_BYTES)));
}

#[test]
fn every_lane_holds_the_scales_of_one_row() {
    for row in 0..Mxf4Tile::ROWS {
        let (pair, lane) = weight_scale_lane(row);
        assert_eq!(weight_scale_row(pair, lane), row);
        assert!(lane < 32);
    }
}

fn matrix_places_are_distinct<T: TileOrder>(rows: usize, k: usize) {
    let layout = MatrixLayout::<T>::new(rows, k);
    let mut used = vec![0u8; layout.bytes() * 2];
    for row in 0..rows {
        for column in 0..k {
            let NibbleOffset { byte, high } = layout.code_offset(row, column);
            used[byte * 2 + high as usize] += 1;
        }
        for block in 0..k / 16 {
            let byte = layout.scale_offset(row, block);
            used[byte * 2] += 1;
            used[byte * 2 + 1] += 1;
        }
    }
    assert!(used.iter().all(|count| *count <= 1));
    assert_eq!(used.iter().map(|count| *count as usize).sum::<usize>(), rows * k + 2 * rows * (k / 16));
}

#[test]
fn grids_are_bijections() {
    fn check<T: TileOrder>() {
        for (row_tiles, k_tiles) in
            [(1, 1), (3, 5), (15, 2), (23, 3), (24, 3), (25, 4), (55, 7), (95, 3), (96, 3), (97, 4), (211, 5)]
        {
            let grid = TileGrid::<T>::new(row_tiles, k_tiles);
            let mut places = vec![false; row_tiles * k_tiles];
            for row_tile in 0..row_tiles {
                for k_tile in 0..k_tiles {
                    let offset = grid.offset(row_tile, k_tile);
                    assert_eq!(grid.position(offset / T::BYTES), (row_tile, k_tile));
                    assert!(!std::mem::replace(&mut places[offset / T::BYTES], true));
                    assert_eq!(offset, grid.offset(row_tile, 0) + k_tile * grid.step(row_tile));
                }
            }
        }
    }
    check::<MmaTile>();
    check::<Mxf4Tile>();
    check::<CpuTile>();
    let grid = TileGrid::<MmaTile>::new(98, 3);
    assert_eq!(grid.offset(5, 1), (96 + 5) * MmaTile::BYTES);
    assert_eq!(grid.offset(97, 2), (96 * 3 + 2 * 2 + 1) * MmaTile::BYTES);
}

#[test]
fn groups_of_slots_are_a_bijection() {
    let counts = [0, 5, 8, 0, 17, 1, 24, 3];
    let k_tiles = 3;
    let slots: usize = counts.iter().sum();
    let mut used = vec![false; most_groups(slots, counts.len()) * GROUP_SLOTS * k_tiles * TILE_K];
    let mut first = 0;
    for (expert, count) in counts.into_iter().enumerate() {
        let groups = SlotGroups::new(expert, first, count);
        // All slots of the groups, also those that fill up the last one: no other expert may have them.
        for slot in 0..groups.count * GROUP_SLOTS {
            for k in 0..k_tiles * TILE_K {
                let place = groups.place(k_tiles, slot, k);
                assert_eq!(groups.position(k_tiles, place), (slot, k));
                assert!(!std::mem::replace(&mut used[place], true), "expert {expert}, slot {slot}, column {k}");
            }
        }
        first += count;
    }
    // The atom: row 3 of 128 bytes, its chunk 5 where chunk 6 would be.
    assert_eq!(SlotGroups { first: 0, count: 1 }.place(1, 3, 5 * 8 + 2), 3 * 64 + 6 * 8 + 2);
}

#[test]
fn matrices_of_odd_sizes_have_distinct_places() {
    for (rows, k) in [(16, 16), (272, 80), (560, 128), (176, 320), (320, 176), (352, 80), (64, 96), (2 * 176, 320)] {
        matrix_places_are_distinct::<MmaTile>(rows, k);
        matrix_places_are_distinct::<Mxf4Tile>(rows, k);
        matrix_places_are_distinct::<CpuTile>(rows, k);
    }
    assert_eq!(MatrixLayout::<CpuTile>::new(176, 320).bytes(), 176 * 320 * 9 / 16, "the CPU order pads nothing");
    assert_eq!(MatrixLayout::<MmaTile>::new(6144, 7168).bytes(), 6144 * 7168 * 9 / 16);
}

#[test]
fn gate_and_up_rows_interleave_as_a_bijection() {
    for interleave in [8, 16] {
        for intermediate in [16, 176, 768] {
            let mut used = vec![false; 2 * intermediate];
            for half in [Half::Gate, Half::Up] {
                for j in 0..intermediate {
                    let row = interleaved_row(interleave, half, j);
                    assert_eq!(deinterleaved_row(interleave, row), (half, j));
                    assert!(!std::mem::replace(&mut used[row], true));
                }
            }
            assert!(used.iter().all(|used| *used));
        }
    }
    let layer = LayerLayout::<MmaTile>::new(320, 176, 5, true);
    assert_eq!((layer.l1_row(Half::Gate, 9), layer.l1_row(Half::Up, 9)), (17, 25));
    assert_eq!(layer.bytes(), layer.l2_offset(4) + layer.l2().bytes());
}

#[test]
fn scale_atoms_are_a_bijection() {
    for (rows, blocks) in [(1, 1), (128, 4), (130, 5), (300, 20), (257, 448)] {
        let mut used = vec![false; scale_atom::bytes(rows, blocks)];
        for row in 0..rows {
            for block in 0..blocks {
                let at = scale_atom::offset(blocks, row, block);
                assert_eq!(scale_atom::position(blocks, at), (row, block));
                assert!(!std::mem::replace(&mut used[at], true));
            }
        }
        assert_eq!(used.iter().filter(|used| **used).count(), rows * blocks);
    }
    // Hand-derived: row 33 = row 1 of the second group of 32, block 5 = block 1 of the second atom.
    assert_eq!(scale_atom::offset(20, 33, 5), 512 + 16 + 4 + 1);
    assert_eq!(scale_atom::unpack4(scale_atom::pack4([1, 2, 3, 4])), [1, 2, 3, 4]);
    assert_eq!(scale_atom::pack4([1, 2, 3, 4]), 0x0403_0201);
}

#[test]
fn slot_orders_are_bijections() {
    use nvfp4_moe_device::format::slots::ExpertSlots;
    for counts in [vec![1], vec![3, 0, 17, 16, 1], vec![0, 40, 15]] {
        let total: usize = counts.iter().sum();
        for blocks in [1, 5, 11] {
            let rows = blocks * 16;
            let mut seen_blocks = vec![false; total * blocks];
            let mut seen_values = vec![false; total * rows];
            let mut first = 0;
            for &count in &counts {
                let slots = ExpertSlots { first, count };
                for slot in first..first + count {
                    for block in 0..blocks {
                        let index = slots.block_index(blocks, slot, block);
                        assert!(!std::mem::replace(&mut seen_blocks[index], true), "slot {slot}, block {block}");
                        assert_eq!(slots.block_position(blocks, index), (slot, block));
                    }
                    for row in 0..rows {
                        let index = slots.value_index(rows, slot, row);
                        assert!(!std::mem::replace(&mut seen_values[index], true), "slot {slot}, row {row}");
                        assert_eq!(slots.value_position(rows, index), (slot, row));
                    }
                }
                first += count;
            }
            assert!(seen_blocks.iter().chain(&seen_values).all(|seen| *seen));
        }
    }
}
