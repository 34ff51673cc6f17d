//! The instruction set, one file a family. Each family decodes what it knows and leaves the rest to the others; a new
//! family is one more file and one more line in [`FAMILIES`].

mod asynchronous;
mod atomic;
mod barrier;
mod bits;
mod bulk;
mod cluster;
mod compare;
mod control;
mod convert;
mod float;
mod half;
mod integer;
mod integer_more;
mod matrix;
mod matrix_descriptor;
mod matrix_memory;
mod matrix_tile;
mod mbarrier;
mod memory;
mod movement;
mod mxf4;
mod packed_float;
mod product;
mod select;
mod small_float;
mod warp;
mod warpgroup;
mod wgmma;

use crate::decode::{Decoder, Operation, Refusal, Statement};
use crate::execute::Reg;
use crate::execute::lanes::{Binary, Quaternary, Ternary, Unary};
use crate::memory::block_clocks::Fenced;

pub(crate) use control::{end, jump};
pub(crate) use mbarrier::Mbarriers;

/// Decodes a statement if its opcode (and type) belongs to the family.
type Family = fn(&mut Decoder, &mut Statement<'_>) -> Result<Option<Operation>, Refusal>;

/// Asked in order.
const FAMILIES: &[Family] = &[
    control::decode,
    movement::decode,
    integer::decode,
    integer_more::decode,
    bits::decode,
    compare::decode,
    select::decode,
    float::decode,
    half::decode,
    packed_float::decode,
    convert::decode,
    memory::decode,
    cluster::decode,
    barrier::decode,
    warp::decode,
    atomic::decode,
    asynchronous::decode,
    matrix::decode,
    matrix_memory::decode,
    mxf4::decode,
    wgmma::decode,
    warpgroup::decode,
    mbarrier::decode,
    bulk::decode,
];

/// State that families keep for each warp.
#[derive(Default)]
pub(crate) struct WarpState {
    copies: asynchronous::Copies,
    residues: matrix::Residues,
    /// Lanes that executed a fence since they last arrived at the cluster's barrier.
    fenced: u32,
    pub(crate) global_fences: Fenced,
    pub(crate) poll: memory::Poll,
}

/// State that families keep for each block.
#[derive(Default)]
pub(crate) struct BlockExtra {
    reductions: barrier::Reductions,
    pub(crate) warpgroups: warpgroup::Warpgroups,
    pub(crate) registers: warpgroup::RegisterPool,
    tiles: matrix_tile::Tiles,
}

/// Decodes a statement.
pub(crate) fn decode(d: &mut Decoder, s: &mut Statement<'_>) -> Result<Operation, Refusal> {
    for family in FAMILIES {
        if let Some(operation) = family(d, s)? {
            return Ok(operation);
        }
    }
    Err(format!("opcode {} with these types", s.name).into())
}

fn unary(d: Reg, a: Reg, f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Operation {
    Box::new(Unary { f, d, a })
}

fn binary(d: Reg, [a, b]: [Reg; 2], f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Operation {
    Box::new(Binary { f, d, a, b })
}

fn ternary(d: Reg, [a, b, c]: [Reg; 3], f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Operation {
    Box::new(Ternary { f, d, a, b, c })
}

fn quaternary(d: Reg, sources: [Reg; 4], f: impl Fn(u64, u64, u64, u64) -> u64 + Send + Sync + 'static) -> Operation {
    Box::new(Quaternary { f, d, sources })
}
