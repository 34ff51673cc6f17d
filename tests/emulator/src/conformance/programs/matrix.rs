//! Matrix fragments and products. Where an element is, is taken from the document's formulas for each fragment.

use half::{bf16, f16};

use super::super::inputs::Kind;
use super::super::{Check, Tolerance};
use super::{Program, exact, pack, scrambled};

/// `ldmatrix` (9.7.14.5.15) and `stmatrix` (9.7.14.5.16): lane i gives the address of row i of all matrices, one below the other.
fn fragments() -> Vec<Check> {
    let inputs = scrambled(64);
    let rows: Vec<u16> = inputs.iter().flat_map(|word| (0..4).map(move |i| (word >> (16 * i)) as u16)).collect();
    // Lane 4g + q holds elements 2q and 2q + 1 of row g, transposed of column g.
    let element = |matrix: usize, lane: usize, i: usize, transposed: bool| {
        let (row, column) = (lane / 4, 2 * (lane % 4) + i);
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        rows[64 * matrix + 8 * row + column]
    };
    let register = |matrix, lane, transposed| {
        u64::from(element(matrix, lane, 0, transposed)) | u64::from(element(matrix, lane, 1, transposed)) << 16
    };
    let mut checks = Vec::new();
    for (count, registers) in [(1, "{%r4}"), (2, "{%r4, %r5}"), (4, "{%r4, %r5, %r6, %r7}")] {
        for transposed in [false, true] {
            for (space, address) in [(".shared", "%r1"), (".shared::cta", "%r1"), ("", "%rd3")] {
                let trans = if transposed { ".trans" } else { "" };
                let prepare = "mad.lo.u32 %r1, %t, 16, %s; cvt.u64.u32 %rd3, %r1; cvta.shared.u64 %rd3, %rd3; \
                    mul.wide.u32 %rd1, %t, 16; add.u64 %rd2, %out, %rd1; add.u64 %rd1, %in, %rd1; mov.u32 %r5, 0; \
                    mov.u32 %r6, 0; mov.u32 %r7, 0;";
                let name = format!("ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16");
                let body = format!(
                    "{prepare} ld.global.v2.b64 {{%rd4, %rd5}}, [%rd1]; st.shared.v2.b64 [%r1], {{%rd4, %rd5}}; bar.sync 0; \
                     {name} {registers}, [{address}]; st.global.v4.b32 [%rd2], {{%r4, %r5, %r6, %r7}};"
                );
                let word = |lane, matrix| if matrix < count { register(matrix, lane, transposed) } else { 0 };
                let expected = (0..32)
                    .flat_map(|lane| [0, 2].map(|matrix| word(lane, matrix) | word(lane, matrix + 1) << 32))
                    .collect();
                checks.push(exact(&name, 80, 32, &body, inputs.clone(), expected));
                // The same registers stored again are the matrices.
                let name = format!("stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16");
                let body = format!(
                    "{prepare} ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd1]; st.shared.v2.b64 [%r1], {{0, 0}}; bar.sync 0; \
                     {name} [{address}], {registers}; bar.sync 0; ld.shared.v2.b64 {{%rd4, %rd5}}, [%r1]; \
                     st.global.v2.b64 [%rd2], {{%rd4, %rd5}};"
                );
                let given = (0..32)
                    .flat_map(|lane| {
                        [0, 2].map(|m| register(m, lane, transposed) | register(m + 1, lane, transposed) << 32)
                    })
                    .collect();
                let expected = inputs.iter().enumerate().map(|(i, &word)| if i < 16 * count { word } else { 0 });
                checks.push(exact(&name, 90, 32, &body, given, expected.collect()));
            }
        }
    }
    checks
}

/// Accumulators of m16n8: (row, column) of element `i` of a lane.
fn accumulator(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2)
}

const LOAD: &str = "mul.wide.u32 %rd1, %t, 16; add.u64 %rd1, %in, %rd1; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1]; \
    ld.global.v2.b32 {%r8, %r9}, [%mine+512]; ld.global.v4.b32 {%r12, %r13, %r14, %r15}, [%rd1+768];";
const STORE: &str = "mul.wide.u32 %rd2, %t, 32; add.u64 %rd2, %out, %rd2; st.global.b32 [%rd2], %r16; \
    st.global.b32 [%rd2+8], %r17; st.global.b32 [%rd2+16], %r18; st.global.b32 [%rd2+24], %r19;";

