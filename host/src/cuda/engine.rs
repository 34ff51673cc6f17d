//! The compiled kernels on one device.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::{Device, DriverError, Function, Module, Stream, StreamHandle};
use crate::kernel_family::KernelFamily;
use crate::schedule::{Launch, Params};

/// PTX of a family of kernels; the driver compiles it for the GPU at hand.
struct Ptx {
    text: &'static str,
    /// CUDA version that the text's ISA version needs.
    needed_cuda: (u32, u32),
}

/// ISA 8.0.
const PORTABLE: Ptx = Ptx { text: include_str!("../../ptx/sm_80.ptx"), needed_cuda: (12, 0) };
/// ISA 8.0 as well.
const HOPPER: Ptx = Ptx { text: include_str!("../../ptx/sm_90a.ptx"), needed_cuda: (12, 0) };
/// ISA 8.8, the first one that has the family sm_120f.
const FP4: Ptx = Ptx { text: include_str!("../../ptx/sm_120f.ptx"), needed_cuda: (12, 9) };

const KERNELS: [&str; 11] = [
    "route_single",
    "route_count",
    "route_scan",
    "route_place",
    "amax",
    "quantize",
    "quantize_tiles",
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
    kernels: KernelFamily,
    module: Module,
    functions: BTreeMap<&'static str, Function>,
}

impl Engine {
    /// Compiles the kernels for `device`.
    ///
    /// # Errors
    /// [`DriverError`]: a driver too old for the PTX, or a failure of the driver's compiler, with its log.
    pub fn new(device: &Device) -> Result<Self, DriverError> {
        let kernels = KernelFamily::of(device.limits().compute_capability);
        let ptx = match kernels {
            KernelFamily::Portable => PORTABLE,
            KernelFamily::Hopper => HOPPER,
            KernelFamily::Fp4 => FP4,
        };
        device.require_driver(ptx.needed_cuda)?;
        let module = Module::load(device, ptx.text, kernels.module())?;
        let mut functions = BTreeMap::new();
        for kernel in KERNELS {
            functions.insert(kernel, module.function(kernel)?);
        }
        for variant in kernels.variants() {
            let function = module.function(variant.kernel)?;
            function.set_max_dynamic_shared(variant.shared_bytes)?;
            functions.insert(variant.kernel, function);
        }
        if kernels.overlap() {
            // So that a GEMM's block can start beside blocks of the kernels in front of it. (The others have most of the
            // shared memory anyway, and `combine`, which comes last, is slower with less cache.)
            for kernel in ["route_single", "quantize_tiles"] {
                functions[kernel].prefer_shared_memory()?;
            }
        }
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), kernels, module, functions }) })
    }

    /// Which kernels were loaded: those of the device's architecture.
    #[must_use]
    pub fn kernels(&self) -> KernelFamily {
        self.inner.kernels
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
            unsafe { self.launch(launch, false, stream.handle())? };
        }
        stream.synchronize()
    }

    /// Starts one launch; `follows` says that the launch before it on the stream was one of the same forward, which this
    /// one may overlap where the kernels wait for each other.
    ///
    /// # Safety
    /// Every address in the launch's params is device memory of the size documented there, alive and not used
    /// otherwise until the kernel has ended.
    pub(super) unsafe fn launch(
        &self,
        launch: &Launch,
        follows: bool,
        stream: StreamHandle<'_>,
    ) -> Result<(), DriverError> {
        let function = &self.inner.functions[launch.kernel];
        let (grid, block, shared) = (launch.grid, [launch.threads, 1, 1], launch.shared_bytes);
        let overlaps = follows && self.kernels().overlap();
        // SAFETY: the caller's contract; the schedule pairs each kernel with its own params struct.
        unsafe {
            match &launch.params {
                Params::Route(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
                Params::Quantize(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
                Params::GroupedGemm(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
                Params::Combine(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
                Params::Pack(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
                Params::Read(params) => function.launch_after(overlaps, grid, block, shared, stream, params),
            }
        }
    }
}
