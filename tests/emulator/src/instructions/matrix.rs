//! Matrix multiply-accumulate of 16-bit operands (PTX ISA 9.7.14.5: `mma.sync` m16n8k16 and m16n8k8). What the unit makes of the operands is in [`super::product`].
//!
//! With `Accumulate::F64` what the rounding to f32 drops is kept beside the register and added again when the
//! register is the accumulator next: a chain of `mma` adds up in f64.

use super::product::{self, Element, fragment_a};
use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::launch::Accumulate;
use crate::execute::{Context, Execute, Fault, Lanes, Reg, Step, fault};
use crate::types::Type;

/// What accumulator registers of a warp lost by rounding.
#[derive(Default)]
pub(crate) struct Residues {
    /// Of each register: the f64 value in each lane, rounded to what the register holds if it is still valid.
    values: Vec<Option<Box<[f64; 32]>>>,
}

impl Residues {
    /// The accumulator in f64: the kept value if the register still holds its rounding.
    pub(super) fn restore(&self, register: Reg, lane: usize, value: f32) -> f64 {
        match self.values.get(register.0 as usize) {
            Some(Some(kept)) if (kept[lane] as f32).to_bits() == value.to_bits() => kept[lane],
            _ => f64::from(value),
        }
    }

    pub(super) fn keep(&mut self, register: Reg, lane: usize, value: f64) {
        let index = register.0 as usize;
        if self.values.len() <= index {
            self.values.resize_with(index + 1, || None);
        }
        self.values[index].get_or_insert_with(|| Box::new([f64::NAN; 32]))[lane] = value;
    }
}

/// All 32 lanes take part in an `.aligned` matrix instruction; what runs otherwise is divergent.
pub(super) fn whole_warp(cx: &mut Context<'_>, lanes: u32) -> Result<bool, Fault> {
    match cx.converge_all(lanes)? {
        Some(u32::MAX) => Ok(true),
        Some(lanes) => {
            let detail = format!("only the lanes {lanes:#010x} of the warp are left");
            Err(fault(FindingKind::Divergent, lanes, detail))
        }
        None => Ok(false),
    }
}

/// Writes `D = A * B + C` for f32 accumulators in the m16n8 layout: lane 4g + q holds (g, 2q), (g, 2q + 1), (g + 8, 2q),
/// (g + 8, 2q + 1). `sums[m][n]` are the sums of the products.
pub(super) fn accumulate(cx: &mut Context<'_>, d: [Reg; 4], c: [Reg; 4], sums: &[[f64; 8]; 16]) -> Result<(), Fault> {
    let exact = cx.launch.config.accumulate == Accumulate::F64;
    let addends: [Lanes; 4] =
        [cx.read(c[0], u32::MAX)?, cx.read(c[1], u32::MAX)?, cx.read(c[2], u32::MAX)?, cx.read(c[3], u32::MAX)?];
    // All four before any is written: D and C may share registers.
    let results: [[f64; 32]; 4] = std::array::from_fn(|i| {
        std::array::from_fn(|lane| {
            let sum = sums[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
            let addend = f32::from_bits(addends[i][lane] as u32);
            if exact { sum + cx.warp.state.residues.restore(c[i], lane, addend) } else { product::add(sum, addend) }
        })
    });
    for (&register, values) in d.iter().zip(&results) {
        if exact {
            values.iter().enumerate().for_each(|(lane, &value)| cx.warp.state.residues.keep(register, lane, value));
        }
        cx.write(register, u32::MAX, &values.map(|value| product::rounded(value).into()));
    }
    Ok(())
}

/// `mma.sync.aligned.m16n8k16.row.col` (and k8; 9.7.14.5.14) with f32 accumulators.
struct Mma {
    element: Element,
    d: [Reg; 4],
    c: [Reg; 4],
    /// Two registers for each 8 of K: rows g and g + 8.
    a: Vec<Reg>,
    /// One register for each 8 of K.
    b: Vec<Reg>,
}

impl Execute for Mma {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !whole_warp(cx, lanes)? {
            return Ok(Step::Hold);
        }
        let mut registers = [[0; 32]; 4];
        for (values, &register) in registers.iter_mut().zip(&self.a) {
            *values = cx.read(register, u32::MAX)?;
        }
        let a = fragment_a(&registers[..self.a.len()], self.element);
        let mut b = [0f64; product::DEPTH * 8];
        for (i, &register) in self.b.iter().enumerate() {
            let values = cx.read(register, u32::MAX)?;
            for (lane, pair) in self.element.pairs(&values).into_iter().enumerate() {
                let (column, k) = (lane / 4, 2 * (lane % 4) + 8 * i);
                [b[8 * k + column], b[8 * (k + 1) + column]] = pair;
            }
        }
        let mut sums = [0.0; product::ROWS * 8];
        product::sums(&a, &b, 8, &mut sums);
        let sums = std::array::from_fn(|row| std::array::from_fn(|column| sums[8 * row + column]));
        accumulate(cx, self.d, self.c, &sums)?;
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "mma" || !(s.modifiers.has("f16") || s.modifiers.has("bf16")) {
        return Ok(None);
    }
    s.modifiers.need("sync")?;
    s.modifiers.need("aligned")?;
    let steps = s.modifiers.one_of(&[("m16n8k16", 2), ("m16n8k8", 1)]).ok_or("its shape")?;
    s.modifiers.need("row")?;
    s.modifiers.need("col")?;
    let [to, a, b, from] = [s.modifiers.kind()?, s.modifiers.kind()?, s.modifiers.kind()?, s.modifiers.kind()?];
    let element = Element::of(a, b).filter(|_| [to, from] == [Type::F32; 2]).ok_or("these matrix types")?;
    let (a, b) = (d.sources(s, 1, Type::B32, false)?, d.sources(s, 2, Type::B32, false)?);
    if (a.len(), b.len()) != (2 * steps, steps) {
        return Err("the number of registers".into());
    }
    let (to, c) = (d.destination_array(s, 0, Type::B32)?, d.source_array(s, 3, Type::B32)?);
    Ok(Some(Box::new(Mma { element, d: to, c, a, b })))
}
