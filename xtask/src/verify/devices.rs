//! The devices of this machine.

use nvfp4_moe::driver::{Device, DriverError};
use nvfp4_moe::harness::{DeviceChoice, HarnessError, Runner, Target};
use nvfp4_moe::plan::PlanError;
use nvfp4_moe_tests::emulated::{ARCHITECTURES, Architecture};

use super::report::{Outcome, Report};

/// A device that verify runs on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Machine {
    /// Of this machine.
    Here(Target),
    /// Emulated, from Ampere to whatever has kernels.
    Emulated(Architecture),
}

impl Machine {
    fn name(&self) -> String {
        match self {
            Self::Here(target) => target.to_string(),
            Self::Emulated(architecture) => architecture.name.to_owned(),
        }
    }

    fn runner(&self) -> Result<Runner, HarnessError> {
        match self {
            Self::Here(target) => Runner::new(*target),
            Self::Emulated(architecture) => architecture.runner(),
        }
    }
}

/// A device on the command line: `auto` would hide which one was meant.
pub(super) fn parse(text: &str) -> Result<Machine, String> {
    if text.starts_with("emulator:") {
        let names = || ARCHITECTURES.map(|architecture| architecture.name).join(", ");
        return Architecture::named(text)
            .map(Machine::Emulated)
            .ok_or_else(|| format!("it must be one of {}, for which there are kernels", names()));
    }
    match text.parse::<DeviceChoice>() {
        Ok(DeviceChoice::Named(target)) => Ok(Machine::Here(target)),
        Ok(DeviceChoice::Auto) => {
            Err("it must be cpu, cuda, cuda:N or emulator:ARCHITECTURE; leave it out for every device".to_owned())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Opens the devices that were asked for, or else every one; what cannot be opened is in the report.
pub(super) fn open(asked: &[Machine], report: &mut Report) -> Vec<Runner> {
    if !asked.is_empty() {
        return asked.iter().filter_map(|&machine| open_one(machine, true, report)).collect();
    }
    let mut machines = vec![Machine::Here(Target::Cpu)];
    match Device::count() {
        Ok(0) => report.add("GPU", Outcome::NotRun("the driver sees no GPU".to_owned())),
        Ok(count) => machines.extend((0..count).map(|ordinal| Machine::Here(Target::Cuda(ordinal)))),
        Err(DriverError::NoDriver { detail }) => {
            report.add("GPU", Outcome::NotRun(format!("no NVIDIA driver is installed here ({detail})")));
        }
        // A driver that is there but does not start is a fault of the machine or of the loader.
        Err(error) => report.add("GPU", Outcome::Failed(error.to_string())),
    }
    machines.extend(ARCHITECTURES.map(Machine::Emulated));
    machines.into_iter().filter_map(|machine| open_one(machine, false, report)).collect()
}

fn open_one(machine: Machine, asked: bool, report: &mut Report) -> Option<Runner> {
    let outcome = match machine.runner() {
        Ok(runner) => return Some(runner),
        // An older GPU beside the one that counts is no fault, unless it was asked for.
        Err(error @ HarnessError::Plan(PlanError::UnsupportedArchitecture { .. })) if !asked => {
            Outcome::NotRun(error.to_string())
        }
        Err(error) => Outcome::Failed(error.to_string()),
    };
    report.add_on("golden cases", machine.name(), outcome);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_one_by_one() {
        assert_eq!(parse("cpu"), Ok(Machine::Here(Target::Cpu)));
        assert_eq!(parse("cuda"), Ok(Machine::Here(Target::Cuda(0))));
        assert_eq!(parse("cuda:2"), Ok(Machine::Here(Target::Cuda(2))));
        assert_eq!(parse("emulator:sm_80"), Ok(Machine::Emulated(ARCHITECTURES[0])));
        parse("emulator:sm_70").expect_err("no kernels");
        parse("auto").expect_err("not a device");
        parse("gpu").expect_err("not a device");
    }

    #[test]
    fn a_gpu_that_was_asked_for_and_is_not_there_is_a_failure() {
        let mut report = Report::default();
        // No machine has this many.
        assert!(open(&[Machine::Here(Target::Cuda(4096))], &mut report).is_empty());
        assert_eq!((report.passed(), report.failed()), (0, 1));
    }
}
