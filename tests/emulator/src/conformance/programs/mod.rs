//! Programs for instructions that need a warp, a block or memory in motion. What they must yield is computed by plain
//! functions after the PTX ISA document, or written down.

mod asynchronous;
mod cluster;
mod matrix;
mod mbarrier;
mod synchronization;
mod warp;
mod warpgroup;
mod wgmma;

use super::inputs::Kind;
use super::{Check, Tolerance, kernel};

pub(super) fn checks() -> Vec<Check> {
    let families = [
        ("lanes", warp::checks()),
        ("blocks", synchronization::checks()),
        ("copies", asynchronous::checks()),
        ("mbarriers, bulk copies", mbarrier::checks()),
        ("matrices", matrix::checks()),
        ("clusters", cluster::checks()),
        ("warpgroups", warpgroup::checks()),
        ("products of warpgroups", wgmma::checks()),
    ];
    families.into_iter().flat_map(|(family, all)| all.into_iter().map(move |check| Check { family, ..check })).collect()
}

/// A program of one block. `%in` and `%out` are its inputs and outputs, `%mine` and `%yours` the words of those that belong
/// to the thread, `%t` its index; `smem` is dynamic shared memory.
struct Program<'a> {
    name: &'a str,
    architecture: u32,
    threads: u32,
    body: &'a str,
    inputs: Vec<u64>,
    expected: Vec<u64>,
    output: Kind,
    tolerance: Tolerance,
}

impl Program<'_> {
    fn check(self) -> Check {
        let ptx = format!(
            "{}.extern .shared .align 128 .b8 smem[];\n.visible .entry k(.param .align 8 .b8 args[24])\n{{\n\
             .reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .b32 %r<48>, %t, %s;\n.reg .b64 %rd<16>, %in, %out, %mine, %yours;\n\
             ld.param.b64 %in, [args];\nld.param.b64 %out, [args+8];\nmov.u32 %t, %tid.x;\nmov.u32 %s, smem;\n\
             mul.wide.u32 %mine, %t, 8;\nadd.u64 %yours, %out, %mine;\nadd.u64 %mine, %in, %mine;\n{}\nret;\n}}\n",
            kernel::header(self.architecture),
            self.body.replace("; ", ";\n"),
        );
        Check {
            name: self.name.to_owned(),
            // [`checks`] says it.
            family: "",
            architecture: self.architecture,
            is_specific: false,
            ptx,
            threads: self.threads,
            blocks: 1,
            shared_bytes: 16 * 1024,
            outputs: vec![self.output; self.expected.len()],
            inputs: vec![Kind::Int(64); self.inputs.len()],
            derived: vec![(self.inputs, self.expected)],
            defined: |_| true,
            tolerance: self.tolerance,
        }
    }
}

/// A program whose results are 64-bit words, the same to the bit.
fn exact(name: &str, architecture: u32, threads: u32, body: &str, inputs: Vec<u64>, expected: Vec<u64>) -> Check {
    let (output, tolerance) = (Kind::Int(64), Tolerance::Bits);
    Program { name, architecture, threads, body, inputs, expected, output, tolerance }.check()
}

/// A check of sm_90 as one of `sm_90a`.
fn of_sm_90a(check: Check) -> Check {
    let ptx = check.ptx.replace(&kernel::header(90), kernel::SM_90A);
    Check { ptx, is_specific: true, ..check }
}

/// Words of 32 bits, two in one of 64.
fn pack(words: &[u32]) -> Vec<u64> {
    words.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(*pair.get(1).unwrap_or(&0)) << 32).collect()
}

/// Numbers without a pattern.
fn scrambled(count: u64) -> Vec<u64> {
    (1..=count).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ i << 17).collect()
}
