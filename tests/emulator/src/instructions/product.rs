//! What a matrix unit makes of 16-bit operands and f32 accumulators: one model for `mma.sync` and `wgmma`.
//!
//! The document leaves order and rounding open. Here: products are exact, they are added in ascending k in f64, then the
//! accumulator is added, and the result is rounded once to f32. With operands of 6 significant bits, as ours are, the
//! sum of the products is exact too: each is a multiple of 2^-20 below 2^23, so 16 of them need 47 bits. For
//! any f16 or bf16 operands the f64 additions err by at most 16 * 2^-53 of the largest partial sum, far below the f32
//! rounding; hardware, which cuts low bits off while aligning, errs more.

use super::half::f16_to_f32;
use super::small_float::add_odd;
use crate::execute::Lanes;
use crate::types::Type;

/// Most of K that one instruction multiplies.
pub(super) const DEPTH: usize = 16;
/// Rows of A that a warp multiplies.
pub(super) const ROWS: usize = 16;
/// Columns that are summed at once.
const COLUMNS: usize = 8;

/// Rows of A in f64.
pub(super) type A = [[f64; DEPTH]; ROWS];

/// A 16-bit format of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F16,
    Bf16,
}

impl Element {
    /// The format of A and B if it is that of both.
    pub(super) fn of(a: Type, b: Type) -> Option<Self> {
        match (a, b) {
            (Type::F16, Type::F16) => Some(Self::F16),
            (Type::Bf16, Type::Bf16) => Some(Self::Bf16),
            _ => None,
        }
    }

    /// The values of elements.
    #[inline(always)]
    pub(super) fn widen<const N: usize>(self, bits: [u16; N]) -> [f64; N] {
        match self {
            Self::F16 => bits.map(|bits| f16_to_f32(bits).into()),
            Self::Bf16 => bits.map(|bits| f32::from_bits(u32::from(bits) << 16).into()),
        }
    }

    /// The values of both elements of a register in each lane.
    pub(super) fn pairs(self, register: &Lanes) -> [[f64; 2]; 32] {
        let low = self.widen(register.map(|value| value as u16));
        let high = self.widen(register.map(|value| (value >> 16) as u16));
        std::array::from_fn(|lane| [low[lane], high[lane]])
    }
}

/// The warp's rows of A from the values of registers, two for each 8 of K: rows g and g + 8.
pub(super) fn fragment_a(registers: &[Lanes], element: Element) -> A {
    let mut a = [[0.0; DEPTH]; ROWS];
    for (i, values) in registers.iter().enumerate() {
        for (lane, pair) in element.pairs(values).iter().enumerate() {
            let (row, k) = (lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2));
            a[row][k..k + 2].copy_from_slice(pair);
        }
    }
    a
}

/// Sums of the products of A's rows with the columns of B, which has `n` of them (a multiple of 8) and k first; zeros
/// where K is less than [`DEPTH`].
pub(super) fn sums(a: &A, b: &[f64], n: usize, sums: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { avx2::sums(a, b, n, sums) };
    }
    sums_with::<false>(a, b, n, sums);
}

