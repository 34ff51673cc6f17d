//! mbarriers: their life, their phases, and the bulk copies that they announce.

use nvfp4_moe_emulator::FindingKind::{Deadlock, InFlight, Mbarrier, Operand, SharedRace};

use super::At::{Nowhere, Shared};
use super::{Pair, check};

/// Thread 0 copies 64 bytes to `smem + 16`, everybody waits and reads.
macro_rules! bulk {
    (init: $init:literal, expect: $expect:literal, size: $size:literal, barrier: $barrier:literal, wait: $wait:literal, read: $read:literal) => {
        concat!(
            "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra WAIT;\n",
            $init,
            "\nfence.mbarrier_init.release.cluster;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], ",
            $expect,
            ";\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1], ",
            $size,
            ", [%r2];\nWAIT: ",
            $barrier,
            "\n",
            $wait,
            "\n",
            $read
        )
    };
}

const INIT: &str = "mbarrier.init.shared.b64 [%r2], 1;";

const MISSING_WAIT: &str = bulk!(init: "mbarrier.init.shared.b64 [%r2], 1;", expect: "64", size: "64", barrier: "bar.sync 0;", wait: "BUG", read: "ld.shared.b32 %r4, [%r2+76]; // here\nLAST: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;\n@!%p3 bra LAST;");
const BYTES: &str = bulk!(init: "mbarrier.init.shared.b64 [%r2], 1;", expect: "BUG", size: "64", barrier: "bar.sync 0;", wait: "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; // here\n@!%p2 bra AGAIN;", read: "");
const COUNT: &str = bulk!(init: "mbarrier.init.shared.b64 [%r2], BUG;", expect: "64", size: "64", barrier: "bar.sync 0;", wait: "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; // here\n@!%p2 bra AGAIN;", read: "");
const SIZE: &str = bulk!(init: "mbarrier.init.shared.b64 [%r2], 1;", expect: "64", size: "BUG // here\n", barrier: "bar.sync 0;", wait: "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra AGAIN;", read: "");
const SEEN: &str = bulk!(init: "mbarrier.init.shared.b64 [%r2], 1;", expect: "64", size: "64", barrier: "BUG", wait: "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; // here\n@!%p2 bra AGAIN;", read: "");

