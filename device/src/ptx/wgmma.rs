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

/// Accumulators of 64 rows x `8 * N` columns, of which each warp has 16 rows: `[n]` as in `mma.sync.m16n8k16`.
pub type Fragments<const N: usize> = [[f32; 4]; N];

/// Numbers of fragments of 8 columns for which there is an instruction here.
pub trait Multiply {
    /// `wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16`: `self += a * b`, b by its matrix descriptor, K-major.
    ///
    /// # Safety
    /// All warps of the warpgroup take part; the registers were fenced, and nobody touches them or the matrix until the
    /// group was waited for; the descriptor is of shared memory that was written.
    unsafe fn multiply(&mut self, a: [u32; 4], b: u64);

    /// Nothing, but in order with the waits: without it the compiler could use a sum before the wait for it.
    fn settle(&mut self);
}

/// One shape: its columns, and the accumulators' indices.
macro_rules! multiply {
    ($columns:literal: $first:literal $($index:literal)*; $a0:literal $a1:literal $a2:literal $a3:literal $b:literal) => {
        impl Multiply for Fragments<{ $columns / 8 }> {
            #[inline(always)]
            unsafe fn multiply(&mut self, a: [u32; 4], b: u64) {
                // SAFETY: the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred add; setp.eq.u32 add, 0, 0; ",
                            "wgmma.mma_async.sync.aligned.m64n", $columns, "k16.f32.f16.f16 {{{", $first, "}",
                            $(", {", $index, "}",)*
                            "}}, {{{", $a0, "}, {", $a1, "}, {", $a2, "}, {", $a3, "}}}, {", $b, "}, add, 1, 1, 0; }}"
                        ),
                        inout(reg32) self[$first / 4][$first % 4],
                        $(inout(reg32) self[$index / 4][$index % 4],)*
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg64) b,
                        options(nostack)
                    )
                };
            }

            #[inline(always)]
            fn settle(&mut self) {
                // SAFETY: no instruction.
                unsafe {
                    asm!(
                        concat!("// {", $first, "}", $(" {", $index, "}",)*),
                        inout(reg32) self[$first / 4][$first % 4],
                        $(inout(reg32) self[$index / 4][$index % 4],)*
                        options(nostack)
                    )
                };
            }
        }
    };
}
multiply!(16: 0 1 2 3 4 5 6 7; 8 9 10 11 12);
multiply!(32: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; 16 17 18 19 20);
multiply!(48: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23; 24 25 26 27 28);
multiply!(64: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31; 32 33 34 35 36);
multiply!(80: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39; 40 41 42 43 44);
multiply!(96: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47; 48 49 50 51 52);
multiply!(112: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55; 56 57 58 59 60);
multiply!(128: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63; 64 65 66 67 68);
multiply!(144: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71; 72 73 74 75 76);
