//! Expert counts, and the largest models there are.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;

use super::builder::{Builder, MODELOPT};
use crate::checkpoint::{Checkpoint, naming};

#[test]
fn any_number_of_experts() {
    for experts in [1, 5, 36, 40, 60, 130, 384] {
        let (_directory, checkpoint) = Builder::sized(MODELOPT, &[3], experts, 16, 32).open();
        let layer = checkpoint.layer(3).unwrap();
        assert_eq!(layer.experts(), experts);
        for e in 0..experts {
            // Experts are in numerical order, not in that of their names (10 before 2).
            assert_eq!(layer.expert(e).unwrap().up.codes[0], (e * 3 + 1) as u8);
        }
        assert!(layer.expert(experts).is_err());
    }
}

#[test]
fn a_model_of_280_thousand_tensors_is_read_in_one_pass() {
    const LAYERS: usize = 61;
    const EXPERTS: usize = 384;
    const TENSORS: usize = LAYERS * EXPERTS * 12;
    let mut header = String::from("{");
    let mut end = 0;
    for layer in 0..LAYERS {
        for expert in 0..EXPERTS {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                for (part, dtype, shape, bytes) in [
                    ("weight", "U8", "[16,8]", 128),
                    ("weight_scale", "F8_E4M3", "[16,1]", 16),
                    ("weight_scale_2", "F32", "[]", 4),
                    ("input_scale", "F32", "[]", 4),
                ] {
                    let start = end;
                    end += bytes;
                    write!(
                        header,
                        r#""model.layers.{layer}.mlp.experts.{expert}.{projection}.{part}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}},"#
                    )
                    .unwrap();
                }
            }
        }
    }
    header.pop();
    header.push('}');
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();

    naming::PARSED.with(|parsed| parsed.set(0));
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    // Each name is looked at once; all that comes after works on positions.
    assert_eq!(naming::PARSED.with(std::cell::Cell::get), TENSORS);
    assert_eq!(checkpoint.tensors(), TENSORS);
    assert_eq!(checkpoint.layers().len(), LAYERS);
    assert!(checkpoint.layers().iter().all(|info| info.experts == EXPERTS));
    assert_eq!(naming::PARSED.with(std::cell::Cell::get), TENSORS);
}
