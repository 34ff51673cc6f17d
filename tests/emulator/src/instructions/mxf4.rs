//! Block-scaled matrix multiply-accumulate on FP4 (PTX ISA 9.7.14.3 and 9.7.14.5.14: `mma.sync.aligned.m16n8k64.row.col`
//! with `.kind::mxf4nvf4.block_scale.scale_vec::4X`, E2M1 operands, UE4M3 scales, f32 accumulators).
//!
//! With g = lane / 4 and q = lane % 4: register r of A holds row g + 8 (r % 2), columns 8q + 32 (r / 2) to
//! 8q + 32 (r / 2) + 7, lowest nibble first; register r of B column g, rows 8q + 32r to 8q + 32r + 7. The four scales of a row of A
//! (for 16 of K each) are the bytes of one word, which for row g comes from lane 4g + 2 t and for row g + 8 from lane
//! 4g + 2 t + 1, t the thread selector; those of a column of B from lane 4g + t.
//!
//! The sum of all 64 scaled products is exact in f64: a multiple of 2^-20 below 2^29. So the result is rounded once,
//! when the accumulator is added ([`super::matrix`]).

use super::matrix::{accumulate, whole_warp};
use super::small_float::Format;
use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::{Context, Execute, Fault, Reg, Step, fault};
use crate::types::Type;

const K: usize = 64;
const BLOCK: usize = 16;

/// Twice the values of the E2M1 codes.
const TWICE: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `mma` with block scales (9.7.14.5.14).
struct MmaBlockScaled {
    d: [Reg; 4],
    a: [Reg; 4],
    b: [Reg; 2],
    c: [Reg; 4],
    scale_a: Reg,
    selectors_a: [Reg; 2],
    scale_b: Reg,
    selectors_b: [Reg; 2],
}

/// The eight codes of a register, as twice their values.
fn codes(register: u64) -> [i32; 8] {
    std::array::from_fn(|i| TWICE[(register >> (4 * i) & 15) as usize])
}

/// The scale word of one row or column.
fn scales(word: u64, lane: usize) -> Result<[f64; 4], Fault> {
    let bytes = (word as u32).to_le_bytes();
    if bytes.iter().any(|byte| byte & 0x80 != 0) {
        let detail = format!("the scales {word:#010x} are no UE4M3 numbers");
        return Err(fault(FindingKind::Operand, 1 << lane, detail));
    }
    Ok(bytes.map(|byte| Format::E4M3.decode(byte.into())))
}

impl MmaBlockScaled {
    /// The thread selector, below `threads`; the byte selector must be 0.
    fn selector(&self, cx: &Context<'_>, [byte, thread]: [Reg; 2], threads: u64) -> Result<usize, Fault> {
        let (byte, thread) = (cx.uniform(byte, u32::MAX)? & 0xFFFF, cx.uniform(thread, u32::MAX)? & 0xFFFF);
        if byte != 0 || thread >= threads {
            let detail = format!("the scale selectors {{{byte}, {thread}}}");
            return Err(fault(FindingKind::Operand, u32::MAX, detail));
        }
        Ok(thread as usize)
    }
}

impl Execute for MmaBlockScaled {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !whole_warp(cx, lanes)? {
            return Ok(Step::Hold);
        }
        let (mut a, mut b) = ([[0; K]; 16], [[0; K]; 8]);
        for (r, &register) in self.a.iter().enumerate() {
            for (lane, value) in cx.read(register, u32::MAX)?.into_iter().enumerate() {
                let (row, k) = (lane / 4 + 8 * (r % 2), 8 * (lane % 4) + 32 * (r / 2));
                a[row][k..k + 8].copy_from_slice(&codes(value));
            }
        }
        for (r, &register) in self.b.iter().enumerate() {
            for (lane, value) in cx.read(register, u32::MAX)?.into_iter().enumerate() {
                let (column, k) = (lane / 4, 8 * (lane % 4) + 32 * r);
                b[column][k..k + 8].copy_from_slice(&codes(value));
            }
        }
        let thread_a = self.selector(cx, self.selectors_a, 2)?;
        let thread_b = self.selector(cx, self.selectors_b, 4)?;
        let row_lane = |row: usize| 4 * (row % 8) + 2 * thread_a + row / 8;
        let column_lane = |column: usize| 4 * column + thread_b;
        let all_a = (0..16).fold(0u32, |lanes, row| lanes | 1 << row_lane(row));
        let all_b = (0..8).fold(0u32, |lanes, column| lanes | 1 << column_lane(column));
        let (words_a, words_b) = (cx.read(self.scale_a, all_a)?, cx.read(self.scale_b, all_b)?);
        let (mut scales_a, mut scales_b) = ([[0.0; 4]; 16], [[0.0; 4]; 8]);
        for (row, values) in scales_a.iter_mut().enumerate() {
            *values = scales(words_a[row_lane(row)], row_lane(row))?;
        }
        for (column, values) in scales_b.iter_mut().enumerate() {
            *values = scales(words_b[column_lane(column)], column_lane(column))?;
        }
        let mut sums = [[0.0; 8]; 16];
        for (m, row) in sums.iter_mut().enumerate() {
            for (n, sum) in row.iter_mut().enumerate() {
                for block in 0..K / BLOCK {
                    let range = block * BLOCK..(block + 1) * BLOCK;
                    let dot: i32 = a[m][range.clone()].iter().zip(&b[n][range]).map(|(x, y)| x * y).sum();
                    *sum += f64::from(dot) * 0.25 * (scales_a[m][block] * scales_b[n][block]);
                }
            }
        }
        accumulate(cx, self.d, self.c, &sums)?;
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "mma" || !s.modifiers.has("kind::mxf4nvf4") {
        return Ok(None);
    }
    let names = ["sync", "aligned", "m16n8k64", "row", "col", "kind::mxf4nvf4", "block_scale", "scale_vec::4X"];
    for name in names {
        s.modifiers.need(name)?;
    }
    for expected in ["f32", "e2m1", "e2m1", "f32", "ue4m3"] {
        if s.modifiers.next() != Some(expected) {
            return Err(format!("these matrix types: .{expected} belongs there").into());
        }
    }
    Ok(Some(Box::new(MmaBlockScaled {
        d: d.destination_array(s, 0, Type::B32)?,
        a: d.source_array(s, 1, Type::B32)?,
        b: d.source_array(s, 2, Type::B32)?,
        c: d.source_array(s, 3, Type::B32)?,
        scale_a: d.source(s, 4, Type::B32)?,
        selectors_a: d.source_array(s, 5, Type::B16)?,
        scale_b: d.source(s, 6, Type::B32)?,
        selectors_b: d.source_array(s, 7, Type::B16)?,
    })))
}
