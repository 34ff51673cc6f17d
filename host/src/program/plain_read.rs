//! Reading parts of files and nothing else: what the file system gives.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// Bytes of one read.
const PIECE_BYTES: u64 = 1 << 20;

/// A part of a file.
pub(super) type Place = (PathBuf, Range<u64>);

/// Bytes of all places.
pub(super) fn bytes_of(places: &[Place]) -> u64 {
    places.iter().map(|(_, range)| range.end - range.start).sum()
}

/// Seconds that `threads` threads take to read all places once, into memory that they use again and again.
pub(super) fn seconds(places: &[Place], threads: usize) -> anyhow::Result<f64> {
    let pieces: Vec<(&Path, Range<u64>)> = places
        .iter()
        .flat_map(|(path, range)| {
            let end = range.end;
            let starts = (range.start..end).step_by(PIECE_BYTES as usize);
            starts.map(move |start| (path.as_path(), start..end.min(start + PIECE_BYTES)))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    thread::scope(|scope| {
        let readers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(|| read_pieces(&pieces, &next))).collect();
        readers.into_iter().try_for_each(|reader| match reader.join() {
            Ok(read) => read,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(start.elapsed().as_secs_f64())
}

fn read_pieces(pieces: &[(&Path, Range<u64>)], next: &AtomicUsize) -> anyhow::Result<()> {
    let mut buffer = vec![0; PIECE_BYTES as usize];
    let mut open: Option<(&Path, File)> = None;
    while let Some((path, range)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
        let mut read = || -> std::io::Result<()> {
            let mut file = match open.take() {
                Some((known, file)) if known == *path => file,
                _ => File::open(path)?,
            };
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(&mut buffer[..(range.end - range.start) as usize])?;
            open = Some((path, file));
            Ok(())
        };
        read().map_err(|error| anyhow::anyhow!("cannot read {}: {error}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_and_a_file_that_ends_early_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, vec![7; 3_000_000]).unwrap();
        let places = vec![(path.clone(), 5..2_999_999), (path.clone(), 9..9)];
        assert_eq!(bytes_of(&places), 2_999_994);
        assert!(seconds(&places, 3).unwrap() > 0.0);
        let error = seconds(&[(path, 0..3_000_001)], 2).unwrap_err().to_string();
        assert!(error.starts_with("cannot read ") && error.contains("/a: "), "{error}");
    }
}
