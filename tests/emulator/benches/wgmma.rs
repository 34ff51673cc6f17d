//! Products of warpgroups a second: `cargo bench -p nvfp4-moe-emulator --bench wgmma` prints one line a shape.
//!
//! A block of two warpgroups multiplies the same tile of B, K-major with 128-byte swizzle, over and over, A from registers or
//! from shared memory; four products are under way at a time.

use std::time::Instant;

use nvfp4_moe_emulator::{Config, Emulator, Module};

const ROUNDS: u64 = 250;
const WARPGROUPS: u64 = 2;
/// Products of a round.
const STEPS: u64 = 4;

fn kernel(n: usize, a_in_registers: bool) -> String {
    let accumulators = (0..n / 2).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(", ");
    let zeros: String = (0..n / 2).map(|i| format!("mov.f32 %f{i}, 0f00000000;\n")).collect();
    let (a, transposed) = if a_in_registers { ("{%a0, %a1, %a2, %a3}", "") } else { ("%da", ", 0") };
    let products: String = (0..STEPS)
        .map(|step| {
            format!(
                "add.u64 %db, %b, {};\nadd.u64 %da, %b, {};\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 \
                 {{{accumulators}}}, {a}, %db, 1, 1, 1{transposed}, 0;\n",
                2 * step,
                2 * step
            )
        })
        .collect();
    format!(
        ".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n\
         .visible .entry k()\n{{\n.reg .pred %p;\n.reg .b32 %r<8>, %a<4>;\n.reg .b64 %b, %da, %db;\n.reg .f32 %f<128>;\n\
         mov.u32 %r1, %tid.x;\nmov.u32 %r2, smem;\nmad.lo.u32 %r3, %r1, 4, %r2;\nmov.u32 %r4, 0;\n\
         FILL: mad.lo.u32 %r5, %r1, 7919, %r4;\nand.b32 %r5, %r5, 0x33ff33ff;\nst.shared.b32 [%r3], %r5;\n\
         add.u32 %r3, %r3, {};\nadd.u32 %r4, %r4, 1;\nsetp.lt.u32 %p, %r4, {};\n@%p bra FILL;\n\
         fence.proxy.async;\nbar.sync 0;\nshr.u32 %r2, %r2, 4;\ncvt.u64.u32 %b, %r2;\n\
         or.b64 %b, %b, 0x4000004000010000;\nmov.b32 %a0, 0x3c003800;\nmov.b32 %a1, %a0;\nmov.b32 %a2, %a0;\n\
         mov.b32 %a3, %a0;\n{zeros}mov.u32 %r4, 0;\n\
         ROUND: wgmma.fence.sync.aligned;\n{products}wgmma.commit_group.sync.aligned;\n\
         wgmma.wait_group.sync.aligned 0;\nadd.u32 %r4, %r4, 1;\nsetp.lt.u32 %p, %r4, {ROUNDS};\n@%p bra ROUND;\nret;\n}}\n",
        4 * 128 * WARPGROUPS,
        n.max(64) * 128 / (4 * 128 * WARPGROUPS as usize),
    )
}

fn main() {
    for (n, a_in_registers) in [(64, true), (128, true), (256, true), (128, false)] {
        let module = Module::parse(&kernel(n, a_in_registers)).unwrap_or_else(|error| panic!("{error}"));
        let mut emulator = Emulator::new(Config { threads: 1, ..Config::default() });
        let start = Instant::now();
        let block = [128 * WARPGROUPS as u32, 1, 1];
        let report = emulator.launch(&module, "k", [1, 1, 1], block, 48 * 1024, &[]).unwrap_or_else(|e| panic!("{e}"));
        let seconds = start.elapsed().as_secs_f64();
        let products = ROUNDS * STEPS * WARPGROUPS;
        println!(
            "m64n{n}k16, A in {:<13} {:>8.0} products/s {:>6.1} us each {:>6.1} million multiply-adds/s {:>6.1} million thread-instructions/s",
            if a_in_registers { "registers" } else { "shared memory" },
            products as f64 / seconds,
            seconds / products as f64 * 1e6,
            (products * 64 * 16 * n as u64) as f64 / seconds / 1e6,
            report.thread_instructions as f64 / seconds / 1e6,
        );
    }
}
