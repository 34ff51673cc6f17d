//! Asynchronous matrix instructions of a warpgroup (`wgmma`, sm_90a): A from registers, B from shared memory.

use core::arch::asm;

/// `wgmma.fence.sync.aligned`: registers written so far may be read by the matrix instructions that follow.
#[inline(always)]
pub fn fence() {
    // SAFETY: orders accesses; no operand.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) };
}

/// `wgmma.commit_group.sync.aligned`.
#[inline(always)]
pub fn commit_group() {
    // SAFETY: ends a group; no operand.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) };
}

/// `wgmma.wait_group.sync.aligned PENDING`: until at most that many groups are under way.
#[inline(always)]
pub fn wait_group<const PENDING: u32>() {
    // SAFETY: waits; no operand.
    unsafe { asm!("wgmma.wait_group.sync.aligned {0};", const PENDING, options(nostack)) };
}

/// A matrix descriptor (PTX ISA, "Matrix Descriptor Format"), in halves: the low one has the address in units of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Bits 0 to 31.
    pub low: u32,
    /// Bits 32 to 63.
    pub high: u32,
}

impl Descriptor {
    /// The matrix so many units of 16 bytes further.
    #[inline(always)]
    pub fn further(self, units: u32) -> Self {
        Self { low: self.low + units, ..self }
    }
}

/// Accumulators of 64 rows x `8 * N` columns, of which each warp has 16 rows: `[n]` as in `mma.sync.m16n8k16`.
pub type Fragments<const N: usize> = [[f32; 4]; N];

/// Sums of which the first ones can be multiplied: a number of fragments that is a constant, with an instruction here.
pub trait Multiply<const SLOT_FRAGMENTS: usize> {
    /// `wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16`, N = 8 `SLOT_FRAGMENTS`: `self[..SLOT_FRAGMENTS] += a * b`, b by
    /// its matrix descriptor, K-major.
    ///
    /// # Safety
    /// All warps of the warpgroup take part; the registers were fenced, and nobody touches them or the matrix until the
    /// group was waited for; the descriptor is of shared memory that was written.
    unsafe fn multiply(&mut self, a: [u32; 4], b: Descriptor);
}

/// One shape: its columns, and the operands' numbers.
macro_rules! multiply {
    ($columns:literal: $first:literal $($index:literal)*; $a0:literal $a1:literal $a2:literal $a3:literal $low:literal $high:literal) => {
        impl<const N: usize> Multiply<{ $columns / 8 }> for Fragments<N> {
            #[inline(always)]
            unsafe fn multiply(&mut self, a: [u32; 4], b: Descriptor) {
                // SAFETY: the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred add; .reg .b64 b; setp.eq.u32 add, 0, 0; mov.b64 b, {{{", $low, "}, {", $high, "}}}; ",
                            "wgmma.mma_async.sync.aligned.m64n", $columns, "k16.f32.f16.f16 {{{", $first, "}",
                            $(", {", $index, "}",)*
                            "}}, {{{", $a0, "}, {", $a1, "}, {", $a2, "}, {", $a3, "}}}, b, add, 1, 1, 0; }}"
                        ),
                        inout(reg32) self[$first / 4][$first % 4],
                        $(inout(reg32) self[$index / 4][$index % 4],)*
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b.low, in(reg32) b.high,
                        options(nostack)
                    )
                };
            }
        }
    };
}

/// All shapes, each with the columns of the one before it and 8 more; A and the descriptor follow the sums' numbers.
macro_rules! shapes {
    ([$($index:literal)*] $columns:literal: $w:literal $x:literal $y:literal $z:literal;
     $next:literal: $a0:literal $a1:literal $a2:literal $a3:literal; $after:literal: $low:literal $high:literal $($rest:tt)*) => {
        multiply!($columns: $($index)* $w $x $y $z; $a0 $a1 $a2 $a3 $low $high);
        shapes!([$($index)* $w $x $y $z] $next: $a0 $a1 $a2 $a3; $after: $low $high $($rest)*);
    };
    // The last two have numbers only.
    ([$($index:literal)*] $($rest:tt)*) => {};
}
shapes!([]
    8: 0 1 2 3; 16: 4 5 6 7; 24: 8 9 10 11; 32: 12 13 14 15; 40: 16 17 18 19; 48: 20 21 22 23;
    56: 24 25 26 27; 64: 28 29 30 31; 72: 32 33 34 35; 80: 36 37 38 39; 88: 40 41 42 43; 96: 44 45 46 47;
    104: 48 49 50 51; 112: 52 53 54 55; 120: 56 57 58 59; 128: 60 61 62 63; 136: 64 65 66 67; 144: 68 69 70 71;
    152: 72 73 74 75; 160: 76 77 78 79; 168: 80 81 82 83; 176: 84 85 86 87; 184: 88 89 90 91; 192: 92 93 94 95;
    200: 96 97 98 99; 208: 100 101 102 103;
);

/// Zeros, of which the compiler does not know it: made here, and not kept in registers from before.
#[inline(always)]
pub fn clear(sums: &mut [[f32; 4]]) {
    for sum in sums.as_flattened_mut() {
        // SAFETY: registers only.
        unsafe { asm!("mov.b32 {0}, 0;", out(reg32) * sum, options(nomem, nostack)) };
    }
}

/// Nothing, but in order with the waits: without it the compiler could use sums before the wait for them. Operands that are
/// used here too have the same registers in all branches that end here.
#[inline(always)]
pub fn settle<const N: usize, const OPERANDS: usize>(sums: &mut Fragments<N>, operands: &mut [[u32; 4]; OPERANDS]) {
    // SAFETY: no instruction.
    unsafe {
        for sum in sums.as_flattened_mut() {
            asm!("// {0}", inout(reg32) * sum, options(nostack));
        }
        for operand in operands.as_flattened_mut() {
            asm!("// {0}", inout(reg32) * operand, options(nostack));
        }
    }
}
