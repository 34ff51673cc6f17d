//! `cargo xtask ptxas`: what NVIDIA's assembler makes of the committed PTX, without a GPU.
//!
//! The driver's compiler at run time is the same assembler, of the driver's age: what spills here spills there. One that is
//! older may do worse; the environment variable PTXAS chooses one (`nvidia-cuda-nvcc` has a release for each).

mod category;
mod record;
mod resources;
mod sass;
mod tools;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use nvfp4_moe::kernel_family::KernelFamily;

use crate::process;
use crate::ptx::manifest::ptx_file;
use record::{Kernel, Kernels, Record};
use tools::Tools;

/// Arguments of `ptxas`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Assemble for this architecture, such as sm_86 or sm_120a, with the module that runs on it; may be given more than
    /// once. Without it: every one that the record has.
    #[arg(long = "arch", value_name = "ARCH", value_parser = Architecture::parse)]
    architectures: Vec<Architecture>,
    /// Print one JSON object instead of the tables.
    #[arg(long)]
    json: bool,
    /// Compare with xtask/sass.json, and fail if a kernel changed.
    #[arg(long, conflicts_with = "record")]
    check: bool,
    /// Write xtask/sass.json.
    #[arg(long, conflicts_with = "architectures")]
    record: bool,
}

/// What is assembled for if nothing is asked for: an architecture for each kind of GPU that a module is meant for.
const ARCHITECTURES: [&str; 8] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120a", "sm_120f", "sm_121a"];

/// What the main loops of some kernels must consist of: a module, how the kernel's name begins, and how the name of
/// every matrix instruction in them begins and ends.
const EXPECTED: [(&str, &str, &str, &str); 4] = [
    ("sm_80", "grouped_gemm", "HMMA.16816.F32", ""),
    ("sm_90a", "grouped_gemm_few", "HMMA.16816.F32", ""),
    ("sm_90a", "grouped_gemm_wgmma", "HGMMA.64x", "x16.F32"),
    ("sm_120f", "grouped_gemm", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3", ".4X"),
];

/// Registers of a multiprocessor, and in what portions a thread of a warp gets them (compute capability 8.0 and newer).
const REGISTERS: u32 = 65_536;
const REGISTER_UNIT: u32 = 8;

/// An architecture, and the module that its GPUs run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Architecture {
    name: String,
    module: &'static str,
}

impl Architecture {
    fn parse(name: &str) -> Result<Self, String> {
        let digits = name.strip_prefix("sm_").map(|rest| rest.strip_suffix(['a', 'f']).unwrap_or(rest));
        let number = digits.and_then(|digits| digits.parse::<u32>().ok()).filter(|number| *number >= 80);
        let number = number.ok_or("it must be sm_80 or newer, such as sm_86 or sm_120a")?;
        let module = match KernelFamily::of((number / 10, number % 10)) {
            KernelFamily::Portable => "sm_80",
            KernelFamily::Hopper => "sm_90a",
            KernelFamily::Fp4 => "sm_120f",
        };
        Ok(Self { name: name.to_owned(), module })
    }
}

/// Runs the verb; whether nothing is wrong.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let root = process::workspace_root();
    let tools = Tools::find()?;
    let mut architectures = arguments.architectures.clone();
    if architectures.is_empty() {
        for name in ARCHITECTURES {
            architectures.push(Architecture::parse(name).map_err(anyhow::Error::msg)?);
        }
    }
    let mut now = Record { ptxas: tools.version.clone(), architectures: BTreeMap::new() };
    let mut problems = Vec::new();
    for architecture in &architectures {
        let kernels = assemble(&root, &tools, architecture)?;
        for (name, kernel) in &kernels {
            problems.extend(
                problem(architecture.module, name, kernel).map(|x| format!("{}, {name}: {x}", architecture.name)),
            );
        }
        if !arguments.json {
            print_table(architecture, &kernels);
        }
        now.architectures.insert(architecture.name.clone(), kernels);
    }
    let mut remark = None;
    if arguments.check {
        let recorded = Record::read(&root)?;
        if recorded.ptxas == now.ptxas {
            problems.extend(recorded.differences(&now)?);
            remark = Some(format!("compared with {}", record::FILE));
        } else {
            remark = Some(format!(
                "{} is of ptxas {}, and this is {}: only spills, stack and the kind of the main loops were checked",
                record::FILE,
                recorded.ptxas,
                now.ptxas
            ));
        }
    }
    if arguments.record && problems.is_empty() {
        now.write(&root)?;
        remark = Some(format!("{} written", record::FILE));
    }
    if arguments.json {
        let all = serde_json::json!({ "record": now, "remark": remark, "problems": problems });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(problems.is_empty());
    }
    println!("ptxas {}", now.ptxas);
    for line in remark.iter().chain(&problems) {
        println!("{line}");
    }
    println!("{} problems", problems.len());
    Ok(problems.is_empty())
}

