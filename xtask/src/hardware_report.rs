//! `cargo xtask hardware-report`: what this project does on a machine's GPUs, in one file to attach to an issue.

mod child;
mod machine;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nvfp4_moe::driver::{Device, DriverError, driver_available};
use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe::kernel_family::KernelFamily;
use nvfp4_moe::measurement::{Ceilings, Measurement};
use serde::{Deserialize as _, Serialize};
use serde_json::Value;

use crate::process;
use child::Ran;
use machine::{Machine, Project};

/// Arguments of `hardware-report`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The file to write.
    #[arg(long, default_value = "hardware-report.json", value_name = "FILE")]
    out: PathBuf,
}

/// Shapes and numbers of tokens to measure: a large and two small kinds of experts, from one token to many.
const SHAPES: [&str; 3] = ["deepseek-v4-pro-ep8", "qwen3-30b", "glm-4.7-ep8"];
const TOKENS: &str = "1,16,256,4096";

/// Some times what a slow machine needs.
const VERIFY_LIMIT: Duration = Duration::from_secs(3600);
const BENCH_LIMIT: Duration = Duration::from_secs(900);

/// The whole report; the fields are in the order of the file.
#[derive(Clone, Debug, Serialize)]
struct HardwareReport {
    /// For people.
    summary: Vec<String>,
    project: Project,
    machine: Machine,
    gpus: Vec<Gpu>,
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
struct Gpu {
    ordinal: u32,
    name: String,
    compute_capability: String,
    /// Newest CUDA version that the driver supports.
    driver_cuda: String,
    multiprocessors: u32,
    shared_bytes_per_block: u32,
    shared_bytes_per_multiprocessor: u32,
    registers_per_multiprocessor: u32,
    max_threads_per_multiprocessor: u32,
    l2_bytes: u32,
    total_memory_bytes: u64,
    free_memory_bytes: u64,
    /// Which kernels the host picks, and from what.
    kernels: String,
    kernels_because: String,
    /// How long the driver took to compile them, or why it did not.
    compiled: String,
    /// `cargo xtask verify` on this GPU; null where the kernels do not load.
    verify: Option<Ran>,
    /// `nvfp4-moe bench`, once a shape, each with the read ceiling of its run.
    bench: Vec<Ran>,
}

/// Runs the verb; whether everything passed.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let count = some_gpus(driver_available().and_then(|()| Device::count()))?;
    let root = process::workspace_root();
    let (project, machine) = (Project::of(&root)?, Machine::here());
    process::run_aloud(process::cargo(&root).args(["build", "--release", "--package", "nvfp4-moe"]))?;
    let gpus = (0..count).map(|ordinal| gpu(&root, ordinal)).collect::<Result<Vec<_>>>()?;
    let report = HardwareReport { summary: summary(&project, &machine, &gpus), project, machine, gpus };
    let out = arguments.out.display();
    fs::write(&arguments.out, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| format!("cannot write {out}"))?;
    for line in &report.summary {
        println!("{line}");
    }
    println!("\n{out} holds the details; attach it to an issue");
    Ok(report.gpus.iter().all(Gpu::passed))
}

/// How many GPUs, at least one.
fn some_gpus(count: Result<u32, DriverError>) -> Result<u32> {
    let needs = "hardware-report describes the GPUs of the machine that it runs on; run it on one with a GPU";
    // What the driver's errors advise is to do without a GPU.
    match count {
        Ok(0) => bail!("{needs}: the driver sees none here"),
        Ok(count) => Ok(count),
        Err(DriverError::NoDriver { detail }) => bail!("{needs}: no NVIDIA driver is installed here ({detail})"),
        Err(DriverError::MissingSymbol { symbol }) => bail!("{needs} and a newer driver: this one has no {symbol}"),
        Err(error) => Err(error).context(needs),
    }
}

