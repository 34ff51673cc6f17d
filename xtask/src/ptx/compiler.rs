//! The compiler at hand: which one it is, and whether it can build core.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::process;

/// Which compiler; the PTX depends on every part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Compiler {
    /// As `rustc --version` says, with the commit and the date.
    pub(crate) rustc: String,
    /// Version of its LLVM.
    pub(crate) llvm: String,
}

impl Compiler {
    /// The compiler that cargo uses in `root`.
    pub(crate) fn at_hand(root: &Path) -> Result<Self> {
        let text = process::output_of(rustc(root).arg("-vV"))?;
        Self::parse(&text).context("`rustc -vV` does not say which version it is")
    }

    fn parse(text: &str) -> Option<Self> {
        let first = text.lines().next()?.strip_prefix("rustc ")?;
        let llvm = text.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
        Some(Self { rustc: first.trim().to_owned(), llvm: llvm.trim().to_owned() })
    }

    /// Whether this is the release that rust-toolchain.toml pins.
    pub(crate) fn is_release(&self, pinned: &str) -> bool {
        self.rustc.split_whitespace().next() == Some(pinned)
    }
}

/// Why core cannot be built from its sources here; nothing if it can be.
pub(crate) fn missing_core_sources(root: &Path) -> Result<Option<String>> {
    let sysroot = PathBuf::from(process::output_of(rustc(root).args(["--print", "sysroot"]))?.trim());
    let found = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs").is_file();
    Ok((!found).then(|| {
        "the sources of core are not installed for this toolchain; run `rustup component add rust-src`".to_owned()
    }))
}

fn rustc(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.current_dir(root);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_text_gives_release_commit_and_llvm() {
        let text = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\nrelease: 1.95.0\nLLVM version: 22.1.2\n";
        let compiler = Compiler::parse(text).expect("both lines are there");
        assert_eq!(compiler.rustc, "1.95.0 (59807616e 2026-04-14)");
        assert_eq!(compiler.llvm, "22.1.2");
        assert!(compiler.is_release("1.95.0"));
        assert!(!compiler.is_release("1.95"));
        assert_eq!(Compiler::parse("gcc 14"), None);
    }
}
