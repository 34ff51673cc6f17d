//! The number formats against `half`, and the exactness that the f16 tensor-core path rests on, over all pairs.

use half::{bf16, f16};
use nvfp4_moe_device::format::{block, e2m1, float16, tile_mma, ue4m3};

#[test]
fn codes_and_bytes_survive_decode_and_encode() {
    for code in 0..16u8 {
        let expected = if code == 8 { 0 } else { code };
        assert_eq!(e2m1::encode(e2m1::decode(code)), expected);
        assert_eq!(e2m1::decode_doubled(code) as f32, 2.0 * e2m1::decode(code));
        let magnitude = e2m1::MAGNITUDES[(code & 7) as usize];
        assert_eq!(e2m1::decode(code), if code & 8 != 0 { -magnitude } else { magnitude });
    }
    assert_eq!(e2m1::decode(8).to_bits(), (-0.0f32).to_bits());
    for byte in 0..0x7Fu8 {
        assert_eq!(ue4m3::encode(ue4m3::decode(byte)), byte);
    }
    assert!(ue4m3::decode(0x7F).is_nan());
    assert_eq!(ue4m3::encode(f32::NAN), 0x7F);
    assert_eq!((ue4m3::encode(-1.0), ue4m3::encode(f32::INFINITY)), (0, 0x7E));
}

#[test]
fn sixteen_bit_floats_agree_with_half_over_all_patterns() {
    for bits in 0..=u16::MAX {
        let ours = float16::f16_to_f32(bits);
        let theirs = f16::from_bits(bits).to_f32();
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "f16 {bits:#06x}");
        let value = bf16::from_bits(bits).to_f32();
        assert!(float16::bf16_to_f32(bits).to_bits() == value.to_bits() || value.is_nan());
        for ulps in [-1i64, 0, 1, 0x7FFF, 0x8000, 0x8001] {
            let near = f32::from_bits(((bits as i64) << 16).wrapping_add(ulps) as u32);
            let expected = bf16::from_f32(near);
            let got = bf16::from_bits(float16::f32_to_bf16(near));
            assert!(got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()), "{near:e}");
        }
    }
}

/// Every weight and every activation operand of the f16 tensor cores equals code * scale exactly, for all 16 x 127
/// pairs, with the powers of two that the kernel folds in.
#[test]
fn dequantization_to_f16_is_exact_for_all_pairs() {
    for code in 0..16u8 {
        for byte in 0..0x7Fu8 {
            let exact = e2m1::decode(code) * ue4m3::decode(byte);
            let quantized = block::Block { codes: code as u64, scale: byte };
            assert_eq!(f16::from_bits(quantized.f16(0)).to_f32().to_bits(), exact.to_bits());

            // As in the kernel: the multiplication in f16, rounded to nearest.
            let element = f16::from_bits(
                tile_mma::fragment_registers(tile_mma::spread(code as u32), tile_mma::xor_and)[0] as u16,
            );
            let scale = f16::from_bits(tile_mma::scale_pairs(tile_mma::spread_scales(byte as u32))[0] as u16);
            let product = f16::from_f32(element.to_f32() * scale.to_f32());
            assert_eq!(product.to_f32() * 128.0, exact, "code {code} scale {byte:#04x}");
        }
    }
    let poisoned = block::Block { codes: 0, scale: ue4m3::NAN };
    assert!(f16::from_bits(poisoned.f16(3)).is_nan());
}

/// Every register of a fragment and every scale of a word, against the plain decoders, from their nibbles and bytes.
#[test]
fn fragments_and_scale_pairs_hold_the_right_values() {
    for seed in 0..4096u32 {
        let nibbles = seed.wrapping_mul(0x9E37_79B9) ^ (seed << 7);
        let word = tile_mma::spread(nibbles);
        assert_eq!(tile_mma::gather(word), nibbles);
        for (register, pair) in tile_mma::fragment_registers(word, tile_mma::xor_and).into_iter().enumerate() {
            for odd in 0..2 {
                let code = (nibbles >> (16 * odd + 4 * register as u32)) & 15;
                let value = f16::from_bits((pair >> (16 * odd)) as u16).to_f32();
                assert_eq!(value * 16384.0, e2m1::decode(code as u8), "register {register}, {nibbles:#010x}");
            }
        }
        let bytes = (nibbles & 0x7F7F_7F7F).to_le_bytes();
        let stored = tile_mma::spread_scales(u32::from_le_bytes(bytes));
        assert_eq!(tile_mma::gather_scales(stored).to_le_bytes(), bytes);
        let pairs = tile_mma::scale_pairs(stored);
        for (block, byte) in bytes.into_iter().enumerate() {
            let value = f16::from_bits((pairs[block % 2] >> (16 * (block / 2))) as u16).to_f32();
            let exact = 128.0 * ue4m3::decode(byte);
            assert!(value == exact || (value.is_nan() && exact.is_nan()), "block {block}, byte {byte:#04x}: {value}");
        }
    }
}

