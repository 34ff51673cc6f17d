//! Files that are missing, truncated or no checkpoints, and shards with and without an index.

use std::collections::BTreeMap;
use std::fs;

use safetensors::Dtype;

use super::builder::{Builder, MODELOPT, Stored, index_path, shard_name, write_tensors};
use super::{assert_says, open_error};
use crate::checkpoint::{Checkpoint, CheckpointError};

fn small() -> Builder {
    Builder::new(MODELOPT, &[0, 1], 3)
}

#[test]
fn shards_open_with_an_index() {
    let directory = small().write_sharded(4);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!((checkpoint.files(), checkpoint.layers().len()), (4, 2));
    let (_single, whole) = small().open();
    assert_eq!(checkpoint.tensors(), whole.tensors());
    assert_eq!(checkpoint.layers(), whole.layers());
    for e in 0..3 {
        let one = checkpoint.layer(1).unwrap().expert(e).unwrap();
        let other = whole.layer(1).unwrap().expert(e).unwrap();
        assert_eq!(one.down.codes, other.down.codes);
        assert_eq!(one.gate.unwrap().scales, other.gate.unwrap().scales);
    }
}

#[test]
fn shards_open_without_an_index() {
    let directory = small().write_sharded(3);
    fs::remove_file(index_path(&directory)).unwrap();
    assert_eq!(Checkpoint::open(directory.path()).unwrap().files(), 3);
    fs::remove_file(directory.path().join(shard_name(2, 3))).unwrap();
    let error = open_error(directory.path());
    assert!(matches!(&error, CheckpointError::MissingShard { shard, .. } if *shard == shard_name(2, 3)), "{error}");
}

#[test]
fn any_one_safetensors_file_will_do() {
    let directory = small().write();
    let (old, new) = ("model.safetensors", "experts.safetensors");
    fs::rename(directory.path().join(old), directory.path().join(new)).unwrap();
    assert!(Checkpoint::open(directory.path()).is_ok());
    assert!(Checkpoint::open(directory.path().join(new)).is_ok());
}

#[test]
fn a_missing_shard_is_named() {
    let directory = small().write_sharded(3);
    fs::remove_file(directory.path().join(shard_name(1, 3))).unwrap();
    let error = open_error(directory.path());
    assert!(matches!(error, CheckpointError::MissingShard { .. }));
    assert_says(&error, &["model.safetensors.index.json", &shard_name(1, 3), "fetch"]);
}

#[test]
fn an_index_that_promises_too_much_is_named() {
    let mut builder = small();
    let directory = builder.write_sharded(2);
    let tensor = "model.layers.1.mlp.experts.2.up_proj.weight";
    let index = fs::read(index_path(&directory)).unwrap();
    builder.remove(tensor);
    let rewritten = builder.write_sharded(2);
    fs::write(index_path(&rewritten), index).unwrap();
    // Tensors were dealt out anew, so that only their names count here.
    let error = open_error(rewritten.path());
    assert!(matches!(error, CheckpointError::MissingFromShard { .. }), "{error}");
}

#[test]
fn the_index_decides_between_two_tensors_of_one_name() {
    let directory = small().write_sharded(2);
    let name = "model.layers.0.mlp.experts.0.gate_proj.input_scale";
    let mut extra = BTreeMap::from([("other".to_owned(), Stored::scalar(1.0))]);
    extra.insert(name.to_owned(), Stored::scalar(77.0));
    let path = directory.path().join("model-extra.safetensors");
    write_tensors(&path, &extra);
    let text = fs::read_to_string(index_path(&directory)).unwrap();
    let with_extra = text.replace("\"weight_map\":{", "\"weight_map\":{\"other\":\"model-extra.safetensors\",");
    fs::write(index_path(&directory), with_extra).unwrap();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.files(), 3);
    let gate = checkpoint.layer(0).unwrap().expert(0).unwrap().gate.unwrap();
    assert_eq!(gate.input_scale, Some(0.5));

    drop(checkpoint);
    fs::remove_file(index_path(&directory)).unwrap();
    let error = open_error(directory.path());
    assert!(matches!(&error, CheckpointError::DuplicateTensor { tensor, .. } if tensor == name), "{error}");
    assert_says(&error, &["model-extra.safetensors", "index"]);
}

