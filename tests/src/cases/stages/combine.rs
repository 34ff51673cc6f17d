//! The weighted sum of a token's slots.

use anyhow::Result;
use half::bf16;
use nvfp4_moe::schedule::{Launch, Params};
use nvfp4_moe_device::kernels::combine::{BLOCK_COLUMNS, THREADS};
use nvfp4_moe_device::params::{CombineParams, Element, NO_SLOT, TokenCount};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::super::device_kernels::downloaded;
use super::{Bench, Lab, same_or_nan};

const TOKENS: usize = 6;
const SLOTS: usize = 7;

/// One call.
#[derive(Clone, Copy, Debug)]
struct Request {
    topk: usize,
    hidden: usize,
    element: Element,
    accumulate: bool,
    /// Tokens that a count on the device leaves.
    device_tokens: Option<usize>,
}

pub(in crate::cases) fn check(lab: &Lab<'_>) -> Result<()> {
    let bench = Bench::new(lab)?;
    for element in [Element::F32, Element::Bf16] {
        for accumulate in [false, true] {
            let request = Request { topk: 3, hidden: 16, element, accumulate, device_tokens: None };
            // Less than a block's columns, exactly as many, and a few more.
            for hidden in [16, 1024, 1040] {
                run(&bench, Request { hidden, ..request })?;
            }
            for topk in 0..10 {
                run(&bench, Request { topk, ..request })?;
            }
            // A count that leaves some out, and one that is too large.
            for tokens in [0, 3, 77] {
                run(&bench, Request { device_tokens: Some(tokens), ..request })?;
            }
        }
    }
    Ok(())
}

/// Slots of each token's entries: some have none, the first token not one, others the same one more than once.
fn entry_slots(topk: usize, rng: &mut StdRng) -> Vec<u32> {
    (0..TOKENS * topk)
        .map(|entry| if entry < topk || rng.random_bool(0.4) { NO_SLOT } else { rng.random_range(0..SLOTS as u32) })
        .collect()
}

/// Values with few bits, so that sums are often halfway between two bf16 numbers, and a few that are no numbers.
fn values(count: usize, rng: &mut StdRng) -> Vec<f32> {
    (0..count)
        .map(|_| match rng.random_range(0..40) {
            0 => f32::INFINITY,
            1 => f32::NAN,
            2..10 => rng.random_range(-2f32..2.0),
            _ => rng.random_range(-1023i32..1024) as f32,
        })
        .collect()
}

fn run(bench: &Bench<'_>, request: Request) -> Result<()> {
    let Request { topk, hidden, element, accumulate, device_tokens } = request;
    let tokens = device_tokens.unwrap_or(TOKENS).min(TOKENS);
    let mut rng = StdRng::seed_from_u64((hidden + topk) as u64);
    let entries = entry_slots(topk, &mut rng);
    let (slots, held) = (values(SLOTS * hidden, &mut rng), values(tokens * hidden, &mut rng));
    let weights: Vec<f32> = (0..TOKENS * topk).map(|_| [0.5, 1.0, 1.25, 0.3][rng.random_range(0..4)]).collect();
    let held_bf16: Vec<bf16> = held.iter().map(|x| bf16::from_f32(*x)).collect();

    let on_device = bench.upload(&[device_tokens.unwrap_or(0) as u32])?;
    let [slot_values, topk_weights] = [bench.upload(&slots)?, bench.upload(&weights)?];
    let entry_slot = bench.upload(&entries)?;
    let output = match (accumulate, element) {
        (false, Element::F32) => bench.room(tokens * hidden * 4)?,
        (false, _) => bench.room(tokens * hidden * 2)?,
        (true, Element::F32) => bench.upload(&held)?,
        (true, _) => bench.upload(&held_bf16)?,
    };
    let params = CombineParams {
        tokens: TokenCount {
            device: if device_tokens.is_some() { on_device.address() } else { 0 },
            bound: TOKENS as u32,
            padding: 0,
        },
        slots: slot_values.address(),
        entry_slot: entry_slot.address(),
        topk_weights: topk_weights.address(),
        output: output.address(),
        topk: topk as u32,
        hidden: hidden as u32,
        element: element as u32,
        accumulate: accumulate.into(),
    };
    let launch = Launch {
        kernel: "combine",
        // One token too many, for which nothing must happen.
        grid: [TOKENS as u32 + 1, (hidden as u32).div_ceil(BLOCK_COLUMNS), 1],
        threads: THREADS,
        shared_bytes: 0,
        params: Params::Combine(params),
    };
    // SAFETY: the kernel's threads and grid; the buffers have the documented sizes.
    unsafe { bench.run(&[launch])? };

    let expected: Vec<f32> = (0..tokens * hidden)
        .map(|at| {
            let (token, column) = (at / hidden, at % hidden);
            let here = || (token * topk..(token + 1) * topk).filter(|&entry| entries[entry] != NO_SLOT);
            let value = |entry: usize| slots[entries[entry] as usize * hidden + column];
            let sum = here().fold(0.0, |sum, entry| sum + weights[entry] * value(entry));
            let held = if element == Element::F32 { held[at] } else { held_bf16[at].to_f32() };
            match (accumulate, here().next()) {
                (false, _) => sum,
                (true, None) => held,
                (true, Some(_)) => sum + held,
            }
        })
        .collect();
    let what = format!("{request:?}");
    match element {
        Element::F32 => same_or_nan(downloaded(&output)?, &expected, &what),
        _ => {
            let got: Vec<bf16> = downloaded(&output)?;
            let rounded: Vec<f32> = expected.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            same_or_nan(got.iter().map(|x| x.to_f32()).collect(), &rounded, &what)
        }
    }
}
