//! How close an output must be to the expected values, and whether it is.

use half::bf16;
use nvfp4_moe::harness::Comparison;

/// Share of the rows that must be as close as can be: the rest is room for an E2M1 code of h that flips where f32 and
/// f64 round to different sides, which moves one row by up to a few per cent.
const MIN_ROWS: f64 = 0.98;

/// Relative L2 of a whole f32 output.
const MAX_REL_L2: f64 = 2e-3;

/// Share of the elements of a bf16 output that must be the correctly rounded ones. The f32 sums are some 1e-7 off, so
/// that about 1 in 5,000 (measured on the golden cases) falls on the other side of a rounding boundary; and all elements
/// of the 2% of rows that may have flipped.
const MIN_EXACT: f64 = 0.97;

/// Where large terms cancel, an element is far smaller than the f32 errors of its terms, and any number of bf16 steps
/// off: this much of the row's root mean square counts as no error. (A term of 3.98 with error 3e-7 leaves 1.94e-5, 2
/// steps off; f64 leaves 4.5e-17 where f32 leaves 0.)
const CANCELLATION: f64 = 1e-6;

/// What is wrong with an f32 output; nothing if it is close enough.
pub(super) fn f32_problem(comparison: &Comparison) -> Option<String> {
    if comparison.nan_count > 0 {
        return Some(format!("{} elements are NaN", comparison.nan_count));
    }
    if comparison.rel_l2 > MAX_REL_L2 {
        let place = comparison.first_difference.map_or_else(String::new, |place| {
            format!("; first at row {}, column {}: {} for {}", place.row, place.column, place.got, place.expected)
        });
        return Some(format!("relative L2 {:.2e}, must be at most {MAX_REL_L2:.0e}{place}", comparison.rel_l2));
    }
    (comparison.rows_close < MIN_ROWS).then(|| {
        format!(
            "{} of the rows are within 1e-6, must be {}; the worst is {:.2e} off",
            percent(comparison.rows_close),
            percent(MIN_ROWS),
            comparison.worst_row_rel_l2
        )
    })
}

/// The comparison whose [`Comparison::first_difference`] goes with [`f32_problem`].
pub(super) fn compare(got: &[f32], expected: &[f32], columns: usize) -> Comparison {
    Comparison::new(got, expected, columns, MAX_REL_L2)
}

/// How close a bf16 output is to the expected values, rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bf16Closeness {
    /// Share of the rows without an element more than one bf16 step off.
    pub(super) rows_within_a_step: f64,
    /// Share of the elements that are the correctly rounded ones.
    pub(super) exact: f64,
}

impl Bf16Closeness {
    /// Compares a bf16 output with expected values.
    pub(super) fn new(got: &[bf16], expected: &[f32], columns: usize) -> Self {
        let (mut rows, mut rows_within, mut exact) = (0, 0, 0);
        for (got, expected) in got.chunks(columns).zip(expected.chunks(columns)) {
            let squares = expected.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let nothing = CANCELLATION * (squares / columns as f64).sqrt();
            let elements = || got.iter().copied().zip(expected.iter().copied());
            let within = |(got, expected): (bf16, f32)| {
                steps(got, bf16::from_f32(expected)) <= 1 || (f64::from(got) - f64::from(expected)).abs() <= nothing
            };
            rows += 1;
            rows_within += usize::from(elements().all(within));
            exact += elements().filter(|&(got, expected)| steps(got, bf16::from_f32(expected)) == 0).count();
        }
        let share = |part: usize, all: usize| if all == 0 { 1.0 } else { part as f64 / all as f64 };
        Self { rows_within_a_step: share(rows_within, rows), exact: share(exact, got.len()) }
    }

    /// What is wrong; nothing if it is close enough.
    pub(super) fn problem(&self) -> Option<String> {
        if self.rows_within_a_step < MIN_ROWS {
            let (got, must) = (percent(self.rows_within_a_step), percent(MIN_ROWS));
            return Some(format!("bf16: in {got} of the rows no element is more than a step off, must be {must}"));
        }
        (self.exact < MIN_EXACT).then(|| {
            let (got, must) = (percent(self.exact), percent(MIN_EXACT));
            format!("bf16: {got} of the elements are the correctly rounded ones, must be {must}")
        })
    }
}

/// Places apart in the order of bf16 numbers; both zeros are one place, and NaN is far from everything.
fn steps(left: bf16, right: bf16) -> u32 {
    if left.is_nan() || right.is_nan() {
        return if left.is_nan() && right.is_nan() { 0 } else { u32::MAX };
    }
    let place = |x: bf16| {
        let magnitude = i32::from(x.to_bits() & 0x7fff);
        if x.is_sign_negative() { -magnitude } else { magnitude }
    };
    place(left).abs_diff(place(right))
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.2}%", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_count_neighbours_across_zero() {
        let b = bf16::from_bits;
        assert_eq!(steps(bf16::ONE, b(bf16::ONE.to_bits() + 1)), 1);
        assert_eq!(steps(b(0x0000), b(0x8000)), 0);
        assert_eq!(steps(b(0x0001), b(0x8001)), 2);
        assert_eq!(steps(bf16::NAN, bf16::ONE), u32::MAX);
        assert_eq!(steps(bf16::NAN, bf16::NAN), 0);
    }

    #[test]
    fn a_row_two_steps_off_is_a_problem_unless_it_is_one_in_many() {
        let expected = [1.0f32; 200];
        let mut got = [bf16::ONE; 200];
        got[0] = bf16::from_bits(bf16::ONE.to_bits() + 2);
        let many = Bf16Closeness::new(&got, &expected, 2);
        assert_eq!((many.rows_within_a_step, many.exact), (0.99, 0.995));
        assert_eq!(many.problem(), None);
        Bf16Closeness::new(&got, &expected, 100).problem().expect("one row in two is off");
        let one_step = [bf16::from_bits(bf16::ONE.to_bits() + 1); 200];
        Bf16Closeness::new(&one_step, &expected, 2).problem().expect("no element is exact");
    }

    #[test]
    fn an_element_left_by_cancellation_may_be_many_steps_off() {
        let row = |small: f32| [bf16::ONE, bf16::from_f32(small)];
        assert_eq!(Bf16Closeness::new(&row(0.0), &[1.0, 4.5e-17], 2).rows_within_a_step, 1.0);
        assert_eq!(Bf16Closeness::new(&row(0.0), &[1.0, 4.5e-6], 2).rows_within_a_step, 0.0);
        assert_eq!(Bf16Closeness::new(&row(f32::NAN), &[1.0, 0.0], 2).rows_within_a_step, 0.0);
    }

    #[test]
    fn f32_outputs_are_judged_by_norm_rows_and_nan() {
        let expected = [1.0f32; 100];
        let problem = |got: &[f32]| f32_problem(&compare(got, &expected, 2));
        assert_eq!(problem(&expected), None);
        let mut got = expected;
        got[3] = 1.0 + 1e-3;
        assert_eq!(problem(&got), None, "one row in fifty may be off");
        got[5] = 1.0 + 1e-3;
        assert!(problem(&got).is_some_and(|text| text.contains("96.00% of the rows")));
        got[5] = 1.1;
        assert!(problem(&got).is_some_and(|text| text.contains("first at row 2, column 1")));
        got[5] = f32::NAN;
        assert!(problem(&got).is_some_and(|text| text.contains("NaN")));
    }
}
