//! Asynchronous copies that nobody waited for, or whose buffer is used again too early.

use nvfp4_moe_emulator::FindingKind::{InFlight, SharedRace};

use super::At::Shared;
use super::{Pair, check};

/// Each thread copies 16 bytes and reads its own.
const OWN: &str = "shl.b32 %r3, %r1, 4;
add.u32 %r4, %r3, %r2;
cp.async.cg.shared.global [%r4], [%rd1], 16;
BUG
ld.shared.b32 %r5, [%r4]; // here
cp.async.wait_all;";

/// Each thread copies 16 bytes and reads those of its neighbour.
const NEIGHBOUR: &str = "shl.b32 %r3, %r1, 4;
add.u32 %r4, %r3, %r2;
cp.async.cg.shared.global [%r4], [%rd1], 16;
cp.async.commit_group;
BUG
xor.b32 %r5, %r3, 16;
add.u32 %r5, %r5, %r2;
ld.shared.b32 %r6, [%r5]; // here
cp.async.wait_all;";

/// The second of two groups is read.
const TWO_GROUPS: &str = "cp.async.ca.shared.global [%r2], [%rd1], 8;
cp.async.commit_group;
cp.async.ca.shared.global [%r2+8], [%rd1], 8;
cp.async.commit_group;
cp.async.wait_group BUG;
ld.shared.b64 %rd3, [%r2+8]; // here
cp.async.wait_all;";

/// A buffer that others may still read is filled anew.
const REFILLED: &str = "shl.b32 %r3, %r1, 4;
add.u32 %r4, %r3, %r2;
cp.async.cg.shared.global [%r4], [%rd1], 16;
cp.async.wait_all;
bar.sync 0;
xor.b32 %r5, %r3, 512;
add.u32 %r5, %r5, %r2;
ld.shared.b32 %r6, [%r5]; // here
BUG
cp.async.cg.shared.global [%r4], [%rd1], 16;
cp.async.wait_all;";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(
        InFlight,
        "no wait",
        OWN,
        ["cp.async.commit_group;", "cp.async.commit_group;\ncp.async.wait_group 0;"],
        Shared(0),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        InFlight,
        "a wait without a group",
        OWN,
        ["cp.async.wait_group 0;", "cp.async.wait_all;"],
        Shared(0),
        [1, 32],
        [0, 0],
    ),
    Pair::one(InFlight, "a wait for all but the last group", TWO_GROUPS, ["1", "0"], Shared(8)),
    Pair::one(
        InFlight,
        "a store into a copy that is under way",
        "cp.async.cg.shared.global [%r2], [%rd1], 16;\nBUG\nst.shared.b32 [%r2+12], 1; // here\ncp.async.wait_all;",
        ["", "cp.async.wait_all;"],
        Shared(12),
    ),
    Pair::one(
        InFlight,
        "an atomic on a copy that is under way",
        "cp.async.cg.shared.global [%r2], [%rd1], 16;\nBUG\nred.shared.add.u32 [%r2+4], 1; // here\ncp.async.wait_all;",
        ["", "cp.async.wait_all;"],
        Shared(4),
    ),
    Pair::one(
        InFlight,
        "two copies to one place",
        "cp.async.cg.shared.global [%r2], [%rd1], 16;\nBUG\ncp.async.cg.shared.global [%r2], [%rd1+16], 16; // here\ncp.async.wait_all;",
        ["", "cp.async.wait_all;"],
        Shared(0),
    ),
    Pair::of(
        InFlight,
        "a barrier in place of the wait",
        NEIGHBOUR,
        ["bar.sync 0;", "cp.async.wait_group 0;\nbar.sync 0;"],
        Shared(16),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a wait without a barrier",
        NEIGHBOUR,
        ["cp.async.wait_group 0;", "cp.async.wait_group 0;\nbar.sync 0;"],
        Shared(16),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a wait behind the barrier",
        NEIGHBOUR,
        ["bar.sync 0;\ncp.async.wait_group 0;", "cp.async.wait_group 0;\nbar.sync 0;"],
        Shared(16),
        [1, 32],
        [0, 0],
    ),
    Pair::of(SharedRace, "a copy over what others read", REFILLED, ["", "bar.sync 0;"], Shared(512), [1, 64], [0, 0]),
];

#[test]
fn copies_are_waited_for() {
    check(PAIRS);
}
