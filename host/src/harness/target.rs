//! Which device a layer runs on, as people write it.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A device that runs a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The CPU engine.
    Cpu,
    /// The GPU with this number.
    Cuda(u32),
    /// A device that something other than the CUDA driver plays; see [`Runner::of_device`](super::Runner::of_device).
    Backend(&'static str),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Backend(name) => f.write_str(name),
        }
    }
}

/// A device by name, or whatever there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The first GPU that works, else the CPU.
    Auto,
    /// This one or an error.
    Named(Target),
}

/// A device name that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no device {got:?}; it must be auto, cpu, cuda or cuda:N with the number of a GPU")]
pub struct DeviceChoiceError {
    /// What was given.
    pub got: String,
}

impl FromStr for DeviceChoice {
    type Err = DeviceChoiceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => Target::Cpu,
            "cuda" => Target::Cuda(0),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
                Target::Cuda(ordinal.ok_or_else(|| DeviceChoiceError { got: text.to_owned() })?)
            }
        };
        Ok(Self::Named(named))
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(target) => target.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_and_shown() {
        for (text, shown) in [("auto", "auto"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), shown);
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let error = text.parse::<DeviceChoice>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }
}