/// The product of two 16-bit matrices given by their bits, 9.7.14.5.7 and 9.7.14.5.8.
struct Product {
    depth: usize,
    kind: &'static str,
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
    tolerance: Tolerance,
}

impl Product {
    fn value(&self, bits: u16) -> f64 {
        if self.kind == "f16" { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() }
    }

    fn check(&self) -> Check {
        let (depth, kind) = (self.depth, self.kind);
        let pair = |first: u16, second: u16| u32::from(first) | u32::from(second) << 16;
        let a = |row: usize, k: usize| pair(self.a[row * depth + k], self.a[row * depth + k + 1]);
        let b = |k: usize, column: usize| pair(self.b[k * 8 + column], self.b[(k + 1) * 8 + column]);
        let mut words = Vec::new();
        for lane in 0..32 {
            let (g, k) = (lane / 4, 2 * (lane % 4));
            let high = if depth == 16 { [a(g, k + 8), a(g + 8, k + 8)] } else { [0, 0] };
            words.extend([a(g, k), a(g + 8, k), high[0], high[1]]);
        }
        for lane in 0..32 {
            let (g, k) = (lane / 4, 2 * (lane % 4));
            words.extend([b(k, g), if depth == 16 { b(k + 8, g) } else { 0 }]);
        }
        let at = |lane: usize, i: usize| {
            let (row, column) = accumulator(lane, i);
            8 * row + column
        };
        words.extend((0..128).map(|i| self.c[at(i / 4, i % 4)].to_bits()));
        let expected = (0..128).map(|i| {
            let (row, column) = accumulator(i / 4, i % 4);
            let products = (0..depth).map(|k| self.value(self.a[row * depth + k]) * self.value(self.b[k * 8 + column]));
            let sum = products.sum::<f64>() + f64::from(self.c[8 * row + column]);
            u64::from((sum as f32).to_bits())
        });
        let name = format!("mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32");
        let (registers_a, registers_b) =
            if depth == 16 { ("%r4, %r5, %r6, %r7", "%r8, %r9") } else { ("%r4, %r5", "%r8") };
        let body = format!(
            "{LOAD} {name} {{%r16, %r17, %r18, %r19}}, {{{registers_a}}}, {{{registers_b}}}, {{%r12, %r13, %r14, %r15}}; {STORE}"
        );
        let (inputs, expected, tolerance) = (pack(&words), expected.collect(), self.tolerance);
        let output = Kind::F32;
        Program { name: &name, architecture: 80, threads: 32, body: &body, inputs, expected, output, tolerance }.check()
    }
}

fn products() -> Vec<Check> {
    let mut checks = Vec::new();
    for (kind, depth) in [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8)] {
        let round = |x: f64| if kind == "f16" { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() };
        let random = scrambled(512);
        // Small integers: every order of summation gives the same. One infinity and one NaN stay in their rows.
        let integer = |word: u64| (word >> 40) as i64 % 8;
        let mut a: Vec<u16> = (0..16 * depth).map(|i| round(integer(random[i]) as f64)).collect();
        a[3 * depth + 2] = round(f64::INFINITY);
        a[5 * depth + 1] = round(f64::NAN);
        let b: Vec<u16> = (0..8 * depth).map(|i| round(integer(random[256 + i]) as f64 - 3.0)).collect();
        let c: Vec<f32> = (0..128).map(|i| i as f32 - 60.0).collect();
        checks.push(Product { depth, kind, a, b, c, tolerance: Tolerance::Bits }.check());
        // Numbers of all their bits: the unit may sum in any order and cut off, but not lose more than 2^-22 of the largest
        // sum of magnitudes, 16 products below 4 and an accumulator below 20.
        let real = |word: u64| (word >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        let a = (0..16 * depth).map(|i| round(real(random[i]))).collect();
        let b = (0..8 * depth).map(|i| round(real(random[256 + i]))).collect();
        let c = (0..128).map(|i| i as f32 * 0.3 - 19.0).collect();
        let tolerance = Tolerance::Error { absolute: 84.0 / f64::from(1 << 22), relative: 0.0 };
        checks.push(Product { depth, kind, a, b, c, tolerance }.check());
    }
    checks
}

