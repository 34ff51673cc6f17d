//! `host/ptx/manifest.json`: which sources and which compiler the committed PTX is from.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::compiler::Compiler;
use super::recipe::TARGETS;

/// Where the manifest is, from the workspace's root.
pub(crate) const FILE: &str = "host/ptx/manifest.json";

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// See [`sources_sha256`].
    pub(crate) sources_sha256: String,
    /// What compiled them.
    pub(crate) compiler: Compiler,
    /// SHA-256 of each target's PTX.
    pub(crate) targets: BTreeMap<String, String>,
}

impl Manifest {
    /// Reads the committed manifest.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let text = fs::read_to_string(root.join(FILE))
            .with_context(|| format!("cannot read {FILE}; `cargo xtask build-ptx` writes it"))?;
        serde_json::from_str(&text).with_context(|| format!("{FILE} is not a manifest"))
    }

    /// The text of the file.
    pub(crate) fn to_text(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }
}

/// Where a target's PTX is, from the workspace's root.
pub(crate) fn ptx_file(target: &str) -> String {
    format!("host/ptx/{target}.ptx")
}

/// The hash of everything in the workspace that the PTX comes from: each file of the device crate, the profile that it
/// is compiled with and that one's parent, and the flags of every target.
pub(crate) fn sources_sha256(root: &Path) -> Result<String> {
    let mut files = vec![root.join("device/Cargo.toml")];
    collect_files(&root.join("device/src"), &mut files)?;
    let mut parts = BTreeMap::new();
    for file in files {
        let name = file.strip_prefix(root)?.components().map(|part| part.as_os_str().to_string_lossy());
        let name = name.collect::<Vec<_>>().join("/");
        parts.insert(name, fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    let workspace = fs::read_to_string(root.join("Cargo.toml")).context("cannot read the workspace's Cargo.toml")?;
    for section in ["[profile.ptx]", "[profile.release]"] {
        let text = section_of(&workspace, section).with_context(|| format!("Cargo.toml has no section {section}"))?;
        parts.insert(section.to_owned(), text.into_bytes());
    }
    for target in TARGETS {
        parts.insert(format!("flags of {}", target.name), target.rustc_flags().join("\n").into_bytes());
    }
    let mut hash = Sha256::new();
    for (name, content) in &parts {
        // The lengths keep the end of one part from passing for the start of the next.
        for bytes in [name.as_bytes(), content] {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        }
    }
    Ok(hex(&hash.finalize()))
}

/// SHA-256 of `bytes`, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The Rust release that rust-toolchain.toml pins.
pub(crate) fn pinned_release(root: &Path) -> Result<String> {
    let text = fs::read_to_string(root.join("rust-toolchain.toml")).context("cannot read rust-toolchain.toml")?;
    let channel = text.lines().find_map(|line| line.trim().strip_prefix("channel"));
    let release = channel.and_then(|rest| rest.split('"').nth(1));
    Ok(release.context("rust-toolchain.toml names no channel")?.to_owned())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn collect_files(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let listing = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    for entry in listing {
        let path = entry?.path();
        if path.is_dir() {
            collect_files(&path, files)?;
        } else {
            files.push(path);
        }
    }
    if files.is_empty() {
        bail!("{} is empty", dir.display());
    }
    Ok(())
}

/// The settings of one section of a TOML file, without comments and empty lines.
fn section_of(toml: &str, header: &str) -> Option<String> {
    let mut lines = toml.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.find(|line| *line == header)?;
    let settings = lines.take_while(|line| !line.starts_with('[')).filter(|line| !line.is_empty());
    Some(settings.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    #[test]
    fn a_section_ends_at_the_next_header() {
        let toml = "[a]\nx = 1\n\n[profile.ptx]\n# why\nlto = \"fat\" # all\n\ndebug = false\n[b]\ny = 2\n";
        assert_eq!(section_of(toml, "[profile.ptx]").as_deref(), Some("lto = \"fat\"\ndebug = false"));
        assert_eq!(section_of(toml, "[b]").as_deref(), Some("y = 2"));
        assert_eq!(section_of(toml, "[c]"), None);
    }

    #[test]
    fn sha256_is_the_published_one() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn the_pinned_release_has_three_numbers() {
        let release = pinned_release(&process::workspace_root()).expect("rust-toolchain.toml is there");
        assert_eq!(release.split('.').filter(|part| part.parse::<u32>().is_ok()).count(), 3, "{release}");
    }
}
