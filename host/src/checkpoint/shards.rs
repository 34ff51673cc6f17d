//! The files of a checkpoint: which they are, and where each tensor is in them.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;

use super::error::CheckpointError;
use super::header::MappedFile;
use super::naming;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// A tensor by its place in [`Shards`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TensorId(u32);

/// Where a tensor is and what it is.
#[derive(Debug)]
pub(super) struct TensorEntry {
    shard: u32,
    pub(super) dtype: Dtype,
    pub(super) shape: Box<[usize]>,
    start: usize,
    end: usize,
}

/// All files of a checkpoint, each mapped once, and one table of their tensors.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<MappedFile>,
    tensors: Vec<TensorEntry>,
}

impl Shards {
    /// Maps the files at `path` and calls `visit` once for every tensor, in file order. Names are not kept
    /// afterwards: a large model has hundreds of thousands.
    pub(super) fn open(
        path: &Path,
        mut visit: impl FnMut(&str, TensorId, &TensorEntry),
    ) -> Result<Self, CheckpointError> {
        let files = Files::find(path)?;
        let mut shards = Self { files: Vec::with_capacity(files.paths.len()), tensors: Vec::new() };
        let mut by_name: HashMap<String, TensorId> = HashMap::new();
        for path in &files.paths {
            let (file, metadata) = MappedFile::open(path)?;
            let shard = shards.files.len() as u32;
            shards.files.push(file);
            for name in metadata.offset_keys() {
                if let Some(index) = &files.index
                    && index.shard_of(&name).is_some_and(|shard| shard != path)
                {
                    continue;
                }
                let Some(info) = metadata.info(&name) else {
                    continue;
                };
                let id = TensorId(shards.tensors.len() as u32);
                let entry = TensorEntry {
                    shard,
                    dtype: info.dtype,
                    shape: info.shape.as_slice().into(),
                    start: info.data_offsets.0,
                    end: info.data_offsets.1,
                };
                match by_name.entry(name) {
                    Entry::Occupied(first) => {
                        let first_shard = shards.tensors[first.get().0 as usize].shard;
                        return Err(CheckpointError::DuplicateTensor {
                            tensor: first.key().clone(),
                            first: shards.files[first_shard as usize].path.clone(),
                            second: path.clone(),
                        });
                    }
                    Entry::Vacant(slot) => {
                        visit(slot.key(), id, &entry);
                        slot.insert(id);
                    }
                }
                shards.tensors.push(entry);
            }
        }
        if let Some(index) = files.index {
            index.check_all_found(&by_name)?;
        }
        Ok(shards)
    }

    /// The files, in the order in which they were read.
    pub(super) fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Number of tensors, experts' or not.
    pub(super) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    pub(super) fn entry(&self, id: TensorId) -> &TensorEntry {
        &self.tensors[id.0 as usize]
    }

    /// The tensor's bytes in the map.
    pub(super) fn bytes(&self, id: TensorId) -> &[u8] {
        let entry = self.entry(id);
        self.files[entry.shard as usize].bytes(entry.start, entry.end)
    }

    /// The tensor's file and its place in it.
    pub(super) fn place(&self, id: TensorId) -> (&Path, Range<u64>) {
        let entry = self.entry(id);
        let file = &self.files[entry.shard as usize];
        (&file.path, file.place(entry.start, entry.end))
    }

    /// Lets the system begin to read the tensor.
    pub(super) fn will_need(&self, id: TensorId) {
        let entry = self.entry(id);
        self.files[entry.shard as usize].will_need(entry.start, entry.end);
    }

    /// The value of a tensor that was checked to be one F32.
    pub(super) fn scalar(&self, id: TensorId) -> f32 {
        let bytes = self.bytes(id).first_chunk();
        bytes.map_or(f32::NAN, |&bytes| f32::from_le_bytes(bytes))
    }
}

/// The files that make up a checkpoint, in the order in which they are read.
struct Files {
    paths: Vec<PathBuf>,
    index: Option<ShardIndex>,
}

impl Files {
    /// A file itself; in a directory the index' shards, else model.safetensors, else every safetensors file.
    fn find(path: &Path) -> Result<Self, CheckpointError> {
        let kind = std::fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
        let without_index = |paths| Self { paths, index: None };
        if !kind.is_dir() {
            return Ok(without_index(vec![path.to_owned()]));
        }
        let index = path.join(INDEX_FILE);
        if is_listed(&index)? {
            return Self::of_index(index);
        }
        let single = path.join(SINGLE_FILE);
        if is_listed(&single)? {
            return Ok(without_index(vec![single]));
        }
        let mut paths = Vec::new();
        for file in std::fs::read_dir(path).map_err(CheckpointError::io(path, "list"))? {
            let file = file.map_err(CheckpointError::io(path, "list"))?.path();
            if file.extension().is_some_and(|e| e == "safetensors") {
                paths.push(file);
            }
        }
        if paths.is_empty() {
            return Err(CheckpointError::NoSafetensors { path: path.to_owned() });
        }
        paths.sort();
        for file in &paths {
            check_siblings(file)?;
        }
        Ok(without_index(paths))
    }

