//! Inner loops of the CPU engine, one set for each instruction set, all with the same bits.
//!
//! Every result is `sum over blocks of 16 along K, ascending: d * (SFw * SFa / 4)`, where d is the exact integer dot
//! product of doubled codes. A term has at most 20 significant bits, so it is exact in f32, and a fused multiply-add
//! gives what a multiplication followed by an addition gives.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use bytemuck::{Pod, Zeroable};
use nvfp4_moe_device::format::block_fma::Processor;
use nvfp4_moe_device::format::packed::TileOrder;
use nvfp4_moe_device::format::slots::PANEL_SLOTS;
use nvfp4_moe_device::format::tile_cpu::CpuTile;
use nvfp4_moe_device::format::{BLOCK, block, e2m1, ue4m3};
use nvfp4_moe_device::kernels::activation::{self, ActivationParams};

/// Rows of a weight tile.
pub(crate) const ROWS: usize = CpuTile::ROWS;

/// Sixteen results of one slot: one row tile.
pub(crate) type RowTile = [f32; ROWS];

/// Results of one row tile for the slots of a panel.
pub(crate) type PanelTile = [RowTile; PANEL_SLOTS];

/// Added to doubled weight codes so that they are unsigned: 0..=24.
const WEIGHT_BIAS: i8 = 12;

/// Weight scales are used 2^-8 times their value (as f16 does without arithmetic) and both codes are doubled.
const ACT_SCALE: f32 = 0.25 / WEIGHT_SCALE;
const WEIGHT_SCALE: f32 = 1.0 / 256.0;
const _: () = assert!(ue4m3::F16_SCALE_LOG2 == -8);

/// Doubled codes plus the bias, for a byte shuffle.
const WEIGHT_BYTES: [i8; 16] = {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = e2m1::decode_doubled(code as u8) + WEIGHT_BIAS;
        code += 1;
    }
    bytes
};

/// One quantized block of 16 activations, as the kernels want it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ActBlock {
    /// Doubled codes, four consecutive elements a word, the first in the low byte.
    words: [i32; BLOCK / 4],
    /// What takes the weights' bias out of a dot product again: -12 times the sum of the doubled codes.
    bias: i32,
    /// 64 times the block scale: undoes the doubling and the factor of the weight scales. NaN where the scale is NaN.
    scale: f32,
}

impl ActBlock {
    /// Quantizes 16 elements under the decode scale `g`.
    #[inline(always)]
    fn quantize(x: &[f32; BLOCK], g: f32) -> Self {
        let block = block::quantize(x, g);
        let mut words = [0; BLOCK / 4];
        let mut sum = 0;
        for (i, word) in words.iter_mut().enumerate() {
            let bytes: [u8; 4] = std::array::from_fn(|j| {
                let doubled = e2m1::decode_doubled(block.code(4 * i + j));
                sum += doubled as i32;
                doubled as u8
            });
            *word = i32::from_le_bytes(bytes);
        }
        Self { words, bias: -(WEIGHT_BIAS as i32) * sum, scale: ue4m3::decode(block.scale) * ACT_SCALE }
    }
}

/// `activate(gate * gate_alpha, up * up_alpha)` of 16 elements.
#[inline(always)]
fn activate(params: &ActivationParams, gate: &RowTile, gate_alpha: f32, up: &RowTile, up_alpha: f32) -> RowTile {
    let mut h = [0.0; ROWS];
    for (h, (gate, up)) in h.iter_mut().zip(gate.iter().zip(up)) {
        *h = activation::activate(params, gate * gate_alpha, up * up_alpha, Processor);
    }
    h
}

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

