//! A layer's inputs, expected outputs and outputs in safetensors files.

use std::borrow::Cow;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo, View};

use super::error::CheckpointError;
use super::header::MappedFile;
use super::shards::is_listed;

const HIDDEN: &str = "hidden";
const TOPK_IDS: &str = "topk_ids";
const TOPK_WEIGHTS: &str = "topk_weights";

/// Hidden states, `[tokens, hidden]` row by row, in the precision of the file.
#[derive(Debug, Clone, PartialEq)]
pub enum HiddenStates {
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// IEEE half precision.
    F16(Vec<f16>),
}

/// What goes into a layer: hidden states and the router's choice.
#[derive(Debug)]
pub struct LayerInputs {
    /// Tokens; may be 0.
    pub tokens: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Experts per token.
    pub topk: usize,
    /// Hidden states, `[tokens, hidden_size]`.
    pub hidden: HiddenStates,
    /// Global expert ids, `[tokens, topk]`; negative ones are skipped.
    pub topk_ids: Vec<i32>,
    /// Router weights, `[tokens, topk]`.
    pub topk_weights: Vec<f32>,
    file: MappedFile,
    metadata: Metadata,
}

impl LayerInputs {
    /// Reads `hidden` (BF16 or F16, `[T, H]`), `topk_ids` (I32 or I64, `[T, k]`) and `topk_weights` (F32 or BF16,
    /// `[T, k]`) from a safetensors file. The file must not be rewritten while this is alive.
    ///
    /// # Errors
    /// A [`CheckpointError`] that names the file, or the tensor that is missing, of another dtype, or of a shape
    /// that does not go with the others.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let (file, metadata) = MappedFile::open(path.as_ref())?;
        let (info, bytes) = find(&file, &metadata, HIDDEN)?;
        let hidden = match info.dtype {
            Dtype::BF16 => HiddenStates::Bf16(decode(bytes, bf16::from_le_bytes)),
            Dtype::F16 => HiddenStates::F16(decode(bytes, f16::from_le_bytes)),
            found => return Err(wrong_dtype(HIDDEN, "BF16 or F16", found)),
        };
        let &[tokens, hidden_size] = info.shape.as_slice() else {
            return Err(wrong_shape(HIDDEN, "[T, H]".to_owned(), info));
        };

        let (info, bytes) = find(&file, &metadata, TOPK_IDS)?;
        let topk = match *info.shape.as_slice() {
            [rows, topk] if rows == tokens && topk > 0 => topk,
            _ => return Err(wrong_shape(TOPK_IDS, format!("[{tokens}, k] with k above 0"), info)),
        };
        let topk_ids = match info.dtype {
            Dtype::I32 => decode(bytes, i32::from_le_bytes),
            Dtype::I64 => narrow_ids(&decode(bytes, i64::from_le_bytes), topk)?,
            found => return Err(wrong_dtype(TOPK_IDS, "I32 or I64", found)),
        };

        let (info, bytes) = find(&file, &metadata, TOPK_WEIGHTS)?;
        if info.shape != [tokens, topk] {
            let expected = format!("[{tokens}, {topk}]");
            return Err(wrong_shape(TOPK_WEIGHTS, expected, info));
        }
        let topk_weights = match info.dtype {
            Dtype::F32 => decode(bytes, f32::from_le_bytes),
            Dtype::BF16 => decode(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            found => return Err(wrong_dtype(TOPK_WEIGHTS, "F32 or BF16", found)),
        };
        Ok(Self { tokens, hidden_size, topk, hidden, topk_ids, topk_weights, file, metadata })
    }

