//! What kernels must not do: for each, a broken kernel that is found at its place, and a fixed twin that is clean.

mod asynchronous;
mod barriers;
mod blocks;
mod bounds;
mod clusters;
mod mbarriers;
mod proxies;
mod races;
mod unwritten;
mod warpgroups;

use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Finding, FindingKind, Module};

/// Bytes of zeros at `%rd1`, behind which nothing is.
const DATA_BYTES: usize = 256;
/// Bytes at `%rd2` that nobody wrote.
const FRESH_BYTES: usize = 64;
/// Dynamic shared memory of a block, at `smem`.
const SHARED_BYTES: u32 = 1024;

/// The address that a finding names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// No address is involved.
    Nowhere,
    /// So many bytes from the zeros on.
    Data(i64),
    /// So many bytes from the unwritten memory on.
    Fresh(i64),
    /// So many bytes from `smem` on.
    Shared(i64),
    /// This very address.
    Absolute(u64),
    /// An address that depends on the memory map.
    Somewhere,
}

/// A broken kernel and its fixed twin.
struct Pair {
    /// What is broken.
    what: &'static str,
    /// The kernels: `BUG` is where they differ, `// here` stands behind what is found.
    body: &'static str,
    broken: &'static str,
    fixed: &'static str,
    /// Blocks and threads of a block.
    launch: [u32; 2],
    kind: FindingKind,
    at: At,
    /// Block and thread that are found.
    by: [u32; 2],
}