    fn of_index(path: PathBuf) -> Result<Self, CheckpointError> {
        let index = ShardIndex::read(path)?;
        for (name, file) in &index.shards {
            if !file.is_file() {
                return Err(CheckpointError::MissingShard { named_by: index.path, shard: name.clone() });
            }
        }
        Ok(Self { paths: index.shards.values().cloned().collect(), index: Some(index) })
    }
}

/// Whether a directory lists this name, be it a link to a file that is not there: then the file is missing, which
/// must not pass for a model that never had it.
pub(super) fn is_listed(path: &Path) -> Result<bool, CheckpointError> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(CheckpointError::io(path, "open")(error)),
    }
}

/// Without an index only the file names tell that a shard is missing: `…-00001-of-00003.safetensors`.
fn check_siblings(path: &Path) -> Result<(), CheckpointError> {
    let Some((stem, number, total)) = path.file_name().and_then(|n| n.to_str()).and_then(numbered) else {
        return Ok(());
    };
    let digits = number.len();
    let name = |shard: usize| format!("{stem}-{shard:0digits$}-of-{total}.safetensors");
    let exists = |shard: usize| path.with_file_name(name(shard)).exists();
    // The first shard speaks for all of them, so that each name is looked up once. Files counted from 0 are
    // left alone: their last number says nothing.
    if exists(0) || (exists(1) && number.parse() != Ok(1)) {
        return Ok(());
    }
    let count: usize = total.parse().unwrap_or(0);
    match (1..=count).find(|&shard| !exists(shard)) {
        None => Ok(()),
        Some(missing) => Err(CheckpointError::MissingShard { named_by: path.to_owned(), shard: name(missing) }),
    }
}

/// `model-00001-of-00003.safetensors` as `("model", "00001", "00003")`.
fn numbered(file_name: &str) -> Option<(&str, &str, &str)> {
    let (rest, total) = file_name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(number) && digits(total)).then_some((stem, number, total))
}

/// `model.safetensors.index.json`.
struct ShardIndex {
    path: PathBuf,
    /// Shard file by tensor.
    weight_map: HashMap<String, String>,
    /// Path by shard file, sorted.
    shards: BTreeMap<String, PathBuf>,
}

impl ShardIndex {
    fn read(path: PathBuf) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: HashMap<String, String>,
        }
        let text = std::fs::read(&path).map_err(CheckpointError::io(&path, "read"))?;
        let index: Result<Index, _> = serde_json::from_slice(&text);
        let Index { weight_map } = index.map_err(|source| {
            if source.is_data() {
                CheckpointError::BadIndex {
                    path: path.clone(),
                    reason: format!("expected a weight_map from tensor names to file names, got: {source}"),
                }
            } else {
                CheckpointError::BadJson { path: path.clone(), source }
            }
        })?;
        let mut shards = BTreeMap::new();
        for shard in weight_map.values() {
            if shards.contains_key(shard) {
                continue;
            }
            let inside = Path::new(shard).components().all(|c| matches!(c, Component::Normal(_)));
            if shard.is_empty() || !inside {
                return Err(CheckpointError::BadIndex {
                    path,
                    reason: format!("the shard {shard:?} is not a file name inside the directory"),
                });
            }
            shards.insert(shard.clone(), path.with_file_name(shard));
        }
        Ok(Self { path, weight_map, shards })
    }

    /// The file that holds a tensor; `None` when the index does not list the tensor.
    fn shard_of(&self, tensor: &str) -> Option<&PathBuf> {
        self.shards.get(self.weight_map.get(tensor)?)
    }

    /// Every expert tensor that the index lists must have been found.
    fn check_all_found(self, by_name: &HashMap<String, TensorId>) -> Result<(), CheckpointError> {
        let lost = self
            .weight_map
            .into_iter()
            .filter(|(tensor, _)| !by_name.contains_key(tensor) && naming::parse(tensor).is_some())
            .min();
        match lost {
            None => Ok(()),
            Some((tensor, shard)) => Err(CheckpointError::MissingFromShard { tensor, index: self.path, shard }),
        }
    }
}
