//! `cp.async` and its groups.

use super::super::Check;
use super::{exact, scrambled};

/// Word `at` of 4 bytes.
fn word(inputs: &[u64], at: usize) -> u64 {
    inputs[at / 2] >> (32 * (at % 2)) & 0xFFFF_FFFF
}

pub(super) fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    let inputs = scrambled(128);
    // 16 bytes of its own for each thread, over which the copy goes.
    let around = |copy: &str| {
        format!(
            "mad.lo.u32 %r1, %t, 16, %s; mul.wide.u32 %rd1, %t, 16; add.u64 %rd1, %in, %rd1; add.u64 %rd2, %out, %rd1; \
             sub.u64 %rd2, %rd2, %in; st.shared.v4.b32 [%r1], {{-1, -1, -1, -1}}; {copy} ld.shared.v4.b32 \
             {{%r4, %r5, %r6, %r7}}, [%r1]; st.global.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};"
        )
    };
    let wait = "cp.async.wait_all;";
    for (copy, copied, zeros) in [
        ("cp.async.ca.shared.global [%r1], [%rd1], 4;", 4, 0),
        ("cp.async.ca.shared.global [%r1], [%rd1], 8;", 8, 0),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16;", 16, 0),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", 16, 0),
        ("cp.async.cg.shared::cta.global [%r1], [%rd1], 16;", 16, 0),
        ("cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;", 16, 0),
        ("cp.async.ca.shared.global.L2::256B [%r1], [%rd1], 16;", 16, 0),
        ("cp.async.ca.shared.global [%r1], [%rd1], 8, 4;", 4, 4),
        ("mov.u32 %r2, 8; cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", 8, 8),
        ("mov.u32 %r2, 0; cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", 0, 16),
        ("setp.eq.u32 %p1, %t, %t; cp.async.cg.shared.global [%r1], [%rd1], 16, %p1;", 0, 16),
        ("setp.ne.u32 %p1, %t, %t; cp.async.ca.shared.global [%r1], [%rd1], 4, %p1;", 4, 0),
    ] {
        let name = copy.split("; ").last().unwrap_or_default().trim_end_matches(';');
        let expected = inputs[..128].chunks(2).take(64).flat_map(|pair| {
            let bytes = pair.iter().flat_map(|word| word.to_le_bytes()).enumerate();
            let bytes: Vec<u8> = bytes
                .map(|(i, byte)| {
                    if i < copied {
                        byte
                    } else if i < copied + zeros {
                        0
                    } else {
                        0xFF
                    }
                })
                .collect();
            bytes
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
                .collect::<Vec<_>>()
        });
        let body = around(&format!("{copy} {wait}"));
        checks.push(exact(name, 80, 64, &body, inputs.clone(), expected.collect()));
    }
    // Three groups of 4 bytes each; after waiting for all but one group the first two are there, then the third.
    let body = "mad.lo.u32 %r1, %t, 16, %s; mul.wide.u32 %rd1, %t, 16; add.u64 %rd1, %in, %rd1; \
        cp.async.ca.shared.global [%r1], [%rd1], 4; cp.async.commit_group; \
        cp.async.ca.shared.global [%r1+4], [%rd1+4], 4; cp.async.commit_group; \
        cp.async.ca.shared.global [%r1+8], [%rd1+8], 4; cp.async.commit_group; \
        cp.async.wait_group 2; ld.shared.u32 %r4, [%r1]; cp.async.wait_group 1; ld.shared.u32 %r5, [%r1+4]; \
        cp.async.wait_group 0; ld.shared.u32 %r6, [%r1+8]; add.u32 %r4, %r4, %r6; st.global.v2.b32 [%yours], {%r4, %r5};";
    let expected = (0..32).map(|t| {
        let [a, b, c] = [0, 1, 2].map(|i| word(&inputs, 4 * t + i));
        (a + c) & 0xFFFF_FFFF | b << 32
    });
    checks.push(exact("cp.async.wait_group", 80, 32, body, inputs.clone(), expected.collect()));
    // An empty group is a group.
    let body = "mad.lo.u32 %r1, %t, 16, %s; cp.async.ca.shared.global [%r1], [%mine], 8; cp.async.commit_group; \
        cp.async.commit_group; cp.async.wait_group 1; ld.shared.b64 %rd1, [%r1]; st.global.b64 [%yours], %rd1;";
    checks.push(exact("cp.async.commit_group", 80, 32, body, inputs[..32].to_vec(), inputs[..32].to_vec()));
    checks
}
