//! Data races: in shared memory between barriers, in global memory between blocks.

use nvfp4_moe_emulator::FindingKind::{GlobalRace, SharedRace};

use super::At::{Data, Shared};
use super::{Pair, check};

/// Each thread writes its word and reads that of a thread of the other warp; the second warp, which comes to the first barrier
/// last, goes on first, and reads before the first has written.
const NEIGHBOURS: &str = "shl.b32 %r3, %r1, 2;
add.u32 %r4, %r3, %r2;
st.shared.b32 [%r4], 0;
bar.sync 0;
st.shared.b32 [%r4], %r1; // here
BUG
xor.b32 %r5, %r3, 128;
add.u32 %r5, %r5, %r2;
ld.shared.b32 %r6, [%r5];";

/// The same among the lanes of a warp.
const LANES: &str = "shl.b32 %r3, %r1, 2;
add.u32 %r4, %r3, %r2;
st.shared.b32 [%r4], %r1;
BUG
xor.b32 %r5, %r3, 4;
add.u32 %r5, %r5, %r2;
ld.shared.b32 %r6, [%r5]; // here";

/// All threads read a word that thread 0 then writes.
const OVERWRITTEN: &str = "setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.b32 [%r2], 1;
bar.sync 0;
ld.shared.b32 %r3, [%r2];
BUG
@%p1 st.shared.b32 [%r2], 2; // here";

/// Every thread writes the word that it may.
const WRITERS: &str = "mul.lo.u32 %r3, %r1, BUG;
add.u32 %r3, %r3, %r2;
st.shared.b32 [%r3], %r1; // here";

const PLAIN_AFTER_ATOMIC: &str = "setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.b32 [%r2], 0;
bar.sync 0;
red.shared.add.u32 [%r2], 1;
BUG
ld.shared.b32 %r3, [%r2]; // here";

const ATOMIC_AFTER_PLAIN: &str = "setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.b32 [%r2], 0;
BUG
red.shared.add.u32 [%r2], 1; // here";

const BLOCK_WORD: &str = "mov.u32 %r3, %ctaid.x;
mul.wide.u32 %rd3, %r3, BUG;
add.u64 %rd3, %rd1, %rd3;
st.global.b32 [%rd3], %r3; // here";

const BLOCK_BYTE: &str = "mov.u32 %r3, %ctaid.x;
mul.wide.u32 %rd3, %r3, BUG;
add.u64 %rd3, %rd1, %rd3;
st.global.b8 [%rd3], %r3; // here";

/// Block 0 writes, the others read.
const READERS: &str = "mov.u32 %r3, %ctaid.x;
setp.eq.u32 %p1, %r3, 0;
@%p1 st.global.b32 [%rd1], 1;
@!%p1 ld.global.b32 %r4, [%rd1+BUG]; // here";

const ATOMIC_AND_STORE: &str = "mov.u32 %r3, %ctaid.x;
setp.eq.u32 %p1, %r3, 0;
@%p1 atom.global.add.u32 %r4, [%rd1], 1;
@!%p1 BUG [%rd1], 1; // here";

const ATOMIC_AND_LOAD: &str = "mov.u32 %r3, %ctaid.x;
setp.eq.u32 %p1, %r3, 0;
@%p1 red.global.add.u32 [%rd1], 1;
@!%p1 ld.BUG.u32 %r4, [%rd1]; // here";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(
        SharedRace,
        "a read of what another warp writes",
        NEIGHBOURS,
        ["", "bar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a barrier of another number of threads",
        NEIGHBOURS,
        ["bar.sync 1, 32;", "bar.sync 1, 64;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a warp barrier between warps",
        NEIGHBOURS,
        ["bar.warp.sync -1;", "bar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a read of what another lane writes",
        LANES,
        ["", "bar.warp.sync -1;"],
        Shared(4),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a shuffle orders no memory",
        LANES,
        ["shfl.sync.idx.b32 %r7, %r1, 0, 31, -1;", "bar.warp.sync -1;"],
        Shared(4),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a fence is no barrier",
        LANES,
        ["membar.cta;", "bar.warp.sync -1;"],
        Shared(4),
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "a warp barrier of other lanes",
        LANES,
        [
            "and.b32 %r8, %r1, 1;\nsetp.eq.u32 %p1, %r8, 0;\n@%p1 bar.warp.sync 0x55555555;\n@!%p1 bar.warp.sync 0xaaaaaaaa;",
            "bar.warp.sync -1;",
        ],
        Shared(4),
        [1, 32],
        [0, 0],
    ),
    Pair::of(SharedRace, "a write over what others read", OVERWRITTEN, ["", "bar.sync 0;"], Shared(0), [1, 64], [0, 0]),
    Pair::of(SharedRace, "two writers of a word", WRITERS, ["0", "4"], Shared(0), [1, 32], [0, 1]),
    Pair::of(
        SharedRace,
        "a plain read among atomics",
        PLAIN_AFTER_ATOMIC,
        ["", "bar.sync 0;"],
        Shared(0),
        [1, 64],
        [0, 32],
    ),
    Pair::of(
        SharedRace,
        "an atomic on what is being initialized",
        ATOMIC_AFTER_PLAIN,
        ["", "bar.sync 0;"],
        Shared(0),
        [1, 32],
        [0, 1],
    ),
    Pair::of(GlobalRace, "two blocks that write a word", BLOCK_WORD, ["0", "4"], Data(0), [2, 1], [1, 0]),
    Pair::of(GlobalRace, "two blocks that write a byte", BLOCK_BYTE, ["0", "1"], Data(0), [2, 1], [1, 0]),
    Pair::of(GlobalRace, "a block that reads what another writes", READERS, ["0", "4"], Data(0), [2, 1], [1, 0]),
    Pair::of(
        GlobalRace,
        "a plain write among atomics",
        ATOMIC_AND_STORE,
        ["st.global.u32", "red.global.add.u32"],
        Data(0),
        [2, 1],
        [1, 0],
    ),
    Pair::of(
        GlobalRace,
        "a plain read among atomics of other blocks",
        ATOMIC_AND_LOAD,
        ["global", "relaxed.gpu.global"],
        Data(0),
        [2, 1],
        [1, 0],
    ),
];

#[test]
fn conflicting_accesses_are_ordered() {
    check(PAIRS);
}
