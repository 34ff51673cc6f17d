//! Input and output files of a layer.

use std::collections::BTreeMap;
use std::fs;

use half::{bf16, f16};
use safetensors::Dtype;
use tempfile::TempDir;

use super::assert_says;
use super::builder::{Stored, write_tensors};
use crate::checkpoint::{CheckpointError, HiddenStates, LayerInputs, OutputData, write_output};

const TOKENS: usize = 3;
const HIDDEN: usize = 4;

fn stored<const N: usize, T: Copy>(dtype: Dtype, shape: &[usize], data: &[T], bytes: impl Fn(T) -> [u8; N]) -> Stored {
    Stored { dtype, shape: shape.to_vec(), data: data.iter().flat_map(|&x| bytes(x)).collect() }
}

fn good() -> BTreeMap<String, Stored> {
    let hidden: Vec<_> = (0..12).map(|i| bf16::from_f32(i as f32 / 4.0)).collect();
    let ids = [0, 1, -1, 7, 2, 2];
    let weights = [0.5f32, 0.25, 1.0, -1.0, 0.0, 3.0];
    BTreeMap::from([
        ("hidden".to_owned(), stored(Dtype::BF16, &[TOKENS, HIDDEN], &hidden, bf16::to_le_bytes)),
        ("topk_ids".to_owned(), stored(Dtype::I32, &[TOKENS, 2], &ids, i32::to_le_bytes)),
        ("topk_weights".to_owned(), stored(Dtype::F32, &[TOKENS, 2], &weights, f32::to_le_bytes)),
    ])
}

fn open(tensors: &BTreeMap<String, Stored>) -> (TempDir, Result<LayerInputs, CheckpointError>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("io.safetensors");
    write_tensors(&path, tensors);
    let inputs = LayerInputs::open(path);
    (directory, inputs)
}

#[test]
fn every_allowed_dtype_is_read() {
    let mut tensors = good();
    let (_directory, inputs) = open(&tensors);
    let inputs = inputs.unwrap();
    assert_eq!((inputs.tokens, inputs.hidden_size, inputs.topk), (TOKENS, HIDDEN, 2));
    assert_eq!(inputs.topk_ids, [0, 1, -1, 7, 2, 2]);
    assert_eq!(inputs.topk_weights, [0.5, 0.25, 1.0, -1.0, 0.0, 3.0]);
    assert_eq!(inputs.expected("hidden").unwrap()[5], 1.25);

    let hidden: Vec<_> = (0..12).map(|i| f16::from_f32(i as f32)).collect();
    let ids = [0i64, -1, i64::from(i32::MAX), i64::from(i32::MIN), 4, 5];
    let weights = [0.5, 2.0, 1.0, -1.0, 0.0, 3.0].map(bf16::from_f32);
    tensors.insert("hidden".to_owned(), stored(Dtype::F16, &[TOKENS, HIDDEN], &hidden, f16::to_le_bytes));
    tensors.insert("topk_ids".to_owned(), stored(Dtype::I64, &[TOKENS, 2], &ids, i64::to_le_bytes));
    tensors.insert("topk_weights".to_owned(), stored(Dtype::BF16, &[TOKENS, 2], &weights, bf16::to_le_bytes));
    let (_directory, inputs) = open(&tensors);
    let inputs = inputs.unwrap();
    assert_eq!(inputs.hidden, HiddenStates::F16(hidden));
    assert_eq!(inputs.topk_ids, [0, -1, i32::MAX, i32::MIN, 4, 5]);
    assert_eq!(inputs.topk_weights, [0.5, 2.0, 1.0, -1.0, 0.0, 3.0]);
    assert_eq!(inputs.expected("hidden").unwrap()[11], 11.0);
}

#[test]
fn no_tokens_are_inputs_too() {
    let tensors = BTreeMap::from([
        ("hidden".to_owned(), Stored::filled(Dtype::BF16, &[0, HIDDEN], 0)),
        ("topk_ids".to_owned(), Stored::filled(Dtype::I64, &[0, 2], 0)),
        ("topk_weights".to_owned(), Stored::filled(Dtype::F32, &[0, 2], 0)),
    ]);
    let (_directory, inputs) = open(&tensors);
    let inputs = inputs.unwrap();
    assert_eq!((inputs.tokens, inputs.topk, inputs.topk_ids.len()), (0, 2, 0));
}

