//! The devices of this machine.

use nvfp4_moe::driver::{Device, DriverError};
use nvfp4_moe::harness::{DeviceChoice, HarnessError, Runner, Target};
use nvfp4_moe::plan::PlanError;

use super::report::{Outcome, Report};

/// A device on the command line: `auto` would hide which one was meant.
pub(super) fn parse(text: &str) -> Result<Target, String> {
    match text.parse::<DeviceChoice>() {
        Ok(DeviceChoice::Named(target)) => Ok(target),
        Ok(DeviceChoice::Auto) => Err("it must be cpu, cuda or cuda:N; leave it out for every device".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Opens the devices that were asked for, or else every one; what cannot be opened is in the report.
pub(super) fn open(asked: &[Target], report: &mut Report) -> Vec<Runner> {
    if !asked.is_empty() {
        return asked.iter().filter_map(|&target| open_one(target, true, report)).collect();
    }
    let mut targets = vec![Target::Cpu];
    match Device::count() {
        Ok(0) => report.add("GPU", Outcome::NotRun("the driver sees no GPU".to_owned())),
        Ok(count) => targets.extend((0..count).map(Target::Cuda)),
        Err(DriverError::NoDriver { detail }) => {
            report.add("GPU", Outcome::NotRun(format!("no NVIDIA driver is installed here ({detail})")));
        }
        // A driver that is there but does not start is a fault of the machine or of the loader.
        Err(error) => report.add("GPU", Outcome::Failed(error.to_string())),
    }
    targets.into_iter().filter_map(|target| open_one(target, false, report)).collect()
}

fn open_one(target: Target, asked: bool, report: &mut Report) -> Option<Runner> {
    let outcome = match Runner::new(target) {
        Ok(runner) => return Some(runner),
        // An older GPU beside the one that counts is no fault, unless it was asked for.
        Err(error @ HarnessError::Plan(PlanError::UnsupportedArchitecture { .. })) if !asked => {
            Outcome::NotRun(error.to_string())
        }
        Err(error) => Outcome::Failed(error.to_string()),
    };
    report.add_on("golden cases", target.to_string(), outcome);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_one_by_one() {
        assert_eq!(parse("cpu"), Ok(Target::Cpu));
        assert_eq!(parse("cuda"), Ok(Target::Cuda(0)));
        assert_eq!(parse("cuda:2"), Ok(Target::Cuda(2)));
        parse("auto").expect_err("not a device");
        parse("gpu").expect_err("not a device");
    }

    #[test]
    fn a_gpu_that_was_asked_for_and_is_not_there_is_a_failure() {
        let mut report = Report::default();
        // No machine has this many.
        assert!(open(&[Target::Cuda(4096)], &mut report).is_empty());
        assert_eq!((report.passed(), report.failed()), (0, 1));
    }
}
