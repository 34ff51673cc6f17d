//! The formats and the quantizer against values made with ml_dtypes and ModelOpt: every bit.

use nvfp4_moe_device::format::{block, e2m1, ue4m3};
use safetensors::SafeTensors;

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/golden/{name}", env!("CARGO_MANIFEST_DIR"))).expect("golden file")
}

fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(file.tensor(name).expect(name).data())
}

#[test]
fn e2m1_and_ue4m3_match_ml_dtypes() {
    let bytes = golden("formats.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let codes = file.tensor("e2m1_code").unwrap();
    for (x, code) in floats(&file, "e2m1_in").iter().zip(codes.data()) {
        assert_eq!(e2m1::encode(*x), *code, "e2m1({x:e})");
    }
    let scales = file.tensor("ue4m3_byte").unwrap();
    for (x, byte) in floats(&file, "ue4m3_in").iter().zip(scales.data()) {
        // The vectors are signed E4M3: their -0.0 is 0x80, which UE4M3 (bit 7 zero) does not have.
        let expected = if x.to_bits() == (-0.0f32).to_bits() { byte & 0x7F } else { *byte };
        assert_eq!(ue4m3::encode(*x), expected, "ue4m3({x:e})");
    }
}

#[test]
fn quantizer_matches_modelopt() {
    let bytes = golden("quantize_vectors.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases = 0;
    for case in file.names().into_iter().filter_map(|name| name.strip_suffix(".x")) {
        let x = floats(&file, &format!("{case}.x"));
        let g = floats(&file, &format!("{case}.global"))[0];
        let packed = file.tensor(&format!("{case}.packed")).unwrap();
        let scale = file.tensor(&format!("{case}.scale")).unwrap();
        for (i, x) in x.chunks_exact(16).enumerate() {
            let block = block::quantize(x.try_into().unwrap(), g);
            assert_eq!(block.scale, scale.data()[i], "{case} block {i}");
            assert_eq!(block.codes.to_le_bytes(), packed.data()[i * 8..][..8], "{case} block {i}");
        }
        if case.ends_with(".own") {
            let amax = x.iter().map(|x| block::magnitude_bits(*x)).max().unwrap();
            assert_eq!(block::global_scale(amax), g, "{case}");
        }
        cases += 1;
    }
    assert_eq!(cases, 12);
}
