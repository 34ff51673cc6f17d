//! Bytes that a stage between the products must move, whatever its kernel: what its time is compared with.

use nvfp4_moe_device::format::BLOCK;

use crate::io::ScaleMode;
use crate::kernel_family::KernelFamily;
use crate::plan::Plan;
use crate::schedule::Stage;

/// Bytes of a bf16 element, of which inputs and outputs are.
const BF16: usize = 2;
/// Bytes of an f32 element, of which h and y are.
const F32: usize = 4;

/// Bytes that `stage` reads and writes at least in a forward of `tokens` tokens, all of whose experts are here, with bf16
/// inputs and outputs. `None` for routing and the products, which memory's copy rate does not bound, and for a stage that
/// has nothing to do because the first product does it.
#[must_use]
pub fn moved_bytes(plan: &Plan, stage: Stage, tokens: usize) -> Option<u64> {
    let spec = plan.spec();
    let slots = tokens * spec.shape.topk;
    let bytes = match stage {
        Stage::QuantizeL1 => {
            let rows = if spec.quantizes_tokens() { tokens } else { slots };
            // Rows that several slots gather are read once.
            quantized_bytes(plan, tokens * spec.shape.hidden * BF16, rows, spec.shape.hidden)
        }
        Stage::QuantizeL2 => {
            if plan.fuses_quantization(plan.variant(tokens), tokens) {
                return None;
            }
            quantized_bytes(plan, slots * spec.shape.intermediate * F32, slots, spec.shape.intermediate)
        }
        Stage::Combine => slots * spec.shape.hidden * F32 + tokens * spec.shape.hidden * BF16,
        Stage::Route | Stage::GroupedGemmL1 | Stage::GroupedGemmL2 => return None,
    };
    Some(bytes as u64)
}

/// Reading `input` bytes and writing `rows` quantized rows of `k`.
fn quantized_bytes(plan: &Plan, input: usize, rows: usize, k: usize) -> usize {
    let block_scales = if plan.kernels() == KernelFamily::Fp4 { rows * k / BLOCK } else { 0 };
    // The largest magnitude of a batch is known only when all of it has been read.
    let reads = if plan.spec().scales == ScaleMode::PerTensor { 2 } else { 1 };
    reads * input + plan.kernels().activation_bytes(rows * k) + block_scales
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;
    use crate::device_limits::DeviceLimits;
    use crate::shape::{ExpertRange, MoeShape};
    use crate::spec::LayerSpec;

    fn moved(compute_capability: (u32, u32), scales: ScaleMode, shared_l1_scale: bool, tokens: usize) -> Vec<u64> {
        let shape = MoeShape { hidden: 64, intermediate: 32, experts: 4, topk: 2 };
        let activation = Activation::SwiGlu { limit: None };
        let spec = LayerSpec { shape, experts: ExpertRange::all(4), activation, scales, shared_l1_scale };
        let limits = DeviceLimits { compute_capability, ..DeviceLimits::H200 };
        let plan = Plan::new(spec, &limits, 1000).unwrap();
        Stage::ALL.into_iter().map(|stage| moved_bytes(&plan, stage, tokens).unwrap_or(0)).collect()
    }

    #[test]
    fn every_element_is_read_and_written_once() {
        let combine = 1000 * (2 * 64 * 4 + 64 * 2);
        let slots_of_h = 2000 * 32;
        assert_eq!(
            moved((9, 0), ScaleMode::PerToken, true, 1000),
            [0, 1000 * 64 * (2 + 2), 0, slots_of_h * (4 + 2), 0, combine]
        );
        // Half a byte an element, and a byte for each 16.
        assert_eq!(
            moved((12, 0), ScaleMode::PerToken, true, 1000),
            [0, 1000 * (64 * 2 + 32 + 4), 0, slots_of_h * 4 + slots_of_h / 2 + slots_of_h / 16, 0, combine]
        );
        assert_eq!(moved((9, 0), ScaleMode::PerTensor, true, 1000)[1], 1000 * 64 * (2 * 2 + 2));
        assert_eq!(moved((9, 0), ScaleMode::Static, false, 1000)[1], 1000 * 64 * 2 + 2000 * 64 * 2);
        assert_eq!(moved((9, 0), ScaleMode::Static, true, 1)[3], 0, "the first product quantizes few slots itself");
    }
}
