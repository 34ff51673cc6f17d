//! The activation between the two matrix products of an expert.

use std::fmt;

use thiserror::Error;

/// What happens to the f32 result of the first matrix product (after alpha) before the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    SwiGlu {
        /// Clamp before the activation: `gate <= limit` (no lower bound) and `-limit <= up <= limit`.
        limit: Option<f32>,
    },
    /// `(up + beta) * gate * sigmoid(alpha * gate)` (gpt-oss).
    SwiGluOai {
        /// Slope inside the sigmoid; 1.702 in every published model.
        alpha: f32,
        /// Added to `up`; 1 in every published model.
        beta: f32,
        /// Clamp before the activation: `gate <= limit` (no lower bound) and `-limit <= up <= limit`.
        limit: f32,
    },
    /// `max(up, 0)^2`, for experts without a gate projection (Nemotron).
    Relu2,
}

/// An activation parameter that gives no usable function.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
#[error(
    "the activation's {parameter} is {got:?}, but it must be {must}; correct it in config.json or on the command line"
)]
pub struct ActivationError {
    /// Which parameter: `limit`, `alpha` or `beta`.
    pub parameter: &'static str,
    /// The value found.
    pub got: f32,
    /// What is allowed.
    pub must: &'static str,
}

impl Activation {
    /// Whether experts have a gate projection beside the up projection.
    #[must_use]
    pub const fn is_gated(self) -> bool {
        !matches!(self, Self::Relu2)
    }

    /// Checks the parameters and returns the activation unchanged.
    ///
    /// # Errors
    /// [`ActivationError`] when a limit is not finite and above 0, or when alpha or beta is not finite.
    pub fn validated(self) -> Result<Self, ActivationError> {
        let check_limit = |limit: f32| {
            if limit.is_finite() && limit > 0.0 {
                Ok(())
            } else {
                Err(ActivationError { parameter: "limit", got: limit, must: "finite and above 0" })
            }
        };
        match self {
            Self::SwiGlu { limit } => limit.map_or(Ok(()), check_limit)?,
            Self::SwiGluOai { alpha, beta, limit } => {
                for (parameter, got) in [("alpha", alpha), ("beta", beta)] {
                    if !got.is_finite() {
                        return Err(ActivationError { parameter, got, must: "finite" });
                    }
                }
                check_limit(limit)?;
            }
            Self::Relu2 => {}
        }
        Ok(self)
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwiGlu { limit: None } => f.write_str("SwiGLU"),
            Self::SwiGlu { limit: Some(limit) } => write!(f, "SwiGLU with limit {limit}"),
            Self::SwiGluOai { alpha, beta, limit } => {
                write!(f, "SwiGLU-OAI with alpha {alpha}, beta {beta} and limit {limit}")
            }
            Self::Relu2 => f.write_str("ReLU^2"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_finite_and_positive() {
        for limit in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let error = Activation::SwiGlu { limit: Some(limit) }.validated().unwrap_err();
            assert_eq!(error.parameter, "limit");
            let oai = Activation::SwiGluOai { alpha: 1.702, beta: 1.0, limit };
            assert!(oai.validated().is_err(), "{limit}");
        }
        let clamped = Activation::SwiGlu { limit: Some(10.0) };
        assert_eq!(clamped.validated(), Ok(clamped));
        assert_eq!(clamped.to_string(), "SwiGLU with limit 10");
    }

    #[test]
    fn only_relu2_has_no_gate() {
        assert!(!Activation::Relu2.is_gated());
        assert!(Activation::SwiGlu { limit: None }.is_gated());
    }
}
