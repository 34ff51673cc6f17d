//! What loading keeps of raw experts, on the host and on the device: how much, and where in it each tensor lies.

use std::ops::Range;
use std::thread;

use nvfp4_moe_device::format::BLOCK;

use crate::checkpoint::{CheckpointError, RawExpert, RawMatrix};
use crate::schedule::StagedExpert;
use crate::spec::LayerSpec;

/// Experts that are on the device in the checkpoint's order: one that is being packed, one that is being uploaded, and one
/// that the host already copies.
const SETS: usize = 3;

/// Threads that copy: with more, a host's memory is busy already.
const MOST_THREADS: usize = 8;

/// Slots of a thread's page-locked memory: one is filled while the device copies the other.
const SLOTS: usize = 2;

/// A slot is no larger: it stays in a core's cache between the copy into it, its check and the device's copy out of it,
/// and page-locking memory takes time.
const MOST_SLOT_BYTES: usize = 1 << 20;

/// Smaller slots are not worth a thread of their own.
const LEAST_SLOT_BYTES: usize = 16 << 10;

/// Alignment of a tensor in a staged expert.
const ALIGNMENT: usize = 16;

/// Memory that loading a layer takes beside the packed weights, and gives back before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadMemory {
    /// Raw experts on the device at a time.
    pub sets: usize,
    /// Bytes of one, its tensors aligned.
    pub expert_bytes: usize,
    /// Threads that copy.
    pub threads: usize,
    /// Page-locked slots of a thread.
    pub slots: usize,
    /// Bytes of one.
    pub slot_bytes: usize,
}

impl LoadMemory {
    /// For a layer on this host: what [`MoeLayer::load`](super::MoeLayer::load) takes.
    #[must_use]
    pub fn here(spec: &LayerSpec) -> Self {
        Self::of(spec, thread::available_parallelism().map_or(1, usize::from))
    }

    /// For a layer on a host with this many cores.
    #[must_use]
    pub fn of(spec: &LayerSpec, cores: usize) -> Self {
        let expert_bytes = StagingLayout::of(spec).expert_bytes();
        let threads = cores.min(expert_bytes.div_ceil(LEAST_SLOT_BYTES)).clamp(1, MOST_THREADS);
        let slot_bytes = expert_bytes.div_ceil(threads).next_multiple_of(ALIGNMENT).min(MOST_SLOT_BYTES);
        Self { sets: SETS.min(spec.experts.count), expert_bytes, threads, slots: SLOTS, slot_bytes }
    }

    /// Device memory: at most three experts.
    #[must_use]
    pub const fn device_bytes(&self) -> usize {
        self.sets * self.expert_bytes
    }

    /// Page-locked host memory: at most two experts, and never more than 16 MiB.
    #[must_use]
    pub const fn host_bytes(&self) -> usize {
        self.threads * self.slots * self.slot_bytes
    }
}

/// Where the tensors of an expert lie in a staging buffer: up, down and gate, each with its codes before its block scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StagingLayout {
    code_bytes: usize,
    matrix_bytes: usize,
    matrices: usize,
}

impl StagingLayout {
    pub(super) fn of(spec: &LayerSpec) -> Self {
        let elems = spec.shape.hidden * spec.shape.intermediate;
        let code_bytes = (elems / 2).next_multiple_of(ALIGNMENT);
        let matrix_bytes = code_bytes + (elems / BLOCK).next_multiple_of(ALIGNMENT);
        Self { code_bytes, matrix_bytes, matrices: if spec.activation.is_gated() { 3 } else { 2 } }
    }

    pub(super) const fn expert_bytes(&self) -> usize {
        self.matrices * self.matrix_bytes
    }

    /// The tensors' addresses in a staging buffer that begins here.
    pub(super) fn staged(&self, address: u64) -> StagedExpert {
        let matrix = |index: usize| {
            let codes = address + (index * self.matrix_bytes) as u64;
            (codes, codes + self.code_bytes as u64)
        };
        StagedExpert { up: matrix(0), down: matrix(1), gate: if self.matrices == 3 { matrix(2) } else { (0, 0) } }
    }

    /// The tensors of an expert that was checked to have the layer's sizes, at their places.
    pub(super) fn image<'a>(&self, expert: &RawExpert<'a>) -> Image<'a> {
        let matrices = [Some(expert.up), Some(expert.down), expert.gate];
        let pieces = matrices.into_iter().flatten().enumerate().flat_map(|(index, matrix)| {
            let at = index * self.matrix_bytes;
            [
                Piece { at, bytes: matrix.codes, scales_of: None },
                Piece { at: at + self.code_bytes, bytes: matrix.scales, scales_of: Some(matrix) },
            ]
        });
        Image { pieces: pieces.collect(), bytes: self.expert_bytes() }
    }
}

/// One expert as it is to lie in a staging buffer: slices of its source.
#[derive(Debug)]
pub(super) struct Image<'a> {
    /// Ascending, without overlap.
    pieces: Vec<Piece<'a>>,
    bytes: usize,
}

#[derive(Debug)]
struct Piece<'a> {
    at: usize,
    bytes: &'a [u8],
    /// The matrix whose block scales these are.
    scales_of: Option<RawMatrix<'a>>,
}

