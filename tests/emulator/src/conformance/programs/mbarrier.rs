//! mbarrier objects and the bulk copies that they wait for.

use super::super::Check;
use super::{exact, scrambled};

/// One thread: a line of steps, each a test whose answer becomes one bit of the output, or an instruction.
fn steps(name: &str, architecture: u32, count: u32, steps: &[&str], answers: u64) -> Check {
    let mut body = format!("mbarrier.init.shared.b64 [%s], {count}; mov.u32 %r1, 0; ");
    let mut tests = 0;
    for step in steps {
        if step.contains("_wait") {
            body += &format!("{step} selp.u32 %r2, {}, 0, %p1; or.b32 %r1, %r1, %r2; ", 1u64 << tests);
            tests += 1;
        } else {
            body += step;
            body += " ";
        }
    }
    body += "mbarrier.inval.shared.b64 [%s]; st.shared.b64 [%s], 0; st.global.b64 [%yours], 0; st.global.b32 [%yours], %r1;";
    exact(name, architecture, 1, &body, vec![0], vec![answers])
}

const EVEN: &str = "mbarrier.test_wait.parity.shared.b64 %p1, [%s], 0;";
const ODD: &str = "mbarrier.test_wait.parity.shared.b64 %p1, [%s], 1;";
const ARRIVE: &str = "mbarrier.arrive.shared.b64 _, [%s];";

/// Everything that one thread can ask.
fn alone() -> Vec<Check> {
    vec![
        // Phase 0 runs: the one before it, which is odd, counts as over.
        steps("mbarrier.test_wait.parity", 80, 1, &[EVEN, ODD, ARRIVE, EVEN, ODD, ARRIVE, ODD, EVEN], 0b01_0110),
        steps(
            "mbarrier.test_wait",
            80,
            2,
            &[
                "mbarrier.arrive.shared.b64 %rd1, [%s];",
                "mbarrier.test_wait.shared.b64 %p1, [%s], %rd1;",
                "mbarrier.arrive.shared::cta.b64 %rd2, [%s];",
                "mbarrier.test_wait.shared::cta.b64 %p1, [%s], %rd1;",
                "mbarrier.test_wait.shared.b64 %p1, [%s], %rd2;",
                "mbarrier.arrive.shared.b64 %rd3, [%s];",
                "mbarrier.test_wait.shared.b64 %p1, [%s], %rd3;",
                "mbarrier.test_wait.shared.b64 %p1, [%s], %rd2;",
            ],
            0b1_0110,
        ),
        steps(
            "mbarrier.arrive with a count",
            90,
            5,
            &[
                "mbarrier.arrive.shared.b64 _, [%s], 3;",
                EVEN,
                "mbarrier.arrive.release.cta.shared::cta.b64 _, [%s], 2;",
                EVEN,
            ],
            0b10,
        ),
        steps(
            "mbarrier.arrive.noComplete, pending_count",
            80,
            5,
            &[
                "mbarrier.arrive.noComplete.shared.b64 %rd1, [%s], 2;",
                "mbarrier.pending_count.b64 %r3, %rd1; shl.b32 %r3, %r3, 8; or.b32 %r1, %r1, %r3;",
                "mbarrier.arrive.noComplete.release.cta.shared.b64 %rd1, [%s], 1;",
                "mbarrier.pending_count.b64 %r3, %rd1; shl.b32 %r3, %r3, 16; or.b32 %r1, %r1, %r3;",
                EVEN,
                ARRIVE,
                ARRIVE,
                EVEN,
            ],
            5 << 8 | 3 << 16 | 0b10,
        ),
        // Three are expected in phase 0, two afterwards.
        steps(
            "mbarrier.arrive_drop",
            80,
            3,
            &["mbarrier.arrive_drop.shared.b64 _, [%s];", ARRIVE, EVEN, ARRIVE, EVEN, ARRIVE, ODD, ARRIVE, ODD],
            0b1010,
        ),
        steps(
            "mbarrier.arrive_drop.noComplete",
            80,
            4,
            &["mbarrier.arrive_drop.noComplete.shared.b64 %rd1, [%s], 3;", EVEN, ARRIVE, EVEN, ARRIVE, ODD],
            0b110,
        ),
        // Bytes hold a phase back, whether announced before or with the arrival.
        steps(
            "mbarrier.arrive.expect_tx, complete_tx",
            90,
            1,
            &[
                "mbarrier.arrive.expect_tx.shared.b64 _, [%s], 16;",
                EVEN,
                "mbarrier.complete_tx.shared.b64 [%s], 8;",
                EVEN,
                "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%s], 8;",
                EVEN,
            ],
            0b100,
        ),
        steps(
            "mbarrier.expect_tx",
            90,
            1,
            &[
                "mbarrier.expect_tx.relaxed.cta.shared.b64 [%s], 32;",
                ARRIVE,
                EVEN,
                "mbarrier.complete_tx.shared.b64 [%s], 32;",
                EVEN,
            ],
            0b10,
        ),
        steps(
            "mbarrier.arrive_drop.expect_tx",
            90,
            2,
            &[
                "mbarrier.arrive_drop.expect_tx.shared.b64 _, [%s], 4;",
                ARRIVE,
                EVEN,
                "mbarrier.complete_tx.shared.b64 [%s], 4;",
                EVEN,
                ARRIVE,
                ODD,
            ],
            0b110,
        ),
        steps(
            "mbarrier.try_wait",
            90,
            1,
            &[
                "mbarrier.try_wait.parity.shared.b64 %p1, [%s], 0, 100;",
                "mbarrier.arrive.shared.b64 %rd1, [%s];",
                "mbarrier.try_wait.parity.shared.b64 %p1, [%s], 0;",
                "mbarrier.try_wait.shared.b64 %p1, [%s], %rd1;",
                "mbarrier.try_wait.acquire.cta.shared::cta.b64 %p1, [%s], %rd1, 100;",
                "mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [%s], 1, 100;",
            ],
            0b0_1110,
        ),
        steps(
            "mbarrier.try_wait.relaxed",
            120,
            1,
            &[
                "mbarrier.arrive.relaxed.cta.shared.b64 _, [%s];",
                "mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, [%s], 0;",
                "mbarrier.test_wait.parity.relaxed.cta.shared.b64 %p1, [%s], 1;",
            ],
            0b01,
        ),
    ]
}

