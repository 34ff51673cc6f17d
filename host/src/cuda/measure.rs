//! What a device's memory can give at best: the ceilings of every kernel that is bound by reading weights, or by moving
//! activations.

use nvfp4_moe_device::kernels::measure;
use nvfp4_moe_device::params::ReadParams;

use super::engine::Engine;
use crate::driver::{DeviceBuffer, DriverError, Event, Function, Stream, StreamHandle};

/// Much more than any L2, where the device has it.
const MOST_BYTES: u64 = 4 << 30;

/// Timed runs; the median counts.
const RUNS: usize = 20;

/// Runs before those: the first ones wake up the memory's clock.
const WARM_UP_RUNS: usize = 3;

/// Bytes of the buffer, each; see [`measure::UNLIKELY`] for why they are equal.
const FILL: u8 = 0x5A;

/// A large buffer and the kernel that reads it.
#[derive(Debug)]
pub struct ReadProbe {
    kernel: Function,
    buffer: DeviceBuffer,
    sums: DeviceBuffer,
    blocks: u32,
}

impl ReadProbe {
    /// Takes 4 GiB of device memory, or a quarter of what is free if that is less.
    ///
    /// # Errors
    /// [`DriverError`]: no memory, or a failure of the driver.
    pub fn new(engine: &Engine) -> Result<Self, DriverError> {
        let device = engine.device();
        let kernel = engine.function("read_all")?;
        let (free, _) = device.free_memory()?;
        let bytes = (free / 4).min(MOST_BYTES) / 16 * 16;
        let buffer = DeviceBuffer::alloc(device, bytes as usize)?;
        buffer.fill(0, buffer.len_bytes(), FILL)?;
        let blocks = device.limits().multiprocessors * measure::BLOCKS_PER_MULTIPROCESSOR;
        Ok(Self { kernel, buffer, sums: DeviceBuffer::alloc(device, 4)?, blocks })
    }

    /// Bytes of one run.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer.len_bytes() as u64
    }

    /// Queues reading the first `bytes` bytes, rounded down to 16, or all if there are fewer: to measure, to flush the L2,
    /// or to keep the device busy while the CPU queues what is to be measured.
    ///
    /// # Errors
    /// [`DriverError`]: a failure of the driver.
    pub fn enqueue(&self, bytes: u64, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        let bytes = bytes.min(self.bytes()) / 16 * 16;
        let params = ReadParams { data: self.buffer.address(), bytes, sums: self.sums.address() };
        // SAFETY: the kernel takes this struct; it reads inside the buffer and writes at most the one u32 of `sums`.
        // Both live as long as `self`, and freeing them waits for the kernel.
        unsafe { self.kernel.launch([self.blocks, 1, 1], [measure::THREADS, 1, 1], 0, stream, &params) }
    }

    /// GB/s (10^9 bytes a second) of reading the whole buffer.
    ///
    /// # Errors
    /// [`DriverError`]: a failure of the driver.
    pub fn bandwidth(&self) -> Result<f64, DriverError> {
        self.rate(self.bytes(), |stream| self.enqueue(self.bytes(), stream))
    }

    /// GB/s (10^9 bytes a second) of copying one half of the buffer to the other by the driver's own copy: bytes read and
    /// bytes written, so that it compares with what a kernel moves.
    ///
    /// # Errors
    /// [`DriverError`]: a failure of the driver.
    pub fn copy_bandwidth(&self) -> Result<f64, DriverError> {
        let half = self.buffer.len_bytes() / 2;
        // All bytes are equal and stay so.
        self.rate(2 * half as u64, |stream| self.buffer.copy_within(0, half, half, stream))
    }

    /// GB/s of work that moves `bytes` bytes: the median of many runs.
    fn rate(
        &self,
        bytes: u64,
        enqueue: impl Fn(StreamHandle<'_>) -> Result<(), DriverError>,
    ) -> Result<f64, DriverError> {
        let device = self.buffer.device();
        let stream = Stream::new(device)?;
        let events = (0..=RUNS).map(|_| Event::new(device)).collect::<Result<Vec<_>, _>>()?;
        for _ in 0..WARM_UP_RUNS {
            enqueue(stream.handle())?;
        }
        events[0].record(stream.handle())?;
        for after in &events[1..] {
            enqueue(stream.handle())?;
            after.record(stream.handle())?;
        }
        stream.synchronize()?;
        let mut times = events.windows(2).map(|pair| pair[0].elapsed_ms(&pair[1])).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f32::total_cmp);
        Ok(bytes as f64 / (f64::from(times[RUNS / 2]) * 1e6))
    }
}

/// GB/s (10^9 bytes a second) at which the device reads its memory: the median of 20 runs over several GB.
///
/// # Errors
/// [`DriverError`]: no memory, or a failure of the driver.
pub fn read_bandwidth(engine: &Engine) -> Result<f64, DriverError> {
    ReadProbe::new(engine)?.bandwidth()
}
