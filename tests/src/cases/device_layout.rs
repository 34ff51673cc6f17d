//! The packed weights of the GPU engine, byte for byte, in the order of each family of kernels: made here by the layout's forward map, by a model of
//! the `pack` kernel (which uses the inverse map), and by the kernel itself.

use anyhow::{Result, ensure};
use nvfp4_moe::activation::Activation;
use nvfp4_moe::checkpoint::RawMatrix;
use nvfp4_moe::io::ScaleMode;
use nvfp4_moe::kernel_family::KernelFamily;
use nvfp4_moe::load::check_expert;
use nvfp4_moe::shape::ExpertRange;
use nvfp4_moe_device::format::BLOCK;
use nvfp4_moe_device::format::packed::{Half, LayerLayout, MatrixLayout, NibbleOffset, TileOrder, deinterleaved_row};
use nvfp4_moe_device::format::{tile_mma::MmaTile, tile_mxf4::Mxf4Tile};
use nvfp4_moe_device::params::ExpertScales;

use super::setup::{Lab, Layer, SWIGLU, gpu};

fn code(raw: &RawMatrix<'_>, row: usize, k: usize) -> u8 {
    (raw.codes[(row * raw.cols + k) / 2] >> (4 * (k % 2))) & 15
}

/// Places one matrix by the forward map: `row_of` is where its row goes.
pub(super) fn place<T: TileOrder>(
    layout: MatrixLayout<T>,
    raw: &RawMatrix<'_>,
    row_of: impl Fn(usize) -> usize,
    packed: &mut [u8],
) {
    for row in 0..raw.rows {
        for k in 0..raw.cols {
            let at = layout.code_offset(row_of(row), k);
            packed[at.byte] |= code(raw, row, k) << (4 * u32::from(at.high));
        }
        for block in 0..raw.cols / BLOCK {
            let scale = raw.scales[row * raw.cols / BLOCK + block];
            packed[layout.scale_offset(row_of(row), block)] = scale;
        }
    }
}

/// Puts the codes and scales of a matrix' tiles into their stored form.
pub(super) fn store_words<T: TileOrder>(packed: &mut [u8]) {
    for tile in packed.chunks_exact_mut(T::BYTES) {
        let (codes, scales) = tile.split_at_mut(T::CODE_BYTES);
        for word in codes.as_chunks_mut::<4>().0 {
            *word = T::stored(u32::from_le_bytes(*word)).to_le_bytes();
        }
        for word in scales.as_chunks_mut::<4>().0 {
            *word = T::stored_scales(u32::from_le_bytes(*word)).to_le_bytes();
        }
    }
}

/// The packed weights of the layer's experts for a family of kernels, padding 0.
pub(super) fn by_layout_for(kernels: KernelFamily, layer: &Layer) -> Vec<u8> {
    match kernels {
        KernelFamily::Portable | KernelFamily::Hopper => by_layout::<MmaTile>(layer),
        KernelFamily::Fp4 => by_layout::<Mxf4Tile>(layer),
    }
}

fn by_layout<T: TileOrder>(layer: &Layer) -> Vec<u8> {
    let spec = &layer.spec;
    let gated = spec.activation.is_gated();
    let layout = LayerLayout::<T>::new(spec.shape.hidden, spec.shape.intermediate, spec.experts.count, gated);
    let mut packed = vec![0; layout.bytes()];
    for (local, expert) in layer.experts[spec.experts.ids()].iter().enumerate() {
        let l1 = &mut packed[layout.l1_offset(local)..][..layout.l1().bytes()];
        if let Some(gate) = &expert.gate {
            place(layout.l1(), &gate.raw(), |row| layout.l1_row(Half::Gate, row), l1);
        }
        place(layout.l1(), &expert.up.raw(), |row| layout.l1_row(Half::Up, row), l1);
        place(layout.l2(), &expert.down.raw(), |row| row, &mut packed[layout.l2_offset(local)..]);
    }
    store_words::<T>(&mut packed);
    packed
}