/// Everything about one GPU.
fn gpu(root: &Path, ordinal: u32) -> Result<Gpu> {
    let device = Device::open(ordinal)?;
    let limits = device.limits();
    let (major, minor) = limits.compute_capability;
    let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    let (free_memory_bytes, _) = device.free_memory()?;
    let start = Instant::now();
    let loaded = Runner::new(Target::Cuda(ordinal));
    let mut gpu = Gpu {
        ordinal,
        name: device.name().to_owned(),
        compute_capability: dotted(limits.compute_capability),
        driver_cuda: dotted(device.driver_version()),
        multiprocessors: limits.multiprocessors,
        shared_bytes_per_block: limits.shared_bytes_per_block,
        shared_bytes_per_multiprocessor: limits.shared_bytes_per_multiprocessor,
        registers_per_multiprocessor: limits.registers_per_multiprocessor,
        max_threads_per_multiprocessor: limits.max_threads_per_multiprocessor,
        l2_bytes: limits.l2_bytes,
        total_memory_bytes: limits.total_memory_bytes,
        free_memory_bytes,
        kernels: KernelFamily::of(limits.compute_capability).description().to_owned(),
        kernels_because: format!("compute capability {major}.{minor}"),
        compiled: match &loaded {
            Ok(_) => format!("in {:.1} s", start.elapsed().as_secs_f64()),
            Err(error) => error.to_string(),
        },
        verify: None,
        bench: Vec::new(),
    };
    if loaded.is_err() {
        return Ok(gpu);
    }
    // The memory is the children's now.
    drop((loaded, device));
    let build = process::target_dir(root);
    let (dir, target) = (build.join("hardware-report"), Target::Cuda(ordinal).to_string());
    let this = env::current_exe().context("cannot find this program's own file")?;
    let verify = ["verify", "--prebuilt", "--json", "--device", target.as_str()];
    gpu.verify = Some(child::run(&this, &verify, &dir, VERIFY_LIMIT)?);
    let program = build.join("release").join(format!("nvfp4-moe{}", env::consts::EXE_SUFFIX));
    for shape in SHAPES {
        let bench = ["bench", "--json", "--shape", shape, "--tokens", TOKENS, "--device", target.as_str()];
        gpu.bench.push(child::run(&program, &bench, &dir, BENCH_LIMIT)?);
    }
    Ok(gpu)
}

impl Gpu {
    fn passed(&self) -> bool {
        self.verify.as_ref().is_some_and(|verify| verify.passed) && self.bench.iter().all(|bench| bench.passed)
    }

    fn summary(&self) -> Vec<String> {
        let mut lines = vec![
            String::new(),
            format!(
                "cuda:{}  {}, compute capability {}, {} SMs, {:.0} GiB, driver for CUDA {}",
                self.ordinal,
                self.name,
                self.compute_capability,
                self.multiprocessors,
                self.total_memory_bytes as f64 / f64::from(1 << 30),
                self.driver_cuda
            ),
            format!("  kernels   {}, because of {}", self.kernels, self.kernels_because),
            format!("  compiled  {}", self.compiled),
        ];
        for ran in self.verify.iter().chain(&self.bench) {
            lines.push(format!(
                "  {}  {} ({}, {:.0} s)",
                if ran.passed { "passed" } else { "FAILED" },
                ran.command,
                ran.ended,
                ran.seconds
            ));
            if let Some(passed) = ran.report["passed"].as_u64() {
                lines.push(format!("    {passed} checks passed, {} failed", ran.report["failed"]));
            }
            // What verify reports is another thing.
            if let Ok(measured) = Measurement::deserialize(&ran.report) {
                lines.extend(times(&measured));
            }
            let failed = |check: &&Value| check["outcome"] == "failed";
            for check in ran.report["checks"].as_array().into_iter().flatten().filter(failed) {
                lines.push(format!(
                    "    {}: {}",
                    check["check"].as_str().unwrap_or("?"),
                    check["detail"].as_str().unwrap_or("?")
                ));
            }
            if !ran.passed && ran.report.is_null() {
                lines.extend(ran.said.last().map(|last| format!("    its last words: {last}")));
            }
        }
        lines
    }
}

/// The lines of one run of `bench`.
fn times(measured: &Measurement) -> Vec<String> {
    let Ceilings { read_gb_per_s, copy_gb_per_s, .. } = measured.ceilings;
    let mut lines = vec![format!("    read ceiling {read_gb_per_s:.0} GB/s, copy ceiling {copy_gb_per_s:.0} GB/s")];
    lines.extend(measured.shapes.iter().flat_map(|shape| &shape.rows).map(|row| {
        format!(
            "    {:>5} tokens {:>9.1} us, {:>4.1}% of the read ceiling, {:>8.3} TFLOP/s",
            row.tokens,
            row.layer_us,
            row.of_read() * 100.0,
            row.tflop_per_s()
        )
    }));
    lines
}