/// All threads write, arrive, wait and read what the thread opposite wrote, in two phases; by a generic address too.
fn together(name: &str, address: &str, space: &str, wait: &str, architecture: u32) -> Check {
    let round = |index: u32| {
        let wait = wait.replace("PARITY", &(index % 2).to_string());
        format!(
            "add.u32 %r4, %r3, {index}; st.shared.u32 [%r1], %r4; mbarrier.arrive{space}.b64 %rd3, [{address}]; \
             W{index}: {wait} @!%p1 bra W{index}; ld.shared.u32 %r5, [%r2]; add.u32 %r6, %r6, %r5; bar.sync 0; "
        )
    };
    let body = format!(
        "cvt.u64.u32 %rd2, %s; cvta.shared.u64 %rd2, %rd2; ld.global.b32 %r3, [%mine]; mov.u32 %r6, 0; \
         mad.lo.u32 %r1, %t, 4, %s; add.u32 %r1, %r1, 16; xor.b32 %r2, %t, 63; mad.lo.u32 %r2, %r2, 4, %s; \
         add.u32 %r2, %r2, 16; setp.ne.u32 %p2, %t, 0; @!%p2 mbarrier.init{space}.b64 [{address}], 64; bar.sync 0; {}{}{} \
         st.global.b64 [%yours], 0; st.global.b32 [%yours], %r6;",
        round(0),
        round(1),
        round(2)
    );
    let expected = (0..64).map(|t| 3 * (1000 + (t ^ 63)) + 3).collect();
    exact(name, architecture, 64, &body, (1000..1064).collect(), expected)
}

/// Bulk copies of the inputs to shared memory, in two rounds.
fn bulk(name: &str, architecture: u32, space: &str, fence: &str) -> Check {
    let round = |index: u32| {
        // Two copies for one phase, the first one shorter.
        let state = if architecture >= 100 { "shared::cta" } else { "shared" };
        format!(
            "@%p2 bra W{index}; mbarrier.arrive.expect_tx.{state}.b64 _, [%s], 1024; \
             cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%s]; \
             cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%r1+256], [%rd1+256], 768, [%s]; \
             W{index}: mbarrier.try_wait.parity.shared.b64 %p1, [%s], {}; @!%p1 bra W{index}; \
             ld.shared.b64 %rd2, [%r2]; st.global.b64 [%yours+{}], %rd2; fence.proxy.async; bar.sync 0; \
             add.u64 %rd1, %rd1, 1024; ",
            index % 2,
            1024 * index
        )
    };
    let body = format!(
        "add.u32 %r1, %s, 128; mad.lo.u32 %r2, %t, 8, %r1; mov.u64 %rd1, %in; setp.ne.u32 %p2, %t, 0; @%p2 bra READY; \
         mbarrier.init.shared.b64 [%s], 1; {fence} READY: bar.sync 0; {}{}",
        round(0),
        round(1)
    );
    let words = scrambled(256);
    exact(name, architecture, 128, &body, words.clone(), words)
}

