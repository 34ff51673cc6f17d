//! Blocks of a cluster: their barrier, and what they do in each other's shared memory.

use nvfp4_moe_emulator::FindingKind::{Barrier, Deadlock, Mbarrier, Operand, OutOfBounds, SharedRace};
use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Module};

use super::At::{Nowhere, Shared, Somewhere};
use super::{Pair, check};

/// A kernel of clusters of two blocks: `%r10` is the block's number, `%r11` the other's, `%p1` holds in the first.
macro_rules! cluster {
    ($($rest:expr),* $(,)?) => {
        concat!(
            ".reqnctapercluster 2 BODY: mov.u32 %r10, %cluster_ctarank;\nxor.b32 %r11, %r10, 1;\n",
            "setp.eq.u32 %p1, %r10, 0;\nsetp.eq.u32 %p2, %r1, 0;\n",
            "mapa.shared::cluster.u32 %r12, %r2, %r11;\n",
            $($rest),*
        )
    };
}

const SYNC: &str = "barrier.cluster.arrive;\nbarrier.cluster.wait;";

/// Each block writes a word of the other's memory, which reads it.
const WRITTEN: &str = cluster!(
    "@%p2 st.shared::cluster.b32 [%r12], %r10;\nbar.sync 0;\nBUG\n@!%p1 ld.shared.b32 %r13, [%r2]; // here\n",
    "barrier.cluster.arrive;\nbarrier.cluster.wait;"
);
/// The second block overwrites what the first reads in it.
const READ: &str = cluster!(
    "@%p2 st.shared.b32 [%r2], 1;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n",
    "@%p1 ld.shared::cluster.b32 %r13, [%r12]; // here\nBUG\nsetp.ne.and.b32 %p3, %r10, 0, %p2;\n@%p3 st.shared.b32 [%r2], 2;\n",
    "barrier.cluster.arrive;\nbarrier.cluster.wait;"
);
/// The second block arrives at the first's mbarrier.
const REMOTE_ARRIVAL: &str = cluster!(
    "setp.ne.and.b32 %p3, %r10, 1, %p2;\n@%p3 mbarrier.init.shared.b64 [%r2], 32;\nBUG\n",
    "@!%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12]; // here\n",
    "barrier.cluster.arrive;\nbarrier.cluster.wait;"
);
/// The same, with an instruction and an address that belong together.
const OTHER_SPACE: &str = cluster!(
    "@%p2 mbarrier.init.shared.b64 [%r2], 32;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n",
    "mbarrier.arrive.BUG.b64 _, [%r12]; // here\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
);
const WAIT_ELSEWHERE: &str = cluster!(
    "@%p2 mbarrier.init.shared.b64 [%r2], 32;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n",
    "mbarrier.arrive.shared::cluster.b64 _, [%r12];\n",
    "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [BUG], 0; // here\n@!%p3 bra AGAIN;\n",
    "barrier.cluster.arrive;\nbarrier.cluster.wait;"
);
const LATE: &str = cluster!(
    "@!%p1 bra OTHER;\nbar.warp.sync -1;\nBUG\nbra END;\nOTHER: mov.u32 %r13, 0;\n",
    "DELAY: nanosleep.u32 1;\nadd.u32 %r13, %r13, 1;\nsetp.lt.u32 %p3, %r13, 64;\n@%p3 bra DELAY;\n",
    "@%p2 st.shared::cluster.b32 [%r12], 1; // here\nbarrier.cluster.arrive;\nEND: ret;"
);
const ARRIVAL: &str = cluster!("barrier.cluster.arrive;\nBUG\nbarrier.cluster.arrive; // here\nbarrier.cluster.wait;");
const WAITS: &str = cluster!("BUG\nbarrier.cluster.wait; // here");
const MAPPED: &str = cluster!("mapa.shared::cluster.u32 %r13, %r2, BUG; // here");

/// The first block copies to both; each reads 32 words.
macro_rules! multicast {
    ($mask:expr, $again:expr) => {
        cluster!(
            "@%p2 mbarrier.init.shared.b64 [%r2], 1;\n@%p2 fence.mbarrier_init.release.cluster;\n",
            "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\nmov.b16 %rs1, ",
            $mask,
            ";\n@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;\nsetp.eq.and.b32 %p3, %r10, 0, %p2;\n",
            "@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster ",
            "[%r2+16], [%rd1], 128, [%r2], %rs1;",
            $again,
            "barrier.cluster.arrive;\nbarrier.cluster.wait;"
        )
    };
}

const MASK: &str =
    multicast!("BUG", " // here\nFULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\n@!%p4 bra FULL;\n");
/// The next copy overwrites what the second block reads.
const REFILLED: &str = multicast!(
    "3",
    concat!(
        "\nFULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\n@!%p4 bra FULL;\n",
        "shl.b32 %r13, %r1, 2;\nadd.u32 %r13, %r13, %r2;\nld.shared.b32 %r14, [%r13+16];\n",
        "@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;\nBUG\n",
        "@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster ",
        "[%r2+16], [%rd1], 128, [%r2], %rs1; // here\n",
        "LAST: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 1;\n@!%p4 bra LAST;\n"
    )
);
/// A copy to the other block signals an mbarrier.
const SIGNALLED: &str = cluster!(
    "@%p2 mbarrier.init.shared.b64 [%r2], 1;\n@%p2 fence.mbarrier_init.release.cluster;\n",
    "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n@!%p2 bra END;\n",
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;\n",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12+16], [%rd1], 128, [BUG]; // here\n",
    "FULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\n@!%p4 bra FULL;\n",
    "END: barrier.cluster.arrive;\nbarrier.cluster.wait;"
);