#[test]
fn wrong_inputs_are_named() {
    let wrong = |name: &str, dtype, shape: &[usize]| {
        let mut tensors = good();
        tensors.insert(name.to_owned(), Stored::filled(dtype, shape, 0));
        open(&tensors).1.unwrap_err()
    };
    for (name, dtype, shape, says) in [
        ("hidden", Dtype::F32, vec![TOKENS, HIDDEN], ["BF16 or F16", "F32"]),
        ("topk_ids", Dtype::U8, vec![TOKENS, 2], ["I32 or I64", "U8"]),
        ("topk_weights", Dtype::F64, vec![TOKENS, 2], ["F32 or BF16", "F64"]),
        ("hidden", Dtype::BF16, vec![12], ["[T, H]", "[12]"]),
        ("topk_ids", Dtype::I32, vec![4, 2], ["[3, k]", "[4, 2]"]),
        ("topk_ids", Dtype::I32, vec![TOKENS, 0], ["k above 0", "[3, 0]"]),
        ("topk_weights", Dtype::F32, vec![2, 2], ["[3, 2]", "[2, 2]"]),
        ("topk_weights", Dtype::F32, vec![3, 3], ["[3, 2]", "[3, 3]"]),
    ] {
        let error = wrong(name, dtype, &shape);
        assert_says(&error, &[name, says[0], says[1]]);
    }
}

#[test]
fn missing_inputs_and_large_ids_are_named() {
    let mut tensors = good();
    tensors.remove("topk_ids");
    let error = open(&tensors).1.unwrap_err();
    assert!(matches!(error, CheckpointError::MissingInput { .. }));
    assert_says(&error, &["topk_ids", "io.safetensors", "hidden"]);

    let ids = [0i64, 1, 2, 3, 1 << 31, 5];
    tensors.insert("topk_ids".to_owned(), stored(Dtype::I64, &[TOKENS, 2], &ids, i64::to_le_bytes));
    let error = open(&tensors).1.unwrap_err();
    assert!(matches!(error, CheckpointError::IdOutOfRange { token: 2, choice: 0, value, .. } if value == 1 << 31));
}

#[test]
fn expected_tensors_are_checked() {
    let mut tensors = good();
    tensors.insert("short".to_owned(), Stored::filled(Dtype::F32, &[2, HIDDEN], 0));
    tensors.insert("ints".to_owned(), Stored::filled(Dtype::I32, &[TOKENS, HIDDEN], 0));
    let (_directory, inputs) = open(&tensors);
    let inputs = inputs.unwrap();
    assert_says(&inputs.expected("short").unwrap_err(), &["short", "[3, 4]", "[2, 4]"]);
    assert_says(&inputs.expected("ints").unwrap_err(), &["ints", "F32, BF16 or F16", "I32"]);
    assert_says(&inputs.expected("none").unwrap_err(), &["none", "topk_ids"]);
}

#[test]
fn outputs_are_written_whole_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    let values: Vec<f32> = (0..6).map(|i| i as f32 / 3.0).collect();
    write_output(&path, "out", &[2, 3], OutputData::F32(&values)).unwrap();
    let halves: Vec<_> = values.iter().map(|&v| bf16::from_f32(v)).collect();
    let read = |path| {
        let bytes = fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let out = file.tensor("out").unwrap();
        (out.dtype(), out.shape().to_vec(), out.data().to_vec())
    };
    assert_eq!(read(&path), (Dtype::F32, vec![2, 3], bytemuck::cast_slice(&values).to_vec()));
    // An existing file is replaced.
    write_output(&path, "out", &[3, 2], OutputData::Bf16(&halves)).unwrap();
    assert_eq!(read(&path), (Dtype::BF16, vec![3, 2], bytemuck::cast_slice(&halves).to_vec()));
    write_output(&path, "out", &[0, 2], OutputData::F32(&[])).unwrap();
    assert_eq!(read(&path), (Dtype::F32, vec![0, 2], vec![]));

    let error = write_output(&path, "out", &[2, 2], OutputData::F32(&values)).unwrap_err();
    assert!(matches!(error, CheckpointError::WrongOutput { elements: 6, .. }));
    let taken = directory.path().join("taken");
    fs::create_dir_all(taken.join("inside")).unwrap();
    let error = write_output(&taken, "out", &[6], OutputData::F32(&values)).unwrap_err();
    assert_says(&error, &["cannot write", "taken"]);
    let nowhere = directory.path().join("no/out");
    assert!(write_output(nowhere, "out", &[6], OutputData::F32(&values)).is_err());
    // The output and the directory; no temporary file.
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
}
