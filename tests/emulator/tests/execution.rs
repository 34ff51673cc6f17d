//! Kernels that need lanes, warps and blocks to make progress together, and matrix instructions against plain loops.

use nvfp4_moe_emulator::{Accumulate, Config, Emulator, Module};

fn module(body: &str) -> Module {
    let text = format!(
        ".version 8.7 .target sm_120a .extern .shared .align 16 .b8 smem[]; .visible .entry k(.param .b64 data) {{
         .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>; ld.param.b64 %rd1, [data]; {body} }}"
    );
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a kernel on words; what they are afterwards.
#[track_caller]
fn run(config: Config, body: &str, blocks: u32, threads: u32, words: &[u32]) -> Vec<u32> {
    let mut emulator = Emulator::new(config);
    let data = emulator.memory_mut().alloc(words.len() * 4);
    emulator.memory_mut().write(data, bytemuck::cast_slice(words)).unwrap();
    let launched = emulator.launch(&module(body), "k", [blocks, 1, 1], [threads, 1, 1], 4096, &data.to_le_bytes());
    launched.unwrap_or_else(|error| panic!("{error}"));
    bytemuck::pod_collect_to_vec(&emulator.memory().read(data, words.len() * 4).unwrap())
}

const ADDRESS: &str = "mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd2, %rd1, %rd2;";

#[test]
fn a_block_spins_for_a_later_one() {
    // Block i waits until word 0 is 7 - i: the last block goes first.
    let body = "mov.u32 %r1, %ctaid.x; sub.u32 %r2, 7, %r1;
        AGAIN: ld.relaxed.gpu.global.u32 %r3, [%rd1]; setp.ne.u32 %p1, %r3, %r2; @%p1 bra AGAIN;
        red.global.add.u32 [%rd1], 1; ret;";
    for threads in [1, 2] {
        assert_eq!(run(Config { threads, ..Config::default() }, body, 8, 1, &[0]), [8]);
    }
}

#[test]
fn a_lane_spins_for_another() {
    // The odd order of places: the spinning lanes stand before the one that lets them go.
    let body = "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 5; @%p1 bra RELEASE;
        AGAIN: ld.relaxed.gpu.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra AGAIN; bra.uni END;
        RELEASE: st.relaxed.gpu.global.u32 [%rd1], 1;
        END: bar.warp.sync -1; redux.sync.add.u32 %r4, 1, -1; @%p1 st.relaxed.gpu.global.u32 [%rd1], %r4; ret;";
    assert_eq!(run(Config::default(), body, 1, 32, &[0]), [32]);
}

#[test]
fn lanes_meet_again() {
    // Lane i goes i times round the loop; behind it all vote together.
    let body = format!(
        "{ADDRESS} mov.u32 %r2, 0; mov.u32 %r3, 0;
         LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra OUT; add.u32 %r2, %r2, 1; add.u32 %r3, %r3, %r2; bra LOOP;
         OUT: activemask.b32 %r4; setp.ne.u32 %p2, %r4, -1; @%p2 trap; st.global.u32 [%rd2], %r3; ret;"
    );
    let expected: Vec<u32> = (0..32).map(|i| i * (i + 1) / 2).collect();
    assert_eq!(run(Config::default(), &body, 1, 32, &[0; 32]), expected);
}

#[test]
fn producers_and_consumers_at_named_barriers() {
    // Warp 0 fills a word for warp 1 four times; barrier 1: full, barrier 2: empty.
    let body = format!(
        "{ADDRESS} mov.u32 %r10, smem; mov.u32 %r2, 0; setp.ge.u32 %p1, %r1, 32; mov.u32 %r7, 0; @%p1 bra CONSUME;
         PRODUCE: mul.lo.u32 %r3, %r2, 10; bar.sync 2, 64; st.shared.u32 [%r10], %r3; bar.arrive 1, 64;
         add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra PRODUCE; ret;
         CONSUME: bar.arrive 2, 64; bar.sync 1, 64; ld.shared.u32 %r6, [%r10]; add.u32 %r7, %r7, %r6;
         add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra CONSUME; st.global.u32 [%rd2], %r7; ret;"
    )
    // One lane writes: all lanes writing the same word would be a race.
    .replace("st.shared.u32 [%r10], %r3;", "setp.eq.u32 %p3, %r1, 0; @%p3 st.shared.u32 [%r10], %r3;");
    let result = run(Config::default(), &body, 1, 64, &[0; 64]);
    assert_eq!(result[32..], [60; 32]);
}

