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

/// An mbarrier counts a copy, and the thread waits for it in its own way.
const ALSO_AN_ARRIVAL: &str = "mbarrier.init.shared.b64 [%r2], 2;
cp.async.cg.shared.global [%r2+16], [%rd1], 16;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
cp.async.commit_group;
BUG
ld.shared.b32 %r3, [%r2+16]; // here
cp.async.wait_all;";

/// The place of a copy is used again after one of two waits.
const WAITED_TWICE: &str = "mbarrier.init.shared.b64 [%r2], 1;
cp.async.cg.shared.global [%r2+16], [%rd1], 16;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
BUG
st.shared.b32 [%r2+16], 7; // here
AGAIN: mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0;
@!%p1 bra AGAIN;
cp.async.wait_all;
ld.shared.b32 %r3, [%r2+16];
setp.eq.u32 %p2, %r3, 7;
@!%p2 trap;
cp.async.cg.shared.global [%r2+16], [%rd1], 16;
cp.async.wait_all;";

/// Two mbarriers count the same copy; the first's phase ends.
const TWO_ARRIVALS: &str = "mbarrier.init.shared.b64 [%r2], 1;
mbarrier.init.shared.b64 [%r2+8], 1;
cp.async.cg.shared.global [%r2+16], [%rd1], 16;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+8];
BUG
ld.shared.b32 %r3, [%r2+16]; // here";

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
    Pair::one(
        InFlight,
        "an mbarrier, and no wait for the group",
        ALSO_AN_ARRIVAL,
        ["cp.async.wait_group 1;", "cp.async.wait_group 0;"],
        Shared(16),
    ),
    Pair::one(InFlight, "a store before both waits", WAITED_TWICE, ["", "cp.async.wait_all;"], Shared(16)),
    Pair::one(
        InFlight,
        "a store before the other wait",
        WAITED_TWICE,
        ["", "FIRST: mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0;\n@!%p1 bra FIRST;"],
        Shared(16),
    ),
    Pair::one(
        InFlight,
        "no wait for the second of two mbarriers",
        TWO_ARRIVALS,
        ["", "AGAIN: mbarrier.test_wait.parity.shared.b64 %p1, [%r2+8], 0;\n@!%p1 bra AGAIN;"],
        Shared(16),
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
