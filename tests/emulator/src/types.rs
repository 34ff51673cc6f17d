//! Fundamental types of PTX operands (PTX ISA 5.2).

/// An instruction type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// The type of a modifier such as `u32`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Pred,
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Width in bits; 1 for predicates.
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::B8 | Self::U8 | Self::S8 => 8,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 16,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::Bf16x2 => 32,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 64,
            Self::B128 => 128,
        }
    }

    /// Width in bytes.
    pub(crate) const fn bytes(self) -> usize {
        self.bits().div_ceil(8) as usize
    }

    pub(crate) const fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub(crate) const fn is_unsigned(self) -> bool {
        matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::U64)
    }

    pub(crate) const fn is_integer(self) -> bool {
        self.is_signed() || self.is_unsigned()
    }

    pub(crate) const fn is_untyped(self) -> bool {
        matches!(self, Self::B8 | Self::B16 | Self::B32 | Self::B64 | Self::B128)
    }
}

/// `value` without the bits above `bits`.
#[inline(always)]
pub(crate) const fn truncate(value: u64, bits: u32) -> u64 {
    if bits >= 64 { value } else { value & ((1 << bits) - 1) }
}

/// The low `bits` of `value` with their sign.
#[inline(always)]
pub(crate) const fn sign_extend(value: u64, bits: u32) -> i64 {
    let shift = 64 - if bits > 64 { 64 } else { bits };
    ((value << shift) as i64) >> shift
}
