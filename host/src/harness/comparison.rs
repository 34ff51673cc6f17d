//! How close a result is to the expected one.

use serde::Serialize;

/// A row this close, in relative L2, is as good as an f32 forward can be.
const CLOSE_ROW: f64 = 1e-6;

/// An element beyond the tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Row: the token.
    pub row: usize,
    /// Column.
    pub column: usize,
    /// What came out.
    pub got: f32,
    /// What was expected.
    pub expected: f32,
}

/// How close two matrices are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Root of the squared errors' sum over that of the squared expected values; infinite if something that should be
    /// finite is not, or if all expected values are 0 and something else came out.
    pub rel_l2: f64,
    /// Largest magnitude of an error; infinite as `rel_l2` is.
    pub max_abs_error: f64,
    /// The first element whose error is above the tolerance times the largest expected magnitude of its row.
    pub first_difference: Option<Difference>,
    /// Share of the rows within a relative L2 of 1e-6; a row of zeros must be met exactly. 1 without rows.
    pub rows_close: f64,
    /// Relative L2 of the worst row.
    pub worst_row_rel_l2: f64,
    /// Elements that are NaN and should not be.
    pub nan_count: usize,
}

/// Sums over one row, or over all.
#[derive(Clone, Copy, Default)]
struct Sums {
    error: f64,
    expected: f64,
    largest_error: f64,
}

impl Sums {
    /// Relative L2; zeros that are met exactly are 0 off.
    fn rel_l2(self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.expected).sqrt() }
    }
}

/// The error of one element. NaN where NaN is expected is right, and so is the same infinity.
fn error_of(got: f32, expected: f32) -> f64 {
    if got == expected || (got.is_nan() && expected.is_nan()) {
        return 0.0;
    }
    let error = (f64::from(got) - f64::from(expected)).abs();
    if error.is_nan() { f64::INFINITY } else { error }
}

impl Comparison {
    /// Compares two matrices with this many columns; `tolerance` only decides what [`Self::first_difference`] is.
    ///
    /// # Panics
    /// When the two have different lengths, or no whole number of rows.
    #[must_use]
    pub fn new(got: &[f32], expected: &[f32], columns: usize, tolerance: f64) -> Self {
        assert_eq!(got.len(), expected.len(), "got and expected have as many elements");
        assert!(columns > 0 && got.len().is_multiple_of(columns), "{} elements in rows of {columns}", got.len());
        let rows = got.len() / columns;
        let mut all = Sums::default();
        let (mut close, mut worst_row_rel_l2, mut nan_count) = (0, 0f64, 0);
        let mut first_difference = None;
        for (row, (got, expected)) in got.chunks(columns).zip(expected.chunks(columns)).enumerate() {
            let mut sums = Sums::default();
            let finite = |x: f32| if x.is_finite() { f64::from(x) } else { 0.0 };
            for (&got, &expected) in got.iter().zip(expected) {
                let error = error_of(got, expected);
                sums.error += error * error;
                sums.expected += finite(expected).powi(2);
                sums.largest_error = sums.largest_error.max(error);
                nan_count += usize::from(got.is_nan() && !expected.is_nan());
            }
            let largest = expected.iter().fold(0f64, |largest, &x| largest.max(finite(x).abs()));
            if first_difference.is_none() && sums.largest_error > tolerance * largest {
                let beyond = |(&got, &expected): (&f32, &f32)| error_of(got, expected) > tolerance * largest;
                first_difference = got.iter().zip(expected).position(beyond).map(|column| Difference {
                    row,
                    column,
                    got: got[column],
                    expected: expected[column],
                });
            }
            close += usize::from(sums.rel_l2() <= CLOSE_ROW);
            worst_row_rel_l2 = worst_row_rel_l2.max(sums.rel_l2());
            all.error += sums.error;
            all.expected += sums.expected;
            all.largest_error = all.largest_error.max(sums.largest_error);
        }
        Self {
            rel_l2: all.rel_l2(),
            max_abs_error: all.largest_error,
            first_difference,
            rows_close: if rows == 0 { 1.0 } else { close as f64 / rows as f64 },
            worst_row_rel_l2,
            nan_count,
        }
    }

    /// Whether the whole is within `tolerance` in relative L2, with no NaN where there should be none.
    #[must_use]
    pub fn within(&self, tolerance: f64) -> bool {
        self.nan_count == 0 && self.rel_l2 <= tolerance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_is_zero_off() {
        let x = [1.0, -2.0, 0.0, 0.0, f32::NAN, f32::INFINITY];
        let same = Comparison::new(&x, &x, 2, 1e-3);
        assert_eq!((same.rel_l2, same.max_abs_error, same.rows_close, same.nan_count), (0.0, 0.0, 1.0, 0));
        assert_eq!(same.first_difference, None);
        assert!(same.within(0.0));
        assert_eq!(Comparison::new(&[], &[], 3, 0.0).rows_close, 1.0);
    }

    #[test]
    fn nan_where_a_number_should_be_never_passes() {
        let nan = Comparison::new(&[1.0, f32::NAN, 1.0, 1.0], &[1.0; 4], 2, 1.0);
        assert_eq!((nan.nan_count, nan.rows_close), (1, 0.5));
        assert!(!nan.within(f64::INFINITY));
        let place = nan.first_difference.unwrap();
        assert_eq!((place.row, place.column), (0, 1));
        let number = Comparison::new(&[1.0], &[f32::NAN], 1, 1.0);
        assert!(!number.within(1.0), "a number where NaN should be is as wrong");
    }

    #[test]
    fn zero_rows_are_met_exactly_or_not_at_all() {
        let off = Comparison::new(&[1e-30, 0.0, 3.0, 4.0], &[0.0, 0.0, 3.0, 4.0], 2, 1e-3);
        assert_eq!((off.rows_close, off.worst_row_rel_l2), (0.5, f64::INFINITY));
        assert!(off.within(1e-3), "the norm of the whole does not see it: that is what rows_close is for");
        assert!(!Comparison::new(&[1.0], &[0.0], 1, 1e-3).within(1e-3));
        assert!(Comparison::new(&[-0.0], &[0.0], 1, 0.0).within(0.0));
    }

    #[test]
    fn numbers_are_relative_to_the_expected_ones() {
        let off = Comparison::new(&[3.0, 4.5], &[3.0, 4.0], 2, 0.1);
        assert_eq!((off.rel_l2, off.max_abs_error, off.rows_close), (0.1, 0.5, 0.0));
        let place = off.first_difference.unwrap();
        assert_eq!((place.row, place.column, place.got, place.expected), (0, 1, 4.5, 4.0));
        assert_eq!(Comparison::new(&[3.0, 4.5], &[3.0, 4.0], 2, 0.2).first_difference, None);
    }
}
