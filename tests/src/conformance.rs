//! The emulator's conformance checks on any device, and the emulator against it.

use bytemuck::{NoUninit, Pod};
use nvfp4_moe::driver::{Device, DeviceBuffer, DriverError, Module, Stream};
use nvfp4_moe_emulator::conformance::Check;

/// What came of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every case agreed.
    Agrees,
    /// The device is older than the instruction, or newer than one that only an older one has.
    Unavailable,
    /// The kernel cannot be loaded or run, or results differ: the first difference, or the compiler's log.
    Failed(String),
}

/// How many cases were compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cases {
    /// All.
    pub compared: usize,
    /// Those with the bits that were expected; all NaNs are one.
    pub same: usize,
    /// Those with other bits, within the check's bound.
    pub near: usize,
}

/// A check that was run.
#[derive(Debug, Clone)]
pub struct Row {
    /// The instruction.
    pub name: String,
    /// What came of its cases.
    pub cases: Cases,
    /// What came of it.
    pub outcome: Outcome,
    /// The device may not be used any more: the kernel failed while it ran.
    pub device_lost: bool,
}

/// Runs a check's derived cases on a device; with `reference`, wide inputs too, whose results there are those expected.
#[must_use]
pub fn run(check: &Check, device: &Device, reference: Option<&Device>) -> Row {
    let mut row =
        Row { name: check.name.clone(), cases: Cases::default(), outcome: Outcome::Unavailable, device_lost: false };
    if !check.runs_on(device.limits().compute_capability) {
        return row;
    }
    let mut cases: Vec<&[u64]> = check.derived.iter().map(|(inputs, _)| inputs.as_slice()).collect();
    let wide = check.wide_inputs();
    if reference.is_some() {
        cases.extend(wide.iter().map(Vec::as_slice));
    }
    let results = match outputs(check, device, &cases) {
        Ok(results) => results,
        Err(error) => {
            row.device_lost = !matches!(error, DriverError::ModuleLoad { .. } | DriverError::DriverTooOld { .. });
            row.outcome = Outcome::Failed(error.to_string());
            return row;
        }
    };
    match compare(check, &cases, &results, reference) {
        Ok((cases, difference)) => {
            row.cases = cases;
            row.outcome = difference.map_or(Outcome::Agrees, Outcome::Failed);
        }
        Err(error) => row.outcome = Outcome::Failed(format!("on the reference: {error}")),
    }
    row
}

/// How results compare with those by hand, and the others with the reference's; the first difference.
fn compare(
    check: &Check,
    cases: &[&[u64]],
    results: &[Vec<u64>],
    reference: Option<&Device>,
) -> Result<(Cases, Option<String>), DriverError> {
    let derived = check.derived.iter().map(|(_, expected)| (expected.clone(), "by hand"));
    let expected: Vec<(Vec<u64>, &str)> = match reference {
        None => derived.collect(),
        Some(reference) => {
            let theirs = outputs(check, reference, cases)?.into_iter().map(|expected| (expected, "by the reference"));
            derived.chain(theirs.skip(check.derived.len())).collect()
        }
    };
    let pairs = || cases.iter().zip(results).zip(&expected);
    let different: Vec<_> = pairs().filter(|((_, result), (expected, _))| !check.agree(result, expected)).collect();
    let same = pairs().filter(|((_, result), (expected, _))| check.same(result, expected)).count();
    let counts = Cases { compared: cases.len(), same, near: cases.len() - same - different.len() };
    let first = different.first().map(|((inputs, result), (expected, whose))| {
        let at = result.iter().zip(expected).position(|(a, b)| a != b).unwrap_or_default();
        // Programs have many words: what is around the first that differs.
        let words = |all: &[u64]| all[at.saturating_sub(2).min(all.len())..all.len().min(at + 4)].to_vec();
        let given = &inputs[..inputs.len().min(6)];
        format!(
            "{} of {} cases differ; {given:x?} gives {:x?} (word {at}), {whose} {:x?}",
            different.len(),
            cases.len(),
            words(result),
            words(expected)
        )
    });
    Ok((counts, first))
}

/// What the check's kernel makes of cases, one after the other.
fn outputs(check: &Check, device: &Device, cases: &[&[u64]]) -> Result<Vec<Vec<u64>>, DriverError> {
    let launch = PtxLaunch {
        ptx: &check.ptx,
        target: &check.target(),
        blocks: check.grid(cases.len()),
        threads: check.threads,
        shared_bytes: check.shared_bytes,
        cases: cases.len(),
    };
    // SAFETY: a check's kernel reads and writes one case after the other.
    let results: Vec<u64> = unsafe { launch.run(device, &cases.concat(), cases.len() * check.outputs.len()) }?;
    Ok(results.chunks_exact(check.outputs.len()).map(<[u64]>::to_vec).collect())
}

/// A launch of the kernel `k` of a module that a check brings along, whose parameter is that of [`Check::ptx`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PtxLaunch<'a> {
    pub(crate) ptx: &'a str,
    /// Architecture that it is for, as errors name it.
    pub(crate) target: &'a str,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    /// How many cases the kernel is told there are.
    pub(crate) cases: usize,
}

impl PtxLaunch<'_> {
    /// Runs the kernel on inputs; `count` outputs, zeros where it writes nothing.
    ///
    /// # Safety
    /// The kernel reads nothing beyond the inputs and writes nothing beyond the outputs.
    pub(crate) unsafe fn run<I: NoUninit, O: Pod>(
        &self,
        device: &Device,
        inputs: &[I],
        count: usize,
    ) -> Result<Vec<O>, DriverError> {
        let module = Module::load(device, self.ptx, self.target)?;
        let kernel = module.function("k")?;
        let bytes: &[u8] = bytemuck::cast_slice(inputs);
        let input_buffer = DeviceBuffer::alloc(device, bytes.len().max(8))?;
        input_buffer.write(0, bytes)?;
        let mut results = vec![O::zeroed(); count];
        let output_buffer = DeviceBuffer::alloc(device, size_of_val(results.as_slice()))?;
        output_buffer.write(0, bytemuck::cast_slice(&results))?;
        let parameter = Check::parameter(input_buffer.address(), output_buffer.address(), self.cases);
        let stream = Stream::new(device)?;
        let (grid, block) = ([self.blocks, 1, 1], [self.threads, 1, 1]);
        // SAFETY: the kernel takes these three words and stays inside of both buffers, as the caller promises; they outlive
        // the wait for the stream, and nothing else uses them.
        unsafe { kernel.launch(grid, block, self.shared_bytes, stream.handle(), &parameter) }?;
        stream.synchronize()?;
        output_buffer.read(0, bytemuck::cast_slice_mut(&mut results))?;
        Ok(results)
    }
}
