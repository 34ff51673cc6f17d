//! The compiled kernels on one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::{Device, DriverError, Function, Module, Stream, StreamHandle};
use crate::schedule::{self, Launch, Params};

/// PTX of the portable kernels; the driver compiles it for the GPU at hand.
const PORTABLE_PTX: &str = include_str!("../../ptx/sm_80.ptx");

/// CUDA version that the PTX needs (ISA 8.0).
const NEEDED_CUDA: (u32, u32) = (12, 0);

const KERNELS: [&str; 10] = [
    "route_single",
    "route_count",
    "route_scan",
    "route_place",
    "amax",
    "quantize",
    "quantize_codes",
    "combine",
    "pack",
    "read_all",
];

/// The kernels, loaded on one device. Cheap to clone; layers and workspaces of one device share one.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    module: Module,
    functions: BTreeMap<&'static str, Function>,
}

impl Engine {
    /// Compiles the kernels for `device`.
    ///
    /// # Errors
    /// [`DriverError`]: a driver too old for the PTX, or a failure of the driver's compiler, with its log.
    pub fn new(device: &Device) -> Result<Self, DriverError> {
        device.require_driver(NEEDED_CUDA)?;
        let module = Module::load(device, PORTABLE_PTX, "sm_80")?;
        let mut functions = BTreeMap::new();
        for kernel in KERNELS {
            functions.insert(kernel, module.function(kernel)?);
        }
        for (kernel, shared_bytes) in schedule::shared_bytes_of_kernels() {
            let function = module.function(kernel)?;
            function.set_max_dynamic_shared(shared_bytes)?;
            functions.insert(kernel, function);
        }
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), module, functions }) })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// A kernel that no forward needs, looked up when it is wanted.
    pub(super) fn function(&self, kernel: &'static str) -> Result<Function, DriverError> {
        self.inner.module.function(kernel)
    }

    /// Runs single kernels in this order, on a stream of their own, and waits for them: for tests. A forward does not
    /// go through here.
    ///
    /// # Errors
    /// [`DriverError`]: the driver refuses a launch, or a kernel fails.
    ///
    /// # Panics
    /// When no kernel has a launch's name.
    ///
    /// # Safety
    /// The params are those of the kernel, its documented grid, threads and shared memory are kept, and every address
    /// in the params is device memory of the size documented there, not used otherwise meanwhile.
    pub unsafe fn run_alone(&self, launches: &[Launch]) -> Result<(), DriverError> {
        let stream = Stream::new(&self.inner.device)?;
        for launch in launches {
            // SAFETY: the caller's contract; the memory is alive until the synchronisation below.
            unsafe { self.launch(launch, stream.handle())? };
        }
        stream.synchronize()
    }

    /// Starts one launch.
    ///
    /// # Safety
    /// Every address in the launch's params is device memory of the size documented there, alive and not used
    /// otherwise until the kernel has ended.
    pub(super) unsafe fn launch(&self, launch: &Launch, stream: StreamHandle<'_>) -> Result<(), DriverError> {
        let function = &self.inner.functions[launch.kernel];
        let (grid, block, shared) = (launch.grid, [launch.threads, 1, 1], launch.shared_bytes);
        // SAFETY: the caller's contract; the schedule pairs each kernel with its own params struct.
        unsafe {
            match &launch.params {
                Params::Route(params) => function.launch(grid, block, shared, stream, params),
                Params::Quantize(params) => function.launch(grid, block, shared, stream, params),
                Params::GroupedGemm(params) => function.launch(grid, block, shared, stream, params),
                Params::Combine(params) => function.launch(grid, block, shared, stream, params),
                Params::Pack(params) => function.launch(grid, block, shared, stream, params),
                Params::Read(params) => function.launch(grid, block, shared, stream, params),
            }
        }
    }
}
