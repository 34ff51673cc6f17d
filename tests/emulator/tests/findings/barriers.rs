//! Convergent instructions in divergent code, barriers that never complete, and the rest of what ends a kernel.

use nvfp4_moe_emulator::FindingKind::{Barrier, Deadlock, Divergent, InstructionLimit, Operand, Trap};

use super::At::Nowhere;
use super::{Pair, check};

/// Threads below a limit wait, the others leave.
const SOME_WAIT: &str = "setp.lt.u32 %p1, %r1, BUG;
@!%p1 bra END;
bar.sync 0; // here
END: ret;";

/// A half of a warp waits here, the other there.
const TWO_PLACES: &str = "setp.lt.u32 %p1, %r1, BUG;
@%p1 bra LOW;
bar.sync 0;
bra END;
LOW: bar.sync 0; // here
END: ret;";

const TWO_BARRIERS: &str = "setp.lt.u32 %p1, %r1, 32;
@%p1 bra LOW;
bar.sync 1;
ret;
LOW: bar.sync BUG; // here";

/// Only some lanes come to the instruction, because the rest takes another way.
const MATRIX: &str = "shl.b32 %r3, %r1, 4;
add.u32 %r3, %r3, %r2;
st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};
bar.warp.sync -1;
setp.lt.u32 %p1, %r1, BUG;
@!%p1 bra END;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3]; // here
END: bar.warp.sync -1;";

const MULTIPLY: &str = "mov.b32 %r3, 0;
setp.lt.u32 %p1, %r1, BUG;
@!%p1 bra END;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r3, %r3, %r3, %r3}, {%r3, %r3}, {0f00000000, 0f00000000, 0f00000000, 0f00000000}; // here
END: bar.warp.sync -1;";

