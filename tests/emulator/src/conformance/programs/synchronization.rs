//! Barriers of a block, calls, and atomic operations of many threads.

use super::super::Check;
use super::exact;

pub(super) fn checks() -> Vec<Check> {
    // Each thread reads what its neighbour in the next warp wrote.
    let neighbours = |barrier: &str| {
        format!(
            "mad.lo.u32 %r1, %t, 4, %s; ld.global.b32 %r2, [%mine]; st.shared.u32 [%r1], %r2; {barrier} add.u32 %r3, %t, 32; \
             and.b32 %r3, %r3, 127; mad.lo.u32 %r3, %r3, 4, %s; ld.shared.u32 %r4, [%r3]; st.global.b64 [%yours], 0; \
             st.global.b32 [%yours], %r4;"
        )
    };
    let mut checks = Vec::new();
    for barrier in [
        "bar.sync 0;",
        "bar.cta.sync 0;",
        "barrier.sync 0;",
        "barrier.sync.aligned 0;",
        "barrier.cta.sync 1;",
        "bar.sync 7, 128;",
        "mov.u32 %r9, 3; mov.u32 %r10, 128; bar.sync %r9, %r10;",
    ] {
        let name = barrier.split("; ").last().unwrap_or_default().trim_end_matches(';');
        let expected = (0..128).map(|t| 100 + (t + 32) % 128).collect();
        checks.push(exact(name, 80, 128, &neighbours(barrier), (100..228).collect(), expected));
    }
    // Producer and consumer: full is barrier 1, empty barrier 2.
    let body = "mov.u32 %r2, 0; mov.u32 %r7, 0; setp.ge.u32 %p1, %t, 32; @%p1 bra CONSUME; \
        PRODUCE: bar.sync 2, 64; mad.lo.u32 %r3, %r2, 10, %t; mad.lo.u32 %r4, %t, 4, %s; st.shared.u32 [%r4], %r3; \
        bar.arrive 1, 64; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra PRODUCE; bra DONE; \
        CONSUME: bar.arrive 2, 64; bar.sync 1, 64; sub.u32 %r4, %t, 32; mad.lo.u32 %r4, %r4, 4, %s; ld.shared.u32 %r6, [%r4]; \
        add.u32 %r7, %r7, %r6; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra CONSUME; \
        DONE: st.global.b64 [%yours], 0; st.global.b32 [%yours], %r7;";
    let expected = [vec![0; 32], (0..32).map(|t| 60 + 4 * t).collect()].concat();
    checks.push(exact("bar.arrive", 80, 64, body, vec![0], expected));
    // Reductions: how many of 96 threads have an index below 40; whether all, whether any have.
    let body = "setp.lt.u32 %p1, %t, 40; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1; \
        bar.red.or.pred %p3, 1, 96, %p1; bar.red.popc.u32 %r2, 2, 96, !%p1; barrier.red.popc.aligned.u32 %r3, 0, %p1; \
        selp.u32 %r4, 256, 0, %p2; selp.u32 %r5, 512, 0, %p3; add.u32 %r1, %r1, %r4; add.u32 %r1, %r1, %r5; \
        shl.b32 %r2, %r2, 16; add.u32 %r1, %r1, %r2; st.global.v2.b32 [%yours], {%r1, %r3};";
    checks.push(exact("bar.red", 80, 96, body, vec![0], vec![40 + 512 + (56 << 16) + (40 << 32); 96]));
    // Every thread adds its index; the sum of 0 to 127 is 8128.
    let body = "setp.ne.u32 %p1, %t, 0; @!%p1 st.shared.u32 [%s], 0; bar.sync 0; atom.shared.add.u32 %r1, [%s], %t; \
        red.shared.max.u32 [%s+4], %t; bar.sync 0; ld.shared.u32 %r2, [%s]; ld.shared.u32 %r3, [%s+4]; \
        st.global.v2.b32 [%yours], {%r2, %r3};"
        .replace("[%s], 0; bar", "[%s], 0; @!%p1 st.shared.u32 [%s+4], 0; bar");
    checks.push(exact("atom.shared.add.u32 of 128 threads", 80, 128, &body, vec![0], vec![8128 | 127 << 32; 128]));
    // Of four sums, each of every fourth index.
    let body = "setp.ge.u32 %p1, %t, 4; and.b32 %r1, %t, 3; mad.lo.u32 %r1, %r1, 4, %s; @!%p1 st.shared.u32 [%r1], 0; bar.sync 0; \
        red.shared.add.u32 [%r1], %t; bar.sync 0; ld.shared.u32 %r2, [%r1]; st.global.v2.b32 [%yours], {%r2, %t};";
    let sums = (0..128).map(|t| (1984 + 32 * (t % 4)) | t << 32).collect();
    checks.push(exact("red.shared.add.u32 of 128 threads", 80, 128, body, vec![0], sums));
    checks.extend(calls());
    checks
}

/// 9.7.12.5: arguments and results in the parameter space, in registers, and a guarded call; 9.7.12.6: an early `ret`.
fn calls() -> Vec<Check> {
    let body = "ld.global.b32 %r1, [%mine]; \
        {.param .b32 given; .param .b32 got; st.param.b32 [given], %r1; call.uni (got), twice_or_zero, (given); \
        ld.param.b32 %r2, [got]; } call (%r3), sum, (%r1, %r2); mov.u32 %r4, 7; setp.lt.u32 %p1, %t, 16; \
        @%p1 call (%r4), sum, (%r3, 1); st.global.v2.b32 [%yours], {%r3, %r4};";
    let function = |t: u64| if t < 8 { 0 } else { 2 * t };
    let expected = (0..32).map(|t| {
        let sum = t + function(t);
        sum | (if t < 16 { sum + 1 } else { 7 }) << 32
    });
    let mut check = exact("call", 80, 32, body, (0..32).collect(), expected.collect());
    let functions = ".func (.param .b32 result) twice_or_zero(.param .b32 number)\n{\n.reg .pred %p<2>;\n.reg .b32 %r<4>;\n\
        ld.param.b32 %r1, [number];\nmov.u32 %r2, 0;\nst.param.b32 [result], %r2;\nsetp.lt.u32 %p1, %r1, 8;\n@%p1 ret;\n\
        add.u32 %r2, %r1, %r1;\nst.param.b32 [result], %r2;\nret;\n}\n\
        .func (.reg .b32 total) sum(.reg .b32 a, .reg .b32 b)\n{\nadd.u32 total, a, b;\nret;\n}\n";
    check.ptx = check.ptx.replace(".visible", &format!("{functions}.visible"));
    vec![check]
}
