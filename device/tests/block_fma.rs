//! The quantizer in few instructions against the plain rule: the same bits.

use nvfp4_moe_device::format::block_fma::{self, Processor};
use nvfp4_moe_device::format::{BLOCK, block, e2m1, ue4m3};
use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

fn random() -> impl FnMut() -> u32 {
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    move || rng.next_u32()
}

/// Powers of two, and any.
fn decode_scales() -> Vec<f32> {
    let mut next = random();
    let mut scales: Vec<_> = [-149, -140, -120, -91, -60, -12, -3, 0, 2, 30, 90, 117, 121, 127]
        .iter()
        .map(|&n| 2f64.powi(n) as f32)
        .collect();
    scales.extend([f32::MAX, 1.0 / 21.0, 1.0 / 2688.0, 3.0 / 7.0]);
    scales.extend((0..6).map(|_| f32::from_bits(0x3000_0000 + next() % 0x2000_0000)));
    scales
}

fn check_codes(x: &[f32; 2], scale: u8, g: f32, amax: f32) {
    let divisor = block::divisor(scale, g);
    let expected = x.map(|x| e2m1::encode(x / divisor) as u32);
    let values = block_fma::round(x, amax, ue4m3::decode(scale), g, Processor);
    assert_eq!(values.codes(0, 1), expected[0] | expected[1] << 4, "{x:?} scale {scale:#04x} g {g:e}");
    assert_eq!(values.scale_byte(), scale);
}

/// Every bf16 number with every scale.
#[test]
fn every_bf16_has_the_plain_rules_code() {
    for g in decode_scales() {
        for scale in 1..ue4m3::NAN {
            for bits in 0..0x7F80u32 {
                let x = f32::from_bits(bits << 16);
                check_codes(&[x, -x], scale, g, x);
            }
        }
    }
}

/// Every mantissa of the divisor, and elements around every threshold; the scale's own mantissa does not matter.
#[test]
fn around_every_threshold_the_code_is_the_plain_rules() {
    const THRESHOLDS: [f32; 4] = [0.25, 0.75, 1.75, 5.0];
    const ONE: u8 = 0x38;
    for mantissa in 0..1 << 23 {
        let g = f32::from_bits(0x3F80_0000 | mantissa);
        // One threshold of each mantissa that thresholds have.
        for threshold in THRESHOLDS {
            let middle = (threshold * g).to_bits();
            for bits in middle - 3..=middle + 3 {
                let x = f32::from_bits(bits);
                check_codes(&[x, -x], ONE, g, x);
            }
        }
    }
}

/// Any numbers, tiny quotients around the underflow to zero included.
#[test]
fn any_number_has_the_plain_rules_code() {
    let mut next = random();
    for g in decode_scales() {
        for scale in 1..ue4m3::NAN {
            let divisor = block::divisor(scale, g);
            let check = |x: f32| check_codes(&[x, -x], scale, g, x.abs());
            for _ in 0..200 {
                check(f32::from_bits(next() % 0x7F80_0000));
                check(f32::from_bits(next() % 64));
                let near = divisor as f64 * f64::from(next() % 32) / 4.0;
                let tiny = divisor as f64 * 2f64.powi(-150) * f64::from(next() % 5);
                for middle in [near as f32, tiny as f32] {
                    for step in 0..9 {
                        let x = f32::from_bits((middle.to_bits() + step).saturating_sub(4));
                        if x.is_finite() {
                            check(x);
                        }
                    }
                }
            }
        }
    }
}

/// Whole blocks, with the scales that come of them, and elements that are not finite.
#[test]
fn blocks_are_the_plain_rules() {
    let mut next = random();
    for g in decode_scales() {
        for turn in 0..40_000 {
            let exponent = next() % 255;
            let block: [f32; BLOCK] = std::array::from_fn(|_| {
                let bits = next();
                let spread = if turn % 2 == 0 { 3 } else { 255 };
                let mask = if turn % 3 == 0 { 0x807F_0000 } else { 0x807F_FFFF };
                let x = f32::from_bits((bits & mask) | (exponent.saturating_sub(next() % spread) << 23));
                match next() % 4096 {
                    0 => 0.0,
                    1 => -0.0,
                    2 => f32::NAN,
                    3 => f32::NEG_INFINITY,
                    _ => x,
                }
            });
            let fast = block_fma::quantize(&block, g, Processor).block();
            assert_eq!(fast, block::quantize(&block, g), "{block:?}, g {g:e}");
        }
        assert_eq!(block_fma::quantize(&[-0.0; BLOCK], g, Processor).block(), block::quantize(&[-0.0; BLOCK], g));
    }
}

/// Every largest magnitude that bf16 can have, and those around every threshold of the scale.
#[test]
fn block_scales_are_the_plain_rules() {
    let mut next = random();
    let check = |amax: f32, g: f32| {
        let scale = block_fma::block_scale(amax, g, Processor);
        let byte = block_fma::Values { values: [0.0], scale }.scale_byte();
        assert_eq!(byte, block::block_scale(amax.to_bits(), g), "amax {amax:e}, g {g:e}");
    };
    for g in decode_scales() {
        for bits in 0..=0x7FC0u32 {
            check(f32::from_bits(bits << 16), g);
        }
    }
    for _ in 0..200_000 {
        let g = f32::from_bits(next() % 0x7F80_0000);
        let byte = (next() % 126) as u8;
        let threshold = (ue4m3::decode(byte) as f64 + ue4m3::decode(byte + 1) as f64) / 2.0;
        let middle = (threshold * (6.0 * g) as f64) as f32;
        for step in 0..7 {
            check(f32::from_bits((middle.to_bits() + step).saturating_sub(3)), g);
        }
    }
}
