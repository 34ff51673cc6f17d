//! Runs the emulator's conformance checks (`nvfp4_moe_emulator::conformance`) on a device and prints a table of the results.
//!
//! Each check compares a device with values derived by hand from the PTX ISA document; `--compare` adds wide inputs, on which
//! the emulator's results are the expected ones, bit for bit or within the bound that the table states. A kernel that cannot
//! be loaded, fails or hangs is a failed check, and the next one goes on in a fresh process.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nvfp4_moe::driver::Device;
use nvfp4_moe_emulator::Config;
use nvfp4_moe_emulator::conformance::{Check, Tolerance};
use nvfp4_moe_tests::conformance::{Outcome, run};
use nvfp4_moe_tests::emulated::{ARCHITECTURES, Architecture};

const USAGE: &str = "usage: conformance [--device cuda[:N]|emulator:ARCHITECTURE] [--compare] [--brief] [--write-ptx DIR] \
                     [FILTER]";

/// A check that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(20);
/// Fresh processes after failures; a device that is broken for good fails every check.
const MOST_RESTARTS: usize = 40;

#[derive(Clone)]
struct Arguments {
    device: String,
    compare: bool,
    brief: bool,
    write_ptx: Option<String>,
    filter: String,
    /// Only the worker has it: the first check to run.
    from: Option<usize>,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments> {
    let device = ARCHITECTURES[0].name.to_owned();
    let (write_ptx, filter) = (None, String::new());
    let mut arguments = Arguments { device, compare: false, brief: false, write_ptx, filter, from: None };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--device" => arguments.device = words.next().context(USAGE)?,
            "--compare" => arguments.compare = true,
            "--brief" => arguments.brief = true,
            "--write-ptx" => arguments.write_ptx = Some(words.next().context(USAGE)?),
            "--worker-from" => arguments.from = Some(words.next().context(USAGE)?.parse()?),
            option if option.starts_with('-') => bail!("there is no option {option}; {USAGE}"),
            _ => arguments.filter = word,
        }
    }
    Ok(arguments)
}

fn open(name: &str) -> Result<Device> {
    if let Some(architecture) = Architecture::named(name) {
        return Ok(architecture.device(Config::default()));
    }
    let ordinal = match name {
        "cuda" => 0,
        _ => name.strip_prefix("cuda:").context(USAGE)?.parse()?,
    };
    Ok(Device::open(ordinal)?)
}

fn checks(filter: &str) -> Vec<Check> {
    Check::all().into_iter().filter(|check| check.name.contains(filter)).collect()
}

fn main() -> Result<ExitCode> {
    let arguments = parse(std::env::args().skip(1))?;
    if let Some(folder) = &arguments.write_ptx {
        return write_ptx(folder, &arguments.filter);
    }
    match arguments.from {
        Some(from) => work(&arguments, from),
        None => supervise(&arguments),
    }
}

