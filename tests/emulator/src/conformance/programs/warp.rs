//! Shuffles, votes, matches, reductions and elections.

use super::super::Check;
use super::{exact, scrambled};

/// `shfl.sync` after 9.7.9.6: the lane that a lane reads, and whether that is in range.
fn source(mode: &str, lane: i64, b: u64, c: u64) -> (i64, bool) {
    let (b, clamp, segment) = ((b & 31) as i64, (c & 31) as i64, (c >> 8 & 31) as i64);
    let most = lane & segment | clamp & !segment;
    let least = lane & segment;
    let (j, in_range) = match mode {
        "up" => (lane - b, lane - b >= most),
        "down" => (lane + b, lane + b <= most),
        "bfly" => (lane ^ b, (lane ^ b) <= most),
        _ => (least | b & !segment, (least | b & !segment) <= most),
    };
    if in_range { (j, true) } else { (lane, false) }
}

fn shuffles() -> Vec<Check> {
    let mut checks = Vec::new();
    for mode in ["up", "down", "bfly", "idx"] {
        // The whole warp, and segments of 16, 8 and 4 lanes with a clamp inside.
        let clamps: [u64; 5] =
            if mode == "up" { [0, 0x1000, 0x1800, 0x1C00, 0x1801] } else { [31, 0x100F, 0x1807, 0x1C03, 0x1805] };
        for c in clamps {
            // A lane that is read must know what to read: each lane's own b.
            let inputs = scrambled(64);
            let body = format!(
                "ld.global.b32 %r1, [%mine]; ld.global.b32 %r2, [%mine+256]; shfl.sync.{mode}.b32 %r3|%p1, %r1, %r2, {c}, -1; \
                 selp.u32 %r4, 1, 0, %p1; st.global.v2.b32 [%yours], {{%r3, %r4}};"
            );
            let word = |at: usize| inputs[at] & 0xFFFF_FFFF;
            let expected = (0..32).map(|lane| {
                let (from, in_range) = source(mode, lane as i64, word(32 + lane), c);
                word(from as usize) | u64::from(in_range) << 32
            });
            let expected = expected.collect();
            checks.push(exact(&format!("shfl.sync.{mode}.b32"), 80, 32, &body, inputs, expected));
        }
    }
    // Written down: one lane up, the first keeps its own; the lower half alone.
    let body = "ld.global.b32 %r1, [%mine]; shfl.sync.up.b32 %r3, %r1, 1, 0, 0xffffffff; st.global.b64 [%yours], 0; \
                st.global.b32 [%yours], %r3;";
    let expected = [[10, 10], [11, 12]].concat().into_iter().chain(13..41).collect();
    checks.push(exact("shfl.sync.up.b32 without predicate", 80, 32, body, (10..42).collect(), expected));
    let body = "ld.global.b32 %r1, [%mine]; st.global.b64 [%yours], 0; setp.ge.u32 %p1, %t, 16; @%p1 bra DONE; \
                shfl.sync.idx.b32 %r3, %r1, 15, 31, 0xffff; st.global.b32 [%yours], %r3; DONE:";
    let expected = [vec![25; 16], vec![0; 16]].concat();
    checks.push(exact("shfl.sync.idx.b32 of half a warp", 80, 32, body, (10..42).collect(), expected));
    checks
}

fn votes() -> Vec<Check> {
    let mut checks = Vec::new();
    let patterns: [u32; 5] = [0, u32::MAX, 1, 0x8000_0000, 0x00FF_3C5A];
    for (mode, holds) in [
        ("all", (|bits| bits == u32::MAX) as fn(u32) -> bool),
        ("any", |bits| bits != 0),
        ("uni", |bits| bits == 0 || bits == u32::MAX),
    ] {
        for (sign, flip) in [("", 0), ("!", u32::MAX)] {
            let inputs = (0..32).map(|lane| (0..5).fold(0, |word, i| word | u64::from(patterns[i] >> lane & 1) << i));
            let votes: String = (0..5)
                .map(|i| {
                    format!(
                        "and.b32 %r2, %r1, {}; setp.ne.u32 %p1, %r2, 0; vote.sync.{mode}.pred %p2, {sign}%p1, -1; \
                         selp.u32 %r2, {}, 0, %p2; or.b32 %r3, %r3, %r2; ",
                        1 << i,
                        1 << i
                    )
                })
                .collect();
            let body = format!(
                "ld.global.b32 %r1, [%mine]; mov.u32 %r3, 0; {votes} st.global.b64 [%yours], 0; st.global.b32 [%yours], %r3;"
            );
            let all = (0..5).fold(0, |word, i| word | u64::from(holds(patterns[i] ^ flip)) << i);
            checks.push(exact(&format!("vote.sync.{mode}.pred"), 80, 32, &body, inputs.collect(), vec![all; 32]));
        }
    }
    let body = "ld.global.b32 %r1, [%mine]; setp.ne.u32 %p1, %r1, 0; vote.sync.ballot.b32 %r2, %p1, -1; \
                vote.sync.ballot.b32 %r3, !%p1, -1; st.global.v2.b32 [%yours], {%r2, %r3};";
    let inputs = (0..32).map(|lane| u64::from(patterns[4] >> lane & 1)).collect();
    let both = u64::from(patterns[4]) | u64::from(!patterns[4]) << 32;
    checks.push(exact("vote.sync.ballot.b32", 80, 32, body, inputs, vec![both; 32]));
    // Lanes that the mask does not name count as 0.
    let body = "mov.u32 %r2, 0; setp.lt.u32 %p1, %t, 4; @!%p1 bra DONE; vote.sync.ballot.b32 %r2, %p1, 15; DONE: \
                st.global.b64 [%yours], 0; st.global.b32 [%yours], %r2;";
    let expected = [vec![15; 4], vec![0; 28]].concat();
    checks.push(exact("vote.sync.ballot.b32 of four lanes", 80, 32, body, vec![0], expected));
    checks
}

