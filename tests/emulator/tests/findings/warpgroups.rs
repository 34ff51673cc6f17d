//! Asynchronous matrix products, and what the warps of a warpgroup must do alike.

use nvfp4_moe_emulator::FindingKind::{
    Divergent, InFlight, Operand, ProxyFence, RegisterFence, RegisterInFlight, RegisterPool, SharedRace,
    UnwrittenMemory,
};

use super::At::{Nowhere, Shared};
use super::{Pair, check};

/// A warpgroup puts 8 columns of B, 256 bytes, to `smem`, and prepares A and four accumulators.
macro_rules! prepared {
    ($($rest:expr),* $(,)?) => {
        concat!(
            "shl.b32 %r3, %r1, 2;\nadd.u32 %r3, %r3, %r2;\nst.shared.b32 [%r3], 0;\n",
            $($rest),*
        )
    };
}

/// Descriptor of B without swizzle, registers, and everything visible.
macro_rules! ready {
    ($($rest:expr),* $(,)?) => {
        prepared!(
            "fence.proxy.async;\nbar.sync 0;\nshr.u32 %r4, %r2, 4;\ncvt.u64.u32 %rd3, %r4;\n",
            "or.b64 %rd3, %rd3, 0x800080000;\nmov.b32 %r8, 0;\nmov.b32 %r9, 0;\nmov.b32 %r10, 0;\nmov.b32 %r11, 0;\n",
            "mov.f32 %f0, 0f00000000;\nmov.f32 %f1, %f0;\nmov.f32 %f2, %f0;\nmov.f32 %f3, %f0;\n",
            $($rest),*
        )
    };
}

/// A product, as a line.
macro_rules! product {
    () => {
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r8, %r9, %r10, %r11}, %rd3, 1, 1, 1, 0;"
    };
}

/// A thread of the last warp stores into B.
macro_rules! late_store {
    () => {
        "setp.eq.u32 %p1, %r1, 97;\n@%p1 st.shared.b32 [%r2+4], 1;\nfence.proxy.async;\n"
    };
}

const COMMIT: &str = "wgmma.commit_group.sync.aligned;";
const FENCE: &str = "wgmma.fence.sync.aligned;";

const READ_EARLY: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nBUG\nadd.f32 %f4, %f3, %f3; // here\nwgmma.wait_group.sync.aligned 0;"
);
const WRITTEN_EARLY: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nBUG\nmov.b32 %r9, 7; // here\nwgmma.wait_group.sync.aligned 0;"
);
const LOADED_EARLY: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nBUG\nld.global.f32 %f2, [%rd1]; // here\nwgmma.wait_group.sync.aligned 0;"
);
const TWO_GROUPS: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nwgmma.commit_group.sync.aligned;\n",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f4, %f5, %f6, %f7}, {%r8, %r9, %r10, %r11}, %rd3, 0, 1, 1, 0;\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\nadd.f32 %f8, %f0, %f1;\n",
    "wgmma.wait_group.sync.aligned BUG;\nadd.f32 %f8, %f4, %f4; // here\nwgmma.wait_group.sync.aligned 0;"
);
const UNFENCED: &str = ready!(
    "wgmma.fence.sync.aligned;\nmov.f32 %f1, 0f3f800000;\nBUG\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const UNFENCED_A: &str = ready!(
    "wgmma.fence.sync.aligned;\nmov.b32 %r10, 0;\nBUG\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const NEVER_FENCED: &str = ready!(
    "BUG\n",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f4, %f5, %f6, %f7}, {%r8, %r9, %r10, %r11}, %rd3, 0, 1, 1, 0; // here\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
/// The second product uses what the first wrote; of the same shape it needs no fence, as A it needs a wait and a fence.
const CHAINED: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\n",
    product!(),
    "\nwgmma.commit_group.sync.aligned;\nBUG\n",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f4, %f5, %f6, %f7}, {%f0, %f1, %f2, %f3}, %rd3, 0, 1, 1, 0; // here\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
/// A product of 16 columns goes on with the accumulators of one of 8.
const OTHER_SHAPE: &str = ready!(
    "st.shared.b32 [%r3+512], 0;\nfence.proxy.async;\nbar.sync 0;\nwgmma.fence.sync.aligned;\n",
    product!(),
    "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nBUG\n",
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, ",
    "{%r8, %r9, %r10, %r11}, %rd3, 0, 1, 1, 0; // here\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const STORED: &str = prepared!(
    "BUG\nshr.u32 %r4, %r2, 4;\ncvt.u64.u32 %rd3, %r4;\nor.b64 %rd3, %rd3, 0x800080000;\nmov.b32 %r8, 0;\n",
    "wgmma.fence.sync.aligned;\n",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f4, %f5, %f6, %f7}, {%r8, %r8, %r8, %r8}, %rd3, 0, 1, 1, 0; // here\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
