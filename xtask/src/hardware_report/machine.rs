//! The machine and the checkout, as far as they decide what is measured. No name of a host or user, and no serial number.

use std::collections::BTreeMap;
use std::env::consts;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use nvfp4_moe::measurement::Checkout;
use serde::Serialize;

use crate::process;
use crate::ptx::manifest::Manifest;

/// Which code.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Project {
    pub(super) version: &'static str,
    #[serde(flatten)]
    pub(super) checkout: Checkout,
    /// The committed PTX.
    pub(super) ptx: Manifest,
}

impl Project {
    pub(super) fn of(root: &Path) -> Result<Self> {
        Ok(Self { version: env!("CARGO_PKG_VERSION"), checkout: Checkout::of(root), ptx: Manifest::read(root)? })
    }
}

/// Which machine, beside its GPUs.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    pub(super) system: String,
    pub(super) kernel: Option<String>,
    pub(super) cpu: String,
    pub(super) threads: usize,
    /// What `nvidia-smi` says of each GPU, in its own order; null where that program is missing.
    pub(super) nvidia_smi: Option<Vec<BTreeMap<String, String>>>,
}

/// What `nvidia-smi` is asked for.
const QUERY: &str = "--query-gpu=index,name,driver_version,vbios_version,compute_mode,mig.mode.current,\
                     clocks.max.sm,clocks.max.memory,clocks.current.sm,clocks.current.memory,power.limit,\
                     temperature.gpu,pcie.link.gen.current,pcie.link.width.current";

impl Machine {
    pub(super) fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let release = field(&read("/etc/os-release"), "PRETTY_NAME", '=');
        let smi = process::output_of(Command::new("nvidia-smi").args([QUERY, "--format=csv"]));
        Self {
            system: format!("{}, {} {}", release.unwrap_or_default(), consts::OS, consts::ARCH),
            kernel: Some(read("/proc/sys/kernel/osrelease").trim().to_owned()).filter(|text| !text.is_empty()),
            cpu: field(&read("/proc/cpuinfo"), "model name", ':').unwrap_or_else(|| consts::ARCH.to_owned()),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            nvidia_smi: smi.ok().map(|text| table(&text)),
        }
    }
}

/// The value of the first line `name = value`.
fn field(text: &str, name: &str, separator: char) -> Option<String> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(separator));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().trim_matches('"').to_owned())
}

/// The rows of a CSV text, by the names in its first line.
fn table(csv: &str) -> Vec<BTreeMap<String, String>> {
    let cells = |line: &str| line.split(", ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let mut lines = csv.lines();
    let names = lines.next().map(cells).unwrap_or_default();
    lines.map(|line| names.iter().cloned().zip(cells(line)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_tables_are_read_by_name() {
        assert_eq!(
            field("NAME=x\nPRETTY_NAME=\"Some Linux 1\"\n", "PRETTY_NAME", '=').as_deref(),
            Some("Some Linux 1")
        );
        assert_eq!(field("cpu\t: 0\nmodel name\t: A CPU\n", "model name", ':').as_deref(), Some("A CPU"));
        assert_eq!(field("", "model name", ':'), None);
        let rows = table("index, name, clocks.max.sm [MHz]\n0, A GPU, 3000 MHz\n1, Another, [N/A]\n");
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0]["clocks.max.sm [MHz]"], "3000 MHz");
        assert_eq!(rows[1]["name"], "Another");
    }

    #[test]
    fn the_checkout_is_named() {
        let root = process::workspace_root();
        let project = Project::of(&root).unwrap();
        assert_eq!(project.ptx, Manifest::read(&root).unwrap());
        assert!(project.checkout.commit.is_none_or(|commit| commit.len() >= 40));
    }
}
