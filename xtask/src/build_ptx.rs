//! `cargo xtask build-ptx`: the device crate to `host/ptx`, and whether what is there is what the sources give.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::process;
use crate::ptx::compiler::{Compiler, missing_core_sources};
use crate::ptx::manifest::{self, Manifest, ptx_file};
use crate::ptx::module_text;
use crate::ptx::recipe::TARGETS;

/// Arguments of `build-ptx`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write nothing: rebuild and compare byte by byte. Where the pinned compiler or rust-src is missing, compare the
    /// hashes in the manifest only, and say so.
    #[arg(long)]
    check: bool,
}

/// Runs the verb.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let root = process::workspace_root();
    if arguments.check {
        println!("{}", check(&root, Depth::Rebuild)?.sentence());
        return Ok(());
    }
    let compiler = Compiler::at_hand(&root)?;
    if let Some(reason) = cannot_build(&root, &compiler)? {
        bail!("{reason}");
    }
    // Hashed before the build: an edit during it must show as a difference later.
    let sources_sha256 = manifest::sources_sha256(&root)?;
    let modules = compile_all(&root)?;
    fs::create_dir_all(root.join("host/ptx")).context("cannot create host/ptx")?;
    let mut targets = BTreeMap::new();
    for (target, ptx) in &modules {
        write(&root, &ptx_file(target), ptx)?;
        targets.insert((*target).to_owned(), manifest::sha256(ptx.as_bytes()));
    }
    write(&root, manifest::FILE, &Manifest { sources_sha256, compiler, targets }.to_text()?)
}

/// How thorough a check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Compile again, where that is possible.
    Rebuild,
    /// Compare hashes only.
    HashesOnly,
}

/// Which check has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Checked {
    /// The PTX was compiled again and is the same, byte by byte.
    Rebuilt,
    /// Sources and PTX have the hashes that the manifest says; they were not compiled again, for this reason.
    Hashes(String),
}

impl Checked {
    /// For people.
    pub(crate) fn sentence(&self) -> String {
        let modules = TARGETS.map(|target| ptx_file(target.name)).join(", ");
        match self {
            Self::Rebuilt => format!("{modules}: compiled again, the same bytes"),
            Self::Hashes(reason) => format!(
                "{modules}: sources and PTX have the hashes of {}; not compiled again, because {reason}",
                manifest::FILE
            ),
        }
    }
}

/// Compares `host/ptx` with the sources and returns which check that was.
pub(crate) fn check(root: &Path, depth: Depth) -> Result<Checked> {
    let manifest = Manifest::read(root)?;
    let sources = manifest::sources_sha256(root)?;
    if sources != manifest.sources_sha256 {
        bail!(
            "the device sources have changed since host/ptx was built (SHA-256 {sources}, {} says {}); run `cargo xtask \
             build-ptx` and commit host/ptx",
            manifest::FILE,
            manifest.sources_sha256
        );
    }
    if manifest.targets.keys().map(String::as_str).ne(BTreeSet::from(TARGETS.map(|target| target.name))) {
        bail!("{} does not list the targets of this program; run `cargo xtask build-ptx`", manifest::FILE);
    }
    for (target, expected) in &manifest.targets {
        let file = ptx_file(target);
        let ptx = read(root, &file)?;
        let found = manifest::sha256(ptx.as_bytes());
        if found != *expected {
            bail!("{file} was changed after it was built (SHA-256 {found}, {} says {expected})", manifest::FILE);
        }
        module_text::check(&ptx).with_context(|| format!("{file} breaks a rule"))?;
    }
    if depth == Depth::HashesOnly {
        return Ok(Checked::Hashes("that was not asked for".to_owned()));
    }
    let compiler = Compiler::at_hand(root)?;
    if let Some(reason) = cannot_build(root, &compiler)? {
        return Ok(Checked::Hashes(reason));
    }
    if compiler != manifest.compiler {
        let (found, built) = (&compiler, &manifest.compiler);
        return Ok(Checked::Hashes(format!(
            "the compiler is rustc {} with LLVM {}, and the PTX is from rustc {} with LLVM {}",
            found.rustc, found.llvm, built.rustc, built.llvm
        )));
    }
    for (target, built) in compile_all(root)? {
        let file = ptx_file(target);
        if let Some(line) = first_difference(&read(root, &file)?, &built) {
            bail!("{file} is not what the sources give: line {line} differs; run `cargo xtask build-ptx`");
        }
    }
    Ok(Checked::Rebuilt)
}

/// Why this machine cannot make the committed PTX; nothing if it can.
fn cannot_build(root: &Path, compiler: &Compiler) -> Result<Option<String>> {
    let pinned = manifest::pinned_release(root)?;
    if !compiler.is_release(&pinned) {
        return Ok(Some(format!(
            "the compiler is rustc {}, and rust-toolchain.toml pins {pinned}; run `rustup toolchain install {pinned}`",
            compiler.rustc
        )));
    }
    missing_core_sources(root)
}

/// Compiles every target and checks what came out.
fn compile_all(root: &Path) -> Result<Vec<(&'static str, String)>> {
    let mut modules = Vec::new();
    for target in TARGETS {
        let ptx =
            target.compile(root).with_context(|| format!("cannot compile the device crate for {}", target.name))?;
        module_text::check(&ptx).with_context(|| format!("the PTX for {} breaks a rule", target.name))?;
        modules.push((target.name, ptx));
    }
    Ok(modules)
}

/// The first line, from 1, where the texts differ.
fn first_difference(left: &str, right: &str) -> Option<usize> {
    if left == right {
        return None;
    }
    let same = left.split('\n').zip(right.split('\n')).take_while(|(left, right)| left == right).count();
    Some(same + 1)
}

fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file))
        .with_context(|| format!("cannot read {file}; `cargo xtask build-ptx` writes it"))
}

/// Replaces a file in one step, so that an interrupted run leaves the old one.
fn write(root: &Path, file: &str, text: &str) -> Result<()> {
    let (path, partial) = (root.join(file), root.join(format!("{file}.partial")));
    fs::write(&partial, text)
        .and_then(|()| fs::rename(&partial, &path))
        .with_context(|| format!("cannot write {file}"))?;
    println!("{file}: {} bytes", text.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_different_line_is_counted_from_one() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
        assert_eq!(first_difference("a\nb", "a\nb\nc"), Some(3));
        assert_eq!(first_difference("", "a"), Some(1));
    }

    /// What a user without the device toolchain sees; the rebuild is `cargo xtask verify`'s.
    #[test]
    fn the_committed_ptx_belongs_to_the_sources() {
        let checked = check(&process::workspace_root(), Depth::HashesOnly);
        assert!(matches!(checked, Ok(Checked::Hashes(_))), "{checked:?}");
    }
}
