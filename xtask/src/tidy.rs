//! Rules that no compiler checks: the invariants of ARCHITECTURE.md, sizes, and documents that name files.
//!
//! An ordinary test of this crate runs them; `cargo xtask tidy` runs nothing else.

mod documents;
mod sources;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::process;

/// A file of the workspace: its path from the root, with `/`, and its text.
#[derive(Clone, Debug)]
struct File {
    path: String,
    text: String,
}

/// Prints what breaks a rule; whether nothing does.
pub(crate) fn run() -> Result<bool> {
    let found = violations(&process::workspace_root())?;
    for violation in &found {
        println!("{violation}");
    }
    println!("{} violations", found.len());
    Ok(found.is_empty())
}

/// Everything in the workspace that breaks a rule, a sentence each.
fn violations(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    collect(root, "", &mut files)?;
    files.sort_by(|left, right| left.path.cmp(&right.path));
    let mut found = Vec::new();
    for file in &files {
        match file.path.rsplit('.').next() {
            Some("rs") => found.extend(sources::check(file)),
            Some("md") => found.extend(documents::check(file, |path| root.join(path).exists())),
            Some("toml") => found.extend(sources::check_manifest(file)),
            _ => {}
        }
    }
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        if !root.join(licence).is_file() {
            found.push(format!("{licence} is missing"));
        }
    }
    Ok(found)
}

/// Reads every text that has rules; not what git or cargo made.
fn collect(root: &Path, dir: &str, files: &mut Vec<File>) -> Result<()> {
    let listing = fs::read_dir(root.join(dir)).with_context(|| format!("cannot list {dir}"))?;
    for entry in listing {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if dir.is_empty() { name.clone() } else { format!("{dir}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !name.starts_with('.') && name != "target" {
                collect(root, &path, files)?;
            }
        } else if [".rs", ".md", ".toml"].iter().any(|end| name.ends_with(end)) && kind.is_file() {
            let text = fs::read_to_string(entry.path()).with_context(|| format!("cannot read {path}"))?;
            files.push(File { path, text });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let found = violations(&process::workspace_root()).expect("the workspace can be read");
        assert!(found.is_empty(), "\n{}\n", found.join("\n"));
    }
}
