//! Numbers on the command line: what makes no sense is refused before anything is done. clap names the flag and the
//! value.

use std::str::FromStr;

/// A whole number that is not negative.
pub(super) fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {}", usize::MAX))
}

/// A finite number that is not negative.
pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "it must be a finite number, 0 or more".to_owned())
}

/// A finite number above 0, also as an f32.
pub(super) fn above_0<T: FromStr + Into<f64> + Copy>(text: &str) -> Result<T, String> {
    let number = text.parse().ok().filter(|&number: &T| number.into().is_finite() && number.into() > 0.0);
    number.ok_or_else(|| "it must be a finite number above 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_within_their_bounds() {
        assert_eq!((whole("0"), whole("64")), (Ok(0usize), Ok(64u64)));
        assert_eq!((not_negative("0"), not_negative("2e-3")), (Ok(0.0), Ok(2e-3)));
        assert_eq!((above_0("798.6"), above_0("1e-40")), (Ok(798.6f64), Ok(1e-40f32)));
        for text in ["", "many", "-1", "1.5", "18446744073709551616"] {
            assert!(whole::<usize>(text).unwrap_err().contains("from 0 to 18446744073709551615"), "{text}");
        }
        for text in ["", "fast", "-1", "-inf", "inf", "NaN", "1e999"] {
            assert!(not_negative(text).unwrap_err().contains("0 or more"), "{text}");
        }
        for text in ["", "fast", "0", "-0.0", "-1", "inf", "NaN", "1e39", "1e-50"] {
            assert!(above_0::<f32>(text).unwrap_err().contains("above 0"), "{text}");
        }
    }
}