#[test]
fn broken_indices_are_named() {
    for (text, says) in [
        ("{", "not valid JSON"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {"a": 1}}"#, "weight_map"),
        (r#"{"weight_map": {"a": "../model.safetensors"}}"#, "inside the directory"),
        (r#"{"weight_map": {"a": "/model.safetensors"}}"#, "inside the directory"),
        (r#"{"weight_map": {"a": ""}}"#, "inside the directory"),
    ] {
        let directory = small().write_sharded(2);
        fs::write(index_path(&directory), text).unwrap();
        let error = open_error(directory.path());
        assert_says(&error, &["model.safetensors.index.json", says]);
    }
}

#[test]
fn every_truncation_is_named() {
    let directory = small().write();
    let path = directory.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    for (length, expected) in [
        (0, 8),
        (7, 8),
        (8, 8 + header),
        (8 + header / 2, 8 + header),
        (8 + header, whole.len()),
        (whole.len() - 1, whole.len()),
    ] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = open_error(directory.path());
        assert!(
            matches!(error, CheckpointError::TruncatedFile { expected: e, found, .. }
                if e == expected as u64 && found == length as u64),
            "{length}: {error}"
        );
        assert_says(&error, &["model.safetensors is truncated", &expected.to_string(), &length.to_string()]);
    }
}

fn header_error(header: &str, data: usize) -> CheckpointError {
    let directory = tempfile::tempdir().unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    fs::write(directory.path().join("model.safetensors"), file).unwrap();
    open_error(directory.path())
}

#[test]
fn broken_headers_are_named() {
    for (header, data) in [
        ("{", 0),
        ("not json", 0),
        ("[]", 0),
        (r#"{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}"#, 4),
        (r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}"#, 8),
        (r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#, 5),
        (r#"{"a": {"dtype": "U8", "shape": [18446744073709551615], "data_offsets": [0, 18446744073709551615]}}"#, 5),
        (r#"{"a": {"dtype": "F64", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}"#, 4),
    ] {
        let error = header_error(header, data);
        assert!(matches!(error, CheckpointError::BadHeader { .. }), "{header}: {error}");
        assert_says(&error, &["model.safetensors", "not a valid safetensors file"]);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, [0xff; 64]).unwrap();
    assert!(matches!(open_error(&path), CheckpointError::BadHeader { .. }));
}

#[test]
fn byte_ranges_that_do_not_fit_are_named() {
    let header = r#"{"a.b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}"#;
    let error = header_error(header, 20);
    assert!(matches!(error, CheckpointError::WrongByteCount { expected: 24, found: 20, .. }), "{error}");
    assert_says(&error, &["tensor a.b", "24", "20"]);
}

#[test]
fn missing_files_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = open_error(directory.path());
    assert!(matches!(error, CheckpointError::NoSafetensors { .. }));
    let error = open_error(directory.path().join("nowhere"));
    assert!(matches!(error, CheckpointError::Io { .. }));
    assert_says(&error, &["nowhere", "cannot open"]);
}

#[test]
fn opening_changes_nothing() {
    let directory = small().write();
    let path = directory.path().join("model.safetensors");
    let mut permissions = fs::metadata(&path).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&path, permissions).unwrap();
    let before = fs::read(&path).unwrap();
    drop(Checkpoint::open(directory.path()).unwrap());
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn tensors_of_other_modules_do_not_matter() {
    let mut builder = small();
    builder.set("model.embed_tokens.weight", Stored::filled(Dtype::I64, &[0, 7], 0));
    assert!(Checkpoint::open(builder.write().path()).is_ok());
}