/// Only [`Isa::available`] makes the last two, after asking the processor: the calls below rely on that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl Isa {
    /// The loops that need nothing but Rust.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// All that this processor has, the fastest last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 {
                all.push(Self(Kind::Avx2));
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                all.push(Self(Kind::Avx512Vnni));
            }
        }
        all
    }

    /// The fastest that this processor has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::PORTABLE)
    }

    /// Name: `portable`, `avx2` or `avx512-vnni`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Products of one row tile of weights (its tiles along K) with one panel of `width` slots: `out[..width]`.
    #[inline]
    pub(crate) fn multiply(self, tiles: &[u8], panel: &[ActBlock], width: usize, out: &mut PanelTile) {
        debug_assert!((1..=PANEL_SLOTS).contains(&width));
        debug_assert_eq!(tiles.len() / CpuTile::BYTES * width, panel.len());
        match self.0 {
            Kind::Portable => portable::multiply(tiles, panel, width, out),
            // SAFETY: such an Isa exists only where the processor has what the function needs (see Kind).
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::multiply(tiles, panel, width, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => unsafe { avx512::multiply(tiles, panel, width, out) },
        }
    }

    /// Quantizes 16 elements under the decode scale `g`.
    #[inline]
    pub(crate) fn quantize(self, x: &[f32; BLOCK], g: f32) -> ActBlock {
        match self.0 {
            Kind::Portable => ActBlock::quantize(x, g),
            // SAFETY: such an Isa exists only where the processor has what the function needs (see Kind).
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::quantize(x, g) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => unsafe { avx512::quantize(x, g) },
        }
    }

    /// `activate(gate * gate_alpha, up * up_alpha)` of 16 elements.
    #[inline]
    pub(crate) fn activate(self, params: &ActivationParams, gate: (&RowTile, f32), up: (&RowTile, f32)) -> RowTile {
        match self.0 {
            Kind::Portable => activate(params, gate.0, gate.1, up.0, up.1),
            // SAFETY: such an Isa exists only where the processor has what the function needs (see Kind).
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::activate(params, gate.0, gate.1, up.0, up.1) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => unsafe { avx512::activate(params, gate.0, gate.1, up.0, up.1) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut rng = StdRng::seed_from_u64(7);
        for k_tiles in [1, 5, 12] {
            let mut tiles = vec![0u8; k_tiles * CpuTile::BYTES];
            for tile in tiles.chunks_exact_mut(CpuTile::BYTES) {
                rng.fill(&mut tile[..CpuTile::CODE_BYTES]);
                tile[CpuTile::CODE_BYTES..].fill_with(|| rng.random_range(0..0x7F));
            }
            for width in 1..=PANEL_SLOTS {
                let rows: Vec<[f32; BLOCK]> = (0..k_tiles * width)
                    .map(|i| {
                        let magnitude = 2f32.powi(rng.random_range(-20..12));
                        let mut x: [f32; BLOCK] = std::array::from_fn(|_| rng.random_range(-1.0..1.0) * magnitude);
                        match i % 23 {
                            5 => x[3] = f32::NAN,
                            7 => x[15] = f32::NEG_INFINITY,
                            9 => x = [0.0; BLOCK],
                            _ => {}
                        }
                        x
                    })
                    .collect();
                let panel: Vec<ActBlock> = rows.iter().map(|x| ActBlock::quantize(x, 0.01)).collect();
                let mut expected = [[0.0; ROWS]; PANEL_SLOTS];
                Isa::PORTABLE.multiply(&tiles, &panel, width, &mut expected);
                for isa in Isa::available() {
                    let again: Vec<ActBlock> = rows.iter().map(|x| isa.quantize(x, 0.01)).collect();
                    assert_eq!(
                        bytemuck::cast_slice::<_, u8>(&again),
                        bytemuck::cast_slice::<_, u8>(&panel),
                        "{}",
                        isa.name()
                    );
                    let mut out = [[f32::NAN; ROWS]; PANEL_SLOTS];
                    isa.multiply(&tiles, &panel, width, &mut out);
                    for (slot, (out, expected)) in out.iter().zip(&expected).take(width).enumerate() {
                        let bits = |x: &RowTile| x.map(f32::to_bits);
                        assert_eq!(bits(out), bits(expected), "{} width {width} slot {slot}", isa.name());
                    }
                }
            }
        }
    }

    #[test]
    fn activations_have_the_same_bits() {
        let mut rng = StdRng::seed_from_u64(8);
        for kind in [activation::KIND_SWIGLU, activation::KIND_SWIGLU_OAI, activation::KIND_RELU2] {
            for limit in [f32::INFINITY, 7.0] {
                let params = ActivationParams { kind, limit, alpha: 1.702, beta: 1.0 };
                for i in 0..2000 {
                    let mut gate: RowTile = std::array::from_fn(|_| rng.random_range(-130.0..130.0));
                    let up: RowTile = std::array::from_fn(|_| rng.random_range(-20.0..20.0));
                    if i % 7 == 0 {
                        gate[2] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0][i / 7 % 4];
                    }
                    let expected = activate(&params, &gate, 0.7, &up, 0.9);
                    for isa in Isa::available() {
                        let h = isa.activate(&params, (&gate, 0.7), (&up, 0.9));
                        for (h, expected) in h.iter().zip(&expected) {
                            let same = h.to_bits() == expected.to_bits() || (h.is_nan() && expected.is_nan());
                            assert!(same, "{}: {h:e} is not {expected:e}", isa.name());
                        }
                    }
                }
            }
        }
    }
}
