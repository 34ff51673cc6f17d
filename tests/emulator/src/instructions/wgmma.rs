//! Asynchronous matrix products of a warpgroup (PTX ISA 9.7.15.5 and 9.7.15.7): `wgmma.mma_async` m64nNk16 of f16 and bf16
//! with f32 accumulators, `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group`.
//!
//! Each warp multiplies its 16 rows when it comes to the instruction. Accumulators, registers with A and what is read in
//! shared memory count as in use until the warp has waited for the product: [`crate::execute::registers`],
//! [`crate::memory`].

use super::matrix::whole_warp;
use super::matrix_descriptor::Descriptor;
use super::matrix_tile::{Reader, TileKey};
use super::product::{self, DEPTH, Element, ROWS, fragment_a};
use super::warpgroup::{WARPS, in_warpgroup};
use super::{Decoder, Operation, Refusal, Statement};
use crate::error::FindingKind;
use crate::execute::access::shared_fault;
use crate::execute::launch::Accumulate;
use crate::execute::registers::Role;
use crate::execute::{Condition, Context, Execute, Fault, Lanes, Reg, Step, fault};
use crate::memory::shared::{SharedFault, SharedMemory};
use crate::types::Type;

/// `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group` (9.7.15.7).
enum Group {
    Fence,
    Commit,
    Wait(usize),
}

impl Execute for Group {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !in_warpgroup(cx, lanes, [0; 3])? {
            return Ok(Step::Hold);
        }
        match *self {
            Self::Fence => cx.warp.products.fence(),
            Self::Commit => cx.warp.products.commit(),
            Self::Wait(pending) => {
                if let Some(time) = cx.warp.products.wait(pending) {
                    cx.cluster.shared.end_matrix_read(cx.warp.index, time);
                }
            }
        }
        Ok(Step::Next)
    }
}

/// Where A is.
enum MatrixA {
    Registers([Reg; 4]),
    Shared { descriptor: Reg, m_major: bool },
}

/// `wgmma.mma_async` (9.7.15.5.2).
struct MultiplyAsync {
    element: Element,
    n: usize,
    d: Vec<Reg>,
    a: MatrixA,
    b: Reg,
    n_major: bool,
    /// Without it the accumulators count as 0.
    accumulates: Condition,
    /// One of A and B is negated.
    negates: bool,
}

impl MultiplyAsync {
    fn descriptor(cx: &Context<'_>, register: Reg) -> Result<(u64, Descriptor), Fault> {
        let bits = cx.uniform(register, u32::MAX)?;
        let descriptor =
            Descriptor::decode(bits, cx.block.rank).map_err(|why| fault(FindingKind::Operand, u32::MAX, why))?;
        Ok((bits, descriptor))
    }

    /// The warp's rows of A from shared memory.
    fn rows(
        &self,
        shared: &mut SharedMemory,
        (descriptor, m_major): (Descriptor, bool),
        reader: Reader,
        first: u32,
    ) -> Result<product::A, (u32, SharedFault)> {
        let mut a = [[0.0; DEPTH]; ROWS];
        // Two chunks for each place in K, or for each row.
        let chunk = |i: u32| match m_major {
            true => descriptor.chunk(true, first / 8 + i % 2, i / 2),
            false => descriptor.chunk(false, first + i / 2, i % 2),
        };
        let chunks: [u32; 2 * ROWS] = std::array::from_fn(|i| chunk(i as u32));
        shared.note_matrix_reads(&chunks, reader.warp, reader.time)?;
        for (i, &chunk) in chunks.iter().enumerate() {
            let elements = self.element.widen(shared.elements(chunk).map_err(|fault| (chunk, fault))?);
            let (outer, inner) = (i / 2, 8 * (i % 2));
            if m_major {
                elements.iter().zip(&mut a[inner..]).for_each(|(&value, row)| row[outer] = value);
            } else {
                a[outer][inner..inner + 8].copy_from_slice(&elements);
            }
        }
        Ok(a)
    }

