//! Synthetic checkpoints: every tensor of every expert, to be altered before it is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use crate::checkpoint::Checkpoint;

/// A tensor with its bytes.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<u8>,
}

impl Stored {
    pub(super) fn scalar(value: f32) -> Self {
        Self { dtype: Dtype::F32, shape: vec![], data: value.to_le_bytes().to_vec() }
    }

    pub(super) fn filled(dtype: Dtype, shape: &[usize], byte: u8) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        Self { dtype, shape: shape.to_vec(), data: vec![byte; bytes] }
    }
}

/// How a synthetic checkpoint names its tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) before: &'static str,
    pub(super) after: &'static str,
    /// Gate (empty for none), up, down.
    pub(super) projections: [&'static str; 3],
    pub(super) reciprocal: bool,
}

pub(super) const MODELOPT: Style = Style {
    before: "model.layers.",
    after: ".mlp.experts.",
    projections: ["gate_proj", "up_proj", "down_proj"],
    reciprocal: false,
};
pub(super) const COMPRESSED: Style = Style { before: "model.language_model.layers.", reciprocal: true, ..MODELOPT };
pub(super) const DEEPSEEK_V4: Style =
    Style { before: "layers.", after: ".ffn.experts.", projections: ["w1", "w3", "w2"], reciprocal: false };
pub(super) const NEMOTRON: Style = Style {
    before: "backbone.layers.",
    after: ".mixer.experts.",
    projections: ["", "up_proj", "down_proj"],
    reciprocal: false,
};

/// Sizes that differ in every axis.
pub(super) const HIDDEN: usize = 48;
pub(super) const INTERMEDIATE: usize = 32;
pub(super) const WEIGHT_SCALE: f32 = 0.25;
pub(super) const INPUT_SCALE: f32 = 0.5;

#[derive(Debug, Clone, Default)]
pub(super) struct Builder {
    pub(super) tensors: BTreeMap<String, Stored>,
    pub(super) config: Option<String>,
}

impl Builder {
    pub(super) fn new(style: Style, layers: &[usize], experts: usize) -> Self {
        Self::sized(style, layers, experts, HIDDEN, INTERMEDIATE)
    }

    pub(super) fn sized(style: Style, layers: &[usize], experts: usize, hidden: usize, intermediate: usize) -> Self {
        let mut builder = Self::default();
        for layer in layers {
            for expert in 0..experts {
                for (at, projection) in style.projections.iter().enumerate() {
                    if projection.is_empty() {
                        continue;
                    }
                    let (rows, cols) = if at == 2 { (hidden, intermediate) } else { (intermediate, hidden) };
                    let Style { before, after, .. } = style;
                    let name = format!("{before}{layer}{after}{expert}.{projection}");
                    let byte = (expert * 3 + at) as u8;
                    builder.add_matrix(&name, style.reciprocal, rows, cols, byte);
                }
            }
        }
        builder
    }

    fn add_matrix(&mut self, name: &str, reciprocal: bool, rows: usize, cols: usize, byte: u8) {
        let codes = Stored::filled(Dtype::U8, &[rows, cols / 2], byte);
        let scales = Stored::filled(Dtype::F8_E4M3, &[rows, cols.div_ceil(16)], 0x38);
        let globals = if reciprocal {
            let one = |value: f32| Stored { shape: vec![1], ..Stored::scalar(1.0 / value) };
            [
                ("weight_packed", codes),
                ("weight_global_scale", one(WEIGHT_SCALE)),
                ("input_global_scale", one(INPUT_SCALE)),
            ]
        } else {
            [
                ("weight", codes),
                ("weight_scale_2", Stored::scalar(WEIGHT_SCALE)),
                ("input_scale", Stored::scalar(INPUT_SCALE)),
            ]
        };
        self.tensors.insert(format!("{name}.weight_scale"), scales);
        for (part, stored) in globals {
            self.tensors.insert(format!("{name}.{part}"), stored);
        }
    }

    pub(super) fn set(&mut self, name: &str, stored: Stored) -> &mut Self {
        self.tensors.insert(name.to_owned(), stored);
        self
    }

    pub(super) fn alter(&mut self, name: &str, alter: impl FnOnce(&mut Stored)) -> &mut Self {
        alter(self.tensors.get_mut(name).expect(name));
        self
    }

    pub(super) fn remove(&mut self, name: &str) -> &mut Self {
        self.tensors.remove(name).expect(name);
        self
    }

    /// Removes every tensor whose name holds `part`.
    pub(super) fn remove_all(&mut self, part: &str) -> &mut Self {
        self.tensors.retain(|name, _| !name.contains(part));
        self
    }

    pub(super) fn config(&mut self, json: &str) -> &mut Self {
        self.config = Some(json.to_owned());
        self
    }

    /// Writes model.safetensors and config.json.
    pub(super) fn write(&self) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        write_tensors(&directory.path().join("model.safetensors"), &self.tensors);
        self.write_config(directory.path());
        directory
    }

    /// Writes `shards` files, tensors dealt out in turn, with an index.
    pub(super) fn write_sharded(&self, shards: usize) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        let mut dealt = vec![BTreeMap::new(); shards];
        let mut weight_map = BTreeMap::new();
        for (at, (name, stored)) in self.tensors.iter().enumerate() {
            dealt[at % shards].insert(name.clone(), stored.clone());
            weight_map.insert(name.clone(), shard_name(at % shards, shards));
        }
        for (shard, tensors) in dealt.iter().enumerate() {
            write_tensors(&directory.path().join(shard_name(shard, shards)), tensors);
        }
        let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
        std::fs::write(index_path(&directory), index.to_string()).unwrap();
        self.write_config(directory.path());
        directory
    }

    pub(super) fn open(&self) -> (TempDir, Checkpoint) {
        let directory = self.write();
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        (directory, checkpoint)
    }

    fn write_config(&self, directory: &Path) {
        if let Some(config) = &self.config {
            std::fs::write(directory.join("config.json"), config).unwrap();
        }
    }
}

pub(super) fn shard_name(shard: usize, shards: usize) -> String {
    format!("model-{:05}-of-{shards:05}.safetensors", shard + 1)
}

pub(super) fn index_path(directory: &TempDir) -> PathBuf {
    directory.path().join("model.safetensors.index.json")
}

pub(super) fn write_tensors(path: &Path, tensors: &BTreeMap<String, Stored>) {
    let views = tensors.iter().map(|(name, stored)| {
        let Stored { dtype, shape, data } = stored;
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}
