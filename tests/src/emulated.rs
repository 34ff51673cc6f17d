//! The emulator as a device: the host's whole GPU path, from packing to a captured graph, runs on it unchanged.
//!
//! A stream keeps what is queued on it until somebody waits for it, so that whoever forgets to wait, or writes too early
//! to what a queued copy reads, gets wrong results here too. A stream in capture keeps its launches for a graph instead.

mod queues;

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvfp4_moe::device_limits::DeviceLimits;
use nvfp4_moe::driver::backend::{Backend, Handle, KernelLaunch, Kernels, Memory};
use nvfp4_moe::driver::{CUcontext, Device, DriverError};
use nvfp4_moe::harness::{HarnessError, Runner};
use nvfp4_moe::kernel_family::KernelFamily;
use nvfp4_moe_emulator::{Config, Emulator, EmulatorError, Module};

use queues::Streams;

/// An architecture that the emulator can play, and for which kernels exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// As verify names it: `emulator:sm_80`.
    pub name: &'static str,
    compute_capability: (u32, u32),
    shared_bytes_per_block: u32,
}

/// All of them.
pub const ARCHITECTURES: [Architecture; 3] = [
    Architecture { name: "emulator:sm_80", compute_capability: (8, 0), shared_bytes_per_block: 163 * 1024 },
    Architecture { name: "emulator:sm_90a", compute_capability: (9, 0), shared_bytes_per_block: 227 * 1024 },
    Architecture { name: "emulator:sm_120a", compute_capability: (12, 0), shared_bytes_per_block: 99 * 1024 },
];

/// Instructions of a warp after which a kernel hangs: far above what any check needs, and some seconds.
const MAX_INSTRUCTIONS: u64 = 1 << 26;

impl Architecture {
    /// The architecture of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        ARCHITECTURES.into_iter().find(|architecture| architecture.name == name)
    }

    /// The kernels that run on it.
    #[must_use]
    pub const fn kernels(&self) -> KernelFamily {
        KernelFamily::of(self.compute_capability)
    }

    /// The limits of a device that is small on purpose: persistent grids then take several tiles a block.
    #[must_use]
    pub const fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            compute_capability: self.compute_capability,
            multiprocessors: 2,
            shared_bytes_per_block: self.shared_bytes_per_block,
            shared_bytes_per_multiprocessor: self.shared_bytes_per_block + 1024,
            registers_per_multiprocessor: 65_536,
            max_threads_per_multiprocessor: 2048,
            l2_bytes: 40 << 20,
            total_memory_bytes: 16 << 30,
        }
    }

    /// A device of this architecture with fresh memory.
    #[must_use]
    pub fn device(&self, config: Config) -> Device {
        self.device_with(config, None)
    }

    fn device_with(&self, config: Config, replacement: Option<Arc<Module>>) -> Device {
        Device::from_backend(Arc::new(Emulated {
            name: format!("{}, every access checked", self.name),
            limits: self.limits(),
            replacement,
            state: Mutex::new(State { emulator: Emulator::new(config), ..State::default() }),
        }))
    }

    /// The shipped kernels on a device of this architecture.
    ///
    /// # Errors
    /// [`HarnessError`]: the emulator does not know something in them.
    pub fn runner(&self) -> Result<Runner, HarnessError> {
        Runner::of_device(&self.device(Config { max_instructions: MAX_INSTRUCTIONS, ..Config::default() }), self.name)
    }

    /// Other kernels in place of the shipped ones, of the same names, on a device of this architecture.
    ///
    /// # Errors
    /// [`HarnessError`]: the device cannot be opened.
    pub fn runner_of(&self, kernels: Module, config: Config) -> Result<Runner, HarnessError> {
        Runner::of_device(&self.device_with(config, Some(Arc::new(kernels))), self.name)
    }
}

#[derive(Debug)]
struct Emulated {
    name: String,
    limits: DeviceLimits,
    /// What every loaded module becomes.
    replacement: Option<Arc<Module>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    emulator: Emulator,
    allocated: BTreeMap<u64, usize>,
    modules: Vec<Arc<Module>>,
    /// Module and name of each kernel.
    kernels: Vec<(Arc<Module>, &'static str)>,
    streams: Streams,
}

/// A launch that is queued, or in a graph.
#[derive(Clone, Debug)]
struct Recorded {
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: Vec<u8>,
}

impl State {
    fn run(&mut self, launch: &Recorded) -> Result<(), EmulatorError> {
        let (module, name) = &self.kernels[launch.kernel];
        let module = Arc::clone(module);
        let Recorded { grid, block, shared_bytes, ref params, .. } = *launch;
        self.emulator.launch(&module, name, grid, block, shared_bytes, params)?;
        Ok(())
    }