/// The new bits of an accumulator in all lanes, from the sums of its products and its old bits.
pub(super) fn accumulate(sums: &[f64; 32], accumulators: &Lanes) -> Lanes {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { avx2::accumulate(sums, accumulators) };
    }
    accumulate_with(sums, accumulators)
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// The same functions with wider vectors, which yield the same bits.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{A, Lanes};

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn sums(a: &A, b: &[f64], n: usize, sums: &mut [f64]) {
        super::sums_with::<true>(a, b, n, sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn accumulate(sums: &[f64; 32], accumulators: &Lanes) -> Lanes {
        super::accumulate_with(sums, accumulators)
    }
}

/// Products are exact in f64, so that nothing depends on whether they are fused with the addition.
#[inline(always)]
fn sums_with<const FUSED: bool>(a: &A, b: &[f64], n: usize, sums: &mut [f64]) {
    const GROUP: usize = 4;
    for first in (0..n).step_by(COLUMNS) {
        for row in (0..ROWS).step_by(GROUP) {
            let mut totals = [[0.0; COLUMNS]; GROUP];
            for (k, b) in b.chunks_exact(n).enumerate() {
                let b: &[f64; COLUMNS] = b[first..first + COLUMNS].try_into().expect("a slice of this length");
                for (totals, a) in totals.iter_mut().zip(&a[row..row + GROUP]) {
                    for (total, y) in totals.iter_mut().zip(b) {
                        *total = if FUSED { a[k].mul_add(*y, *total) } else { *total + a[k] * y };
                    }
                }
            }
            for (i, totals) in totals.iter().enumerate() {
                sums[(row + i) * n + first..][..COLUMNS].copy_from_slice(totals);
            }
        }
    }
}

#[inline(always)]
fn accumulate_with(sums: &[f64; 32], accumulators: &Lanes) -> Lanes {
    let mut values = [0; 32];
    for ((value, &sum), &accumulator) in values.iter_mut().zip(sums).zip(accumulators) {
        *value = rounded(add(sum, f32::from_bits(accumulator as u32))).into();
    }
    values
}

/// The sum of an element's products and its accumulator, so that [`rounded`] is the only rounding.
#[inline(always)]
pub(super) fn add(sum: f64, accumulator: f32) -> f64 {
    add_odd(sum, f64::from(accumulator))
}

/// The accumulator's new bits.
#[inline(always)]
pub(super) fn rounded(value: f64) -> u32 {
    let value = value as f32;
    if value.is_nan() { 0x7FFF_FFFF } else { value.to_bits() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_times_columns() {
        // Not symmetric in any two axes.
        let a: A = std::array::from_fn(|row| std::array::from_fn(|k| (3 * row + 5 * k * k) as f64));
        let n = 24;
        let b: Vec<f64> = (0..DEPTH * n).map(|i| (i / n + 7 * (i % n)) as f64).collect();
        let mut all = vec![0.0; ROWS * n];
        sums(&a, &b, n, &mut all);
        for (i, &sum) in all.iter().enumerate() {
            let expected: f64 = (0..DEPTH).map(|k| a[i / n][k] * b[k * n + i % n]).sum();
            assert_eq!(sum, expected);
        }
    }

    #[test]
    fn vectors_of_any_width_yield_the_same_bits() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            state >> 33
        };
        // Any f16, subnormal, infinite and NaN ones too.
        let a: A = std::array::from_fn(|_| Element::F16.widen(std::array::from_fn(|_| random() as u16)));
        let n = 40;
        let b: Vec<f64> = (0..DEPTH * n).flat_map(|_| Element::F16.widen([random() as u16])).collect();
        let [mut narrow, mut wide] = [vec![0.0; ROWS * n], vec![0.0; ROWS * n]];
        sums_with::<false>(&a, &b, n, &mut narrow);
        sums(&a, &b, n, &mut wide);
        let bits = |all: &[f64]| all.iter().map(|sum| if sum.is_nan() { 0 } else { sum.to_bits() }).collect::<Vec<_>>();
        assert_eq!(bits(&narrow), bits(&wide));
        for sums in wide.as_chunks::<32>().0 {
            let accumulators: Lanes = std::array::from_fn(|_| random() | random() << 16 & 0xFFFF_FFFF);
            let accumulators = accumulators.map(|bits| bits & 0xFFFF_FFFF);
            assert_eq!(accumulate_with(sums, &accumulators), accumulate(sums, &accumulators));
        }
    }

    #[test]
    fn one_rounding() {
        // Half an ulp and a little more: two roundings would give 1.
        let little = f64::from(2f32.powi(-60));
        assert_eq!(rounded(add(1.0 + f64::from(2f32.powi(-24)), little as f32)), 0x3F80_0001);
        assert_eq!(rounded(add(1.0 + f64::from(2f32.powi(-24)), -little as f32)), 0x3F80_0000);
        assert_eq!(rounded(add(f64::INFINITY, f32::NEG_INFINITY)), 0x7FFF_FFFF);
    }
}
