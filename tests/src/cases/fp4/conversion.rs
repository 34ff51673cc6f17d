//! `cvt.rn.satfinite.e2m1x2.f32` against the rule of the quantizer: it is used for numbers above and below 0, and there it must
//! give the rule's code. Of what it makes of NaN and of the zeros nothing is asked: the kernels give it +0 instead.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::harness::Target;
use rayon::prelude::*;

use super::super::setup::Lab;
use super::document::e2m1;
use crate::conformance::PtxLaunch;

/// A thread a pair: the first number becomes the low half of a byte.
const PTX: &str = ".version 8.8
.target sm_120f
.address_size 64
.visible .entry k(.param .align 8 .b8 args[24])
{
.reg .pred %end;
.reg .b8 %codes;
.reg .b32 %index, %size, %pairs, %word;
.reg .f32 %low, %high;
.reg .b64 %in, %out, %at;
ld.param.b64 %in, [args];
ld.param.b64 %out, [args+8];
ld.param.b32 %pairs, [args+16];
mov.u32 %index, %ctaid.x;
mov.u32 %size, %ntid.x;
mov.u32 %word, %tid.x;
mad.lo.u32 %index, %index, %size, %word;
setp.ge.u32 %end, %index, %pairs;
@%end bra DONE;
mul.wide.u32 %at, %index, 8;
add.u64 %in, %in, %at;
cvt.u64.u32 %at, %index;
add.u64 %out, %out, %at;
ld.global.v2.f32 {%low, %high}, [%in];
cvt.rn.satfinite.e2m1x2.f32 %codes, %high, %low;
cvt.u32.u8 %word, %codes;
st.global.u8 [%out], %word;
DONE:
ret;
}
";

/// Nearest code, ties to the even one, saturating; the sign of every number below 0. Found by looking at all of them.
fn rule(x: f32) -> u8 {
    let distance = |code: u8| (e2m1(code) - f64::from(x).abs().min(6.0)).abs();
    let code = (0..8).min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1)))).unwrap_or(0);
    code | if x < 0.0 { 8 } else { 0 }
}

/// Numbers that decide about all others. The rule and a correctly rounded conversion are both monotone in the magnitude, so
/// where they agree on two numbers of one sign with the same code, they agree on all between. Enough are therefore, with
/// either sign, the neighbours of each tie, the smallest and the largest number. The rest guards against an instruction that is
/// not monotone: every upper half of an f32 with the ends of its range and what lies around the middle, and around each code.
fn deciding() -> Vec<f32> {
    let magnitudes: Vec<f64> = (0..8).map(e2m1).collect();
    let ties = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
    let around = |x: f64| {
        let bits = (x as f32).to_bits();
        (bits.saturating_sub(40)..=bits + 40).map(f32::from_bits)
    };
    let mut numbers: Vec<f32> = ties.chain(magnitudes.iter().copied()).flat_map(around).collect();
    numbers.extend([f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX, f32::INFINITY]);
    let halves = (0..=u32::from(u16::MAX) >> 1)
        .flat_map(|upper| [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|lower| f32::from_bits(upper << 16 | lower)));
    numbers.extend(halves);
    numbers.iter().flat_map(|x| [*x, -x]).collect()
}

/// Each number once in the low and once in the high half, beside another one.
fn compare(lab: &Lab<'_>, numbers: &[f32]) -> Result<()> {
    let device = lab.runner.engine().context("a GPU")?.device();
    let count = numbers.len();
    let launch = PtxLaunch {
        ptx: PTX,
        target: "sm_120f",
        blocks: count.div_ceil(256) as u32,
        threads: 256,
        shared_bytes: 0,
        cases: count,
    };
    let pairs: Vec<[f32; 2]> = (0..count).map(|i| [numbers[i], numbers[(i + count / 3 + 1) % count]]).collect();
    // SAFETY: a thread for each of `count` pairs reads one and writes one byte.
    let results: Vec<u8> = unsafe { launch.run(device, &pairs, count) }?;
    pairs.par_iter().zip(&results).try_for_each(|(pair, codes)| {
        for (x, code) in pair.iter().zip([codes & 15, codes >> 4]) {
            if !x.is_nan() && *x != 0.0 {
                let (bits, expected) = (x.to_bits(), rule(*x));
                ensure!(code == expected, "{x:e} ({bits:#010x}) of {pair:?} becomes {code}, not {expected}");
            }
        }
        Ok(())
    })
}

/// On a GPU that runs everything all 2^32 numbers, else those that decide.
pub(in crate::cases) fn every_number(lab: &Lab<'_>) -> Result<()> {
    ensure!(rule(2.5) == 4 && rule(-0.1) == 8 && rule(0.75) == 2 && rule(f32::INFINITY) == 7, "the rule itself");
    compare(lab, &deciding())?;
    if lab.is_full() && matches!(lab.runner.target(), Target::Cuda(_)) {
        for upper in 0..=u32::from(u8::MAX) {
            let numbers: Vec<_> = (0..1 << 24).map(|lower| f32::from_bits(upper << 24 | lower)).collect();
            compare(lab, &numbers)?;
        }
    }
    Ok(())
}
