//! The weighted sum of a token's slots.

use anyhow::Result;
use half::bf16;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe_device::kernels::combine::{BLOCK_COLUMNS, THREADS};
use nvfp4_moe_device::params::{CombineParams, Element, NO_SLOT, TokenCount};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{Bench, Lab, same};

const TOPK: usize = 3;
/// Slots of each token's entries: several, one, none, and the same one twice.
const ENTRY_SLOTS: [[u32; TOPK]; 5] =
    [[4, 0, 2], [NO_SLOT, 1, NO_SLOT], [NO_SLOT; 3], [3, NO_SLOT, 5], [NO_SLOT, 5, 5]];
const SLOTS: usize = 6;

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    // Less than a block's columns, exactly as many, and a few more.
    for hidden in [16, 1024, 1040] {
        for element in [Element::F32, Element::Bf16] {
            for accumulate in [false, true] {
                // All tokens, a count on the device that leaves some out, and one that is too large.
                for tokens in [None, Some(3), Some(77)] {
                    run(&bench, hidden, element, accumulate, tokens)?;
                }
            }
        }
    }
    Ok(())
}

fn run(
    bench: &Bench<'_>,
    hidden: usize,
    element: Element,
    accumulate: bool,
    device_tokens: Option<usize>,
) -> Result<()> {
    let bound = ENTRY_SLOTS.len();
    let tokens = device_tokens.unwrap_or(bound).min(bound);
    let mut rng = StdRng::seed_from_u64(hidden as u64);
    let mut random = |count: usize| (0..count).map(|_| rng.random_range(-2f32..2.0)).collect::<Vec<_>>();
    let (slots, weights, held) = (random(SLOTS * hidden), random(bound * TOPK), random(bound * hidden));
    let held_bf16: Vec<bf16> = held.iter().map(|x| bf16::from_f32(*x)).collect();

    let on_device = bench.upload(&[device_tokens.unwrap_or(0) as u32])?;
    let [slot_values, topk_weights] = [bench.upload(&slots)?, bench.upload(&weights)?];
    let entry_slot = bench.upload(ENTRY_SLOTS.as_flattened())?;
    let output = match (accumulate, element) {
        (false, Element::F32) => bench.room(tokens * hidden * 4)?,
        (false, _) => bench.room(tokens * hidden * 2)?,
        (true, Element::F32) => bench.upload(&held[..tokens * hidden])?,
        (true, _) => bench.upload(&held_bf16[..tokens * hidden])?,
    };
    let params = CombineParams {
        tokens: TokenCount {
            device: if device_tokens.is_some() { on_device.address() } else { 0 },
            bound: bound as u32,
            padding: 0,
        },
        slots: slot_values.address(),
        entry_slot: entry_slot.address(),
        topk_weights: topk_weights.address(),
        output: output.address(),
        topk: TOPK as u32,
        hidden: hidden as u32,
        element: element as u32,
        accumulate: accumulate.into(),
    };
    let launch = Launch {
        kernel: "combine",
        grid: [bound as u32, (hidden as u32).div_ceil(BLOCK_COLUMNS), 1],
        threads: THREADS,
        shared_bytes: 0,
        params: Params::Combine(params),
    };
    // SAFETY: the kernel's threads and grid; the buffers have the documented sizes.
    unsafe { bench.run(&[launch])? };

    let (mut expected, mut expected_bf16) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        let entries = ENTRY_SLOTS[token].iter().zip(&weights[token * TOPK..]).filter(|(slot, _)| **slot != NO_SLOT);
        let leave = accumulate && entries.clone().next().is_none();
        for column in 0..hidden {
            let value = |&slot: &u32| slots[slot as usize * hidden + column];
            let sum = entries.clone().fold(0.0, |sum, (slot, weight)| sum + weight * value(slot));
            let at = token * hidden + column;
            let (held, held_bf16) = (held[at], held_bf16[at]);
            let onto = |held: f32| if accumulate { sum + held } else { sum };
            expected.push(if leave { held } else { onto(held) }.to_bits());
            let sum_bf16 = bf16::from_f32(onto(held_bf16.to_f32()));
            expected_bf16.push(if leave { held_bf16 } else { sum_bf16 }.to_bits());
        }
    }
    let what = format!("hidden {hidden}, {element:?}, accumulate {accumulate}, {device_tokens:?} tokens");
    match element {
        Element::F32 => same(&output, &expected, &what),
        _ => same(&output, &expected_bf16, &what),
    }
}