/// B arrives by `cp.async`, which each thread waits for.
const COPIED_BY_ALL: &str = ready!(
    "and.b32 %r3, %r1, 15;\nshl.b32 %r4, %r3, 4;\nadd.u32 %r3, %r4, %r2;\ncvt.u64.u32 %rd2, %r4;\nadd.u64 %rd2, %rd2, %rd1;\n",
    "setp.lt.u32 %p1, %r1, 16;\n@%p1 cp.async.cg.shared.global [%r3], [%rd2], 16;\ncp.async.wait_all;\nBUG\n",
    "wgmma.fence.sync.aligned;\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
/// Thread 5 overwrites B.
const OVERWRITTEN: &str = ready!(
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nwgmma.commit_group.sync.aligned;\nBUG\nsetp.eq.u32 %p1, %r1, 5;\n@%p1 st.shared.b32 [%r2+36], 1; // here\n",
    "wgmma.wait_group.sync.aligned 0;"
);
/// A bulk copy overwrites B.
const REFILLED: &str = ready!(
    "setp.eq.u32 %p1, %r1, 64;\n@%p1 mbarrier.init.shared.b64 [%r2+768], 1;\n@%p1 fence.mbarrier_init.release.cluster;\n",
    "wgmma.fence.sync.aligned;\n",
    product!(),
    "\nwgmma.commit_group.sync.aligned;\nBUG\n@!%p1 bra END;\n",
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r2+768], 256;\n",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r2+768]; // here\n",
    "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+768], 0;\n@!%p2 bra AGAIN;\n",
    "END: wgmma.wait_group.sync.aligned 0;"
);
/// B arrives by a bulk copy that nobody waited for.
const COPIED: &str = ready!(
    "setp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [%r2+768], 1;\n@%p1 fence.mbarrier_init.release.cluster;\n",
    "bar.sync 0;\n@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2+768], 256;\n",
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r2+768];\nbar.sync 0;\nBUG\n",
    "wgmma.fence.sync.aligned;\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
    "LAST: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+768], 0;\n@!%p2 bra LAST;"
);
/// The last warp skips the product.
const SKIPPED: &str = ready!(
    "wgmma.fence.sync.aligned;\nBUG\n",
    product!(),
    " // here\nSKIP: wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const FENCED_BY_SOME: &str = ready!("setp.lt.u32 %p1, %r1, 96;\nBUG wgmma.fence.sync.aligned; // here");
const OTHER_OPERANDS: &str = ready!(
    "setp.ge.u32 %p1, %r1, 96;\nBUG\nwgmma.fence.sync.aligned;\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const RESERVED_BITS: &str = ready!(
    "or.b64 %rd3, %rd3, BUG;\nwgmma.fence.sync.aligned;\n",
    product!(),
    " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);
const SOME_LANES: &str = ready!(
    "setp.lt.u32 %p1, %r1, BUG;\nwgmma.fence.sync.aligned;\n",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r8, %r9, %r10, %r11}, %rd3, %p1, 1, 1, 0; // here\n",
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
);

/// One warpgroup of two gives registers, the other takes some. 8 warps have 8 * 128 of a thread's registers.
const REGISTERS: &str = ".maxnreg 128 BODY: setp.ge.u32 %p1, %r1, 128;\n@%p1 bra MORE;\nsetmaxnreg.dec.sync.aligned.u32 40;\nbra END;\n\
MORE: setmaxnreg.inc.sync.aligned.u32 BUG; // here\nEND: ret;";

const WARPGROUP: [u32; 2] = [1, 128];
/// Whoever comes last to a barrier goes on first.
const LAST_WARP: [u32; 2] = [0, 96];
const WAIT: &str = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;";
const LATE_STORE: &str = concat!("fence.proxy.async;\nbar.sync 0;\n", late_store!());
const VISIBLE: &str = "fence.proxy.async;\nbar.sync 0;";

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(RegisterInFlight, "no wait", READ_EARLY, [COMMIT, WAIT], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(
        RegisterInFlight,
        "no commit",
        READ_EARLY,
        ["wgmma.wait_group.sync.aligned 0;", WAIT],
        Nowhere,
        WARPGROUP,
        LAST_WARP,
    ),
    Pair::of(RegisterInFlight, "a write to A", WRITTEN_EARLY, [COMMIT, WAIT], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(RegisterInFlight, "a load to an accumulator", LOADED_EARLY, [COMMIT, WAIT], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(RegisterInFlight, "a wait for the first group", TWO_GROUPS, ["1", "0"], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(
        RegisterInFlight,
        "accumulators as A",
        CHAINED,
        [FENCE, "wgmma.wait_group.sync.aligned 0;\nwgmma.fence.sync.aligned;"],
        Nowhere,
        WARPGROUP,
        LAST_WARP,
    ),
    Pair::of(RegisterFence, "an accumulator set", UNFENCED, ["", FENCE], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(RegisterFence, "A set", UNFENCED_A, ["", FENCE], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(RegisterFence, "no fence at all", NEVER_FENCED, ["", FENCE], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(RegisterFence, "another shape", OTHER_SHAPE, ["", FENCE], Nowhere, WARPGROUP, [0, 64]),
    Pair::of(ProxyFence, "B stored", STORED, ["bar.sync 0;", VISIBLE], Shared(0), WARPGROUP, LAST_WARP),
    Pair::of(ProxyFence, "B copied", COPIED_BY_ALL, ["bar.sync 0;", VISIBLE], Shared(0), WARPGROUP, [0, 64]),
    Pair::of(
        SharedRace,
        "B stored without a barrier",
        STORED,
        [LATE_STORE, concat!("fence.proxy.async;\nbar.sync 0;\n", late_store!(), "bar.sync 0;")],
        Shared(0),
        WARPGROUP,
        [0, 0],
    ),
    Pair::of(
        SharedRace,
        "B overwritten before the wait",
        OVERWRITTEN,
        ["bar.sync 0;", "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;"],
        Shared(36),
        WARPGROUP,
        [0, 5],
    ),
    Pair::of(
        SharedRace,
        "B overwritten after the own wait",
        OVERWRITTEN,
        ["wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;"],
        Shared(36),
        WARPGROUP,
        [0, 5],
    ),
    Pair::of(
        SharedRace,
        "B refilled before the wait",
        REFILLED,
        ["bar.sync 0;", "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;"],
        Shared(0),
        WARPGROUP,
        [0, 64],
    ),
    Pair::of(
        InFlight,
        "B not there yet",
        COPIED,
        ["", "FIRST: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+768], 0;\n@!%p2 bra FIRST;"],
        Shared(0),
        WARPGROUP,
        [0, 32],
    ),
    Pair::of(
        Divergent,
        "three warps",
        SKIPPED,
        ["setp.ge.u32 %p1, %r1, 96;\n@%p1 bra SKIP;", ""],
        Nowhere,
        WARPGROUP,
        [0, 0],
    ),
    Pair::of(Divergent, "a fence of three warps", FENCED_BY_SOME, ["@%p1", ""], Nowhere, WARPGROUP, [0, 0]),
    Pair::of(
        Divergent,
        "two descriptors",
        OTHER_OPERANDS,
        ["@%p1 or.b64 %rd3, %rd3, 0x20000;", "or.b64 %rd3, %rd3, 0x80000;"],
        Nowhere,
        WARPGROUP,
        [0, 0],
    ),
    Pair::of(Operand, "bits of no field", RESERVED_BITS, ["0x4000", "0x80000"], Nowhere, WARPGROUP, LAST_WARP),
    Pair::of(Operand, "half a scale-d", SOME_LANES, ["16", "128"], Nowhere, WARPGROUP, [0, 0]),
    Pair::of(RegisterPool, "more than there can be", REGISTERS, ["240", "216"], Nowhere, [1, 256], [0, 128]),
    Pair::of(RegisterPool, "more than are given", REGISTERS, ["224", "216"], Nowhere, [1, 256], [0, 224]),
    Pair::of(RegisterPool, "fewer by .inc", REGISTERS, ["120", "128"], Nowhere, [1, 256], [0, 128]),
    Pair::of(
        UnwrittenMemory,
        "B never written",
        ready!(
            "wgmma.fence.sync.aligned;\nadd.u32 %r4, %r2, BUG;\nshr.u32 %r4, %r4, 4;\ncvt.u64.u32 %rd3, %r4;\n",
            "or.b64 %rd3, %rd3, 0x800080000;\n",
            product!(),
            " // here\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
        ),
        ["512", "256"],
        Shared(512),
        WARPGROUP,
        LAST_WARP,
    ),
];

#[test]
fn products_are_waited_for() {
    check(PAIRS);
}