    /// The sums of the products of the warp's rows.
    fn sums(
        &self,
        cx: &mut Context<'_>,
        fragment: &[Lanes; 4],
        a: Option<(Descriptor, bool)>,
        b: Descriptor,
        time: u32,
    ) -> Result<Vec<f64>, Fault> {
        let first = (cx.own_warp() as usize % WARPS * ROWS) as u32;
        let (shared, tiles) = (&mut cx.cluster.shared, &mut cx.block.extra.tiles);
        let reader = Reader { warp: cx.warp.index, time };
        let in_memory = |(address, fault): (u32, SharedFault)| shared_fault(fault, 0, address.into());
        let mut a = match a {
            Some(matrix) => self.rows(shared, matrix, reader, first).map_err(in_memory)?,
            None => fragment_a(fragment, self.element),
        };
        if self.negates {
            a.iter_mut().flatten().for_each(|value| *value = -*value);
        }
        let key = TileKey { descriptor: b, n: self.n, n_major: self.n_major, element: self.element };
        let b = tiles.read(shared, key, reader).map_err(in_memory)?;
        let mut sums = vec![0.0; ROWS * self.n];
        product::sums(&a, b, self.n, &mut sums);
        Ok(sums)
    }

    /// Lane 4g + q holds in registers 4c to 4c + 3 (g, 8c + 2q), (g, 8c + 2q + 1), (g + 8, 8c + 2q), (g + 8, 8c + 2q + 1).
    fn accumulate(&self, cx: &mut Context<'_>, accumulates: bool, sums: &[f64]) -> Result<(), Fault> {
        let exact = cx.launch.config.accumulate == Accumulate::F64;
        for (i, &register) in self.d.iter().enumerate() {
            let (row, column) = (8 * (i / 2 % 2), 8 * (i / 4) + i % 2);
            let mut values = [0.0; 32];
            for (g, values) in values.chunks_exact_mut(4).enumerate() {
                let row = &sums[(row + g) * self.n + column..];
                values.iter_mut().zip(row.iter().step_by(2)).for_each(|(value, &sum)| *value = sum);
            }
            let addends = if accumulates { *cx.read_for_product(register)? } else { [0; 32] };
            if !exact {
                cx.write_of_product(register, &product::accumulate(&values, &addends));
                continue;
            }
            for (lane, value) in values.iter_mut().enumerate() {
                if accumulates {
                    let addend = f32::from_bits(addends[lane] as u32);
                    *value += cx.warp.state.residues.restore(register, lane, addend);
                }
                cx.warp.state.residues.keep(register, lane, *value);
            }
            cx.write_of_product(register, &values.map(|value| product::rounded(value).into()));
        }
        Ok(())
    }
}

impl Execute for MultiplyAsync {
    fn execute(&self, cx: &mut Context<'_>, lanes: u32) -> Result<Step, Fault> {
        if !whole_warp(cx, lanes)? {
            return Ok(Step::Hold);
        }
        let lanes = u32::MAX;
        let held = cx.holds(self.accumulates, lanes)?;
        if held != 0 && held != u32::MAX {
            let detail = format!("scale-d holds in the lanes {held:#010x} only");
            return Err(fault(FindingKind::Operand, held, detail));
        }
        let (bits_b, b) = Self::descriptor(cx, self.b)?;
        let (bits_a, a) = match self.a {
            MatrixA::Registers(_) => (0, None),
            MatrixA::Shared { descriptor, m_major } => {
                let (bits, descriptor) = Self::descriptor(cx, descriptor)?;
                (bits, Some((descriptor, m_major)))
            }
        };
        if !in_warpgroup(cx, lanes, [bits_a, bits_b, u64::from(held & 1)])? {
            return Ok(Step::Hold);
        }
        let role = Role::Accumulator(self.n as u16);
        for &register in &self.d {
            cx.check_product_register(register, role)?;
        }
        let mut fragment: [Lanes; 4] = [[0; 32]; 4];
        if let MatrixA::Registers(registers) = self.a {
            for (values, register) in fragment.iter_mut().zip(registers) {
                cx.check_product_register(register, Role::Multiplicand)?;
                *values = *cx.read_for_product(register)?;
            }
        }
        let time = cx.cluster.shared.begin_matrix_read();
        let sums = self.sums(cx, &fragment, a, b, time)?;
        self.accumulate(cx, held != 0, &sums)?;
        cx.warp.products.begin(time);
        self.d.iter().for_each(|&register| cx.warp.products.hold(register, role));
        if let MatrixA::Registers(registers) = self.a {
            registers.into_iter().for_each(|register| cx.warp.products.hold(register, Role::Multiplicand));
        }
        Ok(Step::Next)
    }
}