/// FP4 with block scales, 9.7.14.3, 9.7.14.5.11 and 9.7.14.5.14.
fn block_scaled(thread_a: usize, thread_b: usize, scales: [u8; 4]) -> Check {
    let random = scrambled(400);
    let code = |i: usize| (random[i / 16] >> (4 * (i % 16)) & 15) as u32;
    let (a, b) = (|row: usize, k: usize| code(64 * row + k), |k: usize, column: usize| code(1024 + 64 * column + k));
    let value =
        |code: u32| [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7] * if code < 8 { 1.0 } else { -1.0 };
    let word = |codes: &dyn Fn(usize) -> u32| (0..8).fold(0, |word, i| word | codes(i) << (4 * i));
    let mut words = Vec::new();
    for lane in 0..32 {
        let (g, k) = (lane / 4, 8 * (lane % 4));
        words.extend([(g, k), (g + 8, k), (g, k + 32), (g + 8, k + 32)].map(|(row, k)| word(&|i| a(row, k + i))));
    }
    for lane in 0..32 {
        let (g, k) = (lane / 4, 8 * (lane % 4));
        words.extend([k, k + 32].map(|k| word(&|i| b(k + i, g))));
    }
    words.extend((0..128).map(|i| (i as f32 - 60.0).to_bits()));
    // A scale byte of each lane, for each block of 16; those of lanes that are not selected must not matter.
    let scale =
        |matrix: usize, lane: usize, block: usize| scales[(random[100 * matrix + 4 * lane + block] >> 20) as usize % 4];
    let bytes =
        |matrix, lane| (0..4).fold(0, |word, block| word | u32::from(scale(matrix, lane, block)) << (8 * block));
    words.extend((0..32).flat_map(|lane| [bytes(0, lane), bytes(1, lane)]));
    let ue4m3 = |bits: u8| match bits {
        0x7F => f64::NAN,
        0..8 => f64::from(bits) / 512.0,
        _ => (1.0 + f64::from(bits & 7) / 8.0) * f64::from(i32::from(bits >> 3) - 7).exp2(),
    };
    let expected = (0..128).map(|i| {
        let (row, column) = accumulator(i / 4, i % 4);
        let lane_a = 4 * (row % 8) + 2 * thread_a + row / 8;
        let lane_b = 4 * column + thread_b;
        let products = (0..64).map(|k| {
            let scale = ue4m3(scale(0, lane_a, k / 16)) * ue4m3(scale(1, lane_b, k / 16));
            value(a(row, k)) * value(b(k, column)) * scale
        });
        u64::from(((products.sum::<f64>() + i64::try_from(i).unwrap_or(0) as f64 - 60.0) as f32).to_bits())
    });
    let name = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3";
    let body = format!(
        "{LOAD} ld.global.v2.b32 {{%r20, %r21}}, [%mine+1280]; mov.b16 %h1, {thread_b}; {name} {{%r16, %r17, %r18, %r19}}, \
         {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{%r12, %r13, %r14, %r15}}, %r20, {{0, {thread_a}}}, %r21, {{0, %h1}}; {STORE}"
    );
    let (inputs, expected, output) = (pack(&words), expected.collect(), Kind::F32);
    let (architecture, threads, body, tolerance) = (120, 32, body.as_str(), Tolerance::Bits);
    Program { name, architecture, threads, body, inputs, expected, output, tolerance }.check()
}

pub(super) fn checks() -> Vec<Check> {
    let mut checks = fragments();
    checks.extend(products());
    // 1, 2, 0.5, 1.5: all sums are exact in f32.
    let simple = [0x38, 0x40, 0x30, 0x3C];
    for (thread_a, thread_b) in [(0, 0), (1, 0), (0, 1), (1, 2), (0, 3), (1, 3)] {
        checks.push(block_scaled(thread_a, thread_b, simple));
    }
    // The ends of the scale format, and a NaN, which stays in its rows and columns.
    checks.push(block_scaled(0, 0, [0x01, 0x01, 0x01, 0x02]));
    checks.push(block_scaled(0, 0, [0x7E, 0x7E, 0x70, 0x7E]));
    checks.push(block_scaled(1, 3, [0x38, 0x38, 0x7F, 0x38]));
    checks.push(block_scaled(0, 0, [0x00, 0x38, 0x08, 0x07]));
    checks
}
