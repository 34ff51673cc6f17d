//! Accesses outside of what there is, and misaligned ones, in every state space.

use nvfp4_moe_emulator::FindingKind::{Misaligned, OutOfBounds};

use super::At::{Absolute, Data, Fresh, Shared, Somewhere};
use super::{Pair, check};

/// Each thread loads 8 bytes.
const EACH_LOADS: &str = "mul.wide.u32 %rd3, %r1, BUG;
add.u64 %rd3, %rd1, %rd3;
ld.global.b64 %rd4, [%rd3]; // here";

/// Lane i gives row i of four matrices, 16 bytes a row.
const LOAD_MATRIX: &str = "shl.b32 %r3, %r1, 5;
add.u32 %r3, %r3, %r2;
st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};
st.shared.v4.b32 [%r3+16], {%r1, %r1, %r1, %r1};
bar.sync 0;
BUG
add.u32 %r3, %r4, %r2;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3]; // here";

const BULK: &str = "mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
BUG
AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
@!%p1 bra AGAIN;";

const STORE_BULK: &str = "st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};
fence.proxy.async;
cp.async.bulk.global.shared::cta.bulk_group BUG, 16; // here";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(OutOfBounds, "a load behind the end", EACH_LOADS, ["16", "8"], Data(256), [1, 32], [0, 16]),
    Pair::of(
        OutOfBounds,
        "a load of the second block",
        "mov.u32 %r3, %ctaid.x;\nmul.wide.u32 %rd3, %r3, BUG;\nadd.u64 %rd3, %rd1, %rd3;\nld.global.b32 %r4, [%rd3]; // here",
        ["256", "64"],
        Data(256),
        [2, 1],
        [1, 0],
    ),
    Pair::one(
        OutOfBounds,
        "a store before the beginning",
        "st.global.b8 [%rd1BUG], 0; // here",
        ["+-1", "+1"],
        Data(-1),
    ),
    Pair::one(
        OutOfBounds,
        "a vector half behind the end",
        "st.global.v4.b32 [%rd2+BUG], {%r1, %r1, %r1, %r1}; // here",
        ["64", "48"],
        Fresh(64),
    ),
    Pair::one(OutOfBounds, "a null pointer", "ld.b32 %r3, [BUG]; // here", ["0", "%rd1"], Absolute(0)),
    Pair::one(
        OutOfBounds,
        "an atomic behind the end",
        "atom.global.add.u32 %r3, [%rd1+BUG], 1; // here",
        ["256", "252"],
        Data(256),
    ),
    Pair::one(
        OutOfBounds,
        "a reduction behind the end",
        "red.global.max.u32 [%rd1+BUG], 1; // here",
        ["256", "252"],
        Data(256),
    ),
    Pair::one(
        OutOfBounds,
        "a store behind the end of shared memory",
        "st.shared.b32 [%r2+BUG], 0; // here",
        ["1024", "1020"],
        Shared(1024),
    ),
    Pair::one(
        OutOfBounds,
        "a vector behind the end of shared memory",
        "st.shared.v4.b32 [%r2+BUG], {%r1, %r1, %r1, %r1}; // here",
        ["1024", "1008"],
        Shared(1024),
    ),
    Pair::one(OutOfBounds, "the shared address 0", "st.shared.b32 [BUG], 0; // here", ["0", "%r2"], Absolute(0)),
    Pair::one(
        OutOfBounds,
        "an atomic behind the end of shared memory",
        "st.shared.b32 [%r2], 0;\natom.shared.add.u32 %r3, [%r2+BUG], 1; // here",
        ["1024", "0"],
        Shared(1024),
    ),
    Pair::one(
        OutOfBounds,
        "shared memory through a generic address",
        "cvt.u64.u32 %rd4, %r2;\ncvta.shared.u64 %rd3, %rd4;\nst.b32 [%rd3+BUG], 0; // here",
        ["1024", "1020"],
        Somewhere,
    ),
    Pair::one(
        OutOfBounds,
        "local memory",
        "mov.u64 %rd3, depot;\nst.local.b64 [%rd3+BUG], 0; // here",
        ["16", "8"],
        Somewhere,
    ),
    Pair::one(
        OutOfBounds,
        "a parameter that there is not",
        "ld.param.b64 %rd3, [data+BUG]; // here",
        ["16", "8"],
        Somewhere,
    ),
    Pair::one(
        OutOfBounds,
        "a constant that there is not",
        "mov.u64 %rd3, numbers;\nld.const.b32 %r3, [%rd3+BUG]; // here",
        ["8", "4"],
        Somewhere,
    ),
    Pair::one(
        OutOfBounds,
        "a write to constants",
        "mov.u64 %rd3, BUG;\nst.global.b32 [%rd3], %r1; // here",
        ["numbers", "%rd1"],
        Somewhere,
    ),
    Pair::one(
        OutOfBounds,
        "an asynchronous copy from behind the end",
        "cp.async.cg.shared.global [%r2], [%rd1+BUG], 16; // here\ncp.async.wait_all;",
        ["256", "240"],
        Data(256),
    ),
    Pair::one(
        OutOfBounds,
        "an asynchronous copy to behind the end",
        "cp.async.cg.shared.global [%r2+BUG], [%rd1], 16; // here\ncp.async.wait_all;",
        ["1024", "1008"],
        Shared(1024),
    ),
    Pair::one(
        OutOfBounds,
        "a bulk copy of more than there is",
        BULK,
        [
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+208], 64, [%r2]; // here",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+192], 64, [%r2];",
        ],
        Data(256),
    ),
    Pair::one(
        OutOfBounds,
        "a bulk copy to behind the end",
        BULK,
        [
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+976], [%rd1], 64, [%r2]; // here",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+960], [%rd1], 64, [%r2];",
        ],
        Shared(976),
    ),
    Pair::of(
        OutOfBounds,
        "a matrix row behind the end",
        LOAD_MATRIX,
        ["mul.lo.u32 %r4, %r1, 48;", "shl.b32 %r4, %r1, 5;"],
        Shared(1056),
        [1, 32],
        [0, 22],
    ),
    Pair::one(Misaligned, "4 bytes at 2", "ld.global.b32 %r3, [%rd1+BUG]; // here", ["2", "4"], Data(2)),
    Pair::one(Misaligned, "a store of 8 bytes at 4", "st.global.b64 [%rd1+BUG], 0; // here", ["4", "8"], Data(4)),
    Pair::one(
        Misaligned,
        "a vector of 16 bytes at 8",
        "ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd1+BUG]; // here",
        ["8", "16"],
        Data(8),
    ),
    Pair::one(Misaligned, "an atomic at 2", "atom.global.add.u32 %r3, [%rd1+BUG], 1; // here", ["2", "4"], Data(2)),
    Pair::one(
        Misaligned,
        "2 bytes of shared memory at 1",
        "st.shared.b16 [%r2+BUG], 0; // here",
        ["1", "2"],
        Shared(1),
    ),
    Pair::one(
        Misaligned,
        "a vector of shared memory at 4",
        "st.shared.v2.b32 [%r2+BUG], {%r1, %r1}; // here",
        ["4", "8"],
        Shared(4),
    ),
    Pair::one(
        Misaligned,
        "an atomic in shared memory",
        "st.shared.b64 [%r2], 0;\nred.shared.add.u32 [%r2+BUG], 1; // here",
        ["2", "4"],
        Shared(2),
    ),
    Pair::one(
        Misaligned,
        "local memory at 2",
        "mov.u64 %rd3, depot;\nst.local.b32 [%rd3+BUG], 0; // here",
        ["2", "4"],
        Somewhere,
    ),
    Pair::one(Misaligned, "a parameter at 4", "ld.param.b64 %rd3, [data+BUG]; // here", ["4", "8"], Somewhere),
    Pair::one(
        Misaligned,
        "a constant at 2",
        "mov.u64 %rd3, numbers;\nld.const.b32 %r3, [%rd3+BUG]; // here",
        ["2", "4"],
        Somewhere,
    ),
    Pair::one(
        Misaligned,
        "an asynchronous copy from 8",
        "cp.async.cg.shared.global [%r2], [%rd1+BUG], 16; // here\ncp.async.wait_all;",
        ["8", "16"],
        Data(8),
    ),
    Pair::one(
        Misaligned,
        "an asynchronous copy to 8",
        "cp.async.cg.shared.global [%r2+BUG], [%rd1], 16; // here\ncp.async.wait_all;",
        ["8", "16"],
        Shared(8),
    ),
    Pair::one(
        Misaligned,
        "a bulk copy from 8",
        BULK,
        [
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+8], 64, [%r2]; // here",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+16], 64, [%r2];",
        ],
        Data(8),
    ),
    Pair::one(
        Misaligned,
        "a bulk copy to 24",
        BULK,
        [
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+24], [%rd1], 64, [%r2]; // here",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+32], [%rd1], 64, [%r2];",
        ],
        Shared(24),
    ),
    Pair::one(Misaligned, "an mbarrier at 4", "mbarrier.init.shared.b64 [%r2+BUG], 1; // here", ["4", "8"], Shared(4)),
    Pair::of(
        Misaligned,
        "matrix rows of 8 bytes",
        LOAD_MATRIX,
        ["shl.b32 %r4, %r1, 3;", "shl.b32 %r4, %r1, 4;"],
        Shared(8),
        [1, 32],
        [0, 1],
    ),
    Pair::one(
        OutOfBounds,
        "a bulk copy to behind the end of global memory",
        STORE_BULK,
        ["[%rd1+256], [%r2]", "[%rd1+240], [%r2]"],
        Data(256),
    ),
    Pair::one(
        Misaligned,
        "a bulk copy to 8 of global memory",
        STORE_BULK,
        ["[%rd1+8], [%r2]", "[%rd1+16], [%r2]"],
        Data(8),
    ),
];

#[test]
fn every_access_is_inside_and_aligned() {
    check(PAIRS);
}
