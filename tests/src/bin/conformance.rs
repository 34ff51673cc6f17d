//! Runs the emulator's conformance checks (`nvfp4_moe_emulator::conformance`) on a device and prints tables of the results: a
//! line a form, and a line a family, which is all with `--brief`.
//!
//! Each check compares a device with values derived by hand from the PTX ISA document; `--compare` adds wide inputs, on which
//! the emulator's results are the expected ones, bit for bit or within the bound that the table states. A kernel that cannot
//! be loaded, fails or hangs is a failed check, and the next one goes on in a fresh process.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nvfp4_moe::driver::Device;
use nvfp4_moe_emulator::Config;
use nvfp4_moe_emulator::conformance::{Check, Tolerance};
use nvfp4_moe_tests::conformance::{Cases, Outcome, run};
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
        std::fs::write(format!("{folder}/{}_{index:04}_{name}.ptx", check.target().replace('_', "")), &check.ptx)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs checks from the given one on until the device is lost; one line each: number, cases compared, those with the same
/// bits and those near, result.
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
                println!("{running}\t0 0 0\tFAILED: no end after {PATIENCE:?}");
                std::process::exit(3);
            }
        }
    });
    for (index, check) in checks(&arguments.filter).iter().enumerate().skip(from) {
        RUNNING.store(index, Relaxed);
        let row = run(check, &device, reference.as_ref());
        let outcome = match &row.outcome {
            Outcome::Agrees => "ok".to_owned(),
            Outcome::Unavailable => format!("needs {}", check.target()),
            Outcome::Failed(what) => format!("FAILED: {}", what.replace(['\n', '\t'], " ")),
        };
        let Cases { compared, same, near } = row.cases;
        println!("{index}\t{compared} {same} {near}\t{outcome}");
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
    let mut results: Vec<(Cases, String)> = Vec::new();
    let (mut device, mut restarts) = (None, 0);
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
                    results.push((counts(cases)?, outcome.to_owned()));
                }
                (None, Some(name), None) => device = Some(name.to_owned()),
                _ => {}
            }
        }
        // The name comes first: a worker without it has no device.
        if device.is_none() {
            bail!("{} is no device that can be opened (above is why); {USAGE}", arguments.device);
        }
        if results.len() < checks.len() && (ended.status.success() || results.len() == before) {
            results.push((Cases::default(), format!("FAILED: the process ended with {}", ended.status)));
        }
        restarts += 1;
        if restarts > MOST_RESTARTS {
            let missing = checks.len() - results.len();
            let not_run = (Cases::default(), "FAILED: not run, too many failures before".to_owned());
            results.extend(std::iter::repeat_n(not_run, missing));
        }
    }
    print(&checks, &results, device.as_deref().unwrap_or(&arguments.device), arguments);
    let failed = results.iter().any(|(_, outcome)| outcome.starts_with("FAILED"));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The three numbers of a worker's line.
fn counts(text: &str) -> Result<Cases> {
    let numbers: Vec<usize> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [compared, same, near] = numbers[..] else { bail!("a worker counted {text:?}, not three numbers") };
    Ok(Cases { compared, same, near })
}

/// What a check's comparison allows.
fn bound(tolerance: Tolerance) -> String {
    match tolerance {
        Tolerance::Bits => "same bits".to_owned(),
        Tolerance::Error { absolute, relative: 0.0 } => format!("{absolute:.1e}"),
        Tolerance::Error { absolute, relative } if absolute <= f32::MIN_POSITIVE.into() => {
            format!("relative {relative:.1e}")
        }
        Tolerance::Error { absolute, relative } => format!("relative {relative:.1e} or absolute {absolute:.1e}"),
    }
}

fn print(checks: &[Check], results: &[(Cases, String)], device: &str, arguments: &Arguments) {
    if !arguments.brief {
        println!("| instruction | inputs compared | comparison | result |\n|---|---:|---|---|");
        for (check, (cases, outcome)) in checks.iter().zip(results) {
            let outcome = outcome.replace('|', "\\|");
            println!("| `{}` | {} | {} | {outcome} |", check.name, cases.compared, bound(check.tolerance));
        }
        println!();
    }
    print_families(checks, results, device);
    let failures: Vec<_> =
        checks.iter().zip(results).filter(|(_, (_, outcome))| outcome.starts_with("FAILED")).collect();
    let agree = results.iter().filter(|(_, outcome)| outcome == "ok").count();
    let missing = results.len() - agree - failures.len();
    let compared: usize = results.iter().map(|(cases, _)| cases.compared).sum();
    let (all, failed) = (checks.len(), failures.len());
    println!(
        "\n{device}: {agree} of {all} forms agree on {compared} inputs, {failed} fail, {missing} need another GPU."
    );
    for (check, (_, outcome)) in failures {
        println!("- `{}`: {outcome}", check.name);
    }
}

/// What is in a family, and what came of it.
#[derive(Default)]
struct Family<'a> {
    name: &'a str,
    opcodes: BTreeSet<&'a str>,
    forms: usize,
    cases: Cases,
    failed: usize,
    missing: usize,
}

/// A line a family, and one for all, as `docs/emulator.md` has them.
fn print_families(checks: &[Check], results: &[(Cases, String)], device: &str) {
    let mut families: Vec<Family<'_>> = Vec::new();
    let mut all = Family { name: "all", ..Family::default() };
    for (check, (cases, outcome)) in checks.iter().zip(results) {
        if families.last().is_none_or(|family| family.name != check.family) {
            families.push(Family { name: check.family, ..Family::default() });
        }
        for family in families.last_mut().into_iter().chain([&mut all]) {
            family.opcodes.insert(check.name.split(['.', ' ']).next().unwrap_or_default());
            family.forms += 1;
            family.cases.compared += cases.compared;
            family.cases.same += cases.same;
            family.cases.near += cases.near;
            family.failed += usize::from(outcome.starts_with("FAILED"));
            family.missing += usize::from(outcome.starts_with("needs"));
        }
    }
    println!(
        "| {device} | opcodes | forms | inputs compared | bit-equal | within bound | forms that fail | need another GPU |\n\
         |---|---|---:|---:|---:|---:|---:|---:|"
    );
    let count = all.opcodes.len().to_string();
    for family in families.iter().chain([&all]) {
        let opcodes = family.opcodes.iter().map(|opcode| format!("`{opcode}`")).collect::<Vec<_>>().join(" ");
        let opcodes = if family.name == all.name { &count } else { &opcodes };
        let Family { name, forms, cases: Cases { compared, same, near }, failed, missing, .. } = family;
        println!("| {name} | {opcodes} | {forms} | {compared} | {same} | {near} | {failed} | {missing} |");
    }
}
