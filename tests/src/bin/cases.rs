//! Runs the checks of `nvfp4_moe_tests::cases` on one device.
//!
//! `cases [--device cpu|cuda[:N]|emulator:ARCHITECTURE] [--small] [--list] [FILTER]`

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use nvfp4_moe::harness::Runner;
use nvfp4_moe_tests::cases::{self, Lab, Size};
use nvfp4_moe_tests::emulated::Architecture;

const USAGE: &str = "usage: cases [--device cpu|cuda[:N]|emulator:ARCHITECTURE] [--small] [--list] [FILTER]";

struct Arguments {
    device: String,
    size: Size,
    list: bool,
    filter: Option<String>,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments> {
    let mut arguments = Arguments { device: "cpu".to_owned(), size: Size::Full, list: false, filter: None };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--device" => arguments.device = words.next().context(USAGE)?,
            "--small" => arguments.size = Size::Small,
            "--list" => arguments.list = true,
            option if option.starts_with('-') => bail!("there is no option {option}; {USAGE}"),
            _ if arguments.filter.is_some() => bail!("one filter is enough; {USAGE}"),
            _ => arguments.filter = Some(word),
        }
    }
    Ok(arguments)
}

fn main() -> Result<ExitCode> {
    let Arguments { device, size, list, filter } = parse(std::env::args().skip(1))?;
    let runner = match Architecture::named(&device) {
        Some(architecture) => architecture.runner()?,
        None => Runner::choose(device.parse()?)?,
    };
    println!("{} ({})", runner.device_name(), runner.reason());
    let lab = Lab { runner: &runner, size };
    if list {
        cases::names(&lab).iter().for_each(|name| println!("{name}"));
        return Ok(ExitCode::SUCCESS);
    }
    let (mut passed, mut failed) = (0, 0);
    cases::run(&lab, filter.as_deref(), &mut |result| match &result.outcome {
        Ok(()) => {
            passed += 1;
            println!("ok      {:<45} {:7.2} s", result.name, result.seconds);
        }
        Err(message) => {
            failed += 1;
            println!("FAILED  {:<45} {:7.2} s\n        {message}", result.name, result.seconds);
        }
    });
    println!("{passed} passed, {failed} failed");
    if passed + failed == 0 {
        bail!("no check has a name with {:?} in it; --list shows them", filter.unwrap_or_default());
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