/// One matrix (or two, interleaved) as the `pack` kernel makes it: word by word of the output, where everything outside
/// the matrix is 0.
fn by_words<T: TileOrder>(first: &RawMatrix<'_>, up: Option<&RawMatrix<'_>>) -> Vec<u8> {
    let halves = if up.is_some() { 2 } else { 1 };
    let layout = MatrixLayout::<T>::new(first.rows * halves, first.cols);
    let source = |packed_row: usize| match up {
        None => (first, packed_row),
        Some(up) => match deinterleaved_row(T::INTERLEAVE, packed_row) {
            (Half::Gate, row) => (first, row),
            (Half::Up, row) => (up, row),
        },
    };
    let code_at = |packed_row, k| {
        let (raw, row) = source(packed_row);
        if row < raw.rows && k < raw.cols { u32::from(code(raw, row, k)) } else { 0 }
    };
    let scale_at = |packed_row, block| {
        let (raw, row) = source(packed_row);
        let blocks = raw.cols / BLOCK;
        if row < raw.rows && block < blocks { u32::from(raw.scales[row * blocks + block]) } else { 0 }
    };
    let word = |offset: usize| {
        let (tile, inner) = (offset / T::BYTES, offset % T::BYTES);
        let (row_tile, k_tile) = layout.grid().position(tile);
        let (row_base, k_base) = (row_tile * T::ROWS, k_tile * T::K);
        if inner >= T::CODE_BYTES {
            return T::stored_scales((0..4).fold(0, |word, byte| {
                let (row, block) = T::scale_position(inner - T::CODE_BYTES + byte);
                word | scale_at(row_base + row, k_base / BLOCK + block) << (8 * byte)
            }));
        }
        T::stored((0..8).fold(0, |word, nibble| {
            let at = NibbleOffset { byte: inner + nibble / 2, high: nibble % 2 == 1 };
            let (row, k) = T::code_position(at);
            word | code_at(row_base + row, k_base + k) << (4 * nibble)
        }))
    };
    (0..layout.bytes()).step_by(4).flat_map(|offset| word(offset).to_le_bytes()).collect()
}

/// Ragged in both axes, with and without a gate, some with nothing to pad.
pub(super) fn layers() -> Vec<Layer> {
    let layer = |sizes, activation| Layer::new(sizes, activation, ScaleMode::Static);
    vec![
        layer([80, 176, 5, 2], SWIGLU).on_rank(ExpertRange { first: 1, count: 3 }),
        layer([48, 112, 3, 1], Activation::Relu2),
        layer([16, 16, 2, 1], SWIGLU),
        layer([128, 64, 2, 1], SWIGLU),
        layer([336, 80, 2, 1], Activation::Relu2).on_rank(ExpertRange { first: 1, count: 1 }),
    ]
}

pub(super) fn pack_model(_: &Lab<'_>) -> Result<()> {
    pack_model_of::<MmaTile>()?;
    pack_model_of::<Mxf4Tile>()
}

fn pack_model_of<T: TileOrder>() -> Result<()> {
    for layer in layers() {
        let by_layout = by_layout::<T>(&layer);
        let mut by_words_of_all = Vec::new();
        let experts = &layer.experts[layer.spec.experts.ids()];
        for expert in experts {
            by_words_of_all.extend(match &expert.gate {
                Some(gate) => by_words::<T>(&gate.raw(), Some(&expert.up.raw())),
                None => by_words::<T>(&expert.up.raw(), None),
            });
        }
        for expert in experts {
            by_words_of_all.extend(by_words::<T>(&expert.down.raw(), None));
        }
        same_bytes(&by_words_of_all, &by_layout, &format!("{:?}", layer.spec))?;
    }
    Ok(())
}

pub(super) fn packed_weights(lab: &Lab<'_>) -> Result<()> {
    for layer in layers() {
        let what = format!("{:?}", layer.spec);
        let mut loaded = lab.load(&layer, 1)?;
        let gpu = gpu(&mut loaded)?;
        let plan = gpu.plan();
        let expected = by_layout_for(plan.kernels(), &layer);
        ensure!(plan.packed_bytes() == expected.len() as u64, "{what}: another size");
        let mut packed = vec![0; expected.len()];
        gpu.layer().weights().read(0, &mut packed)?;
        same_bytes(&packed, &expected, &what)?;

        let mut first = None;
        for (local, id) in layer.spec.experts.ids().enumerate() {
            let scales = check_expert(&layer.spec, id, &layer.experts[id].raw(), first.as_ref())?;
            let mut bytes = [0; size_of::<ExpertScales>()];
            gpu.layer().weights().read(plan.scales_offset() as usize + local * bytes.len(), &mut bytes)?;
            ensure!(bytes == *bytemuck::bytes_of(&scales), "{what}: scales of expert {id}");
            first.get_or_insert(scales);
        }
    }
    Ok(())
}

pub(super) fn same_bytes(got: &[u8], expected: &[u8], what: &str) -> Result<()> {
    ensure!(got.len() == expected.len(), "{what}: {} bytes, but {} expected", got.len(), expected.len());
    let place = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(place) = place {
        anyhow::bail!("{what}: byte {place} is {:#04x}, but {:#04x} was expected", got[place], expected[place]);
    }
    Ok(())
}
