//! What kernels must not do, each found at its place, beside a correct kernel that is clean.

use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Finding, FindingKind, Module};

/// A kernel with the body, whose line 1 is the module's line 7; `%rd1` holds the parameter.
fn module(body: &str) -> Module {
    let text = format!(
        ".version 8.7\n.target sm_120a\n.extern .shared .align 16 .b8 smem[];\n.visible .entry k(.param .b64 data) {{\n\
         .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>;\nld.param.b64 %rd1, [data];\n{body}\n}}"
    );
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs it on 256 bytes of zeros behind which nothing is, with 1 KiB of shared memory.
fn launch(body: &str, blocks: u32, threads: u32) -> Result<Emulator, Finding> {
    let config = Config { max_instructions: 1 << 22, ..Config::default() };
    let mut emulator = Emulator::new(config);
    let data = emulator.memory_mut().alloc(256);
    emulator.memory_mut().fill(data, 0, 256).unwrap();
    match emulator.launch(&module(body), "k", [blocks, 1, 1], [threads, 1, 1], 1024, &data.to_le_bytes()) {
        Ok(_) => Ok(emulator),
        Err(EmulatorError::Findings { mut findings }) => Err(findings.remove(0)),
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn clean(body: &str, blocks: u32, threads: u32) {
    if let Err(finding) = launch(body, blocks, threads) {
        panic!("{finding}");
    }
}

/// The finding, whose line is given as a line of the body.
#[track_caller]
fn found(kind: FindingKind, line: u32, body: &str, blocks: u32, threads: u32) -> Finding {
    let finding = launch(body, blocks, threads).expect_err("nothing was found");
    assert_eq!((finding.kind, finding.ptx_line), (kind, line + 6), "{finding}");
    finding
}

#[test]
fn bounds_and_alignment() {
    let body = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 8;\nadd.u64 %rd2, %rd2, %rd1;\nld.global.b64 %rd3, [%rd2];\nret;";
    clean(body, 1, 32);
    let finding = found(FindingKind::OutOfBounds, 4, body, 1, 64);
    assert_eq!(finding.thread, 32);
    found(FindingKind::OutOfBounds, 1, "st.global.b8 [%rd1+-1], 0;\nret;", 1, 1);
    found(FindingKind::OutOfBounds, 1, "ld.b32 %r1, [0];\nret;", 1, 1);
    found(FindingKind::Misaligned, 1, "ld.global.b32 %r1, [%rd1+2];\nret;", 1, 1);
    found(FindingKind::Misaligned, 1, "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+8];\nret;", 1, 1);
    found(FindingKind::OutOfBounds, 2, "mov.u32 %r1, smem;\nst.shared.b32 [%r1+1024], 0;\nret;", 1, 1);
    found(FindingKind::OutOfBounds, 1, "st.shared.b32 [0], 0;\nret;", 1, 1);
    found(FindingKind::OutOfBounds, 1, "ld.param.b64 %rd2, [data+8];\nret;", 1, 1);
}

#[test]
fn unwritten() {
    let finding = found(FindingKind::UnwrittenRegister, 1, "add.u32 %r1, %r2, 1;\nret;", 1, 1);
    assert!(finding.detail.contains("%r2"), "{finding}");
    found(FindingKind::UnwrittenRegister, 1, "@%p1 ret;\nret;", 1, 1);
    found(FindingKind::UnwrittenMemory, 2, "mov.u32 %r1, smem;\nld.shared.b32 %r2, [%r1];\nret;", 1, 1);
    // Only some lanes write the register.
    let body = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 mov.b32 %r2, 7;\nadd.u32 %r3, %r2, 1;\nret;";
    assert_eq!(found(FindingKind::UnwrittenRegister, 4, body, 1, 32).thread, 16);
}

const NEIGHBOUR: &str = "mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, smem;
add.u32 %r4, %r3, %r2;
st.shared.b32 [%r4], %r1;
BARRIER
xor.b32 %r5, %r2, MASK;
add.u32 %r5, %r3, %r5;
ld.shared.b32 %r6, [%r5];
ret;";

#[test]
fn races_in_shared_memory() {
    let body = |barrier: &str, mask: &str| NEIGHBOUR.replace("BARRIER", barrier).replace("MASK", mask);
    clean(&body("bar.sync 0;", "128"), 1, 64);
    clean(&body("bar.warp.sync 0xffffffff;", "4"), 1, 64);
    clean(&body("bar.sync 3, 64;", "128"), 1, 64);
    found(FindingKind::SharedRace, 9, &body("", "4"), 1, 64);
    // The first warp reads before the second has written; had somebody written earlier, it would be a race.
    found(FindingKind::UnwrittenMemory, 9, &body("bar.warp.sync 0xffffffff;", "128"), 1, 64);
    let zeroed = "mov.u32 %r8, %tid.x; shl.b32 %r8, %r8, 2; mov.u32 %r9, smem; add.u32 %r8, %r8, %r9; \
                  st.shared.b32 [%r8], 0; bar.sync 0; "
        .to_owned();
    found(FindingKind::SharedRace, 5, &(zeroed + &body("bar.warp.sync 0xffffffff;", "128")), 1, 64);
    // A shuffle does not order memory.
    found(FindingKind::SharedRace, 9, &body("shfl.sync.idx.b32 %r7, %r1, 0, 31, -1;", "4"), 1, 64);
}

#[test]
fn races_between_blocks() {
    let body = "mov.u32 %r1, %ctaid.x;\nSTORE;\nret;";
    found(FindingKind::GlobalRace, 2, &body.replace("STORE", "st.global.b32 [%rd1], %r1"), 2, 1);
    clean(&body.replace("STORE", "red.global.add.u32 [%rd1], %r1"), 2, 64);
    clean(&body.replace("STORE", "st.global.b32 [%rd1], %r1"), 1, 1);
    // Bytes of one word belong to different blocks.
    clean(
        "mov.u32 %r1, %ctaid.x;\ncvt.u64.u32 %rd2, %r1;\nadd.u64 %rd2, %rd1, %rd2;\nst.global.b8 [%rd2], %r1;\nret;",
        4,
        1,
    );
}

#[test]
fn divergent_convergent_instructions() {
    let body = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, LIMIT;\n@!%p1 bra END;\nbar.sync 0;\nEND: ret;";
    found(FindingKind::Divergent, 4, &body.replace("LIMIT", "16"), 1, 64);
    let finding = found(FindingKind::Deadlock, 4, &body.replace("LIMIT", "32"), 1, 64);
    assert!(finding.detail.contains("32 threads"), "{finding}");
    clean(&body.replace("LIMIT", "64"), 1, 64);
    // The two halves wait at two shuffles for each other.
    let body = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 bra LOW;\nshfl.sync.idx.b32 %r2, %r1, 0, 31, -1;\nret;\nLOW: shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;\nret;";
    let finding = launch(body, 1, 32).err().unwrap();
    assert_eq!(finding.kind, FindingKind::Divergent, "{finding}");
    found(FindingKind::Divergent, 2, "mov.u32 %r1, %tid.x;\nredux.sync.max.u32 %r2, %r1, 0xffff;\nret;", 1, 32);
}

#[test]
fn asynchronous_copies() {
    let body = "mov.u32 %r1, smem;
mov.u32 %r2, %tid.x;
shl.b32 %r3, %r2, 4;
add.u32 %r4, %r1, %r3;
cvt.u64.u32 %rd2, %r3;
and.b64 %rd2, %rd2, 255;
add.u64 %rd2, %rd1, %rd2;
cp.async.cg.shared.global [%r4], [%rd2], 16;
COMMIT
WAIT
BARRIER
xor.b32 %r5, %r4, OTHER;
ld.shared.b32 %r6, [%r5];
ret;";
    let body = |commit: &str, wait: &str, barrier: &str, other: &str| {
        body.replace("COMMIT", commit).replace("WAIT", wait).replace("BARRIER", barrier).replace("OTHER", other)
    };
    let (commit, wait) = ("cp.async.commit_group;", "cp.async.wait_group 0;");
    clean(&body(commit, wait, "", "0"), 1, 32);
    clean(&body("", "cp.async.wait_all;", "", "0"), 1, 32);
    clean(&body(commit, wait, "bar.sync 0;", "16"), 1, 32);
    found(FindingKind::InFlight, 13, &body("", wait, "bar.sync 0;", "0"), 1, 32);
    found(FindingKind::InFlight, 13, &body(commit, "cp.async.wait_group 1;", "bar.sync 0;", "0"), 1, 32);
    found(FindingKind::InFlight, 13, &body(commit, "", "bar.sync 0;", "0"), 1, 32);
    found(FindingKind::SharedRace, 13, &body(commit, wait, "", "16"), 1, 32);
    // The barrier must come after the wait.
    found(FindingKind::SharedRace, 13, &body(commit, "bar.sync 0;", wait, "16"), 1, 32);
}

const BULK: &str = "mov.u32 %r1, smem;
mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra WAIT;
mbarrier.init.shared::cta.b64 [%r1], 1;
FENCE
STORE
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], BYTES;
add.u32 %r3, %r1, 16;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 64, [%r1];
WAIT:
BARRIER
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], PARITY;
@!%p2 bra AGAIN;
ld.shared.b32 %r4, [%r1+16];
ret;";

#[test]
fn bulk_copies_and_mbarriers() {
    let body = |changes: &[(&str, &str)]| {
        let defaults = [
            ("FENCE", "fence.mbarrier_init.release.cluster;"),
            ("STORE", ""),
            ("BYTES", "64"),
            ("BARRIER", "bar.sync 0;"),
            ("PARITY", "0"),
        ];
        let text = changes.iter().fold(BULK.to_owned(), |text, (from, to)| text.replace(from, to));
        defaults.iter().fold(text, |text, (from, to)| text.replace(from, to))
    };
    clean(&body(&[]), 1, 64);
    // The warps other than the first never see the initialization.
    let finding = found(FindingKind::SharedRace, 13, &body(&[("BARRIER", "")]), 1, 64);
    assert!(finding.thread != 0, "{finding}");
    found(FindingKind::ProxyFence, 10, &body(&[("FENCE", "")]), 1, 64);
    found(FindingKind::ProxyFence, 10, &body(&[("STORE", "st.shared.b32 [%r1+32], 1;")]), 1, 64);
    clean(&body(&[("STORE", "st.shared.b32 [%r1+32], 1; fence.proxy.async.shared::cta;")]), 1, 64);
    // Whoever does not repeat the test does not wait.
    found(FindingKind::InFlight, 15, &body(&[("@!%p2 bra AGAIN;", "")]), 1, 32);
    // Announced bytes that never come.
    found(FindingKind::Deadlock, 13, &body(&[("BYTES", "80")]), 1, 64);
    // The phase before the first counts as ended: nobody waits.
    found(FindingKind::InFlight, 15, &body(&[("PARITY", "1")]), 1, 64);
    found(FindingKind::Mbarrier, 15, &body(&[("+16];\nret", "];\nret")]), 1, 64);
    found(FindingKind::Mbarrier, 7, &body(&[("STORE", "mbarrier.init.shared.b64 [%r1], 1;")]), 1, 64);
    // One arrival too many for the phase, which still lacks bytes.
    let twice = body(&[("add.u32 %r3", "mbarrier.arrive.shared.b64 _, [%r1]; add.u32 %r3")]);
    found(FindingKind::Mbarrier, 9, &twice, 1, 64);
    found(FindingKind::Mbarrier, 2, "mov.u32 %r1, smem;\nmbarrier.arrive.shared.b64 _, [%r1];\nret;", 1, 1);
}

#[test]
fn barriers_and_the_rest() {
    found(FindingKind::Barrier, 1, "bar.sync 16;\nret;", 1, 32);
    found(FindingKind::Barrier, 1, "bar.sync 1, 48;\nret;", 1, 64);
    found(FindingKind::Deadlock, 1, "bar.sync 1, 96;\nret;", 1, 64);
    found(FindingKind::Trap, 1, "trap;", 1, 1);
    found(FindingKind::InstructionLimit, 1, "AGAIN: bra AGAIN;", 1, 1);
    let body = "mov.u32 %r1, smem;\ncp.async.cg.shared.global [%r1], [%rd1], 16, 32;\nret;";
    found(FindingKind::Operand, 2, body, 1, 1);
}

#[test]
fn unknown_instructions_are_named() {
    for (body, reason) in [
        ("frobnicate.u32 %r1, %r2;", "opcode frobnicate"),
        ("add.rz.f32 %r1, %r2, %r3;", "modifier .rz"),
        ("add.u32 %r1, %r2, %r3, %r4;", "operand 4"),
        ("add.u32 %rd1, %r2, %r3;", "64 bits"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("ld.global.nonsense.u32 %r1, [%rd1];", "modifier .nonsense"),
    ] {
        let text = format!(
            ".version 8.0\n.target sm_80\n.visible .entry k() {{ .reg .b32 %r<8>; .reg .b64 %rd<8>;\n{body} ret; }}"
        );
        let error = Module::parse(&text).expect_err(body);
        let EmulatorError::UnknownInstruction { kernel, line, reason: found, .. } = &error else { panic!("{error}") };
        assert_eq!((kernel.as_str(), *line), ("k", 4));
        assert!(found.contains(reason), "{error}");
    }
}
