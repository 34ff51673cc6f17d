//! Matrix fragments from and to shared memory (PTX ISA 9.7.14.5.15 `ldmatrix`, 9.7.14.5.16 `stmatrix`) of 8x8 matrices
//! of 16-bit elements.
//!
//! Lanes 8i to 8i + 7 give the row addresses of matrix i. Lane 4g + q holds elements 2q and 2q + 1 of row g, or with `.trans`
//! of column g.

use super::matrix::whole_warp;
use super::{Decoder, Operation, Refusal, Statement};
use crate::decode::Source;
use crate::execute::access::Space;
use crate::execute::{Context, Execute, Fault, Reg, Step};
use crate::memory::global_races::Access;
use crate::types::Type;

/// The 16-bit elements of a row.
type Row = [u16; 8];

/// `ldmatrix` (9.7.14.5.15).
struct LoadMatrix {
    space: Space,
    d: Vec<Reg>,
    address: Source,
    transposed: bool,
}

impl Execute for LoadMatrix {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !whole_warp(cx, lanes)? {
            return Ok(Step::Hold);
        }
        let given = self.d.len() * 8;
        let bases = cx.read(self.address.base, if given == 32 { u32::MAX } else { (1 << given) - 1 })?;
        for (matrix, &register) in self.d.iter().enumerate() {
            let mut rows: [Row; 8] = [[0; 8]; 8];
            for (i, row) in rows.iter_mut().enumerate() {
                let lane = 8 * matrix + i;
                let mut bytes = [0; 16];
                cx.load(self.space, lane, self.address.address(bases[lane]), &mut bytes, Access::Read)?;
                for (element, pair) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                    *element = u16::from_le_bytes([pair[0], pair[1]]);
                }
            }
            let element = |g: usize, k: usize| u64::from(if self.transposed { rows[k][g] } else { rows[g][k] });
            let values = std::array::from_fn(|lane| {
                let (g, k) = (lane / 4, 2 * (lane % 4));
                element(g, k) | element(g, k + 1) << 16
            });
            cx.write(register, u32::MAX, &values);
        }
        Ok(Step::Next)
    }
}

/// `stmatrix` (9.7.14.5.16).
struct StoreMatrix {
    space: Space,
    sources: Vec<Reg>,
    address: Source,
    transposed: bool,
}

impl Execute for StoreMatrix {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !whole_warp(cx, lanes)? {
            return Ok(Step::Hold);
        }
        let given = self.sources.len() * 8;
        let bases = cx.read(self.address.base, if given == 32 { u32::MAX } else { (1 << given) - 1 })?;
        for (matrix, &register) in self.sources.iter().enumerate() {
            let values = cx.read(register, u32::MAX)?;
            for i in 0..8 {
                let mut bytes = [0; 16];
                for k in 0..8 {
                    let (g, column) = if self.transposed { (k, i) } else { (i, k) };
                    let element = (values[4 * g + column / 2] >> (16 * (column % 2))) as u16;
                    bytes[2 * k..2 * k + 2].copy_from_slice(&element.to_le_bytes());
                }
                let lane = 8 * matrix + i;
                cx.store(self.space, lane, self.address.address(bases[lane]), &bytes, Access::Write)?;
            }
        }
        Ok(Step::Next)
    }
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    let load = match s.name {
        "ldmatrix" => true,
        "stmatrix" => false,
        _ => return Ok(None),
    };
    for modifier in ["sync", "aligned", "m8n8", "b16"] {
        s.modifiers.need(modifier)?;
    }
    let count = s.modifiers.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)]).ok_or("without .x1, .x2 or .x4")?;
    let transposed = s.modifiers.take("trans");
    let spaces = [("shared", Space::Shared), ("shared::cta", Space::Shared)];
    let space = s.modifiers.one_of(&spaces).unwrap_or(Space::Generic);
    let (operand, address) = if load { (0, 1) } else { (1, 0) };
    let registers = d.sources(s, operand, Type::B32, false)?;
    let address = d.address(s, address)?;
    if registers.len() != count {
        return Err(format!("{} registers for {count} matrices", registers.len()).into());
    }
    Ok(Some(if load {
        // Destinations must be registers, which constants are not.
        let d = d.destinations(s, 0, Type::B32, false)?.into_iter().collect::<Option<Vec<_>>>().ok_or("`_`")?;
        Box::new(LoadMatrix { space, d, address, transposed })
    } else {
        Box::new(StoreMatrix { space, sources: registers, address, transposed })
    }))
}
