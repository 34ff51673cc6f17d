//! The last stage: each token's results, weighted by the router and summed in ascending k, rounded once.

use half::bf16;
use nvfp4_moe_device::format::float16;
use rayon::prelude::*;

use super::kernel::ROWS;
use super::stages::tile_at;
use crate::io::{Inputs, OutputRows};
use crate::routing::{NOT_LOCAL, Routing};
use crate::shape::ExpertRange;

/// Element of the output.
trait Output: Copy + Send {
    fn read(self) -> f32;
    fn round(sum: f32) -> Self;
}

impl Output for f32 {
    #[inline(always)]
    fn read(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(sum: f32) -> Self {
        sum
    }
}

impl Output for bf16 {
    #[inline(always)]
    fn read(self) -> f32 {
        float16::bf16_to_f32(self.to_bits())
    }

    #[inline(always)]
    fn round(sum: f32) -> Self {
        Self::from_bits(float16::f32_to_bf16(sum))
    }
}

/// Writes (or adds) the sum of each token's results `y` (in row tiles) to its row of `out`.
pub(super) fn combine(
    experts: ExpertRange,
    routing: &Routing,
    inputs: &Inputs<'_>,
    y: &[f32],
    out: OutputRows<'_>,
    accumulate: bool,
) {
    match out {
        OutputRows::Bf16(rows) => combine_rows(experts, routing, inputs, y, rows, accumulate),
        OutputRows::F32(rows) => combine_rows(experts, routing, inputs, y, rows, accumulate),
    }
}

fn combine_rows<T: Output>(
    experts: ExpertRange,
    routing: &Routing,
    inputs: &Inputs<'_>,
    y: &[f32],
    rows: &mut [T],
    accumulate: bool,
) {
    let tokens = inputs.topk_ids.len() / inputs.topk;
    if tokens == 0 {
        return;
    }
    let hidden = rows.len() / tokens;
    rows.par_chunks_exact_mut(hidden).enumerate().for_each(|(token, row)| {
        let picks = token * inputs.topk..(token + 1) * inputs.topk;
        if routing.slot_of[picks.clone()].iter().all(|slot| *slot == NOT_LOCAL) {
            if !accumulate {
                row.fill(T::round(0.0));
            }
            return;
        }
        for (tile, out) in row.chunks_exact_mut(ROWS).enumerate() {
            let mut sums = [0.0; ROWS];
            for pick in picks.clone() {
                let slot = routing.slot_of[pick];
                if slot == NOT_LOCAL {
                    continue;
                }
                let slots = routing.expert_slots(inputs.topk_ids[pick] as usize - experts.first);
                let weight = inputs.topk_weights[pick];
                for (sum, y) in sums.iter_mut().zip(tile_at(y, slots.value_index(hidden, slot as usize, tile * ROWS))) {
                    *sum += weight * y;
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                let sum = if accumulate { out.read() + sum } else { sum };
                // One NaN for all: which of two NaN operands survives an addition is the compiler's choice.
                *out = T::round(if sum.is_nan() { f32::NAN } else { sum });
            }
        }
    });
}
