//! A captured forward, replayed with other inputs, other routing and other numbers of tokens.

use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_moe::driver::DeviceBuffer;
use nvfp4_moe::io::OutputRows;
use nvfp4_moe_device::params::Element;

use super::determinism::nothing_of;
use super::setup::{Batch, Lab, Layer, MODES, SWIGLU, gpu, same_bits};

const SIZES: [usize; 4] = [96, 80, 6, 3];
const HIDDEN: usize = SIZES[0];
const MAX_TOKENS: usize = 129;
/// What the harness fills the output with before a call.
const POISON: u8 = 0xFF;

/// Checks that a buffer still holds the poison from this byte on.
fn untouched_from(buffer: &DeviceBuffer, first: usize, what: &str) -> Result<()> {
    let mut bytes = vec![0; buffer.len_bytes()];
    buffer.read(0, &mut bytes)?;
    let written = bytes[first..].iter().position(|byte| *byte != POISON);
    ensure!(written.is_none(), "{what}: byte {} of the output was written", first + written.unwrap_or(0));
    Ok(())
}

/// Batches of several sizes, each with its own hidden states and routing; one has all tokens on one expert.
fn batches(layer: &Layer) -> Vec<Batch> {
    let mut batches: Vec<_> = [MAX_TOKENS, 33, 1, 128, 2, 64, MAX_TOKENS]
        .into_iter()
        .enumerate()
        .map(|(i, tokens)| Batch::new(&layer.spec.shape, tokens, 100 + i as u64))
        .collect();
    let crowded = Batch::new(&layer.spec.shape, 120, 200);
    batches.insert(3, crowded.with_ids((0..360).map(|entry| if entry % 3 == 0 { 4 } else { -1 })));
    batches
}

pub(super) fn replay(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        for half in [Element::Bf16, Element::F16] {
            let layer = Layer::new(SIZES, SWIGLU, mode);
            let mut loaded = lab.load(&layer, MAX_TOKENS)?;
            let batches: Vec<_> = batches(&layer)
                .into_iter()
                .map(|batch| if half == Element::F16 { batch.in_f16() } else { batch })
                .collect();
            let mut eager = Vec::new();
            for batch in &batches {
                eager.push((loaded.forward_f32(&batch.inputs())?, loaded.forward_bf16(&batch.inputs())?));
            }
            let what = |batch: &Batch| format!("replay with {} tokens, {half:?}, {mode:?}", batch.tokens());
            let mut graph = loaded.forward_graph(half, Element::F32, false)?;
            for (batch, (expected, _)) in batches.iter().zip(&eager) {
                let mut out = vec![0.0; expected.len()];
                graph.forward(&batch.inputs(), OutputRows::F32(&mut out))?;
                same_bits(&out, expected, &what(batch))?;
                untouched_from(graph.output(), expected.len() * 4, &what(batch))?;
            }
            drop(graph);
            let mut graph = loaded.forward_graph(half, Element::Bf16, false)?;
            for (batch, (_, expected)) in batches.iter().zip(&eager) {
                let mut out = vec![bf16::ZERO; expected.len()];
                graph.forward(&batch.inputs(), OutputRows::Bf16(&mut out))?;
                ensure!(out == *expected, "{}, bf16 output: not the eager bits", what(batch));
                untouched_from(graph.output(), expected.len() * 2, &what(batch))?;
            }
        }
    }
    Ok(())
}

/// No tokens, eager and as a replay: ends, and writes nothing at all.
pub(super) fn without_tokens(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let mut loaded = lab.load(&layer, MAX_TOKENS)?;
        let batch = Batch::new(&layer.spec.shape, MAX_TOKENS, 36);
        let full = loaded.forward_f32(&batch.inputs())?;
        let nothing = nothing_of(&batch.inputs());
        ensure!(loaded.forward_f32(&nothing)?.is_empty(), "no tokens gave something");
        untouched_from(gpu(&mut loaded)?.output(), 0, &format!("no tokens, {mode:?}"))?;

        let mut graph = loaded.forward_graph(Element::Bf16, Element::F32, false)?;
        for round in 0..3 {
            let what = format!("round {round}, {mode:?}");
            graph.forward(&nothing, OutputRows::F32(&mut []))?;
            untouched_from(graph.output(), 0, &format!("replay without tokens, {what}"))?;
            let mut out = vec![0.0; full.len()];
            graph.forward(&batch.inputs(), OutputRows::F32(&mut out))?;
            same_bits(&out, &full, &format!("replay after one without tokens, {what}"))?;
        }
    }
    Ok(())
}

pub(super) fn accumulating(lab: &Lab<'_>) -> Result<()> {
    for mode in MODES {
        let layer = Layer::new(SIZES, SWIGLU, mode);
        let mut loaded = lab.load(&layer, MAX_TOKENS)?;
        let batches = batches(&layer);
        let held = |i: usize| i as f32 * 0.003 - 5.0;
        let mut eager = Vec::new();
        for batch in &batches {
            let mut out: Vec<f32> = (0..batch.tokens() * HIDDEN).map(held).collect();
            loaded.forward(&batch.inputs(), OutputRows::F32(&mut out), true)?;
            eager.push(out);
        }
        let mut graph = loaded.forward_graph(Element::Bf16, Element::F32, true)?;
        for (batch, expected) in batches.iter().zip(&eager) {
            let mut out: Vec<f32> = (0..expected.len()).map(held).collect();
            graph.forward(&batch.inputs(), OutputRows::F32(&mut out))?;
            same_bits(&out, expected, &format!("accumulating replay with {} tokens, {mode:?}", batch.tokens()))?;
        }
    }
    Ok(())
}
