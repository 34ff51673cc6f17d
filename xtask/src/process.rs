//! Child processes of the workspace, and where the workspace is.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The workspace's root. Cargo says at run time where this crate is, so that a copy of the workspace works too; the
/// place where it was compiled is for whoever starts the program without cargo.
pub(crate) fn workspace_root() -> PathBuf {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// The directory of build output, where cargo puts it too.
pub(crate) fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// A cargo command in `root`: the cargo that started this program, hence the same toolchain.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` tells this program about itself is not meant for the next cargo.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
        command.env_remove(name);
    }
    command.current_dir(root).stdin(Stdio::null());
    command
}

/// Runs to the end with everything that it says on stderr: stdout belongs to this program's own report.
pub(crate) fn run_aloud(command: &mut Command) -> Result<()> {
    let line = line_of(command);
    eprintln!("$ {line}");
    let status =
        command.stdout(Stdio::from(io::stderr())).status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs to the end and returns what it printed to stdout.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let line = line_of(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command as one would type it: the program without its directory.
fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_else(|| OsStr::new("?"));
    let words = std::iter::once(name).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
