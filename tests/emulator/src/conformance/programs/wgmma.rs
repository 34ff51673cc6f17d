//! Products of a warpgroup (9.7.15.5). Where an element of a matrix in shared memory is, is taken from the document's
//! canonical layouts (9.7.15.5.1.2.1.3), where one in registers is from its figures of fragments.

use std::fmt::Write as _;

use half::{bf16, f16};

use super::super::inputs::Kind;
use super::super::{Check, Tolerance};
use super::{Program, of_sm_90a, scrambled};

/// K of one instruction.
const K: usize = 16;
/// Rows of a warpgroup.
const M: usize = 64;

/// How a matrix lies in shared memory. Strides in bytes.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes of the swizzle, 0 for none.
    swizzle: usize,
    mn_major: bool,
    leading: usize,
    stride: usize,
    /// Bytes from the 1024-byte boundary to the pattern: a multiple of 128.
    pattern: usize,
    /// Bytes from the pattern to the matrix.
    start: usize,
}

impl Layout {
    /// Without holes, for this many rows of A or columns of B, and as much of K as the swizzle is wide.
    fn dense(swizzle: usize, mn_major: bool, mn: usize) -> Self {
        let (leading, stride) = match (swizzle, mn_major) {
            (0, false) => (16 * mn, 128),
            (0, true) => (16 * mn, 128),
            (_, false) => (16, 8 * swizzle),
            (_, true) => (16 * swizzle, 8 * swizzle),
        };
        Self { swizzle, mn_major, leading, stride, pattern: 0, start: 0 }
    }

    /// Bytes from the 1024-byte boundary to an element.
    fn offset(&self, mn: usize, k: usize) -> usize {
        let Self { swizzle: w, leading, stride, .. } = *self;
        let linear = match (w, self.mn_major) {
            (0, false) => mn % 8 * 16 + mn / 8 * stride + k % 8 * 2 + k / 8 * leading,
            (0, true) => mn % 8 * 2 + mn / 8 * stride + k % 8 * 16 + k / 8 * leading,
            (_, false) => mn % 8 * w + mn / 8 * stride + k * 2,
            (_, true) => mn % (w / 2) * 2 + mn / (w / 2) * leading + k % 8 * w + k / 8 * stride,
        };
        let linear = linear + self.start;
        let mask = match w {
            0 => 0,
            _ => w / 16 - 1,
        };
        self.pattern + (linear ^ (linear >> 7 & mask) << 4)
    }

    /// The descriptor without the start address.
    fn fields(&self) -> u64 {
        let mode: u64 = match self.swizzle {
            0 => 0,
            128 => 1,
            64 => 2,
            _ => 3,
        };
        let base = if self.swizzle == 0 { 0 } else { self.pattern >> 7 & 7 };
        (self.leading as u64 >> 4) << 16 | (self.stride as u64 >> 4) << 32 | (base as u64) << 49 | mode << 62
    }

    fn name(&self) -> String {
        let major = if self.mn_major { "MN" } else { "K" };
        let pattern = if self.pattern == 0 { String::new() } else { format!(" at {}", self.pattern) };
        format!("{major}-major {}{pattern}", self.swizzle)
    }
}

/// One product with its operands, `steps` instructions along K.
struct Product {
    kind: &'static str,
    n: usize,
    warpgroups: usize,
    /// In registers where there is none.
    a_layout: Option<Layout>,
    b_layout: Layout,
    steps: usize,
    scale_d: &'static str,
    negated: [bool; 2],
    /// Rows of all warpgroups, K of all steps.
    a: Vec<u16>,
    b: Vec<u16>,
    c: Vec<f32>,
    tolerance: bool,
    note: &'static str,
}

impl Product {
    /// Small integers, whose sums are exact in any order.
    fn integers(n: usize, a_layout: Option<Layout>, b_layout: Layout) -> Self {
        let mut product = Self {
            kind: "f16",
            n,
            warpgroups: 1,
            a_layout,
            b_layout,
            steps: 1,
            scale_d: "1",
            negated: [false; 2],
            a: Vec::new(),
            b: Vec::new(),
            c: Vec::new(),
            tolerance: false,
            note: "",
        };
        product.fill(|word| (word >> 40) as i64 as f64 % 8.0, |word| (word >> 40) as i64 as f64 % 8.0 - 3.0);
        product
    }

