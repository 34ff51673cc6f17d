//! What a matrix unit makes of 16-bit operands and f32 accumulators: one model for `mma.sync` and `wgmma`.
//!
//! The document leaves order and rounding open. Here: products are exact, they are added in ascending k in f64, then the
//! accumulator is added, and the result is rounded once to f32. With operands of 6 significant bits, as ours are, the
//! sum of the products is exact too: each is a multiple of 2^-20 below 2^23, so 16 of them need 47 bits. For
//! any f16 or bf16 operands the f64 additions err by at most 16 * 2^-53 of the largest partial sum, far below the f32
//! rounding; hardware, which cuts low bits off while aligning, errs more.

use super::small_float::add_odd;

/// Most of K that one instruction multiplies.
pub(super) const DEPTH: usize = 16;
/// Rows of A that a warp multiplies.
pub(super) const ROWS: usize = 16;
/// Columns that are summed at once.
const COLUMNS: usize = 8;

/// Rows of A in f64.
pub(super) type A = [[f64; DEPTH]; ROWS];

/// Sums of the products of A's rows with the columns of B, which has `n` of them (a multiple of 8) and k first; zeros
/// where K is less than [`DEPTH`].
pub(super) fn sums(a: &A, b: &[f64], n: usize, sums: &mut [f64]) {
    const GROUP: usize = 4;
    for first in (0..n).step_by(COLUMNS) {
        for row in (0..ROWS).step_by(GROUP) {
            let mut totals = [[0.0; COLUMNS]; GROUP];
            for (k, b) in b.chunks_exact(n).enumerate() {
                let b: &[f64; COLUMNS] = b[first..first + COLUMNS].try_into().expect("a slice of this length");
                for (totals, a) in totals.iter_mut().zip(&a[row..row + GROUP]) {
                    for (total, y) in totals.iter_mut().zip(b) {
                        *total += a[k] * y;
                    }
                }
            }
            for (i, totals) in totals.iter().enumerate() {
                sums[(row + i) * n + first..][..COLUMNS].copy_from_slice(totals);
            }
        }
    }
}

/// The sum of an element's products and its accumulator, so that [`rounded`] is the only rounding.
pub(super) fn add(sum: f64, accumulator: f32) -> f64 {
    add_odd(sum, f64::from(accumulator))
}

/// The accumulator's new bits.
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
    fn one_rounding() {
        // Half an ulp and a little more: two roundings would give 1.
        let little = f64::from(2f32.powi(-60));
        assert_eq!(rounded(add(1.0 + f64::from(2f32.powi(-24)), little as f32)), 0x3F80_0001);
        assert_eq!(rounded(add(1.0 + f64::from(2f32.powi(-24)), -little as f32)), 0x3F80_0000);
        assert_eq!(rounded(add(f64::INFINITY, f32::NEG_INFINITY)), 0x7FFF_FFFF);
    }
}