fn summary(project: &Project, machine: &Machine, gpus: &[Gpu]) -> Vec<String> {
    let commit = project.checkout.commit.as_deref().unwrap_or("no git checkout");
    let changed = if project.checkout.changed { ", with changes" } else { "" };
    let mut lines = vec![
        format!("nvfp4-moe {}, {commit}{changed}", project.version),
        format!("{}; {}, {} threads", machine.system, machine.cpu, machine.threads),
    ];
    lines.extend(gpus.iter().flat_map(Gpu::summary));
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ran(passed: bool, report: Value) -> Ran {
        Ran {
            command: "a b".to_owned(),
            passed,
            ended: "exit status: 0".to_owned(),
            seconds: 2.0,
            report,
            said: vec!["where it was".to_owned()],
        }
    }

    fn gpu(verify: Ran, bench: Ran) -> Gpu {
        Gpu {
            ordinal: 0,
            name: "A GPU".to_owned(),
            compute_capability: "12.0".to_owned(),
            driver_cuda: "13.0".to_owned(),
            multiprocessors: 170,
            shared_bytes_per_block: 101_376,
            shared_bytes_per_multiprocessor: 102_400,
            registers_per_multiprocessor: 65_536,
            max_threads_per_multiprocessor: 1536,
            l2_bytes: 96 << 20,
            total_memory_bytes: 32 << 30,
            free_memory_bytes: 31 << 30,
            kernels: KernelFamily::Fp4.description().to_owned(),
            kernels_because: "compute capability 12.0".to_owned(),
            compiled: "in 1.0 s".to_owned(),
            verify: Some(verify),
            bench: vec![bench],
        }
    }

    #[test]
    fn without_a_gpu_there_is_an_error() {
        let no_driver = DriverError::NoDriver { detail: "libcuda.so.1 is missing".to_owned() };
        let no_symbol = DriverError::MissingSymbol { symbol: "cuInit" };
        for (count, part) in [(Err(no_driver), "libcuda.so.1"), (Err(no_symbol), "cuInit"), (Ok(0), "sees none")] {
            let error = format!("{:#}", some_gpus(count).unwrap_err());
            assert!(error.contains("run it on one with a GPU") && error.contains(part), "{error}");
            assert!(!error.contains("--device cpu"), "nothing that this verb has: {error}");
        }
        assert_eq!(some_gpus(Ok(2)).unwrap(), 2);
    }

    #[test]
    fn the_report_begins_with_what_people_read_and_has_every_part() {
        let checks = json!({"passed": 7, "failed": 1, "checks": [
            {"check": "ragged, static", "outcome": "failed", "detail": "3 rows are off"},
            {"check": "qwen3_moe, static", "outcome": "passed", "detail": "close"},
        ]});
        let fixture = process::workspace_root().join("xtask/fixtures/bench.json");
        let bench = serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap();
        let gpus = vec![gpu(ran(false, checks), ran(true, bench))];
        assert!(!gpus[0].passed());
        let (project, machine) = (Project::of(&process::workspace_root()).unwrap(), Machine::here());
        let report = HardwareReport { summary: summary(&project, &machine, &gpus), project, machine, gpus };
        let text = report.summary.join("\n");
        for part in [
            "nvfp4-moe ",
            "A GPU, compute capability 12.0, 170 SMs, 32 GiB",
            "FP4 tensor cores",
            "because of compute capability 12.0",
            "FAILED  a b",
            "7 checks passed, 1 failed",
            "ragged, static: 3 rows are off",
            "read ceiling 4000 GB/s, copy ceiling 3000 GB/s",
            "    4 tokens      40.0 us, 25.0% of the read ceiling,  150.000 TFLOP/s",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("qwen3_moe"), "what passed is counted only:\n{text}");
        let json = serde_json::to_string_pretty(&report).unwrap();
        assert!(json.starts_with("{\n  \"summary\": ["), "{json}");
        let json: Value = serde_json::from_str(&json).unwrap();
        assert!(json["project"]["ptx"]["targets"]["sm_120f"].is_string());
        assert_eq!(json["gpus"][0]["verify"]["report"]["checks"][0]["detail"], "3 rows are off");
        assert_eq!(json["gpus"][0]["l2_bytes"], 96 << 20);
    }

    #[test]
    fn a_run_without_a_report_says_its_last_words() {
        let gpu = gpu(ran(false, Value::Null), ran(true, json!({})));
        assert!(gpu.summary().iter().any(|line| line.contains("its last words: where it was")));
        let mut unloaded = gpu.clone();
        unloaded.verify = None;
        assert!(!unloaded.passed(), "kernels that do not load are no pass");
    }
}
