//! The loader on real and on synthetic checkpoints.

mod builder;
mod config;
mod files;
mod golden;
mod inputs;
mod scales;
mod sizes;
mod tensors;

use super::{Checkpoint, CheckpointError};

/// The error of opening a path.
fn open_error(path: impl AsRef<std::path::Path>) -> CheckpointError {
    Checkpoint::open(path).expect_err("must not open")
}

/// Asserts that a message holds every one of `parts`.
fn assert_says(error: &CheckpointError, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