#[test]
fn local_memory_and_generic_addresses() {
    let body = format!(
        "{ADDRESS} .local .align 8 .b8 depot[16]; mov.u64 %rd3, depot; cvta.local.u64 %rd4, %rd3;
         st.u32 [%rd4+4], %r1; ld.local.u32 %r2, [depot+4]; mov.u32 %r3, smem; cvt.u64.u32 %rd5, %r3;
         cvta.shared.u64 %rd6, %rd5; st.shared.u32 [%r3], 5; ld.u32 %r4, [%rd6]; add.u32 %r5, %r2, %r4;
         cvta.to.global.u64 %rd7, %rd2; st.global.u32 [%rd7], %r5; ret;"
    );
    assert_eq!(run(Config::default(), &body, 1, 1, &[0]), [5]);
}

/// Loads four words a lane into `%r10` on, from word 4 * lane on.
const LOAD_A: &str = "shl.b64 %rd3, %rd2, 0; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd1, %rd2;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2]; ld.global.v2.u32 {%r14, %r15}, [%rd2+512];
    ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%rd2+1024];";

fn random_words(count: usize, seed: u64) -> Vec<u32> {
    use rand::{RngCore, SeedableRng};
    let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.next_u32()).collect()
}

#[test]
fn f16_matrices() {
    let body = format!(
        "mov.u64 %rd2, 0; {LOAD_A}
         mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}},
         {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}}; st.global.v4.u32 [%rd2+1024], {{%r20, %r21, %r22, %r23}}; ret;"
    );
    // Magnitudes below 2, so that nothing overflows.
    let mut words: Vec<u32> = random_words(256, 1).iter().map(|word| word & 0xBFFF_BFFF).collect();
    words.extend((0..128).map(|i| (i as f32 * 0.37 - 20.0).to_bits()));
    let result = run(Config::default(), &body, 1, 32, &words);
    let half = |word: u32, high: usize| f64::from(half::f16::from_bits((word >> (16 * high)) as u16));
    // By element, from the tables of the document: group and thread of an element.
    let a = |m: usize, k: usize| {
        let lane = m % 8 * 4 + k % 8 / 2;
        half(words[4 * lane + m / 8 + 2 * (k / 8)], k % 2)
    };
    let b = |k: usize, n: usize| half(words[128 + 4 * (n * 4 + k % 8 / 2) + k / 8], k % 2);
    for m in 0..16 {
        for n in 0..8 {
            let at = 256 + 4 * (m % 8 * 4 + n / 2) + 2 * (m / 8) + n % 2;
            let sum: f64 = (0..16).map(|k| a(m, k) * b(k, n)).sum();
            let expected = (sum + f64::from(f32::from_bits(words[at]))) as f32;
            assert_eq!(f32::from_bits(result[at]), expected, "{m} {n}");
        }
    }
}

#[test]
fn sums_in_f64_keep_what_f32_drops() {
    // Four times (2^24, 1, 1, -2^24), one after the other: every lane of a quad adds its product.
    let mma = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, {A, 0, 0, 0}, {%r4, 0},
        {%r20, %r21, %r22, %r23};";
    let steps: String = ["0x6c00", "0x0c00", "0x0c00", "0xec00"].iter().map(|a| mma.replace('A', a)).collect();
    // 2^12, 2^-12, 2^-12, -2^12 times 2^12.
    let body = format!(
        "{ADDRESS} mov.u32 %r4, 0x6c00; mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r23, 0; {steps}
         st.global.u32 [%rd2], %r20; ret;"
    );
    let run = |accumulate| run(Config { accumulate, ..Config::default() }, &body, 1, 32, &[0; 32])[0];
    assert_eq!(f32::from_bits(run(Accumulate::F32)), 0.0);
    assert_eq!(f32::from_bits(run(Accumulate::F64)), 8.0);
}