/// Lanes from 16 on are elsewhere.
const ELECT: &str = "setp.lt.u32 %p2, %r1, 16;
@!%p2 bra END;
elect.sync %r3|%p1, BUG; // here
END: bar.warp.sync -1;";
const VOTE: &str = "setp.lt.u32 %p2, %r1, 16;
@!%p2 bra END;
vote.sync.ballot.b32 %r3, %p2, BUG; // here
END: bar.warp.sync -1;";
const SHUFFLE: &str = "setp.lt.u32 %p2, %r1, 16;
@!%p2 bra END;
shfl.sync.bfly.b32 %r3, %r1, 1, 31, BUG; // here
END: bar.warp.sync -1;";
const MATCH: &str = "setp.lt.u32 %p2, %r1, 16;
@!%p2 bra END;
match.any.sync.b32 %r3, %r1, BUG; // here
END: bar.warp.sync -1;";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(
        Divergent,
        "a block barrier that half of a warp reaches",
        SOME_WAIT,
        ["16", "64"],
        Nowhere,
        [1, 64],
        [0, 0],
    ),
    Pair::of(Divergent, "a block barrier in two branches of a warp", TWO_PLACES, ["16", "0"], Nowhere, [1, 32], [0, 0]),
    Pair::of(Divergent, "a matrix load in a branch", MATRIX, ["16", "32"], Nowhere, [1, 32], [0, 0]),
    Pair::of(Divergent, "a matrix multiplication in a branch", MULTIPLY, ["16", "32"], Nowhere, [1, 32], [0, 0]),
    Pair::of(
        Divergent,
        "an election among lanes that are elsewhere",
        ELECT,
        ["-1", "0xffff"],
        Nowhere,
        [1, 32],
        [0, 0],
    ),
    Pair::of(Divergent, "a vote of lanes that are elsewhere", VOTE, ["-1", "0xffff"], Nowhere, [1, 32], [0, 0]),
    Pair::of(Divergent, "a shuffle with lanes that are elsewhere", SHUFFLE, ["-1", "0xffff"], Nowhere, [1, 32], [0, 0]),
    Pair::of(Divergent, "a match with lanes that are elsewhere", MATCH, ["-1", "0xffff"], Nowhere, [1, 32], [0, 0]),
    Pair::of(
        Divergent,
        "a lane that its own mask does not name",
        "redux.sync.max.u32 %r3, %r1, BUG; // here",
        ["0xffff", "-1"],
        Nowhere,
        [1, 32],
        [0, 16],
    ),
    Pair::of(
        Divergent,
        "a value from a lane that does not take part",
        "setp.lt.u32 %p1, %r1, 16;\n@!%p1 bra END;\nshfl.sync.idx.b32 %r3, %r1, BUG, 31, 0xffff; // here\nEND: ret;",
        ["20", "2"],
        Nowhere,
        [1, 32],
        [0, 0],
    ),
    Pair::of(
        Divergent,
        "a uniform branch that is not",
        "setp.lt.u32 %p1, %r1, BUG;\n@%p1 bra.uni END; // here\nmov.u32 %r3, 1;\nEND: ret;",
        ["16", "32"],
        Nowhere,
        [1, 32],
        [0, 0],
    ),
    Pair::of(Deadlock, "a block barrier that a whole warp misses", SOME_WAIT, ["32", "64"], Nowhere, [1, 64], [0, 0]),
    Pair::of(Deadlock, "warps that wait at different barriers", TWO_BARRIERS, ["2", "1"], Nowhere, [1, 64], [0, 0]),
    Pair::of(
        Deadlock,
        "a barrier for more threads than there are",
        "bar.sync 1, BUG; // here",
        ["96", "64"],
        Nowhere,
        [1, 64],
        [0, 0],
    ),
    Pair::of(Barrier, "a barrier that there is not", "bar.sync BUG; // here", ["16", "15"], Nowhere, [1, 32], [0, 0]),
    Pair::of(
        Barrier,
        "a number of threads that is not whole warps",
        "bar.sync 1, BUG; // here",
        ["48", "64"],
        Nowhere,
        [1, 64],
        [0, 0],
    ),
    Pair::of(
        Barrier,
        "warps that disagree about the number of threads",
        "setp.lt.u32 %p1, %r1, 32;\nselp.u32 %r3, 64, BUG, %p1;\nbar.sync 1, %r3; // here",
        ["96", "64"],
        Nowhere,
        [1, 64],
        [0, 32],
    ),
    Pair::of(
        Operand,
        "a copy of more bytes than it has",
        "cp.async.cg.shared.global [%r2], [%rd1], 16, BUG; // here\ncp.async.wait_all;",
        ["32", "8"],
        Nowhere,
        [1, 1],
        [0, 0],
    ),
    Pair::of(
        Operand,
        "a mask that differs between lanes",
        "setp.lt.u32 %p1, %r1, 16;\nselp.b32 %r3, -1, BUG, %p1;\nvote.sync.ballot.b32 %r4, %p1, %r3; // here",
        ["0xfffffffe", "-1"],
        Nowhere,
        [1, 32],
        [0, 16],
    ),
    Pair::one(Trap, "a trap", "setp.BUG.u32 %p1, %r1, 0;\n@%p1 trap; // here", ["eq", "ne"], Nowhere),
    Pair::one(
        InstructionLimit,
        "a loop without end",
        "setp.BUG.u32 %p1, %r1, 0;\nAGAIN: @%p1 bra AGAIN; // here",
        ["eq", "ne"],
        Nowhere,
    ),
    Pair::of(
        InstructionLimit,
        "a warp that spins for what never comes",
        "setp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.b32 [%rd2], BUG;\nbar.sync 0;\nAGAIN: ld.volatile.global.b32 %r3, [%rd2]; setp.eq.u32 %p2, %r3, 0; @%p2 bra AGAIN; // here",
        ["0", "1"],
        Nowhere,
        [1, 32],
        [0, 0],
    ),
];

#[test]
fn threads_meet_where_they_must() {
    check(PAIRS);
}