/// The number of columns of a shape m64nNk16.
fn columns(shape: &str) -> Option<usize> {
    let n: usize = shape.strip_prefix("m64n")?.strip_suffix("k16")?.parse().ok()?;
    (n.is_multiple_of(8) && (8..=256).contains(&n) && shape == format!("m64n{n}k16")).then_some(n)
}

/// An immediate 0 or 1.
fn flag(d: &Decoder, s: &Statement<'_>, index: usize) -> Result<bool, Refusal> {
    match d.integer(s, index)? {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(format!("operand {} is {value}, not 0 or 1", index + 1).into()),
    }
}

fn multiply(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    let shape = s.modifiers.next().ok_or("without a shape")?;
    let n = columns(shape).ok_or_else(|| format!("shape .{shape}"))?;
    let [to, a, b] = [s.modifiers.kind()?, s.modifiers.kind()?, s.modifiers.kind()?];
    let element = Element::of(a, b).filter(|_| to == Type::F32).ok_or("these matrix types")?;
    d.note_async_product();
    let registers = |d: &mut Decoder, index| -> Result<Vec<Reg>, Refusal> {
        let all: Option<Vec<Reg>> = d.destinations(s, index, Type::B32, false)?.into_iter().collect();
        all.ok_or_else(|| "`_` where a register belongs".into())
    };
    let accumulators = registers(d, 0)?;
    if accumulators.len() != n / 2 {
        return Err(format!("{} accumulators where {} belong", accumulators.len(), n / 2).into());
    }
    let in_registers = matches!(s.operand(1)?, crate::parse::ast::Operand::Vector(_));
    let a = if in_registers {
        let all = registers(d, 1)?.try_into();
        MatrixA::Registers(all.map_err(|all: Vec<Reg>| format!("{} registers of A, not 4", all.len()))?)
    } else {
        MatrixA::Shared { descriptor: d.source(s, 1, Type::B64)?, m_major: flag(d, s, 6)? }
    };
    let sign = |index| match d.integer(s, index)? as i64 {
        1 => Ok(false),
        -1 => Ok(true),
        value => Err(Refusal(format!("operand {} is {value}, not 1 or -1", index + 1))),
    };
    let negates = sign(4)? != sign(5)?;
    let n_major = flag(d, s, if in_registers { 6 } else { 7 })?;
    let (b, accumulates) = (d.source(s, 2, Type::B64)?, d.predicate_source(s, 3)?);
    Ok(Box::new(MultiplyAsync { element, n, d: accumulators, a, b, n_major, accumulates, negates }))
}

pub(super) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Option<Operation>, Refusal> {
    if s.name != "wgmma" {
        return Ok(None);
    }
    let name = s.modifiers.next().ok_or("without an operation")?;
    for name in ["sync", "aligned"] {
        s.modifiers.need(name)?;
    }
    Ok(Some(match name {
        "fence" => Box::new(Group::Fence),
        "commit_group" => Box::new(Group::Commit),
        "wait_group" => Box::new(Group::Wait(d.integer(s, 0)? as usize)),
        "mma_async" => multiply(d, s)?,
        _ => return Err(format!("operation .{name}").into()),
    }))
}