#[test]
fn a_block_with_nan_or_infinity_is_marked_and_others_are_not() {
    let mut x = [0.25f32; 16];
    assert_ne!(block::quantize(&x, 1.0).scale, ue4m3::NAN);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        x[7] = bad;
        assert_eq!(block::quantize(&x, 1.0), block::Block { codes: 0, scale: ue4m3::NAN });
    }
}

#[test]
fn global_scale_is_always_usable() {
    for amax in [0.0, f32::from_bits(1), f32::INFINITY, f32::NAN] {
        assert_eq!(block::global_scale(block::magnitude_bits(amax)), 1.0);
    }
    assert_eq!(block::global_scale(2688f32.to_bits()), 1.0);
    assert_eq!(block::global_scale(5376f32.to_bits()), 2.0);
}

#[test]
fn exponential_is_within_two_units_in_the_last_place() {
    use nvfp4_moe_device::format::block_fma::Processor;
    use nvfp4_moe_device::kernels::activation::{exp, scaled_silu};
    let exp = |x| exp(x, Processor);
    let mut worst = 0f64;
    for step in -85_999i32..=86_999 {
        let x = step as f32 * 1e-3;
        let exact = (x as f64).exp();
        worst = worst.max(((exp(x) as f64 - exact) / exact).abs());
    }
    assert!(worst < 2.0 * 2f64.powi(-23), "relative error {worst:e}");
    assert_eq!((exp(0.0), exp(100.0), exp(-200.0)), (1.0, exp(87.0), exp(-86.0)));
    assert_eq!(1.0 + exp(-86.0), 1.0);
    assert!(scaled_silu(f32::NAN, 1.0, Processor).is_nan());
}

/// The GPU's reciprocal for all 24-bit significands: one step from the nearest number to 1/x stays there, and from those beside
/// it leads there, but for 33. `rcp.approx` starts from none of these: NVIDIA's assembler makes `rcp.rn` with the same step.
#[test]
fn one_newton_step_keeps_the_nearest_reciprocal() {
    let (mut nearest, mut beside) = (0, 0);
    for significand in 0..1 << 23 {
        let x = f32::from_bits(1.0f32.to_bits() | significand);
        let exact = 1.0 / x;
        let step = |from: u32| {
            let from = f32::from_bits(from);
            (-x).mul_add(from, 1.0).mul_add(from, from)
        };
        nearest += (step(exact.to_bits()) != exact) as u32;
        beside += (step(exact.to_bits() + 1) != exact) as u32 + (step(exact.to_bits() - 1) != exact) as u32;
    }
    assert_eq!((nearest, beside), (0, 33));
}

#[test]
fn clamp_bounds_gate_above_only_and_up_on_both_sides() {
    use nvfp4_moe_device::format::block_fma::Processor;
    use nvfp4_moe_device::kernels::activation::{ActivationParams, KIND_SWIGLU, activate, scaled_silu};
    let clamped = ActivationParams { kind: KIND_SWIGLU, limit: 10.0, alpha: 1.0, beta: 0.0 };
    assert_eq!(activate(&clamped, 50.0, 50.0, Processor), scaled_silu(10.0, 1.0, Processor) * 10.0);
    assert_eq!(activate(&clamped, 50.0, -50.0, Processor), scaled_silu(10.0, 1.0, Processor) * -10.0);
    assert_eq!(
        activate(&clamped, -20.0, 1.0, Processor),
        scaled_silu(-20.0, 1.0, Processor),
        "gate has no lower bound"
    );
    assert!(
        activate(&clamped, f32::NAN, 1.0, Processor).is_nan() && activate(&clamped, 1.0, f32::NAN, Processor).is_nan()
    );
}

/// Each unit belongs to one block, the first claims are the largest, and none is more than a turn.
#[test]
fn claims_share_the_last_units() {
    use nvfp4_moe_device::kernels::grouped_gemm::sm90::LastShares;
    assert_eq!(LastShares::of(16 * 132 - 1, 132, [16, 4]), None);
    assert!(LastShares::pay(112) && !LastShares::pay(12));
    for (blocks, most, even) in [(1, 16, 4), (2, 11, 2), (132, 16, 4), (114, 11, 2), (960, 16, 4)] {
        for units in (most * blocks + 1..most * blocks * 6).step_by(7) {
            let last = LastShares::of(units, blocks, [most, even]).expect("several turns");
            let claims: Vec<u32> = (0..blocks).map(|number| last.end_of(number + 1) - last.end_of(number)).collect();
            assert_eq!((last.end_of(0), last.end_of(blocks)), (last.first, units));
            assert!(claims.iter().all(|&claim| claim <= most), "{claims:?}");
            assert!(claims.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{claims:?}");
            // No more turns than without claims.
            let (each, own) = (units.div_ceil(blocks), last.first.div_ceil(blocks));
            assert!(own.div_ceil(most) < each.div_ceil(most), "{units} units of {blocks} blocks: {own} of {each}");
        }
    }
}
