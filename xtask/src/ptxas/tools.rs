//! NVIDIA's assembler and disassembler, wherever they are.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The programs, found.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    ptxas: PathBuf,
    nvdisasm: PathBuf,
    /// The assembler's version, such as `13.1.80`: another one allocates registers otherwise.
    pub(super) version: String,
}

impl Tools {
    /// Finds both and asks for the version.
    pub(super) fn find() -> Result<Self> {
        let ptxas = find("ptxas", "PTXAS", "nvidia-cuda-nvcc")?;
        let nvdisasm = find("nvdisasm", "NVDISASM", "nvidia-cuda-nvdisasm")?;
        let text = run(Command::new(&ptxas).arg("--version"))?;
        let version = version(&text).with_context(|| format!("`ptxas --version` says no version, but {text:?}"))?;
        Ok(Self { version: version.to_owned(), ptxas, nvdisasm })
    }

    /// Assembles `ptx` for `arch` into `cubin`, and returns what the assembler says of each kernel.
    pub(super) fn assemble(&self, ptx: &Path, arch: &str, cubin: &Path) -> Result<String> {
        run(Command::new(&self.ptxas).args(["-v", "-arch", arch]).arg(ptx).arg("-o").arg(cubin))
    }

    /// The instructions of a cubin.
    pub(super) fn disassemble(&self, cubin: &Path) -> Result<String> {
        run(Command::new(&self.nvdisasm).arg("-c").arg(cubin))
    }
}

fn find(program: &str, variable: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable).map(PathBuf::from) {
        if !path.is_file() {
            bail!("the environment variable {variable} is {}, but there is no such file", path.display());
        }
        return Ok(path);
    }
    let of_toolkit = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let of_path = env::var_os("PATH").unwrap_or_default();
    let found = of_toolkit.into_iter().chain(env::split_paths(&of_path)).map(|dir| dir.join(program));
    found.into_iter().find(|path| path.is_file()).with_context(|| {
        format!(
            "there is no {program} in CUDA_HOME/bin or PATH; it comes with the CUDA toolkit, and alone with \
             `pip install {package}` (in site-packages/nvidia/cu13/bin, which then belongs into PATH), or set {variable} \
             to the program"
        )
    })
}

/// Runs to the end and returns what it said, on both streams.
fn run(command: &mut Command) -> Result<String> {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, said.trim());
    }
    Ok(said)
}

/// What stands between `, V` and the end of a line.
fn version(text: &str) -> Option<&str> {
    text.lines().find_map(|line| Some(line.trim().split_once(", V")?.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_exact_one() {
        let text = "ptxas: some assembler\nCuda compilation tools, release 12.9, V12.9.41\nBuild x\n";
        assert_eq!(version(text), Some("12.9.41"));
        assert_eq!(version("ptxas: some assembler\n"), None);
    }

    #[test]
    fn a_program_that_is_nowhere_is_named_with_a_way_to_get_it() {
        let error = find("no-such-assembler", "NO_SUCH_VARIABLE", "some-package").unwrap_err().to_string();
        assert!(error.contains("no-such-assembler") && error.contains("pip install some-package"), "{error}");
    }
}