impl Pair {
    /// A kernel of one thread.
    const fn one(kind: FindingKind, what: &'static str, body: &'static str, bug: [&'static str; 2], at: At) -> Self {
        Self::of(kind, what, body, bug, at, [1, 1], [0, 0])
    }

    const fn of(
        kind: FindingKind,
        what: &'static str,
        body: &'static str,
        [broken, fixed]: [&'static str; 2],
        at: At,
        launch: [u32; 2],
        by: [u32; 2],
    ) -> Self {
        Self { what, body, broken, fixed, launch, kind, at, by }
    }
}

/// The module of a body: the zeros in `%rd1`, the unwritten memory in `%rd2`, the thread in `%r1`, `smem` in `%r2`.
///
/// What stands in a body before `BODY:` are directives of the kernel.
fn text(body: &str) -> String {
    let (directive, body) = body.split_once("BODY:").unwrap_or(("", body));
    format!(
        ".version 8.7
.target sm_120a
.extern .shared .align 16 .b8 smem[];
.const .align 8 .b32 numbers[2] = {{1, 2}};
.visible .entry kernel_of_the_pair(.param .b64 data, .param .b64 fresh) {directive} {{
.reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .f32 %f<16>;
.local .align 8 .b8 depot[16];
ld.param.b64 %rd1, [data];
ld.param.b64 %rd2, [fresh];
mov.u32 %r1, %tid.x;
mov.u32 %r2, smem;
{body}
ret;
}}"
    )
}

/// What a launch gave, and the addresses that it was given.
struct Ran {
    outcome: Result<(), Vec<Finding>>,
    data: u64,
    fresh: u64,
}

fn launch(text: &str, [blocks, threads]: [u32; 2]) -> Ran {
    let module = Module::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    // On one host thread, so that the same block is always the later one.
    let config = Config { max_instructions: 1 << 20, threads: 1, ..Config::default() };
    let mut emulator = Emulator::new(config);
    let memory = emulator.memory_mut();
    let (data, fresh) = (memory.alloc(DATA_BYTES), memory.alloc(FRESH_BYTES));
    memory.fill(data, 0, DATA_BYTES).unwrap();
    let params = [data.to_le_bytes(), fresh.to_le_bytes()].concat();
    let ran = emulator.launch(&module, "kernel_of_the_pair", [blocks, 1, 1], [threads, 1, 1], SHARED_BYTES, &params);
    let outcome = match ran {
        Ok(_) => Ok(()),
        Err(EmulatorError::Findings { findings }) => Err(findings),
        Err(error) => panic!("{error}"),
    };
    Ran { outcome, data, fresh }
}

/// Where `smem` is, as addresses of findings give it.
fn shared_address() -> u64 {
    let text = text("add.u32 %r3, %r2, 4096;\nst.shared.b32 [%r3], 0;");
    let findings = launch(&text, [1, 1]).outcome.unwrap_err();
    findings[0].address.unwrap() - 4096
}

/// Runs all pairs of a file.
#[track_caller]
fn check(pairs: &[Pair]) {
    let failures: Vec<_> = pairs.iter().filter_map(|pair| failure(pair).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn failure(pair: &Pair) -> Result<(), String> {
    let fixed = text(&pair.body.replace("BUG", pair.fixed));
    if let Err(findings) = launch(&fixed, pair.launch).outcome {
        return Err(format!("{}, fixed: {}", pair.what, findings[0]));
    }
    let broken = text(&pair.body.replace("BUG", pair.broken));
    let marked: Vec<_> = broken.lines().enumerate().filter(|(_, line)| line.contains("// here")).collect();
    let [(line, _)] = marked[..] else { panic!("{}: {} lines are marked", pair.what, marked.len()) };
    let ran = launch(&broken, pair.launch);
    let Err(findings) = &ran.outcome else { return Err(format!("{}: nothing was found", pair.what)) };
    let finding = &findings[0];
    let address = match pair.at {
        At::Nowhere => None,
        At::Data(offset) => Some(ran.data.wrapping_add_signed(offset)),
        At::Fresh(offset) => Some(ran.fresh.wrapping_add_signed(offset)),
        At::Shared(offset) => Some(shared_address().wrapping_add_signed(offset)),
        At::Absolute(address) => Some(address),
        At::Somewhere => finding.address,
    };
    let place = (finding.kind, finding.ptx_line, finding.block, finding.thread, finding.address);
    let expected = (pair.kind, line as u32 + 1, [pair.by[0], 0, 0], pair.by[1], address);
    if place != expected || finding.kernel != "kernel_of_the_pair" {
        return Err(format!("{}: {expected:x?} expected, but found\n    {place:x?}\n    {finding}", pair.what));
    }
    Ok(())
}

#[test]
fn every_kind_has_a_pair() {
    let lists = [
        asynchronous::PAIRS,
        barriers::PAIRS,
        blocks::PAIRS,
        bounds::PAIRS,
        clusters::PAIRS,
        mbarriers::PAIRS,
        proxies::PAIRS,
        races::PAIRS,
        unwritten::PAIRS,
        warpgroups::PAIRS,
    ];
    let kinds = lists.iter().flat_map(|pairs| pairs.iter()).map(|pair| pair.kind);
    let mut missing = vec![
        FindingKind::OutOfBounds,
        FindingKind::Misaligned,
        FindingKind::UnwrittenMemory,
        FindingKind::UnwrittenRegister,
        FindingKind::SharedRace,
        FindingKind::GlobalRace,
        FindingKind::Divergent,
        FindingKind::Deadlock,
        FindingKind::Barrier,
        FindingKind::InFlight,
        FindingKind::ProxyFence,
        FindingKind::Mbarrier,
        FindingKind::RegisterInFlight,
        FindingKind::RegisterFence,
        FindingKind::RegisterPool,
        FindingKind::Operand,
        FindingKind::Trap,
        FindingKind::InstructionLimit,
    ];
    for kind in kinds {
        missing.retain(|missing| *missing != kind);
    }
    assert_eq!(missing, []);
}

#[test]
fn unknown_instructions_are_named() {
    for (body, reason) in [
        ("frobnicate.u32 %r1, %r2;", "opcode frobnicate"),
        ("add.up.f32 %r1, %r2, %r3;", "modifier .up"),
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
