//! One safetensors file, memory-mapped, with its header parsed once.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::CheckpointError;

/// Bytes of the header's length, at the start of every safetensors file.
const LENGTH_BYTES: usize = 8;

/// Bytes that a header may have; beyond, the file is something else.
const MAX_HEADER_BYTES: usize = 1 << 30;

/// A mapped safetensors file.
#[derive(Debug)]
pub(super) struct MappedFile {
    pub(super) path: PathBuf,
    map: Mmap,
    /// Where the tensors' bytes start: the offsets of the header count from here.
    data_start: usize,
}

impl MappedFile {
    /// Maps the file and parses its header. Every byte range of the header is within the file.
    pub(super) fn open(path: &Path) -> Result<(Self, Metadata), CheckpointError> {
        // Before it is opened: opening a pipe would wait for somebody who writes to it.
        if !std::fs::metadata(path).map_err(CheckpointError::io(path, "open"))?.is_file() {
            return Err(CheckpointError::io(path, "open")(std::io::Error::other("it is not a regular file")));
        }
        let file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
        // SAFETY: the map is read-only and private to this process' readers. What Rust cannot check is that no
        // other process shortens or rewrites the file while it is mapped; that is the contract of opening a
        // checkpoint, stated at `Checkpoint::open`.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path, "map"))?;
        let (data_start, metadata) = parse_header(path, &map)?;
        let path = path.to_owned();
        Ok((Self { path, map, data_start }, metadata))
    }

    /// The bytes of a tensor, from its offsets in the header.
    pub(super) fn bytes(&self, start: usize, end: usize) -> &[u8] {
        &self.map[self.data_start + start..self.data_start + end]
    }

    /// Where in the file the bytes of a tensor are.
    pub(super) fn place(&self, start: usize, end: usize) -> Range<u64> {
        (self.data_start + start) as u64..(self.data_start + end) as u64
    }

    /// Lets the system begin to read the bytes of a tensor.
    pub(super) fn will_need(&self, start: usize, end: usize) {
        // A hint: where it is refused, the bytes are read when they are touched.
        #[cfg(unix)]
        let _ = self.map.advise_range(memmap2::Advice::WillNeed, self.data_start + start, end - start);
        #[cfg(not(unix))]
        let _ = (start, end);
    }
}

fn parse_header(path: &Path, file: &[u8]) -> Result<(usize, Metadata), CheckpointError> {
    let truncated = |expected: usize| CheckpointError::TruncatedFile {
        path: path.to_owned(),
        expected: expected as u64,
        found: file.len() as u64,
    };
    let bad = |reason: String| CheckpointError::BadHeader { path: path.to_owned(), reason };
    let length = file.first_chunk::<LENGTH_BYTES>().ok_or_else(|| truncated(LENGTH_BYTES))?;
    let length = u64::from_le_bytes(*length);
    let header_bytes = usize::try_from(length).ok().filter(|&bytes| bytes <= MAX_HEADER_BYTES).ok_or_else(|| {
        bad(format!("its header would have {length} bytes, more than the {MAX_HEADER_BYTES} that are allowed"))
    })?;
    let data_start = LENGTH_BYTES + header_bytes;
    let header = file.get(LENGTH_BYTES..data_start).ok_or_else(|| truncated(data_start))?;
    let metadata: Metadata = serde_json::from_slice(header)
        .map_err(|error| wrong_byte_count(path, header).unwrap_or_else(|| bad(format!("its header says: {error}"))))?;
    let expected = data_start
        .checked_add(metadata.data_len())
        .ok_or_else(|| bad("its tensors are larger than memory".to_owned()))?;
    if file.len() < expected {
        return Err(truncated(expected));
    }
    if file.len() > expected {
        return Err(bad(format!("its header describes {expected} bytes, the file has {}", file.len())));
    }
    Ok((data_start, metadata))
}

/// Looks, in a header that was refused, for the tensor whose byte range does not fit its dtype and shape.
fn wrong_byte_count(path: &Path, header: &[u8]) -> Option<CheckpointError> {
    let entries: HashMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let mut wrong: Vec<_> = entries
        .into_iter()
        .filter_map(|(tensor, entry)| {
            let info: TensorInfo = serde_json::from_value(entry).ok()?;
            let expected = bytes_of(info.dtype, &info.shape)?;
            let found = info.data_offsets.1.checked_sub(info.data_offsets.0)?;
            (expected != found).then_some((tensor, expected, found))
        })
        .collect();
    wrong.sort();
    let (tensor, expected, found) = wrong.into_iter().next()?;
    Some(CheckpointError::WrongByteCount {
        path: path.to_owned(),
        tensor,
        expected: expected as u64,
        found: found as u64,
    })
}

/// Bytes of a tensor; `None` when they overflow or are no whole number.
fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    let bits = elems.checked_mul(dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}
