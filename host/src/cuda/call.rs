//! Arguments of one forward in device memory, and their checks.

use nvfp4_moe_device::params::Element;
use thiserror::Error;

use crate::driver::{DeviceBuffer, DriverError};
use crate::plan::Plan;
use crate::schedule::CallAddresses;

/// A number of tokens in device memory: the first u32 of a buffer.
pub type DeviceTokens<'a> = &'a DeviceBuffer;

/// Arguments of one forward, as buffers of this library. Raw addresses go through
/// [`MoeLayer::forward_raw`](super::MoeLayer::forward_raw).
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// `[tokens, hidden]` bf16 or f16.
    pub hidden: &'a DeviceBuffer,
    /// Which of the two.
    pub hidden_element: Element,
    /// `[tokens, topk]` i32, global expert ids; ids that are not here, -1 among them, are skipped.
    pub topk_ids: &'a DeviceBuffer,
    /// `[tokens, topk]` f32.
    pub topk_weights: &'a DeviceBuffer,
    /// `[tokens, hidden]` bf16 or f32.
    pub output: &'a DeviceBuffer,
    /// Which of the two.
    pub output_element: Element,
    /// Number of tokens; in a captured graph the largest number of any replay.
    pub tokens: usize,
    /// The number of tokens of a replay, read by the kernels; at most `tokens`.
    pub device_tokens: Option<DeviceTokens<'a>>,
    /// Add to the output (whose tokens without local experts then stay as they are) instead of overwriting it.
    pub accumulate: bool,
}

/// Arguments that do not fit the plan, or a failure of the driver.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum CallError {
    /// More tokens than planned.
    #[error("the call has {tokens} tokens, but the plan allows {max_tokens}; plan for more or split the batch")]
    TooManyTokens {
        /// Tokens of the call.
        tokens: usize,
        /// Of the plan.
        max_tokens: usize,
    },
    /// A buffer is too small.
    #[error("{argument} has {found_bytes} bytes, but {tokens} tokens need {needed_bytes}; give a larger buffer")]
    TooSmall {
        /// Which argument.
        argument: &'static str,
        /// Its bytes.
        found_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
        /// Tokens of the call.
        tokens: usize,
    },
    /// An address is not aligned.
    #[error(
        "{argument} is at address {address:#x}, which is not a multiple of {alignment}; align it, since the kernels load that many bytes at once"
    )]
    Misaligned {
        /// Which argument.
        argument: &'static str,
        /// Its address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// An element type that an argument cannot have.
    #[error("{argument} is {found:?}, but must be {must}; convert it")]
    Element {
        /// Which argument.
        argument: &'static str,
        /// Its type.
        found: Element,
        /// Allowed types.
        must: &'static str,
    },
    /// The workspace was made for a smaller plan.
    #[error(
        "the workspace has {found_bytes} bytes, but the layer's plan needs {needed_bytes}; make it from the largest plan"
    )]
    Workspace {
        /// Its bytes.
        found_bytes: u64,
        /// Bytes needed.
        needed_bytes: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

pub(super) const fn element_bytes(element: Element) -> u64 {
    match element {
        Element::Bf16 | Element::F16 => 2,
        Element::F32 => 4,
    }
}

impl Call<'_> {
    /// The call's addresses, after checking every buffer's size.
    pub(super) fn addresses(&self, plan: &Plan) -> Result<CallAddresses, CallError> {
        let shape = &plan.spec().shape;
        let (rows, entries) = ((self.tokens * shape.hidden) as u64, (self.tokens * shape.topk) as u64);
        let tokens = self.tokens;
        let sizes = [
            ("hidden", self.hidden, rows * element_bytes(self.hidden_element)),
            ("topk_ids", self.topk_ids, entries * 4),
            ("topk_weights", self.topk_weights, entries * 4),
            ("output", self.output, rows * element_bytes(self.output_element)),
        ];
        let count = self.device_tokens.map(|buffer| ("device_tokens", buffer, 4));
        for (argument, buffer, needed_bytes) in sizes.into_iter().chain(count) {
            let found_bytes = buffer.len_bytes() as u64;
            if found_bytes < needed_bytes {
                return Err(CallError::TooSmall { argument, found_bytes, needed_bytes, tokens });
            }
        }
        Ok(CallAddresses {
            hidden: self.hidden.address(),
            hidden_element: self.hidden_element,
            topk_ids: self.topk_ids.address(),
            topk_weights: self.topk_weights.address(),
            output: self.output.address(),
            output_element: self.output_element,
            tokens,
            device_tokens: self.device_tokens.map_or(0, DeviceBuffer::address),
            accumulate: self.accumulate,
        })
    }
}

/// Checks what both forms of a call share.
pub(super) fn check(call: &CallAddresses, plan: &Plan) -> Result<(), CallError> {
    if call.tokens > plan.max_tokens() {
        return Err(CallError::TooManyTokens { tokens: call.tokens, max_tokens: plan.max_tokens() });
    }
    if call.hidden_element == Element::F32 {
        return Err(CallError::Element { argument: "hidden", found: call.hidden_element, must: "Bf16 or F16" });
    }
    if call.output_element == Element::F16 {
        return Err(CallError::Element { argument: "output", found: call.output_element, must: "Bf16 or F32" });
    }
    let aligned = [
        ("hidden", call.hidden, 16),
        ("output", call.output, 16),
        ("topk_ids", call.topk_ids, 4),
        ("topk_weights", call.topk_weights, 4),
        ("device_tokens", call.device_tokens, 4),
    ];
    for (argument, address, alignment) in aligned {
        if address % alignment != 0 {
            return Err(CallError::Misaligned { argument, address, alignment });
        }
    }
    Ok(())
}
