//! Blocks of a launch that pass data to each other through global memory: releases, acquires, fences.

use nvfp4_moe_emulator::FindingKind::{Deadlock, GlobalRace};
use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Module};

use super::At::{self, Data};
use super::{Pair, check, text};

/// The first block writes a word at 64 and then the flag at 0, the second waits for the flag: what they do it with, and
/// what the second does with the word.
macro_rules! message {
    ($write:expr, $wait:expr, $use:expr $(,)?) => {
        concat!(
            "mov.u32 %r3, %ctaid.x;\nsetp.ne.u32 %p1, %r3, 0;\n@%p1 bra WAIT;\n",
            $write,
            "\nbra END;\nWAIT: ",
            $wait,
            "\nsetp.eq.u32 %p2, %r4, 0;\n@%p2 bra WAIT;\n",
            $use,
            "\nEND: mov.u32 %r9, 0;"
        )
    };
}

const ACQUIRED: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nred.release.gpu.global.add.u32 [%rd1], 1;",
    "ld.BUG.global.u32 %r4, [%rd1];",
    "ld.global.u32 %r5, [%rd1+64]; // here"
);
const RELEASED: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nBUG [%rd1], 1;",
    "ld.acquire.gpu.global.u32 %r4, [%rd1];",
    "ld.global.u32 %r5, [%rd1+64]; // here"
);
/// The flag itself is what is found.
const FLAG_WRITTEN: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nBUG [%rd1], 1;",
    "ld.acquire.gpu.global.u32 %r4, [%rd1]; // here",
    "ld.global.u32 %r5, [%rd1+64];"
);
const FLAG_READ: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nst.release.sys.global.b32 [%rd1], 1;",
    "ld.BUG.u32 %r4, [%rd1]; // here",
    "ld.global.u32 %r5, [%rd1+64];"
);
const LATE: &str = message!(
    "st.global.b32 [%rd1+BUG], 4;\nred.release.gpu.global.add.u32 [%rd1], 1;\nst.global.b32 [%rd1+72], 5;",
    "ld.acquire.gpu.global.u32 %r4, [%rd1];",
    "ld.global.u32 %r5, [%rd1+68];\nld.global.u32 %r6, [%rd1+BUG]; // here"
);
const OVERWRITTEN: &str = message!(
    "ld.global.b32 %r5, [%rd1+64];\natom.release.gpu.global.exch.b32 %r6, [%rd1], 1;",
    "atom.BUG.gpu.global.or.b32 %r4, [%rd1], 0;",
    "st.global.b32 [%rd1+64], 5; // here"
);
const COPIED: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nred.release.gpu.global.add.u32 [%rd1], 1;",
    "ld.BUG.gpu.global.u32 %r4, [%rd1];",
    concat!(
        "fence.proxy.async.global;\nmbarrier.init.shared.b64 [%r2], 1;\nfence.mbarrier_init.release.cluster;\n",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 32;\n",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd1+64], 32, [%r2]; // here\n",
        "FULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;\n@!%p4 bra FULL;"
    )
);
const FENCED_WRITE: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nBUG\nst.relaxed.gpu.global.b32 [%rd1], 1;",
    "ld.acquire.gpu.global.u32 %r4, [%rd1];",
    "ld.global.u32 %r5, [%rd1+64]; // here"
);
const FENCED_READ: &str = message!(
    "st.global.b32 [%rd1+64], 5;\nmembar.gl;\natom.global.add.u32 %r6, [%rd1], 1;",
    "ld.volatile.global.u32 %r4, [%rd1];",
    "BUG\nld.global.u32 %r5, [%rd1+64]; // here"
);
const LATE_FENCE: &str = message!(
    "BUG\nst.relaxed.gpu.global.b32 [%rd1], 1;",
    "ld.acquire.gpu.global.u32 %r4, [%rd1];",
    "ld.global.u32 %r5, [%rd1+64]; // here"
);

/// The second block passes on what the first one wrote.
const PASSED_ON: &str = "mov.u32 %r3, %ctaid.x;
setp.eq.u32 %p1, %r3, 1;
setp.eq.u32 %p2, %r3, 2;
@%p1 bra SECOND;
@%p2 bra THIRD;
st.global.b32 [%rd1+64], 5;
st.release.gpu.global.b32 [%rd1], 1;
bra END;
SECOND: ld.BUG.gpu.global.u32 %r4, [%rd1];
setp.eq.u32 %p3, %r4, 0;
@%p3 bra SECOND;
st.release.gpu.global.b32 [%rd1+4], 1;
bra END;
THIRD: ld.acquire.gpu.global.u32 %r4, [%rd1+4];
setp.eq.u32 %p3, %r4, 0;
@%p3 bra THIRD;
ld.global.u32 %r5, [%rd1+64]; // here
END: mov.u32 %r9, 0;";

