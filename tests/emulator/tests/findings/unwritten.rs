//! Reads of what nobody wrote.

use nvfp4_moe_emulator::FindingKind::{UnwrittenMemory, UnwrittenRegister};

use super::At::{Fresh, Nowhere, Shared, Somewhere};
use super::{Pair, check};

const HALF_OF_A_WARP: &str = "setp.lt.u32 %p1, %r1, BUG;
@%p1 mov.b32 %r3, 7;
add.u32 %r4, %r3, 1; // here";

const MATRIX: &str = "shl.b32 %r3, %r1, 4;
add.u32 %r3, %r3, %r2;
setp.ne.u32 %p1, %r1, BUG;
@%p1 st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3]; // here";

pub(super) const PAIRS: &[Pair] = &[
    Pair::one(UnwrittenRegister, "a register", "BUG\nadd.u32 %r4, %r3, 1; // here", ["", "mov.u32 %r3, 1;"], Nowhere),
    Pair::one(
        UnwrittenRegister,
        "a guard",
        "BUG\n@%p1 add.u32 %r4, %r1, 1; // here",
        ["", "setp.eq.u32 %p1, %r1, 0;"],
        Nowhere,
    ),
    Pair::of(
        UnwrittenRegister,
        "a register that some lanes wrote",
        HALF_OF_A_WARP,
        ["16", "32"],
        Nowhere,
        [1, 32],
        [0, 16],
    ),
    Pair::one(
        UnwrittenRegister,
        "half of a packed register",
        "mov.u16 %rs1, 1;\nBUG\nmov.b32 %r3, {%rs1, %rs2}; // here",
        ["", "mov.u16 %rs2, 1;"],
        Nowhere,
    ),
    Pair::one(
        UnwrittenRegister,
        "one register of a vector store",
        "mov.u32 %r3, 1;\nBUG\nst.shared.v2.b32 [%r2], {%r3, %r4}; // here",
        ["", "mov.u32 %r4, 1;"],
        Nowhere,
    ),
    Pair::one(
        UnwrittenRegister,
        "an address",
        "BUG\nld.global.b32 %r3, [%rd3]; // here",
        ["", "mov.u64 %rd3, %rd1;"],
        Nowhere,
    ),
    Pair::of(
        UnwrittenRegister,
        "a register of another lane",
        "setp.ne.u32 %p1, %r1, BUG;\n@%p1 mov.u32 %r3, %r1;\nshfl.sync.bfly.b32 %r4, %r3, 1, 31, -1; // here",
        ["5", "32"],
        Nowhere,
        [1, 32],
        [0, 5],
    ),
    Pair::one(
        UnwrittenMemory,
        "global memory",
        "BUG\nld.global.b32 %r3, [%rd2+8]; // here",
        ["", "st.global.b32 [%rd2+8], 1;"],
        Fresh(8),
    ),
    Pair::one(
        UnwrittenMemory,
        "one byte of a word of global memory",
        "st.global.b16 [%rd2], 1;\nst.global.b8 [%rd2+2], 1;\nBUG\nld.global.b32 %r3, [%rd2]; // here",
        ["", "st.global.b8 [%rd2+3], 1;"],
        Fresh(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "the last word of a vector of global memory",
        "st.global.b64 [%rd2], 1;\nst.global.b32 [%rd2+8], 1;\nBUG\nld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd2]; // here",
        ["", "st.global.b32 [%rd2+12], 1;"],
        Fresh(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "an atomic on global memory",
        "BUG\natom.global.add.u32 %r3, [%rd2], 1; // here",
        ["", "st.global.b32 [%rd2], 0;"],
        Fresh(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "the source of an asynchronous copy",
        "st.global.b64 [%rd2], 1;\nBUG\ncp.async.cg.shared.global [%r2], [%rd2], 16; // here\ncp.async.wait_all;",
        ["", "st.global.b64 [%rd2+8], 1;"],
        Fresh(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "shared memory",
        "BUG\nld.shared.b32 %r3, [%r2+4]; // here",
        ["", "st.shared.b32 [%r2+4], 1;"],
        Shared(4),
    ),
    Pair::one(
        UnwrittenMemory,
        "one byte of shared memory",
        "st.shared.b16 [%r2], 1;\nst.shared.b8 [%r2+2], 1;\nBUG\nld.shared.b32 %r3, [%r2]; // here",
        ["", "st.shared.b8 [%r2+3], 1;"],
        Shared(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "a vector of shared memory",
        "st.shared.b64 [%r2], 1;\nBUG\nld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r2]; // here",
        ["", "st.shared.b64 [%r2+8], 1;"],
        Shared(0),
    ),
    Pair::one(
        UnwrittenMemory,
        "an atomic on shared memory",
        "BUG\nred.shared.add.u32 [%r2], 1; // here",
        ["", "st.shared.b32 [%r2], 0;"],
        Shared(0),
    ),
    Pair::of(UnwrittenMemory, "a row of a matrix", MATRIX, ["9", "32"], Shared(144), [1, 32], [0, 9]),
    Pair::one(
        UnwrittenMemory,
        "local memory",
        "mov.u64 %rd3, depot;\nst.local.b32 [%rd3], 1;\nBUG\nld.local.b64 %rd4, [%rd3]; // here",
        ["", "st.local.b32 [%rd3+4], 1;"],
        Somewhere,
    ),
];

#[test]
fn what_is_read_was_written() {
    check(PAIRS);
}
