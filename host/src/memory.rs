//! Host memory, asked for so that a refusal is an error in words rather than the end of the process.

use thiserror::Error;

/// Memory that the machine does not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "{what} would take {bytes} bytes of memory, which this machine does not give; ask for fewer tokens or a smaller layer"
)]
pub struct OutOfMemory {
    /// What it is for.
    pub what: &'static str,
    /// Bytes asked for.
    pub bytes: usize,
}

impl OutOfMemory {
    const fn of<T>(what: &'static str, len: usize) -> Self {
        Self { what, bytes: len.saturating_mul(size_of::<T>()) }
    }
}

/// `len` zeros.
///
/// # Errors
/// [`OutOfMemory`].
pub fn zeros<T: bytemuck::Zeroable>(what: &'static str, len: usize) -> Result<Vec<T>, OutOfMemory> {
    bytemuck::try_zeroed_vec(len).map_err(|()| OutOfMemory::of::<T>(what, len))
}

/// An empty vector with room for `len` elements.
///
/// # Errors
/// [`OutOfMemory`].
pub fn room<T>(what: &'static str, len: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| OutOfMemory::of::<T>(what, len))?;
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_a_sentence() {
        assert_eq!(zeros::<u32>("numbers", 3), Ok(vec![0; 3]));
        assert!(room::<u32>("numbers", 3).unwrap().capacity() >= 3);
        for len in [usize::MAX, 1 << 61, 1 << 58] {
            let error = zeros::<u64>("numbers", len).unwrap_err();
            assert_eq!(error, OutOfMemory { what: "numbers", bytes: len.saturating_mul(8) });
            assert_eq!(room::<u64>("numbers", len).unwrap_err(), error);
            assert!(error.to_string().starts_with("numbers would take"), "{error}");
        }
    }
}