/// The first block waits for so many of three others, then reads what all of them wrote.
const COUNTED: &str = "mov.u32 %r3, %ctaid.x;
mul.wide.u32 %rd3, %r3, 4;
add.u64 %rd3, %rd1, %rd3;
setp.eq.u32 %p1, %r3, 0;
@%p1 bra WAIT;
st.global.b32 [%rd3], %r3; // here
red.release.gpu.global.add.u32 [%rd1+128], 1;
bra END;
WAIT: ld.acquire.gpu.global.u32 %r4, [%rd1+128];
setp.lt.u32 %p2, %r4, BUG;
@%p2 bra WAIT;
ld.global.u32 %r5, [%rd1+4];
ld.global.u32 %r5, [%rd1+8];
ld.global.u32 %r5, [%rd1+12];
END: mov.u32 %r9, 0;";

/// A pair of two blocks, of which the second is found.
const fn race(what: &'static str, body: &'static str, bug: [&'static str; 2], at: At) -> Pair {
    Pair::of(GlobalRace, what, body, bug, at, [2, 1], [1, 0])
}

pub(super) const PAIRS: &[Pair] = &[
    race("a relaxed load of the flag", ACQUIRED, ["relaxed.gpu", "acquire.gpu"], Data(64)),
    race("an acquire for the cluster", ACQUIRED, ["acquire.cluster", "acquire.gpu"], Data(64)),
    race("a relaxed reduction", RELEASED, ["red.global.add.u32", "red.release.gpu.global.add.u32"], Data(64)),
    race("a relaxed store", RELEASED, ["st.relaxed.gpu.b32", "st.release.gpu.b32"], Data(64)),
    race("a release for the cluster", RELEASED, ["red.release.cluster.add.u32", "red.release.sys.add.u32"], Data(64)),
    race(
        "an atomic that only acquires",
        RELEASED,
        ["atom.acquire.gpu.add.u32 %r6,", "atom.acq_rel.gpu.add.u32 %r6,"],
        Data(64),
    ),
    race("a plain store to the flag", FLAG_WRITTEN, ["st.global.b32", "st.release.gpu.global.b32"], Data(0)),
    race("a release for the block", FLAG_WRITTEN, ["red.release.cta.add.u32", "red.release.gpu.add.u32"], Data(0)),
    race("a store for the block", FLAG_WRITTEN, ["st.release.cta.b32", "st.release.gpu.b32"], Data(0)),
    race("a plain load of the flag", FLAG_READ, ["global", "acquire.gpu.global"], Data(0)),
    race("an acquire for the block", FLAG_READ, ["acquire.cta.global", "acquire.sys.global"], Data(0)),
    race("a word written after the release", LATE, ["72", "68"], Data(72)),
    race("a write over what another block reads", OVERWRITTEN, ["relaxed", "acquire"], Data(64)),
    race("a bulk copy of what another block writes", COPIED, ["relaxed", "acquire"], Data(64)),
    race("no fence before a relaxed store", FENCED_WRITE, ["", "fence.acq_rel.gpu;"], Data(64)),
    race("a fence of the block before it", FENCED_WRITE, ["fence.acq_rel.cta;", "fence.sc.sys;"], Data(64)),
    race("a fence that only acquires", FENCED_WRITE, ["fence.acquire.gpu;", "fence.release.gpu;"], Data(64)),
    race("no fence after a volatile load", FENCED_READ, ["", "membar.gl;"], Data(64)),
    race("a fence of the block after it", FENCED_READ, ["membar.cta;", "membar.sys;"], Data(64)),
    race(
        "a word written after the fence",
        LATE_FENCE,
        ["membar.gl;\nst.global.b32 [%rd1+64], 5;", "st.global.b32 [%rd1+64], 5;\nmembar.gl;"],
        Data(64),
    ),
    Pair::of(GlobalRace, "a link that is relaxed", PASSED_ON, ["relaxed", "acquire"], Data(64), [3, 1], [2, 0]),
    Pair::of(GlobalRace, "a count that is too low", COUNTED, ["2", "3"], Data(12), [4, 1], [3, 0]),
];

#[test]
fn blocks_pass_data_on() {
    check(PAIRS);
}

/// Runs a body on words, the first of them at `%rd1`; what they are afterwards.
fn run(config: Config, body: &str, [blocks, threads]: [u32; 2], words: usize) -> Result<Vec<u32>, EmulatorError> {
    let module = Module::parse(&text(body))?;
    let mut emulator = Emulator::new(config);
    let data = emulator.memory_mut().alloc(4 * words);
    emulator.memory_mut().fill(data, 0, 4 * words)?;
    let params = [data.to_le_bytes(); 2].concat();
    emulator.launch(&module, "kernel_of_the_pair", [blocks, 1, 1], [threads, 1, 1], super::SHARED_BYTES, &params)?;
    Ok(bytemuck::pod_collect_to_vec(&emulator.memory().read(data, 4 * words)?))
}

#[test]
fn many_messages_at_once() {
    // Each block adds its number to what it gets from the one before, all on several host threads.
    let body = "mov.u32 %r3, %ctaid.x;
        mul.wide.u32 %rd3, %r3, 8;
        add.u64 %rd3, %rd1, %rd3;
        mov.u32 %r5, 0;
        setp.eq.u32 %p1, %r3, 0;
        @%p1 bra WRITE;
        WAIT: ld.acquire.gpu.global.u32 %r4, [%rd3-8];
        setp.eq.u32 %p2, %r4, 0;
        @%p2 bra WAIT;
        ld.global.u32 %r5, [%rd3-4];
        WRITE: add.u32 %r5, %r5, %r3;
        st.global.b32 [%rd3+4], %r5;
        red.release.gpu.global.add.u32 [%rd3], 1;";
    for threads in [1, 2, 4] {
        for _ in 0..20 {
            let words = run(Config { threads, ..Config::default() }, body, [64, 1], 128);
            assert_eq!(words.unwrap_or_else(|error| panic!("{error}"))[127], 63 * 64 / 2);
        }
    }
}

/// All blocks but the last wait for it.
const LAST_ONE: &str = "mov.u32 %r3, %ctaid.x;
mov.u32 %r4, %nctaid.x;
sub.u32 %r4, %r4, 1;
setp.eq.u32 %p1, %r3, %r4;
@%p1 st.release.gpu.global.b32 [%rd1], 1;
WAIT: ld.acquire.gpu.global.u32 %r5, [%rd1];
setp.eq.u32 %p2, %r5, 0;
@%p2 bra WAIT;";

#[test]
fn blocks_that_wait_for_one_that_has_no_room() {
    for threads in [1, 2] {
        let config = |resident_blocks| Config { threads, resident_blocks, ..Config::default() };
        assert_eq!(run(config(4), LAST_ONE, [4, 32], 1).unwrap(), [1]);
        let Err(EmulatorError::Findings { findings }) = run(config(3), LAST_ONE, [5, 32], 1) else {
            panic!("nothing was found");
        };
        let detail = "all of 3 resident blocks wait, and 2 begin only when these end";
        assert_eq!((findings[0].kind, findings[0].detail.as_str()), (Deadlock, detail));
        assert!(findings[0].text.starts_with("WAIT: ld.acquire"), "{}", findings[0]);
    }
}

#[test]
fn warps_wait_for_a_warp_that_waits_for_a_block() {
    // 31 warps wait at an mbarrier while the first one waits for a block that takes its time.
    let body = "mov.u32 %r3, %ctaid.x;
        setp.ne.u32 %p1, %r3, 0;
        @%p1 bra SLOW;
        setp.eq.u32 %p2, %r1, 0;
        @%p2 mbarrier.init.shared.b64 [%r2], 1;
        bar.sync 0;
        @!%p2 bra FULL;
        WAIT: ld.acquire.gpu.global.u32 %r4, [%rd1];
        setp.eq.u32 %p3, %r4, 0;
        @%p3 bra WAIT;
        mbarrier.arrive.shared.b64 _, [%r2];
        FULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;
        @!%p4 bra FULL;
        bra END;
        SLOW: setp.ne.u32 %p2, %r1, 0;
        @%p2 bra END;
        mov.u32 %r5, 0;
        AGAIN: nanosleep.u32 1;
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %p3, %r5, 400000;
        @%p3 bra AGAIN;
        st.release.gpu.global.b32 [%rd1], 1;
        END: mov.u32 %r9, 0;";
    let words = run(Config { threads: 1, ..Config::default() }, body, [2, 1024], 1);
    assert_eq!(words.unwrap_or_else(|error| panic!("{error}")), [1]);
}

#[test]
fn a_cooperative_launch_has_room_for_all_blocks() {
    let emulator = Emulator::new(Config { resident_blocks: 6, ..Config::default() });
    emulator.check_cooperative("k", [3, 2, 1], 1).unwrap();
    emulator.check_cooperative("k", [12, 1, 1], 2).unwrap();
    for (grid, cluster) in [([7, 1, 1], 1), ([14, 1, 1], 2)] {
        let error = emulator.check_cooperative("k", grid, cluster).unwrap_err();
        assert!(matches!(error, EmulatorError::Launch { .. }), "{error}");
    }
}