impl Image<'_> {
    /// The image in ranges of at most `slot_bytes` bytes.
    pub(super) fn ranges(&self, slot_bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let bytes = self.bytes;
        (0..bytes).step_by(slot_bytes).map(move |start| start..bytes.min(start + slot_bytes))
    }

    /// Copies a range of the image to the beginning of `slot`, and checks the block scales in it. What lies between the
    /// tensors stays as it was.
    ///
    /// # Errors
    /// [`CheckpointError::BadScaleByte`].
    pub(super) fn copy(&self, range: &Range<usize>, slot: &mut [u8]) -> Result<(), CheckpointError> {
        for piece in &self.pieces {
            let (start, end) = (range.start.max(piece.at), range.end.min(piece.at + piece.bytes.len()));
            if start >= end {
                continue;
            }
            let copied = &mut slot[start - range.start..end - range.start];
            copied.copy_from_slice(&piece.bytes[start - piece.at..end - piece.at]);
            if let Some(matrix) = &piece.scales_of {
                // What the device gets, while it is in the cache.
                matrix.check_scale_bytes(copied, start - piece.at)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;
    use crate::io::ScaleMode;
    use crate::shape::{ExpertRange, MODELS, MoeShape};
    use crate::weights::{ExpertSource, RandomExperts, RandomInputScales};

    fn spec(shape: MoeShape, activation: Activation) -> LayerSpec {
        let experts = ExpertRange::all(shape.experts);
        LayerSpec { shape, experts, activation, scales: ScaleMode::PerToken, shared_l1_scale: true }
    }

    const GATED: Activation = Activation::SwiGlu { limit: None };

    #[test]
    fn loading_takes_a_few_experts_whatever_their_number() {
        let small = [[16, 16, 1, 1], [96, 80, 5, 2], [320, 176, 130, 8]];
        let small = small.map(|[h, i, e, k]| MoeShape::new(h, i, e, k).unwrap());
        for shape in MODELS.iter().map(|model| model.shape).chain(small) {
            for cores in [0, 1, 2, 5, 16, 192] {
                let memory = LoadMemory::of(&spec(shape, GATED), cores);
                let raw = 3 * shape.hidden * shape.intermediate * 9 / 16;
                assert!(memory.expert_bytes >= raw && memory.expert_bytes < raw + 6 * ALIGNMENT, "{memory:?}");
                assert!(memory.device_bytes() <= 3 * memory.expert_bytes, "{memory:?}");
                let rounding = 2 * ALIGNMENT * memory.threads;
                assert!(memory.host_bytes() <= 2 * memory.expert_bytes + rounding, "{memory:?}");
                assert!(memory.host_bytes() <= 16 << 20, "{memory:?}");
                assert!((1..=cores.max(1)).contains(&memory.threads) && memory.slot_bytes > 0, "{memory:?}");
                let none = LayerSpec { experts: ExpertRange { first: 0, count: 0 }, ..spec(shape, GATED) };
                assert_eq!(LoadMemory::of(&none, cores).device_bytes(), 0);
            }
        }
    }

    #[test]
    fn ranges_of_an_image_together_hold_every_byte_once() {
        for activation in [GATED, Activation::Relu2] {
            let shape = MoeShape::new(48, 80, 2, 1).unwrap();
            let source = RandomExperts::new(shape, activation.is_gated(), RandomInputScales::Missing, 1);
            let expert = source.expert(1).unwrap();
            let layout = StagingLayout::of(&spec(shape, activation));
            let image = layout.image(&expert);
            let mut expected = vec![0xEE; layout.expert_bytes()];
            let staged = layout.staged(0);
            let gate = expert.gate.map(|gate| (gate, staged.gate));
            for (matrix, (codes, scales)) in
                [(expert.up, staged.up), (expert.down, staged.down)].into_iter().chain(gate)
            {
                expected[codes as usize..][..matrix.codes.len()].copy_from_slice(matrix.codes);
                expected[scales as usize..][..matrix.scales.len()].copy_from_slice(matrix.scales);
            }
            for slot_bytes in [1, 16, 100, 1920, 4096, 1 << 20] {
                let mut whole = vec![0xEE; layout.expert_bytes()];
                let mut next = 0;
                for range in image.ranges(slot_bytes) {
                    assert!(range.start == next && range.len() <= slot_bytes && !range.is_empty(), "{range:?}");
                    next = range.end;
                    image.copy(&range, &mut whole[range.clone()]).unwrap();
                }
                assert_eq!(next, layout.expert_bytes());
                assert!(whole == expected, "slots of {slot_bytes}");
            }
        }
    }

    #[test]
    fn a_bad_scale_is_named_by_its_place_in_the_matrix() {
        let shape = MoeShape::new(48, 80, 1, 1).unwrap();
        let source = RandomExperts::new(shape, true, RandomInputScales::Missing, 1);
        let mut expert = source.expert(0).unwrap();
        let mut scales = expert.down.scales.to_vec();
        scales[37] = 0x80;
        expert.down.scales = &scales;
        let whole = expert.down.check_scales().unwrap_err().to_string();
        let image = StagingLayout::of(&spec(shape, GATED)).image(&expert);
        let mut slot = [0; 64];
        let errors: Vec<_> = image.ranges(64).filter_map(|range| image.copy(&range, &mut slot).err()).collect();
        assert_eq!(errors.iter().map(ToString::to_string).collect::<Vec<_>>(), [whole]);
    }
}
