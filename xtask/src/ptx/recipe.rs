//! How the device crate becomes PTX: the targets, and the one cargo command a target.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::module_text;
use crate::process;

/// One PTX module: `host/ptx/NAME.ptx`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Name of the file, and of the build's directory.
    pub(crate) name: &'static str,
    /// What rustc calls the processor.
    pub(crate) cpu: &'static str,
    /// Features of the processor: the PTX ISA version.
    pub(crate) features: &'static str,
    /// Which kernels the module holds: the device crate's `nvfp4_arch`, any number of values.
    pub(crate) arch: &'static [&'static str],
}

/// Every module that is committed. Each is one build of the whole device crate.
pub(crate) const TARGETS: [Target; 3] = [
    Target { name: "sm_80", cpu: "sm_80", features: "+ptx80", arch: &["sm80"] },
    // What only this architecture has: wgmma. The kernel for few slots is the portable one.
    Target { name: "sm_90a", cpu: "sm_90a", features: "+ptx80", arch: &["sm80", "sm90"] },
    // The family: sm_120 and sm_121, with what both have beyond the baseline.
    Target { name: "sm_120f", cpu: "sm_120f", features: "+ptx88", arch: &["sm120"] },
];

const TRIPLE: &str = "nvptx64-nvidia-cuda";
const PACKAGE: &str = "nvfp4-moe-device";
const CRATE: &str = "nvfp4_moe_device";
const PROFILE: &str = "ptx";

impl Target {
    /// The flags for rustc; they are part of the hash of the sources.
    pub(crate) fn rustc_flags(&self) -> Vec<String> {
        let mut flags = vec![
            format!("-Ctarget-cpu={}", self.cpu),
            format!("-Ctarget-feature={}", self.features),
            // The assembly of the one LTO module is the PTX; nothing is linked after it.
            "--emit=asm".to_owned(),
            "-Clinker=true".to_owned(),
            // Arrays of accumulators stay in registers only if every loop over them is unrolled.
            "-Cllvm-args=-unroll-threshold=20000".to_owned(),
            // No indirect branches: a few comparisons a tile cost nothing, and say more to the assembler.
            "-Cllvm-args=-min-jump-table-entries=1000".to_owned(),
        ];
        for arch in self.arch {
            flags.extend(["--cfg".to_owned(), format!("nvfp4_arch=\"{arch}\"")]);
        }
        flags
    }

    /// Compiles the device crate and returns the module's text.
    pub(crate) fn compile(&self, root: &Path) -> Result<String> {
        let target_dir = process::target_dir(root).join("ptx").join(self.name);
        // Cargo does not know about the assembly file: it must be made now, and be the only one.
        remove_earlier_output(&target_dir)?;
        let mut command = process::cargo(root);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PROFILE_") || text.starts_with("CARGO_BUILD_") || text == "RUSTFLAGS" {
                command.env_remove(name);
            }
        }
        command
            // Kernels, their intrinsics and inline PTX are unstable features of this otherwise stable compiler.
            .env("RUSTC_BOOTSTRAP", "1")
            // Unlike RUSTFLAGS this allows spaces, and wins over it.
            .env("CARGO_ENCODED_RUSTFLAGS", self.rustc_flags().join("\u{1f}"))
            .args(["rustc", "--package", PACKAGE, "--lib", "--crate-type", "cdylib", "--profile", PROFILE])
            .args(["--target", TRIPLE, "-Zbuild-std=core", "--target-dir"])
            .arg(&target_dir);
        process::run_aloud(&mut command)?;
        let found = assembly_files(&target_dir)?;
        let [file] = found.as_slice() else {
            bail!("the compiler left {} assembly files for {} in the target directory, not 1", found.len(), self.name);
        };
        let ptx = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(module_text::with_thread_bounds(&ptx))
    }
}

fn output_dir(target_dir: &Path) -> PathBuf {
    target_dir.join(TRIPLE).join(PROFILE)
}

/// Forgets the device crate's earlier build, but not core's.
fn remove_earlier_output(target_dir: &Path) -> Result<()> {
    let profile = output_dir(target_dir);
    for file in assembly_files(target_dir)? {
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    for dir in entries(&profile.join(".fingerprint"))? {
        if file_name(&dir).starts_with(PACKAGE) {
            fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        }
    }
    Ok(())
}

fn assembly_files(target_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = entries(&output_dir(target_dir).join("deps"))?;
    files.retain(|file| file_name(file).starts_with(CRATE) && file.extension().is_some_and(|end| end == "s"));
    Ok(files)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What is in `dir`; nothing if there is no such directory.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let listing = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    listing.map(|entry| Ok(entry?.path())).collect()
}