/// A ring of one stage, filled twice by thread 0; the reader is the other warp.
const REUSED: &str = "setp.eq.u32 %p1, %r1, 0;
setp.ge.u32 %p2, %r1, 32;
@%p1 mbarrier.init.shared.b64 [%r2], 1;
@%p1 mbarrier.init.shared.b64 [%r2+8], 32;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@!%p1 bra READ;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1], 64, [%r2];
FULL: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
@!%p3 bra FULL;
BUG
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+64], 64, [%r2]; // here
AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 1;
@!%p3 bra AGAIN;
READ: @!%p2 bra END;
FIRST: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
@!%p3 bra FIRST;
ld.shared.b32 %r4, [%r2+16];
mbarrier.arrive.shared.b64 _, [%r2+8];
END: ret;";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(
        InFlight,
        "no wait",
        MISSING_WAIT,
        ["", "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra AGAIN;"],
        Shared(76),
        [1, 64],
        [0, 32],
    ),
    Pair::of(
        InFlight,
        "a test that is not repeated",
        MISSING_WAIT,
        [
            "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;",
            "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra AGAIN;",
        ],
        Shared(76),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        InFlight,
        "the parity of the phase before the first",
        MISSING_WAIT,
        [
            "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 1;\n@!%p2 bra AGAIN;",
            "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;\n@!%p2 bra AGAIN;",
        ],
        Shared(76),
        [1, 64],
        [0, 32],
    ),
    Pair::of(Deadlock, "more bytes announced than come", BYTES, ["80", "64"], Shared(0), [1, 64], [0, 32]),
    Pair::of(Deadlock, "fewer bytes announced than come", BYTES, ["48", "64"], Shared(0), [1, 64], [0, 32]),
    Pair::of(Deadlock, "more arrivals expected than come", COUNT, ["2", "1"], Shared(0), [1, 64], [0, 32]),
    Pair::one(
        Deadlock,
        "the parity of a phase that never ends",
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.shared.b64 _, [%r2];\nmbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;\nAGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], BUG; // here\n@!%p1 bra AGAIN;",
        ["1", "0"],
        Shared(0),
    ),
    Pair::of(Operand, "a size that is no multiple of 16", SIZE, ["56", "64"], Nowhere, [1, 64], [0, 0]),
    Pair::of(
        SharedRace,
        "an initialization that the others do not see",
        SEEN,
        ["", "bar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 1],
    ),
    Pair::of(
        SharedRace,
        "a stage filled before its readers are done",
        REUSED,
        ["", "EMPTY: mbarrier.try_wait.parity.shared.b64 %p3, [%r2+8], 0;\n@!%p3 bra EMPTY;"],
        Shared(16),
        [1, 64],
        [0, 0],
    ),
    Pair::one(
        Mbarrier,
        "an arrival at nothing",
        "BUG\nmbarrier.arrive.shared.b64 _, [%r2]; // here",
        ["", INIT],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "a wait for nothing",
        "BUG\nmbarrier.test_wait.parity.shared.b64 %p1, [%r2], 1; // here",
        ["", INIT],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "an arrival after the end",
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.inval.shared.b64 [%r2];\nBUG\nmbarrier.arrive.shared.b64 _, [%r2]; // here",
        ["", INIT],
        Shared(0),
    ),
    Pair::one(Mbarrier, "an end of nothing", "BUG\nmbarrier.inval.shared.b64 [%r2]; // here", ["", INIT], Shared(0)),
    Pair::one(
        Mbarrier,
        "an initialization of what is in use",
        "mbarrier.init.shared.b64 [%r2], 1;\nBUG\nmbarrier.init.shared.b64 [%r2], 1; // here",
        ["", "mbarrier.inval.shared.b64 [%r2];"],
        Shared(0),
    ),
    Pair::one(Mbarrier, "a count of 0", "mbarrier.init.shared.b64 [%r2], BUG; // here", ["0", "1"], Shared(0)),
    Pair::one(
        Mbarrier,
        "a count that is too large",
        "mbarrier.init.shared.b64 [%r2], BUG; // here",
        ["1048576", "1048575"],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "a load from where an mbarrier lies",
        "mbarrier.init.shared.b64 [%r2], 1;\nst.shared.b32 [%r2+8], 0;\nld.shared.b32 %r3, [%r2+BUG]; // here",
        ["4", "8"],
        Shared(4),
    ),
    Pair::one(
        Mbarrier,
        "a store to where an mbarrier lies",
        "mbarrier.init.shared.b64 [%r2], 1;\nst.shared.b32 [%r2+BUG], 0; // here",
        ["4", "8"],
        Shared(4),
    ),
    Pair::one(
        Mbarrier,
        "more arrivals than the phase lacks",
        "mbarrier.init.shared.b64 [%r2], 2;\nmbarrier.arrive.shared.b64 _, [%r2];\nmbarrier.arrive.shared.b64 _, [%r2], BUG; // here",
        ["2", "1"],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "an arrival for the next phase before this one has ended",
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;\nBUG\nmbarrier.arrive.shared.b64 _, [%r2]; // here",
        ["", "mbarrier.complete_tx.shared.b64 [%r2], 64;"],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "too many bytes pending",
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.expect_tx.shared.b64 [%r2], 1048560;\nmbarrier.expect_tx.shared.b64 [%r2], BUG; // here",
        ["16", "15"],
        Shared(0),
    ),
    Pair::one(
        Mbarrier,
        "the state of a phase long past",
        "mbarrier.init.shared.b64 [%r2], 1;\nmbarrier.arrive.shared.b64 %rd3, [%r2];\nBUG\nmbarrier.test_wait.shared.b64 %p1, [%r2], %rd3; // here",
        ["mbarrier.arrive.shared.b64 _, [%r2];", ""],
        Shared(0),
    ),
];

#[test]
fn phases_are_kept() {
    check(PAIRS);
}
