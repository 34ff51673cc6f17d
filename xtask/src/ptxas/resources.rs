//! What `ptxas -v` says of each kernel.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

/// What a kernel takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) registers: u32,
    /// Static shared memory.
    pub(super) shared_bytes: u32,
    pub(super) stack_bytes: u32,
    pub(super) spill_store_bytes: u32,
    pub(super) spill_load_bytes: u32,
    pub(super) barriers: u32,
    /// Whether its `wgmma` instructions wait for each other, which the assembler only remarks: nothing else changes but the
    /// speed.
    pub(super) serialized: bool,
}

/// The report's kernels by name. A function that a kernel calls counts as part of it.
pub(super) fn parse(report: &str) -> Result<BTreeMap<String, Resources>> {
    let mut kernels: BTreeMap<String, Resources> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.insert(name.clone(), Resources::default());
            current = Some(name);
        }
        let Some(kernel) = current.as_ref().and_then(|name| kernels.get_mut(name)) else {
            continue;
        };
        if line.contains("bytes stack frame") {
            let count = |unit| number_before(line, unit).with_context(|| format!("no {unit} in {line:?} of ptxas"));
            kernel.stack_bytes += count(" bytes stack frame")?;
            kernel.spill_store_bytes += count(" bytes spill stores")?;
            kernel.spill_load_bytes += count(" bytes spill loads")?;
        } else if let Some(registers) = number_before(line, " registers") {
            kernel.registers = registers;
            kernel.barriers = number_before(line, " barriers").unwrap_or(0);
            kernel.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    for line in report.lines().filter(|line| line.contains("wgmma") && line.contains("serialized")) {
        let name = line.split_once("function '").and_then(|(_, rest)| rest.split('\'').next());
        let kernel = name.and_then(|name| kernels.get_mut(name));
        kernel.with_context(|| format!("{line:?} of ptxas names no kernel"))?.serialized = true;
    }
    for (name, kernel) in &kernels {
        if kernel.registers == 0 {
            bail!("ptxas says no number of registers for {name}; is this still the format of `ptxas -v`?");
        }
    }
    Ok(kernels)
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    line[..line.find(unit)?].rsplit([' ', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 44 registers, used 1 barriers, 1024 bytes smem, 480 bytes cmem[0]
ptxas info    : Compile time = 5.0 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for called
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
";

    #[test]
    fn every_kernel_has_its_own_numbers() {
        let kernels = parse(REPORT).unwrap();
        let first = Resources { registers: 44, shared_bytes: 1024, barriers: 1, ..Resources::default() };
        let second = Resources {
            registers: 255,
            stack_bytes: 24,
            spill_store_bytes: 8,
            spill_load_bytes: 12,
            ..Resources::default()
        };
        assert_eq!(kernels, BTreeMap::from([("first".to_owned(), first), ("second".to_owned(), second)]));
    }

    #[test]
    fn a_remark_on_serialized_products_counts_for_its_kernel() {
        let remark = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
                      insufficient register resources for the function 'second'\n";
        let kernels = parse(&format!("{remark}{REPORT}")).unwrap();
        assert!(kernels["second"].serialized && !kernels["first"].serialized);
        parse(&format!("{}{REPORT}", remark.replace("second", "third"))).unwrap_err();
    }

    #[test]
    fn another_format_is_an_error_and_not_zeros() {
        let error = parse("ptxas info    : Compiling entry function 'x' for 'sm_90'\n").unwrap_err().to_string();
        assert!(error.contains("no number of registers for x"), "{error}");
        let odd = "Compiling entry function 'x' for 'y'\n some bytes stack frame, 0 bytes spill stores\n";
        parse(odd).unwrap_err();
    }
}