/// What the record says of the loops of a kernel: matrix instructions and all instructions of each.
pub(crate) fn recorded_loops(root: &Path, architecture: &str, kernel: &str) -> Result<Vec<(usize, usize)>> {
    let record = Record::read(root)?;
    let kernel = record.architectures.get(architecture).and_then(|kernels| kernels.get(kernel));
    let kernel = kernel.with_context(|| format!("{} has no such kernel for {architecture}", record::FILE))?;
    Ok(kernel.loops.iter().map(|body| (body.matrix_count(), body.instructions)).collect())
}

/// Every kernel of the architecture's module.
fn assemble(root: &Path, tools: &Tools, architecture: &Architecture) -> Result<Kernels> {
    let dir = process::target_dir(root).join("ptxas");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let cubin = dir.join(format!("{}.cubin", architecture.name));
    let ptx = ptx_file(architecture.module);
    let report = tools.assemble(&root.join(&ptx), &architecture.name, &cubin);
    let report = report.with_context(|| format!("cannot assemble {ptx} for {}", architecture.name))?;
    for warning in report.lines().filter(|line| line.contains("warning")) {
        eprintln!("{ptx} for {}: {warning}", architecture.name);
    }
    let mut codes = sass::parse(&tools.disassemble(&cubin)?)?;
    let mut kernels = Kernels::new();
    for (name, resources) in resources::parse(&report)? {
        let code = codes.remove(&name).with_context(|| format!("nvdisasm shows no code of {name}"))?;
        kernels.insert(name, Kernel::new(resources, code));
    }
    if kernels.is_empty() {
        bail!("ptxas reports no kernel in {ptx}; is this still the format of `ptxas -v`?");
    }
    Ok(kernels)
}

/// The module that is one text for all architectures.
const PORTABLE: &str = "sm_80";
/// Stack that its kernels may have: on some architecture they exceed the registers by a few words, outside of the main
/// loops or nearly so.
const PORTABLE_STACK_BYTES: u32 = 16;

/// What no kernel may have; nothing if all is well.
fn problem(module: &str, name: &str, kernel: &Kernel) -> Option<String> {
    let Kernel { spill_store_bytes, spill_load_bytes, stack_bytes, .. } = kernel;
    let allowed = if module == PORTABLE { PORTABLE_STACK_BYTES } else { 0 };
    if *stack_bytes > allowed || (allowed == 0 && spill_store_bytes + spill_load_bytes != 0) {
        return Some(format!(
            "{spill_store_bytes} bytes of spill stores, {spill_load_bytes} of spill loads and {stack_bytes} of stack; \
             at most {allowed} are allowed"
        ));
    }
    if kernel.serialized {
        return Some(
            "its wgmma instructions wait for each other (\"serialized\"), so nothing is done meanwhile".to_owned(),
        );
    }
    // The largest block that a multiprocessor can hold; the driver would refuse the launch.
    let mut variants = KernelFamily::ALL.iter().flat_map(|family| family.variants());
    if let Some(variant) = variants.find(|variant| variant.kernel == name) {
        let taken = kernel.registers.next_multiple_of(REGISTER_UNIT) * variant.threads;
        if taken > REGISTERS {
            return Some(format!("a block takes {taken} registers, but a multiprocessor has {REGISTERS}"));
        }
    }
    let is_expected = |x: &&(&str, &str, &str, &str)| x.0 == module && name.starts_with(x.1);
    let (_, _, start, end) = EXPECTED.iter().find(is_expected)?;
    if kernel.loops.iter().all(|body| body.matrix.is_empty()) {
        return Some(format!("no loop has matrix instructions, but {start}*{end} must be in one"));
    }
    let mut found = kernel.loops.iter().flat_map(|body| &body.matrix);
    let other = found.find(|opcode| !opcode.starts_with(start) || !opcode.ends_with(end))?;
    Some(format!("a main loop has {other}, but its matrix instructions must be {start}*{end}"))
}