#[test]
fn fp4_matrices() {
    let code = |word: u32, i: usize| {
        let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let code = word >> (4 * i) & 15;
        values[(code & 7) as usize] * if code & 8 == 0 { 1.0 } else { -1.0 }
    };
    let ue4m3 = |word: u32, byte: usize| {
        let bits = word >> (8 * byte) & 0x7F;
        let (exponent, fraction) = ((bits >> 3) as i32, f64::from(bits & 7));
        if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * f64::from(exponent - 7).exp2() }
    };
    for (thread_a, thread_b) in [(0, 0), (1, 3), (0, 2)] {
        let body = format!(
            "mov.u64 %rd2, 0; {LOAD_A} ld.global.v2.u32 {{%r24, %r25}}, [%rd2+1536];
             mov.b16 %rs1, 0; mov.b16 %rs2, {thread_b};
             mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
             {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}},
             %r24, {{0, {thread_a}}}, %r25, {{%rs1, %rs2}};
             st.global.v4.u32 [%rd2+1024], {{%r20, %r21, %r22, %r23}}; ret;"
        );
        let mut words = random_words(512, 2);
        words[384..].iter_mut().for_each(|word| *word &= 0x3F3F_3F3F);
        words[256..384].iter_mut().enumerate().for_each(|(i, word)| *word = (i as f32).to_bits());
        let result = run(Config::default(), &body, 1, 32, &words);
        for m in 0..16 {
            for n in 0..8 {
                let scale_a = words[384 + 4 * (m % 8 * 4 + 2 * thread_a + m / 8)];
                let scale_b = words[384 + 4 * (n * 4 + thread_b) + 1];
                let sum: f64 = (0..64)
                    .map(|k| {
                        let lane = k % 32 / 8;
                        let a = code(words[4 * (m % 8 * 4 + lane) + m / 8 + 2 * (k / 32)], k % 8);
                        let b = code(words[128 + 4 * (n * 4 + lane) + k / 32], k % 8);
                        a * b * ue4m3(scale_a, k / 16) * ue4m3(scale_b, k / 16)
                    })
                    .sum();
                let at = 256 + 4 * (m % 8 * 4 + n / 2) + 2 * (m / 8) + n % 2;
                let expected = (sum + f64::from(f32::from_bits(words[at]))) as f32;
                assert_eq!(f32::from_bits(result[at]), expected, "{m} {n}");
            }
        }
    }
}

#[test]
fn matrices_from_and_to_shared_memory() {
    // Lane i's 16 bytes are row i of the matrices; loaded (transposed), stored as they were, read back.
    let body = |load: &str, store: &str| {
        format!(
            "mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd2, %rd1, %rd2; mov.u32 %r2, smem;
             mad.lo.u32 %r3, %r1, 16, %r2; ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd2];
             st.shared.v4.u32 [%r3], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1;
             ldmatrix.sync.aligned.m8n8.x4{load}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r3]; bar.warp.sync -1;
             stmatrix.sync.aligned.m8n8.x4{store}.shared.b16 [%r3], {{%r20, %r21, %r22, %r23}}; bar.warp.sync -1;
             ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r3];
             st.global.v4.u32 [%rd2], {{%r10, %r11, %r12, %r13}}; ret;"
        )
    };
    let words = random_words(128, 3);
    let elements: Vec<u16> = bytemuck::pod_collect_to_vec(&words);
    for (load, store) in [("", ""), (".trans", ".trans"), (".trans", ""), ("", ".trans")] {
        let result: Vec<u16> = bytemuck::pod_collect_to_vec(&run(Config::default(), &body(load, store), 1, 32, &words));
        for (at, &element) in result.iter().enumerate() {
            let (matrix, row, column) = (at / 64, at / 8 % 8, at % 8);
            let from = if load == store { at } else { matrix * 64 + column * 8 + row };
            assert_eq!(element, elements[from], "{load} {store} {at}");
        }
    }
}