/// One file a check, its architecture in front.
fn write_ptx(folder: &str, filter: &str) -> Result<ExitCode> {
    std::fs::create_dir_all(folder)?;
    for (index, check) in checks(filter).iter().enumerate() {
        let name: String = check.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        std::fs::write(format!("{folder}/sm{}_{index:04}_{name}.ptx", check.architecture), &check.ptx)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs checks from the given one on until the device is lost; one line each: number, cases, result.
fn work(arguments: &Arguments, from: usize) -> Result<ExitCode> {
    static RUNNING: AtomicUsize = AtomicUsize::new(usize::MAX);
    let device = open(&arguments.device)?;
    println!("device\t{}", device.name());
    let reference = arguments.compare.then(|| ARCHITECTURES[0].device(Config::default()));
    std::thread::spawn(|| {
        let (mut last, mut since) = (usize::MAX, Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let running = RUNNING.load(Relaxed);
            if running != last {
                (last, since) = (running, Instant::now());
            } else if since.elapsed() > PATIENCE {
                println!("{running}\t0\tFAILED: no end after {PATIENCE:?}");
                std::process::exit(3);
            }
        }
    });
    for (index, check) in checks(&arguments.filter).iter().enumerate().skip(from) {
        RUNNING.store(index, Relaxed);
        let row = run(check, &device, reference.as_ref());
        let outcome = match &row.outcome {
            Outcome::Agrees => "ok".to_owned(),
            Outcome::Unavailable => format!("needs sm_{}", check.architecture),
            Outcome::Failed(what) => format!("FAILED: {}", what.replace(['\n', '\t'], " ")),
        };
        println!("{index}\t{}\t{outcome}", row.cases);
        std::io::stdout().flush()?;
        if row.device_lost {
            return Ok(ExitCode::from(4));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs workers until every check has a result, and prints the table.
fn supervise(arguments: &Arguments) -> Result<ExitCode> {
    let checks = checks(&arguments.filter);
    if checks.is_empty() {
        bail!("no check has a name with {:?} in it", arguments.filter);
    }
    let mut results: Vec<(usize, String)> = Vec::new();
    let (mut device, mut restarts) = (arguments.device.clone(), 0);
    while results.len() < checks.len() {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--device", &arguments.device, "--worker-from", &results.len().to_string()]);
        command.args(arguments.compare.then_some("--compare")).arg(&arguments.filter).stdout(Stdio::piped());
        let ended = command.spawn()?.wait_with_output()?;
        let before = results.len();
        for line in String::from_utf8_lossy(&ended.stdout).lines() {
            let mut columns = line.splitn(3, '\t');
            let (first, second, third) = (columns.next(), columns.next(), columns.next());
            match (first.and_then(|index| index.parse::<usize>().ok()), second, third) {
                (Some(index), Some(cases), Some(outcome)) if index == results.len() => {
                    results.push((cases.parse()?, outcome.to_owned()));
                }
                (None, Some(name), None) => device = name.to_owned(),
                _ => {}
            }
        }
        if results.len() < checks.len() && (ended.status.success() || results.len() == before) {
            results.push((0, format!("FAILED: the process ended with {}", ended.status)));
        }
        restarts += 1;
        if restarts > MOST_RESTARTS {
            let missing = checks.len() - results.len();
            results.extend((0..missing).map(|_| (0, "FAILED: not run, too many failures before".to_owned())));
        }
    }
    print(&checks, &results, &device, arguments);
    let failed = results.iter().any(|(_, outcome)| outcome.starts_with("FAILED"));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What a check's comparison allows.
fn bound(tolerance: Tolerance) -> String {
    match tolerance {
        Tolerance::Bits => "same bits".to_owned(),
        Tolerance::Error { absolute, relative: 0.0 } => format!("{absolute:.1e}"),
        Tolerance::Error { absolute, relative } if absolute == relative => {
            format!("{absolute:.1e}, relative or absolute")
        }
        Tolerance::Error { relative, .. } => format!("relative {relative:.1e}"),
    }
}

fn print(checks: &[Check], results: &[(usize, String)], device: &str, arguments: &Arguments) {
    if !arguments.brief {
        println!("| instruction | cases | compared | result |\n|---|---:|---|---|");
        for (check, (cases, outcome)) in checks.iter().zip(results) {
            println!("| `{}` | {cases} | {} | {} |", check.name, bound(check.tolerance), outcome.replace('|', "\\|"));
        }
        println!();
    }
    // One line an opcode: forms that agree, that are not there, that fail.
    let mut opcodes: BTreeMap<&str, (usize, usize, usize, usize)> = BTreeMap::new();
    for (check, (cases, outcome)) in checks.iter().zip(results) {
        let opcode = check.name.split(['.', ' ']).next().unwrap_or_default();
        let (all, agree, missing, total) = opcodes.entry(opcode).or_default();
        *all += 1;
        *agree += usize::from(outcome == "ok");
        *missing += usize::from(outcome.starts_with("needs"));
        *total += cases;
    }
    println!("| opcode | forms | cases | {device} |\n|---|---:|---:|---|");
    for (opcode, (all, agree, missing, cases)) in &opcodes {
        let failed = all - agree - missing;
        let mut result = if failed > 0 { format!("**{failed} differ**") } else { "agrees".to_owned() };
        if missing == all {
            "not on this device".clone_into(&mut result);
        } else if *missing > 0 {
            result += &format!(", {missing} not on this device");
        }
        println!("| `{opcode}` | {all} | {cases} | {result} |");
    }
    let failures: Vec<_> =
        checks.iter().zip(results).filter(|(_, (_, outcome))| outcome.starts_with("FAILED")).collect();
    let agree = results.iter().filter(|(_, outcome)| outcome == "ok").count();
    let cases: usize = results.iter().map(|(cases, _)| cases).sum();
    println!("\n{agree} of {} forms agree on {cases} cases, {} fail.", checks.len(), failures.len());
    for (check, (_, outcome)) in failures {
        println!("- `{}`: {outcome}", check.name);
    }
}