fn print_table(architecture: &Architecture, kernels: &Kernels) {
    println!("{} for {}", ptx_file(architecture.module), architecture.name);
    println!(
        "  {:20} {:>9} {:>7} {:>12} {:>6} {:>8} {:>12} {:>13}",
        "kernel", "registers", "shared", "spill st/ld", "stack", "barriers", "instructions", "outside calls"
    );
    for (name, kernel) in kernels {
        let spills = format!("{}/{}", kernel.spill_store_bytes, kernel.spill_load_bytes);
        println!(
            "  {name:20} {:>9} {:>7} {spills:>12} {:>6} {:>8} {:>12} {:>13}",
            kernel.registers,
            kernel.shared_bytes,
            kernel.stack_bytes,
            kernel.barriers,
            kernel.instructions,
            kernel.outside_calls
        );
        for body in &kernel.loops {
            let matrix = body.matrix_count();
            let what = if matrix == 0 {
                "that copies".to_owned()
            } else {
                format!("of {matrix} {}", body.matrix.join(" and "))
            };
            let each = body.instructions as f64 / matrix as f64;
            let each = if matrix == 0 { String::new() } else { format!(", {each:.2} each") };
            let mix: Vec<_> = body.mix.iter().map(|(kind, count)| format!("{} {count}", kind.label())).collect();
            println!("    loop {what}: {} instructions{each} ({})", body.instructions, mix.join(", "));
        }
    }
    println!();
}

#[cfg(test)]
mod tests {
    use super::sass::Loop;
    use super::*;
    use crate::ptx::recipe::TARGETS;

    #[test]
    fn an_architecture_has_the_module_that_its_gpus_run() {
        let modules = [("sm_80", "sm_80"), ("sm_90a", "sm_90a"), ("sm_100", "sm_80"), ("sm_121a", "sm_120f")];
        for (name, module) in modules {
            assert_eq!(Architecture::parse(name), Ok(Architecture { name: name.to_owned(), module }));
        }
        for name in ["sm_75", "90", "sm_", "sm_90x", "compute_90"] {
            Architecture::parse(name).unwrap_err();
        }
        let modules: Vec<_> = ARCHITECTURES.map(|name| Architecture::parse(name).unwrap().module).to_vec();
        for target in TARGETS {
            assert!(modules.contains(&target.name), "nothing is assembled of {}", target.name);
            assert!(EXPECTED.iter().any(|expected| expected.0 == target.name), "{}", target.name);
        }
    }

    /// The record belongs to the committed PTX as far as its kernels go; what they are assembled to needs the assembler.
    #[test]
    fn the_record_has_every_kernel_of_every_architecture() {
        let root = process::workspace_root();
        let record = Record::read(&root).unwrap();
        let mut names: Vec<_> = ARCHITECTURES.iter().map(|name| (*name).to_owned()).collect();
        names.sort_unstable();
        assert_eq!(record.architectures.keys().cloned().collect::<Vec<_>>(), names);
        for (name, kernels) in &record.architectures {
            let module = Architecture::parse(name).unwrap().module;
            let ptx = fs::read_to_string(root.join(ptx_file(module))).unwrap();
            let entries = ptx.lines().filter_map(|line| line.strip_prefix(".visible .entry ")?.strip_suffix('('));
            let mut entries: Vec<_> = entries.collect();
            entries.sort_unstable();
            assert_eq!(kernels.keys().collect::<Vec<_>>(), entries, "{name}: run `cargo xtask ptxas --record`");
            for (kernel_name, kernel) in kernels {
                assert_eq!(problem(module, kernel_name, kernel), None, "{name}, {kernel_name}");
            }
        }
    }

    #[test]
    fn what_no_kernel_may_have_is_a_problem() {
        let record = Record::read(&process::workspace_root()).unwrap();
        let good = &record.architectures["sm_120a"]["grouped_gemm_fp4"];
        let problem_of = |change: fn(&mut Kernel)| {
            let mut kernel = good.clone();
            change(&mut kernel);
            problem("sm_120f", "grouped_gemm_fp4", &kernel).unwrap_or_default()
        };
        assert_eq!(problem_of(|_| {}), "");
        assert!(problem_of(|kernel| kernel.stack_bytes = 8).contains("8 of stack"));
        assert!(problem_of(|kernel| kernel.spill_load_bytes = 4).contains("4 of spill loads"));
        assert!(problem_of(|kernel| kernel.spill_store_bytes = 4).contains("4 bytes of spill stores"));
        assert!(problem_of(|kernel| kernel.registers = 225).contains("takes 66816 registers"));
        assert!(problem_of(|kernel| kernel.loops.clear()).contains("no loop has matrix"));
        let other = |kernel: &mut Kernel| {
            let body = kernel.loops.iter_mut().find(|body| !body.matrix.is_empty());
            let Loop { matrix, .. } = body.expect("there is one");
            *matrix = vec!["OMMA.SF.16864.F32.E2M1.E2M1.E8".to_owned()];
        };
        assert!(problem_of(other).contains("OMMA.SF.16864.F32.E2M1.E2M1.E8,"));
    }
}