fn matches_and_reductions() -> Vec<Check> {
    let mut checks = Vec::new();
    // Lanes with the same remainder by 3 have the same value; high and low words differ for b64.
    let inputs: Vec<u64> = (0..32).map(|lane| (lane % 3) << 32 | (lane % 2)).collect();
    let mask =
        |same: &dyn Fn(u64) -> bool| (0..32).filter(|&lane| same(lane)).fold(0u64, |mask, lane| mask | 1 << lane);
    let body = "ld.global.b64 %rd1, [%mine]; match.any.sync.b64 %r2, %rd1, -1; st.global.b64 [%yours], 0; \
                st.global.b32 [%yours], %r2;";
    let expected = (0..32).map(|lane| mask(&|other| other % 6 == lane % 6)).collect();
    checks.push(exact("match.any.sync.b64", 80, 32, body, inputs.clone(), expected));
    let body = "ld.global.b32 %r1, [%mine]; match.any.sync.b32 %r2, %r1, -1; st.global.b64 [%yours], 0; \
                st.global.b32 [%yours], %r2;";
    let expected = (0..32).map(|lane| mask(&|other| other % 2 == lane % 2)).collect();
    checks.push(exact("match.any.sync.b32", 80, 32, body, inputs.clone(), expected));
    for (kind, register, load) in [("b32", "%r1", "b32"), ("b64", "%rd1", "b64")] {
        let body = format!(
            "ld.global.{load} {register}, [%mine]; match.all.sync.{kind} %r2|%p1, {register}, -1; selp.u32 %r3, 1, 0, %p1; \
             st.global.v2.b32 [%yours], {{%r2, %r3}};"
        );
        let name = format!("match.all.sync.{kind}");
        checks.push(exact(&name, 80, 32, &body, vec![7; 32], vec![0x1_FFFF_FFFF; 32]));
        checks.push(exact(&name, 80, 32, &body, inputs.clone(), vec![0; 32]));
    }
    let inputs: Vec<u64> = scrambled(32).iter().map(|word| word & 0xFFFF_FFFF).collect();
    let fold = |f: fn(u32, u32) -> u32| u64::from(inputs.iter().map(|&word| word as u32).reduce(f).unwrap_or(0));
    for (name, value) in [
        ("add.u32", fold(u32::wrapping_add)),
        ("add.s32", fold(u32::wrapping_add)),
        ("min.u32", fold(u32::min)),
        ("max.u32", fold(u32::max)),
        ("min.s32", fold(|a, b| (a as i32).min(b as i32) as u32)),
        ("max.s32", fold(|a, b| (a as i32).max(b as i32) as u32)),
        ("and.b32", fold(|a, b| a & b)),
        ("or.b32", fold(|a, b| a | b)),
        ("xor.b32", fold(|a, b| a ^ b)),
    ] {
        let body = format!(
            "ld.global.b32 %r1, [%mine]; redux.sync.{name} %r2, %r1, -1; st.global.b64 [%yours], 0; \
             st.global.b32 [%yours], %r2;"
        );
        checks.push(exact(&format!("redux.sync.{name}"), 80, 32, &body, inputs.clone(), vec![value; 32]));
    }
    checks
}

pub(super) fn checks() -> Vec<Check> {
    let mut checks = shuffles();
    checks.extend(votes());
    checks.extend(matches_and_reductions());
    let body = "activemask.b32 %r2; st.global.b64 [%yours], 0; st.global.b32 [%yours], %r2;";
    checks.push(exact("activemask.b32", 80, 32, body, vec![0], vec![0xFFFF_FFFF; 32]));
    // One leader, the one that every lane is told of.
    let body = "elect.sync %r2|%p1, -1; vote.sync.ballot.b32 %r3, %p1, -1; mov.u32 %r4, 1; shl.b32 %r4, %r4, %r2; \
                setp.eq.u32 %p2, %r3, %r4; selp.u64 %rd1, 1, 0, %p2; st.global.b64 [%yours], %rd1;";
    checks.push(exact("elect.sync", 90, 32, body, vec![0], vec![1; 32]));
    let body = "bar.warp.sync -1; mov.u32 %r1, %laneid; mov.u32 %r2, %lanemask_lt; mov.u32 %r3, %lanemask_ge; \
                add.u32 %r2, %r2, %r3; st.global.v2.b32 [%yours], {%r1, %r2};";
    let expected = (0..32).map(|lane| lane | 0xFFFF_FFFF << 32).collect();
    checks.push(exact("bar.warp.sync, special registers", 80, 32, body, vec![0], expected));
    checks
}
