//! What a forward reads and writes, in host memory.

use std::ops::Range;

use half::{bf16, f16};
use nvfp4_moe_device::format::{BLOCK, float16};
use thiserror::Error;

/// A buffer whose length does not fit the layer and the number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{axis} has {got} elements, but must have {must}; give buffers of the layer's sizes")]
pub struct LengthError {
    /// Which buffer or axis: `topk`, `topk_ids`, `topk_weights`, `hidden` or `output`.
    pub axis: &'static str,
    /// Elements found.
    pub got: usize,
    /// Elements that it must have.
    pub must: usize,
}

impl LengthError {
    /// The error, if the two lengths differ.
    ///
    /// # Errors
    /// When `got` is not `must`.
    pub const fn check(axis: &'static str, got: usize, must: usize) -> Result<(), Self> {
        if got == must { Ok(()) } else { Err(Self { axis, got, must }) }
    }
}

/// Hidden states, `[tokens, hidden]`, row after row.
#[derive(Debug, Clone, Copy)]
pub enum HiddenRows<'a> {
    /// In bf16.
    Bf16(&'a [bf16]),
    /// In f16.
    F16(&'a [f16]),
}

impl<'a> HiddenRows<'a> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bf16(rows) => rows.len(),
            Self::F16(rows) => rows.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of the elements.
    ///
    /// # Panics
    /// When the range reaches past the end.
    #[must_use]
    pub fn slice(&self, elems: Range<usize>) -> HiddenRows<'a> {
        match self {
            Self::Bf16(rows) => HiddenRows::Bf16(&rows[elems]),
            Self::F16(rows) => HiddenRows::F16(&rows[elems]),
        }
    }

    /// The 16 elements from element `16 * block` on, as f32 (exact).
    ///
    /// # Panics
    /// When the block reaches past the end.
    #[inline(always)]
    #[must_use]
    pub fn block(&self, block: usize) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        match self {
            Self::Bf16(rows) => {
                for (value, x) in values.iter_mut().zip(&rows[block * BLOCK..][..BLOCK]) {
                    *value = float16::bf16_to_f32(x.to_bits());
                }
            }
            Self::F16(rows) => {
                for (value, x) in values.iter_mut().zip(&rows[block * BLOCK..][..BLOCK]) {
                    *value = float16::f16_to_f32(x.to_bits());
                }
            }
        }
        values
    }
}

/// Inputs of one forward, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Hidden states, `[tokens, hidden]`.
    pub hidden: HiddenRows<'a>,
    /// Global expert ids, `[tokens, topk]`. Ids of experts that are not here, -1 among them, are skipped.
    pub topk_ids: &'a [i32],
    /// Router weights, `[tokens, topk]`.
    pub topk_weights: &'a [f32],
    /// Experts a token.
    pub topk: usize,
}

impl<'a> Inputs<'a> {
    /// Number of tokens, after checking that every length fits a layer of width `hidden` with `topk` experts a token.
    ///
    /// # Errors
    /// [`LengthError`] naming the first length that does not fit.
    ///
    /// # Panics
    /// When `topk` is 0, which no checked shape has.
    pub const fn checked_tokens(&self, hidden: usize, topk: usize) -> Result<usize, LengthError> {
        if let Err(error) = LengthError::check("topk", self.topk, topk) {
            return Err(error);
        }
        let tokens = self.topk_ids.len() / topk;
        if let Err(error) = LengthError::check("topk_ids", self.topk_ids.len(), tokens * topk) {
            return Err(error);
        }
        if let Err(error) = LengthError::check("topk_weights", self.topk_weights.len(), tokens * topk) {
            return Err(error);
        }
        if let Err(error) = LengthError::check("hidden", self.hidden.len(), tokens * hidden) {
            return Err(error);
        }
        Ok(tokens)
    }

    /// The inputs of some of the tokens, for a layer of width `hidden`.
    ///
    /// # Panics
    /// When the range reaches past the last token.
    #[must_use]
    pub fn tokens(&self, range: Range<usize>, hidden: usize) -> Inputs<'a> {
        let picks = range.start * self.topk..range.end * self.topk;
        Inputs {
            hidden: self.hidden.slice(range.start * hidden..range.end * hidden),
            topk_ids: &self.topk_ids[picks.clone()],
            topk_weights: &self.topk_weights[picks],
            topk: self.topk,
        }
    }
}

/// Where the result goes, `[tokens, hidden]`, row after row.
#[derive(Debug)]
pub enum OutputRows<'a> {
    /// Rounded once, to bf16.
    Bf16(&'a mut [bf16]),
    /// The f32 sums.
    F32(&'a mut [f32]),
}

impl OutputRows<'_> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::Bf16(rows) => rows.len(),
            Self::F32(rows) => rows.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of the elements, borrowed again.
    ///
    /// # Panics
    /// When the range reaches past the end.
    #[must_use]
    pub fn slice(&mut self, elems: Range<usize>) -> OutputRows<'_> {
        match self {
            Self::Bf16(rows) => OutputRows::Bf16(&mut rows[elems]),
            Self::F32(rows) => OutputRows::F32(&mut rows[elems]),
        }
    }
}

/// Where the global scale of quantized activations comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    /// The checkpoint's `input_scale` of each expert.
    Static,
    /// The largest magnitude of each row.
    PerToken,
    /// The largest magnitude of the whole batch: a token's result then depends on the others.
    PerTensor,
}