    fn taken_bytes(&self) -> u64 {
        self.allocated.values().map(|bytes| *bytes as u64).sum()
    }
}

impl Emulated {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, error: &EmulatorError) -> DriverError {
        DriverError::Backend { backend: self.name.clone(), detail: error.to_string() }
    }
}

impl Backend for Emulated {
    fn ordinal(&self) -> u32 {
        0
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn driver_version(&self) -> (u32, u32) {
        (13, 0)
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn raw_context(&self) -> CUcontext {
        std::ptr::null_mut()
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.state().run_all().map_err(|error| self.failed(&error))
    }
}

impl Memory for Emulated {
    fn free_memory(&self) -> Result<(u64, u64), DriverError> {
        let total = self.limits.total_memory_bytes;
        Ok((total.saturating_sub(self.state().taken_bytes()), total))
    }

    fn alloc(&self, bytes: usize) -> Result<u64, DriverError> {
        let mut state = self.state();
        let (requested_bytes, total_bytes) = (bytes as u64, self.limits.total_memory_bytes);
        let free_bytes = total_bytes.saturating_sub(state.taken_bytes());
        if requested_bytes > free_bytes {
            return Err(DriverError::OutOfMemory { requested_bytes, free_bytes, total_bytes });
        }
        let address = state.emulator.memory_mut().alloc(bytes);
        state.allocated.insert(address, bytes);
        Ok(address)
    }

    fn free(&self, address: u64) {
        let mut state = self.state();
        // Freeing waits for the work that is queued; its errors are for whoever waits for a stream.
        let _ = state.run_all();
        if state.allocated.remove(&address).is_some() {
            // The address was given out by `alloc` and not freed since.
            let _ = state.emulator.memory_mut().free(address);
        }
    }

    fn write(&self, address: u64, source: &[u8]) -> Result<(), DriverError> {
        self.state().emulator.memory_mut().write(address, source).map_err(|error| self.failed(&error))
    }

    fn read(&self, address: u64, target: &mut [u8]) -> Result<(), DriverError> {
        let bytes = self.state().emulator.memory().read(address, target.len()).map_err(|error| self.failed(&error))?;
        target.copy_from_slice(&bytes);
        Ok(())
    }

    fn fill(&self, address: u64, bytes: usize, value: u8) -> Result<(), DriverError> {
        self.state().emulator.memory_mut().fill(address, value, bytes).map_err(|error| self.failed(&error))
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>, DriverError> {
        let memory: Box<[u8]> = vec![0; bytes].into_boxed_slice();
        Ok(NonNull::from(Box::leak(memory)).cast())
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: a box of as many bytes was leaked for it, and the caller, its one owner, gives it up.
        drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(memory, bytes).as_ptr()) });
    }

    unsafe fn queue_write(
        &self,
        address: u64,
        source: NonNull<u8>,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        // SAFETY: the source stays as it is until the stream has passed the copy: the caller's promise.
        unsafe { self.state().streams.upload(stream, address, source, bytes) };
        Ok(())
    }
}

impl Kernels for Emulated {
    fn load_module(&self, ptx: &str, target: &str) -> Result<Handle, DriverError> {
        let module = match &self.replacement {
            Some(module) => Arc::clone(module),
            None => Arc::new(Module::parse(ptx).map_err(|error| DriverError::ModuleLoad {
                target: target.to_owned(),
                code: 0,
                name: "not given to a driver".to_owned(),
                log: error.to_string(),
            })?),
        };
        let mut state = self.state();
        state.modules.push(module);
        Ok(Handle(state.modules.len() - 1))
    }

    fn unload_module(&self, _module: Handle) {}

    fn kernel(&self, module: Handle, name: &'static str) -> Result<(Handle, Option<usize>), DriverError> {
        let mut state = self.state();
        let module = Arc::clone(&state.modules[module.0]);
        state.kernels.push((module, name));
        Ok((Handle(state.kernels.len() - 1), None))
    }

    fn set_max_dynamic_shared(&self, _kernel: Handle, name: &'static str, bytes: u32) -> Result<(), DriverError> {
        let most = self.limits.shared_bytes_per_block;
        if bytes > most {
            let detail = format!("kernel {name} wants {bytes} bytes of shared memory, but a block can have {most}");
            return Err(DriverError::Backend { backend: self.name.clone(), detail });
        }
        Ok(())
    }

    fn prefer_shared_memory(&self, _kernel: Handle, _name: &'static str) -> Result<(), DriverError> {
        Ok(())
    }

    unsafe fn launch(&self, kernel: Handle, stream: Handle, launch: &KernelLaunch<'_>) -> Result<(), DriverError> {
        let KernelLaunch { grid, block, shared_bytes, params, .. } = *launch;
        let recorded = Recorded { kernel: kernel.0, grid, block, shared_bytes, params: params.to_vec() };
        self.state().streams.launch(stream, recorded);
        Ok(())
    }
}