const TWO_BLOCKS: [u32; 2] = [2, 32];

pub(super) const PAIRS: &[Pair] = &[
    Pair::of(SharedRace, "a word of another block", WRITTEN, ["", SYNC], Shared(0), TWO_BLOCKS, [1, 0]),
    Pair::of(
        SharedRace,
        "an order that nobody gave",
        WRITTEN,
        [
            "barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;",
            "fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;",
        ],
        Shared(0),
        TWO_BLOCKS,
        [1, 0],
    ),
    Pair::of(SharedRace, "overwritten while another block reads", READ, ["", SYNC], Somewhere, TWO_BLOCKS, [0, 0]),
    Pair::of(SharedRace, "an mbarrier not seen yet", REMOTE_ARRIVAL, ["", SYNC], Somewhere, TWO_BLOCKS, [1, 0]),
    Pair::of(SharedRace, "a copy to a block that still reads", REFILLED, ["", SYNC], Shared(16), TWO_BLOCKS, [0, 0]),
    Pair::of(
        OutOfBounds,
        "a block that has ended",
        LATE,
        ["", "barrier.cluster.arrive;\nbarrier.cluster.wait;"],
        Somewhere,
        TWO_BLOCKS,
        [1, 0],
    ),
    Pair::of(
        Mbarrier,
        "an arrival for the own block only",
        OTHER_SPACE,
        ["shared::cta", "shared::cluster"],
        Somewhere,
        TWO_BLOCKS,
        [1, 0],
    ),
    Pair::of(Mbarrier, "a wait in another block", WAIT_ELSEWHERE, ["%r12", "%r2"], Somewhere, TWO_BLOCKS, [1, 0]),
    Pair::of(Mbarrier, "an mbarrier elsewhere", SIGNALLED, ["%r2", "%r12"], Shared(0), TWO_BLOCKS, [1, 0]),
    Pair::of(Barrier, "two arrivals", ARRIVAL, ["", "barrier.cluster.wait;"], Nowhere, TWO_BLOCKS, [0, 0]),
    Pair::of(Barrier, "a wait without an arrival", WAITS, ["", "barrier.cluster.arrive;"], Nowhere, TWO_BLOCKS, [0, 0]),
    Pair::of(Operand, "a block that is not there", MAPPED, ["2", "1"], Nowhere, TWO_BLOCKS, [0, 0]),
    Pair::of(Operand, "a copy to blocks that are not there", MASK, ["7", "3"], Nowhere, TWO_BLOCKS, [0, 0]),
    Pair::of(
        Deadlock,
        "half of the cluster",
        cluster!(
            "BUG\nbarrier.cluster.arrive;\nbarrier.cluster.wait; // here\nbra END;\nSKIP: bar.sync 1, 64;\nEND: ret;"
        ),
        ["@!%p1 bra SKIP;", ""],
        Nowhere,
        TWO_BLOCKS,
        [0, 0],
    ),
];

#[test]
fn blocks_of_a_cluster_meet() {
    check(PAIRS);
}

/// A kernel that counts blocks, with a directive.
fn launch(directive: &str, cluster: Option<u32>, blocks: u32) -> Result<Vec<u8>, EmulatorError> {
    let module = Module::parse(&format!(
        ".version 8.7 .target sm_90 .address_size 64 .visible .entry k(.param .b64 out) {directive} {{
         .reg .b32 %r<4>; .reg .b64 %rd<4>; ld.param.b64 %rd1, [out]; mov.u32 %r1, %ctaid.x; cvt.u64.u32 %rd2, %r1;
         add.u64 %rd1, %rd1, %rd2; mov.u32 %r2, %cluster_nctarank; st.global.b8 [%rd1], %r2; ret; }}"
    ))?;
    let mut emulator = Emulator::new(Config::default());
    let out = emulator.memory_mut().alloc(8);
    let shape = [[blocks, 1, 1], [1, 1, 1]];
    emulator.launch_clusters(&module, "k", cluster, shape, 0, &out.to_le_bytes())?;
    emulator.memory().read(out, blocks as usize)
}

#[test]
fn sizes_of_clusters() {
    assert_eq!(launch("", None, 3).unwrap(), [1; 3]);
    assert_eq!(launch("", Some(2), 4).unwrap(), [2; 4]);
    assert_eq!(launch(".explicitcluster", Some(4), 8).unwrap(), [4; 8]);
    assert_eq!(launch(".reqnctapercluster 2, 1, 1", None, 4).unwrap(), [2; 4]);
    for (directive, cluster, blocks) in [
        (".explicitcluster", None, 2),
        (".reqnctapercluster 2", Some(4), 8),
        (".maxclusterrank 2", Some(4), 8),
        ("", Some(2), 3),
        ("", Some(16), 16),
        ("", Some(0), 2),
    ] {
        let error = launch(directive, cluster, blocks).unwrap_err();
        assert!(matches!(error, EmulatorError::Launch { .. }), "{directive}, {cluster:?}, {blocks}: {error}");
    }
    launch(".reqnctapercluster 2, 2", None, 4).unwrap_err();
}