    /// Checks that every expert that a token picks is in a layer of `experts` experts; negative ids pick none.
    ///
    /// # Errors
    /// [`CheckpointError::NoSuchExpert`] for the first that is not.
    pub fn check_experts(&self, experts: usize) -> Result<(), CheckpointError> {
        let beyond = |&id: &i32| usize::try_from(id).is_ok_and(|id| id >= experts);
        match self.topk_ids.iter().position(beyond) {
            None => Ok(()),
            Some(at) => Err(CheckpointError::NoSuchExpert {
                path: self.file.path.clone(),
                tensor: TOPK_IDS.to_owned(),
                token: at / self.topk,
                choice: at % self.topk,
                id: self.topk_ids[at],
                experts,
            }),
        }
    }

    /// Element type of another tensor of the file; `None` when there is no such tensor.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.metadata.info(name).map(|info| info.dtype)
    }

    /// Another tensor of the file, `[tokens, hidden_size]` in F32, BF16 or F16, widened to f32 (exactly).
    ///
    /// # Errors
    /// [`CheckpointError::MissingInput`], [`CheckpointError::WrongShape`] or [`CheckpointError::WrongDtype`].
    pub fn expected(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let (info, bytes) = find(&self.file, &self.metadata, name)?;
        if info.shape != [self.tokens, self.hidden_size] {
            let expected = format!("[{}, {}]", self.tokens, self.hidden_size);
            return Err(wrong_shape(name, expected, info));
        }
        match info.dtype {
            Dtype::F32 => Ok(decode(bytes, f32::from_le_bytes)),
            Dtype::BF16 => Ok(decode(bytes, |b| bf16::from_le_bytes(b).to_f32())),
            Dtype::F16 => Ok(decode(bytes, |b| f16::from_le_bytes(b).to_f32())),
            found => Err(wrong_dtype(name, "F32, BF16 or F16", found)),
        }
    }
}

fn find<'a>(
    file: &'a MappedFile,
    metadata: &'a Metadata,
    tensor: &str,
) -> Result<(&'a TensorInfo, &'a [u8]), CheckpointError> {
    match metadata.info(tensor) {
        Some(info) => Ok((info, file.bytes(info.data_offsets.0, info.data_offsets.1))),
        None => Err(CheckpointError::MissingInput {
            path: file.path.clone(),
            tensor: tensor.to_owned(),
            have: some_of(&metadata.offset_keys()),
        }),
    }
}

/// The first of these names, and how many more there are: a model has thousands.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names {
        [] => "nothing".to_owned(),
        [shown @ .., _] if shown.len() < SHOWN => names.join(", "),
        _ => format!("{} and {} more", names[..SHOWN].join(", "), names.len() - SHOWN),
    }
}

/// Little-endian elements; the bytes need no alignment.
fn decode<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| decode(b)).collect()
}

fn narrow_ids(ids: &[i64], topk: usize) -> Result<Vec<i32>, CheckpointError> {
    let narrow = |(at, &value): (usize, &i64)| {
        i32::try_from(value).map_err(|_| CheckpointError::IdOutOfRange {
            tensor: TOPK_IDS.to_owned(),
            token: at / topk,
            choice: at % topk,
            value,
        })
    };
    ids.iter().enumerate().map(narrow).collect()
}

fn wrong_dtype(tensor: &str, expected: &'static str, found: Dtype) -> CheckpointError {
    CheckpointError::WrongDtype { tensor: tensor.to_owned(), expected, found }
}

fn wrong_shape(tensor: &str, expected: String, info: &TensorInfo) -> CheckpointError {
    CheckpointError::WrongShape {
        tensor: tensor.to_owned(),
        expected,
        meaning: "T tokens, H elements of a hidden state, k experts per token",
        found: info.shape.clone(),
    }
}

/// Elements to write.
#[derive(Debug, Clone, Copy)]
pub enum OutputData<'a> {
    /// Written as F32.
    F32(&'a [f32]),
    /// Written as BF16.
    Bf16(&'a [bf16]),
}

impl OutputData<'_> {
    const fn elems(self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }
}

