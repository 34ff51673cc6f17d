//! Values of flags that several commands share.

use clap::ValueEnum;
use nvfp4_moe::io::ScaleMode;

/// Scales of the quantized activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Scales {
    /// Static where the checkpoint has input scales, else per token
    Auto,
    /// The checkpoint's input scales
    Static,
    /// Each row's own largest magnitude
    PerToken,
    /// The whole batch's largest magnitude
    PerTensor,
}

impl Scales {
    /// The mode; `None` leaves it to the checkpoint.
    pub(super) const fn mode(self) -> Option<ScaleMode> {
        match self {
            Self::Auto => None,
            Self::Static => Some(ScaleMode::Static),
            Self::PerToken => Some(ScaleMode::PerToken),
            Self::PerTensor => Some(ScaleMode::PerTensor),
        }
    }
}

/// Name of a mode in reports: what the flag calls it.
pub(super) const fn scales_label(mode: ScaleMode) -> &'static str {
    match mode {
        ScaleMode::Static => "static",
        ScaleMode::PerToken => "per-token",
        ScaleMode::PerTensor => "per-tensor",
    }
}

/// What happens between the two matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ActivationKind {
    /// silu(gate) * up
    Swiglu,
    /// (up + 1) * gate * sigmoid(1.702 * gate), clamped
    Swigluoai,
    /// max(up, 0)^2, for experts without a gate
    Relu2,
}

/// Element type of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OutDtype {
    /// Rounded once, to bf16
    Bf16,
    /// The f32 sums
    F32,
}

impl OutDtype {
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}
