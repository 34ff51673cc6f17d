//! Which compiled kernels run on which GPU.

use nvfp4_moe_device::format::packed::{LayerLayout, TileOrder};
use nvfp4_moe_device::format::tile_mma::MmaTile;
use nvfp4_moe_device::format::tile_mxf4::{Mxf4Tile, row_stride};
use nvfp4_moe_device::kernels::grouped_gemm::{Variant, sm80, sm90, sm120};

use crate::spec::LayerSpec;

/// Kernels of one kind of tensor core. All give the same semantics; a layer is packed for one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelFamily {
    /// f16 tensor cores, NVFP4 dequantized in registers: every GPU from compute capability 8.0 on.
    Portable,
    /// The same and `wgmma` kernels: compute capability 9.0.
    Hopper,
    /// FP4 tensor cores of compute capability 12.0 and 12.1.
    Fp4,
}

/// One of a layer's two packed matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedMatrix {
    /// First byte of expert 0's.
    pub offset: usize,
    /// Bytes of one expert's.
    pub bytes: usize,
    /// Tiles of weight rows.
    pub row_tiles: usize,
    /// Weight rows of a tile.
    pub tile_rows: usize,
    /// Tiles along K.
    pub k_tiles: usize,
    /// Columns of an activation row: K, padded.
    pub stride: usize,
}

fn packed_matrix<T: TileOrder>(spec: &LayerSpec, second: bool, stride: fn(usize) -> usize) -> PackedMatrix {
    let layout = LayerLayout::<T>::new(
        spec.shape.hidden,
        spec.shape.intermediate,
        spec.experts.count,
        spec.activation.is_gated(),
    );
    let (matrix, offset) = if second { (layout.l2(), layout.l2_offset(0)) } else { (layout.l1(), layout.l1_offset(0)) };
    PackedMatrix {
        offset,
        bytes: matrix.bytes(),
        row_tiles: matrix.row_tiles(),
        tile_rows: T::ROWS,
        k_tiles: matrix.k_tiles(),
        stride: stride(matrix.k),
    }
}

impl KernelFamily {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Hopper, Self::Fp4];

    /// The fastest kernels that a GPU of this compute capability runs; what is not known runs the portable ones.
    #[must_use]
    pub const fn of(compute_capability: (u32, u32)) -> Self {
        match compute_capability {
            (9, 0) => Self::Hopper,
            (12, 0 | 1) => Self::Fp4,
            _ => Self::Portable,
        }
    }

    /// Their module in `host/ptx`, called like the architecture that its PTX is for.
    #[must_use]
    pub const fn module(self) -> &'static str {
        match self {
            Self::Portable => "sm_80",
            Self::Hopper => "sm_90a",
            Self::Fp4 => "sm_120f",
        }
    }

    /// What they are, and which GPUs run them.
    #[must_use]
    pub const fn description(self) -> &'static str {
        match self {
            Self::Portable => "portable (f16 mma.sync, exact dequantization), for compute capability 8.0 and newer",
            Self::Hopper => "Hopper (f16 wgmma, exact dequantization), for compute capability 9.0",
            Self::Fp4 => "FP4 tensor cores (mma.sync mxf4nvf4), for compute capability 12.0 and 12.1",
        }
    }

    /// Whether the kernels of a forward may overlap: they wait for each other where they have to.
    #[must_use]
    pub const fn overlap(self) -> bool {
        matches!(self, Self::Hopper)
    }

    /// Variants of the grouped GEMM, from few slots a tile to many; each gives the same bits.
    #[must_use]
    pub const fn variants(self) -> &'static [Variant] {
        match self {
            Self::Portable => &sm80::VARIANTS,
            Self::Hopper => &sm90::VARIANTS,
            Self::Fp4 => &sm120::VARIANTS,
        }
    }

    /// Bytes of this many elements of quantized activations, block scales apart.
    #[must_use]
    pub const fn activation_bytes(self, elements: usize) -> usize {
        match self {
            Self::Portable | Self::Hopper => elements * 2,
            Self::Fp4 => elements / 2,
        }
    }

    /// The first (gate and up) or second (down) matrix of a layer.
    #[must_use]
    pub fn packed_matrix(self, spec: &LayerSpec, second: bool) -> PackedMatrix {
        match self {
            Self::Portable | Self::Hopper => packed_matrix::<MmaTile>(spec, second, |k| k.next_multiple_of(MmaTile::K)),
            Self::Fp4 => packed_matrix::<Mxf4Tile>(spec, second, row_stride),
        }
    }
}