/// Checks that [`write_output`] can write to `path`, as far as that can be known beforehand.
///
/// # Errors
/// [`CheckpointError::Io`], when there is something else than a file that may be written, or no directory for one.
pub fn check_output(path: impl AsRef<Path>) -> Result<(), CheckpointError> {
    let target = output_target(path.as_ref())?;
    let temporary = create_beside(&target)?;
    fs::remove_file(&temporary).map_err(CheckpointError::io(temporary, "remove"))
}

/// Writes one tensor as a safetensors file. The file appears whole or not at all: it is written beside its place
/// and then renamed, replacing a file of that name. A link stays a link, and what it points to is replaced.
///
/// A process that is killed meanwhile leaves a hidden file whose name ends in `.tmp`, and what was there before.
///
/// # Errors
/// [`CheckpointError::WrongOutput`] when the data do not fill the shape, [`CheckpointError::Io`] otherwise; nothing
/// is left behind then.
pub fn write_output(
    path: impl AsRef<Path>,
    name: &str,
    shape: &[usize],
    data: OutputData<'_>,
) -> Result<(), CheckpointError> {
    let path = path.as_ref();
    let elements = data.elems();
    if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) != Some(elements) {
        return Err(CheckpointError::WrongOutput { tensor: name.to_owned(), shape: shape.to_vec(), elements });
    }
    let target = output_target(path)?;
    let temporary = create_beside(&target)?;
    let written = write_file(&temporary, name, OutputView { shape, data })
        .and_then(|()| fs::rename(&temporary, &target))
        .map_err(CheckpointError::io(path, "write"));
    if written.is_err() {
        // The first error says what went wrong; a failed clean-up adds nothing to it.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The file that an output replaces or becomes. A device, a pipe or a file that may not be written is none: renaming
/// would take its place without asking.
fn output_target(path: &Path) -> Result<PathBuf, CheckpointError> {
    let refused = |why| Err(CheckpointError::io(path, "write")(std::io::Error::other(why)));
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return refused("it names a directory, not a file");
    }
    if !is_listed(path)? {
        return Ok(path.to_owned());
    }
    let target = fs::canonicalize(path).map_err(CheckpointError::io(path, "write"))?;
    let found = fs::metadata(&target).map_err(CheckpointError::io(path, "write"))?;
    if !found.is_file() {
        return refused("it is there and is not a regular file");
    }
    if found.permissions().readonly() {
        return refused("it is there and is read-only");
    }
    Ok(target)
}

/// Creates a new, empty file in the directory of `path`.
fn create_beside(path: &Path) -> Result<PathBuf, CheckpointError> {
    let mut attempt = 0u32;
    loop {
        let process = std::process::id();
        let temporary = path.with_file_name(format!(".nvfp4-moe.{process}.{attempt}.tmp"));
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(_) => return Ok(temporary),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => attempt += 1,
            Err(error) => return Err(CheckpointError::io(path, "write")(error)),
        }
    }
}

fn write_file(path: &Path, name: &str, view: OutputView<'_>) -> std::io::Result<()> {
    safetensors::serialize_to_file([(name, view)], None, path).map_err(|error| match error {
        SafeTensorError::IoError(error) => error,
        other => std::io::Error::other(other),
    })?;
    fs::File::open(path)?.sync_all()
}

struct OutputView<'a> {
    shape: &'a [usize],
    data: OutputData<'a>,
}

impl View for OutputView<'_> {
    fn dtype(&self) -> Dtype {
        match self.data {
            OutputData::F32(_) => Dtype::F32,
            OutputData::Bf16(_) => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // safetensors is little-endian, as is every machine with one of the GPUs this is for.
        const { assert!(cfg!(target_endian = "little")) };
        Cow::Borrowed(match self.data {
            OutputData::F32(data) => bytemuck::cast_slice(data),
            OutputData::Bf16(data) => bytemuck::cast_slice(data),
        })
    }

    fn data_len(&self) -> usize {
        self.data().len()
    }
}