/// `cp.async` whose landing is an arrival: counted from the start with `.noinc`, otherwise on top of what is expected.
fn copies_that_arrive() -> Vec<Check> {
    let forms = [
        ("cp.async.mbarrier.arrive.noinc.shared.b64", 128),
        ("cp.async.mbarrier.arrive.noinc.shared::cta.b64", 128),
        ("cp.async.mbarrier.arrive.shared.b64", 64),
    ];
    let checks = forms.into_iter().map(|(name, count)| {
        let body = format!(
            "setp.ne.u32 %p2, %t, 0; @!%p2 mbarrier.init.shared.b64 [%s], {count}; bar.sync 0; add.u32 %r1, %s, 16; \
             xor.b32 %r2, %t, 63; mad.lo.u32 %r2, %r2, 8, %r1; mad.lo.u32 %r1, %t, 8, %r1; \
             cp.async.ca.shared.global [%r1], [%mine], 8; {name} [%s]; mbarrier.arrive.shared.b64 %rd3, [%s]; \
             WAIT: mbarrier.test_wait.shared.b64 %p1, [%s], %rd3; @!%p1 bra WAIT; ld.shared.b64 %rd4, [%r2]; \
             st.global.b64 [%yours], %rd4;"
        );
        exact(name, 80, 64, &body, (100..164).collect(), (0..64).map(|t| 100 + (t ^ 63)).collect())
    });
    // A thread's own copy is there when it has waited for the group; the other's when the mbarrier's phase has ended. That the
    // group is waited for once more, and the place used again, changes nothing.
    let body = "setp.ne.u32 %p2, %t, 0; @!%p2 mbarrier.init.shared.b64 [%s], 128; bar.sync 0; add.u32 %r1, %s, 16; \
        xor.b32 %r2, %t, 63; mad.lo.u32 %r2, %r2, 8, %r1; mad.lo.u32 %r1, %t, 8, %r1; \
        cp.async.ca.shared.global [%r1], [%mine], 8; cp.async.mbarrier.arrive.noinc.shared.b64 [%s]; \
        cp.async.commit_group; cp.async.wait_group 0; ld.shared.b64 %rd5, [%r1]; mbarrier.arrive.shared.b64 %rd3, [%s]; \
        WAIT: mbarrier.test_wait.shared.b64 %p1, [%s], %rd3; @!%p1 bra WAIT; ld.shared.b64 %rd4, [%r2]; bar.sync 0; \
        st.shared.b32 [%r1], %t; cp.async.wait_all; ld.shared.b32 %r3, [%r1]; add.u64 %rd4, %rd4, %rd5; \
        cvt.u64.u32 %rd5, %r3; add.u64 %rd4, %rd4, %rd5; st.global.b64 [%yours], %rd4;";
    let both = exact(
        "cp.async.mbarrier.arrive and wait_group",
        80,
        64,
        body,
        (100..164).collect(),
        (0..64).map(|t| 200 + t + (t ^ 63) + t).collect(),
    );
    checks.chain([both]).collect()
}

pub(super) fn checks() -> Vec<Check> {
    let mut checks = alone();
    let test = "mbarrier.test_wait.shared.b64 %p1, [%s], %rd3;";
    checks.push(together("mbarrier.arrive of 64 threads", "%s", ".shared", test, 80));
    let test = "mbarrier.test_wait.parity.b64 %p1, [%rd2], PARITY;";
    checks.push(together("mbarrier with generic addresses", "%rd2", "", test, 80));
    let test = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%s], PARITY;";
    checks.push(together("mbarrier.try_wait.parity of 64 threads", "%s", ".shared::cta", test, 90));
    let fences = [
        ("fence.proxy.async", "fence.proxy.async;"),
        ("fence.proxy.async.shared::cta", "fence.proxy.async.shared::cta;"),
        ("fence.mbarrier_init", "fence.mbarrier_init.release.cluster;"),
    ];
    for (name, fence) in fences {
        checks.push(bulk(&format!("cp.async.bulk.shared::cluster.global behind {name}"), 90, "shared::cluster", fence));
    }
    checks.extend(copies_that_arrive());
    checks.push(bulk("cp.async.bulk.shared::cta.global", 120, "shared::cta", "fence.proxy.async;"));
    checks
}