    fn bits(&self, x: f64) -> u16 {
        if self.kind == "f16" { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() }
    }

    fn value(&self, bits: u16) -> f64 {
        if self.kind == "f16" { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() }
    }

    /// New operands, made of numbers without a pattern.
    fn fill(&mut self, a: impl Fn(u64) -> f64, b: impl Fn(u64) -> f64) {
        let (rows, depth) = (M * self.warpgroups, K * self.steps);
        let random = scrambled(((rows + self.n) * depth) as u64);
        self.a = random[..rows * depth].iter().map(|&word| self.bits(a(word))).collect();
        self.b = random[rows * depth..].iter().map(|&word| self.bits(b(word))).collect();
        self.c = (0..rows * self.n).map(|i| (i * 5 % 101) as f32 - 50.0).collect();
    }

    /// Numbers of all their bits; the sums may be rounded in any order.
    fn reals(mut self) -> Self {
        let real = |word: u64| (word >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        self.fill(real, |word| real(word.rotate_left(29)));
        self.c.iter_mut().for_each(|c| *c *= 0.37);
        self.tolerance = true;
        self
    }

    const fn shape(&self) -> [usize; 2] {
        [M * self.warpgroups, K * self.steps]
    }

    fn pair(first: u16, second: u16) -> u32 {
        u32::from(first) | u32::from(second) << 16
    }

    /// Shared memory from the 1024-byte boundary on: B, behind it A.
    fn image(&self) -> (Vec<u8>, usize) {
        let [rows, depth] = self.shape();
        let mut image = Vec::new();
        let mut put = |at: usize, bits: u16| {
            if image.len() < at + 2 {
                image.resize(at + 2, 0);
            }
            image[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        };
        for k in 0..depth {
            for column in 0..self.n {
                put(self.b_layout.offset(column, k), self.b[column * depth + k]);
            }
        }
        let mut a_at = 0;
        if let Some(layout) = &self.a_layout {
            a_at = (0..self.n).map(|column| self.b_layout.offset(column, depth - 1)).max().unwrap_or_default();
            a_at = (a_at + 1024).next_multiple_of(1024);
            for k in 0..depth {
                for row in 0..rows {
                    put(a_at + layout.offset(row, k), self.a[row * depth + k]);
                }
            }
        }
        image.resize(image.len().next_multiple_of(8 * 128 * self.warpgroups), 0);
        (image, a_at)
    }

    /// Fragments of A of all steps, a thread after the other.
    fn fragments(&self) -> Vec<u32> {
        let depth = K * self.steps;
        let mut words = Vec::new();
        for thread in 0..128 * self.warpgroups {
            let (row, q) = (thread / 32 * 16 + thread % 32 / 4, 2 * (thread % 4));
            for step in 0..self.steps {
                for (down, right) in [(0, 0), (8, 0), (0, 8), (8, 8)] {
                    let at = (row + down) * depth + K * step + q + right;
                    words.push(Self::pair(self.a[at], self.a[at + 1]));
                }
            }
        }
        words
    }

    /// Row and column of accumulator `i` of a thread.
    fn accumulator(thread: usize, i: usize) -> (usize, usize) {
        (thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + 2 * (thread % 4) + i % 2)
    }

    /// All of D, and what rounding in another order may change.
    fn expected(&self) -> (Vec<u64>, f64) {
        let depth = K * self.steps;
        let sign = if self.negated[0] == self.negated[1] { 1.0 } else { -1.0 };
        let mut largest = 0f64;
        let words = (0..128 * self.warpgroups).flat_map(|thread| (0..self.n / 2).map(move |i| (thread, i)));
        let words = words.map(|(thread, i)| {
            let (row, column) = Self::accumulator(thread, i);
            let accumulator = if self.scale_d == "0" { 0.0 } else { self.c[row * self.n + column] };
            let mut sum = accumulator;
            let mut magnitude = f64::from(sum.abs());
            for step in 0..self.steps {
                let products = (K * step..K * (step + 1))
                    .map(|k| sign * self.value(self.a[row * depth + k]) * self.value(self.b[column * depth + k]));
                magnitude += products.clone().map(f64::abs).sum::<f64>();
                sum = (products.sum::<f64>() + f64::from(sum)) as f32;
            }
            largest = largest.max(magnitude);
            u64::from(sum.to_bits())
        });
        let words = words.collect();
        (words, largest / f64::from(1 << 22))
    }

    fn check(&self) -> Check {
        let (image, a_at) = self.image();
        let (threads, registers) = (128 * self.warpgroups, self.n / 2);
        let name = format!("wgmma.mma_async.sync.aligned.m64n{}k16.f32.{}.{}", self.n, self.kind, self.kind);
        let mut inputs: Vec<u64> = bytes_to_words(&image);
        let fragments_at = 8 * inputs.len();
        inputs.extend(super::pack(&self.fragments()));
        let c_at = 8 * inputs.len();
        let c: Vec<u32> = (0..threads)
            .flat_map(|thread| (0..registers).map(move |i| Self::accumulator(thread, i)))
            .map(|(row, column)| self.c[row * self.n + column].to_bits())
            .collect();
        inputs.extend(super::pack(&c));
        let mut body = format!(
            "{{ .reg .b32 %d<{registers}>, %a<{}>; .reg .b64 %da, %db; add.u32 %s, %s, 1023; and.b32 %s, %s, -1024; \
             mad.lo.u32 %r1, %t, 8, %s; ",
            4 * self.steps
        );
        for at in (0..image.len()).step_by(8 * threads) {
            let _ = write!(body, "ld.global.b64 %rd1, [%mine+{at}]; st.shared.b64 [%r1+{at}], %rd1; ");
        }
        let _ = write!(
            body,
            "fence.proxy.async; bar.sync 0; mul.wide.u32 %rd2, %t, {}; add.u64 %rd2, %in, %rd2; mul.wide.u32 %rd3, %t, {}; \
             add.u64 %rd3, %in, %rd3; mul.wide.u32 %rd4, %t, {}; add.u64 %rd4, %out, %rd4; mov.b32 %r2, 1; \
             setp.ne.u32 %p1, %r2, 0; ",
            16 * self.steps,
            4 * registers,
            8 * registers
        );
        for i in 0..4 * self.steps {
            let _ = write!(body, "ld.global.b32 %a{i}, [%rd2+{}]; ", fragments_at + 4 * i);
        }
        for i in 0..registers {
            let _ = write!(body, "ld.global.b32 %d{i}, [%rd3+{}]; ", c_at + 4 * i);
        }
        body += "wgmma.fence.sync.aligned; ";
        let signs = self.negated.map(|negated| if negated { -1 } else { 1 });
        for step in 0..self.steps {
            let b_start = self.b_layout.pattern + self.b_layout.start + self.advance(&self.b_layout, step);
            body += &descriptor("%db", "0", b_start, self.b_layout.fields());
            let (operand, transposed) = match &self.a_layout {
                None => {
                    let registers = (4 * step..4 * step + 4).map(|i| format!("%a{i}")).collect::<Vec<_>>().join(", ");
                    (format!("{{{registers}}}"), String::new())
                }
                Some(layout) => {
                    let start = a_at + layout.pattern + layout.start + self.advance(layout, step);
                    // Each warpgroup has its own 64 rows.
                    let _ = write!(body, "shr.u32 %r4, %t, 7; mul.lo.u32 %r4, %r4, {}; ", layout.offset(M, 0));
                    body += &descriptor("%da", "%r4", start, layout.fields());
                    ("%da".to_owned(), format!(", {}", u8::from(layout.mn_major)))
                }
            };
            let accumulators = (0..registers).map(|i| format!("%d{i}")).collect::<Vec<_>>().join(", ");
            let _ = write!(
                body,
                "{name} {{{accumulators}}}, {operand}, %db, {}, {}, {}{transposed}, {}; wgmma.commit_group.sync.aligned; ",
                self.scale_d,
                signs[0],
                signs[1],
                u8::from(self.b_layout.mn_major)
            );
            if step == 1 {
                body += "wgmma.wait_group.sync.aligned 1; ";
            }
        }
        body += "wgmma.wait_group.sync.aligned 0; ";
        for i in 0..registers {
            let _ = write!(body, "st.global.b32 [%rd4+{}], %d{i}; ", 8 * i);
        }
        body += "}";
        let (expected, absolute) = self.expected();
        let tolerance = if self.tolerance { Tolerance::Error { absolute, relative: 0.0 } } else { Tolerance::Bits };
        let a_name = self.a_layout.map_or("registers".to_owned(), |layout| layout.name());
        let note = self.note;
        let title = format!("{name}: A {a_name}, B {}{note}", self.b_layout.name());
        let program = Program {
            name: &title,
            architecture: 90,
            threads: threads as u32,
            body: &body,
            inputs,
            expected,
            output: Kind::F32,
            tolerance,
        };
        of_sm_90a(Check { shared_bytes: image.len() as u32 + 1024, ..program.check() })
    }

    /// Bytes from one step along K to another.
    fn advance(&self, layout: &Layout, step: usize) -> usize {
        let depth = K * step;
        match (layout.swizzle, layout.mn_major) {
            (0, _) => 2 * step * layout.leading,
            (_, false) => 2 * depth,
            (_, true) => 2 * step * layout.stride,
        }
    }
}

/// Puts a descriptor together: `start` bytes behind the boundary, and `more` of them.
fn descriptor(register: &str, more: &str, start: usize, fields: u64) -> String {
    format!(
        "add.u32 %r3, %s, {start}; add.u32 %r3, %r3, {more}; shr.u32 %r3, %r3, 4; and.b32 %r3, %r3, 16383; \
         cvt.u64.u32 {register}, %r3; or.b64 {register}, {register}, {fields:#x}; "
    )
}

fn bytes_to_words(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    bytes.chunks(8).map(word).collect()
}

const SWIZZLES: [usize; 4] = [0, 32, 64, 128];

/// Every shape, and every layout.
fn layouts() -> Vec<Product> {
    let mut all = Vec::new();
    for n in (8..=256).step_by(8) {
        all.push(Product::integers(n, None, Layout::dense(128, false, n)));
    }
    for swizzle in SWIZZLES {
        for b_major in [false, true] {
            let b = Layout::dense(swizzle, b_major, 96);
            all.push(Product::integers(96, None, b));
            for a_major in [false, true] {
                all.push(Product::integers(96, Some(Layout::dense(swizzle, a_major, M)), b));
            }
        }
    }
    // Different ones of A and B; strides with holes; patterns that do not start where the address says.
    let mut holes = Layout::dense(0, false, 40);
    (holes.leading, holes.stride) = (1040, 144);
    all.push(Product { note: ", holes", ..Product::integers(40, Some(Layout::dense(64, true, M)), holes) });
    let mut holes = Layout::dense(0, true, 40);
    (holes.leading, holes.stride) = (1040, 144);
    all.push(Product { note: ", holes", ..Product::integers(40, Some(Layout::dense(128, false, M)), holes) });
    for (swizzle, mn_major, pattern) in [(128, false, 384), (64, false, 128), (32, false, 128), (128, true, 640)] {
        let b = Layout { pattern, ..Layout::dense(swizzle, mn_major, 64) };
        all.push(Product { note: ", base offset", ..Product::integers(64, None, b) });
    }
    all
}

/// Signs, accumulators that do not count, steps, two warpgroups.
fn forms() -> Vec<Product> {
    let wide = |n| Layout::dense(128, false, n);
    let simple = |note| Product { note, ..Product::integers(48, None, wide(48)) };
    let mut all = vec![
        Product { scale_d: "0", ..simple(", scale-d 0") },
        Product { scale_d: "%p1", ..simple(", scale-d true") },
        Product { negated: [true, false], ..simple(", A negated") },
        Product { negated: [false, true], ..simple(", B negated") },
        Product { negated: [true, true], ..simple(", both negated") },
    ];
    for kind in ["f16", "bf16"] {
        for (a_layout, b_layout, steps, warpgroups) in [
            (None, wide(128), 4, 1),
            (None, wide(128), 4, 2),
            (Some(wide(M)), wide(64), 4, 1),
            (Some(Layout::dense(64, false, 2 * M)), Layout::dense(64, false, 64), 2, 2),
            (None, Layout { leading: 3072, ..Layout::dense(64, true, 64) }, 3, 1),
            (Some(Layout::dense(0, true, M)), Layout::dense(0, false, 64), 2, 1),
        ] {
            let n = if warpgroups * steps == 4 && a_layout.is_none() { 128 } else { 64 };
            let mut product = Product::integers(n, a_layout, b_layout);
            (product.kind, product.steps, product.warpgroups) = (kind, steps, warpgroups);
            product.note = if warpgroups == 2 { ", two warpgroups, steps" } else { ", steps" };
            product.fill(|word| (word >> 40) as i64 as f64 % 8.0, |word| (word >> 40) as i64 as f64 % 8.0 - 3.0);
            all.push(product);
        }
    }
    all
}

/// Numbers at which units differ.
fn numbers() -> Vec<Product> {
    let wide = |n| Layout::dense(128, false, n);
    let mut all = Vec::new();
    for kind in ["f16", "bf16"] {
        for (n, steps) in [(8, 1), (64, 1), (128, 4), (256, 1)] {
            let mut product = Product::integers(n, None, wide(n));
            (product.kind, product.steps, product.note) = (kind, steps, ", all bits");
            all.push(product.reals());
        }
        // One infinity, two opposite ones, and a NaN stay in their rows.
        let mut product = Product { note: ", not finite", ..Product::integers(64, None, wide(64)) };
        product.kind = kind;
        product.fill(|word| (word >> 40) as i64 as f64 % 8.0, |word| (word >> 40) as i64 as f64 % 8.0 - 3.0);
        product.a[3 * K + 2] = product.bits(f64::INFINITY);
        product.a[20 * K + 1] = product.bits(f64::INFINITY);
        product.a[20 * K + 9] = product.bits(f64::NEG_INFINITY);
        product.a[37 * K + 5] = product.bits(f64::NAN);
        product.c[50 * 64 + 7] = f32::NEG_INFINITY;
        product.c[51 * 64 + 8] = f32::NAN;
        all.push(product);
        // Large products that cancel, and small ones; f16 products up to 2^31.
        let mut product = Product { note: ", cancellation", ..Product::integers(64, None, wide(64)) };
        product.kind = kind;
        let real = |word: u64| (word >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        product.fill(real, |word| real(word.rotate_left(29)));
        for row in 0..M {
            let large = product.bits(40_000.0 - 30.0 * row as f64);
            (product.a[row * K + 3], product.a[row * K + 12]) = (large, large ^ 0x8000);
        }
        for column in 0..64 {
            let large = product.bits(1000.0 + 7.0 * column as f64);
            (product.b[column * K + 3], product.b[column * K + 12]) = (large, large);
        }
        product.tolerance = true;
        all.push(product);
    }
    // Subnormal numbers of f16 times small integers, and products of them: all sums are exact.
    let mut product = Product { note: ", subnormal", ..Product::integers(64, None, wide(64)) };
    let integer = |word: u64| (word >> 40) as i64 as f64 % 8.0;
    product.fill(|word| (integer(word) - 3.0) * (-24f64).exp2(), integer);
    product.c.iter_mut().for_each(|c| *c = 0.0);
    all.push(product);
    let mut product = Product { note: ", products of subnormal numbers", ..Product::integers(64, None, wide(64)) };
    product.fill(|word| (integer(word) - 3.0) * (-24f64).exp2(), |word| integer(word) * (-24f64).exp2());
    product.c.iter_mut().for_each(|c| *c = 0.0);
    all.push(product);
    all
}

pub(super) fn checks() -> Vec<Check> {
    [layouts(), forms(), numbers()].iter().flatten().map(Product::check).collect()
}
