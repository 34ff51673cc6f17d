//! Launching: the blocks of a grid on host threads.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use super::Lanes;
use super::block::{Cluster, Slice};
use crate::decode::{Kernel, Module};
use crate::error::{EmulatorError, Finding};
use crate::memory::DeviceMemory;
use crate::memory::block_clocks::Releases;
use crate::memory::global_races::GlobalRaces;

/// Turns of each warp before another block may run.
const TURNS: u32 = 64;
/// Of so many slices of blocks, one goes to a block that has not begun, though begun ones wait.
const NEW_EVERY: u64 = 8;
/// Slices in a row in which every block waits, after which they will for ever.
const PATIENCE: u32 = 1 << 10;
/// Most blocks of a cluster on every GPU that has clusters.
const PORTABLE_CLUSTER: u32 = 8;

/// In which precision matrix instructions add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accumulate {
    /// As the hardware: f32.
    #[default]
    F32,
    /// f64 inside an instruction, rounded to f32 when it leaves: without the unit's own rounding.
    F64,
}

/// How kernels are run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Precision of matrix instructions.
    pub accumulate: Accumulate,
    /// Host threads; 0 for as many as there are.
    pub threads: usize,
    /// Instructions of one warp after which its block counts as hung.
    pub max_instructions: u64,
    /// Blocks, or clusters of them, that may have begun and not ended at one time.
    pub resident_blocks: usize,
    /// Largest shared memory of a block, in bytes.
    pub max_shared_bytes: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            accumulate: Accumulate::F32,
            threads: 0,
            max_instructions: 1 << 32,
            resident_blocks: 256,
            max_shared_bytes: 227 * 1024,
        }
    }
}

/// What a launch did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaunchReport {
    /// Instructions, each counted once for each thread that was there.
    pub thread_instructions: u64,
}

/// A GPU.
#[derive(Debug, Default)]
pub struct Emulator {
    config: Config,
    memory: DeviceMemory,
    /// Addresses of the variables of each module that was launched.
    variables: HashMap<u64, Vec<u64>>,
}

/// What is the same for all blocks of a launch.
pub(crate) struct Launch<'a> {
    pub(crate) module: &'a Module,
    pub(crate) kernel: &'a Kernel,
    pub(crate) config: &'a Config,
    pub(crate) memory: &'a DeviceMemory,
    pub(crate) races: GlobalRaces,
    /// What blocks released, where the kernel has any that do.
    pub(crate) releases: Option<Releases>,
    pub(crate) params: &'a [u8],
    pub(crate) variables: &'a [u64],
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// Blocks of a cluster, along x.
    pub(crate) cluster: u32,
    pub(crate) dynamic_shared_bytes: u32,
    /// End of the block's shared memory in the shared window.
    pub(crate) shared_end: u32,
    /// Registers of warps that ended.
    pub(crate) spare_registers: Mutex<Vec<Vec<Lanes>>>,
    stop: AtomicBool,
}

impl Launch<'_> {
    /// Whether another block found something.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub(crate) fn text(&self, line: u32) -> String {
        self.module.text(line)
    }
}

#[derive(Default)]
struct Queue {
    next: u32,
    live: usize,
    slices: u64,
    paused: VecDeque<Cluster>,
    /// Slices that may have changed what others wait for, and clusters that have waited long since the last of them.
    changes: u64,
    starved: usize,
    findings: Vec<Finding>,
    report: LaunchReport,
}

impl Queue {
    /// A cluster to run: one that waits, or the next new one.
    fn take(&mut self, launch: &Launch<'_>, clusters: u32) -> Option<Cluster> {
        self.slices += 1;
        let may_begin = self.next < clusters && self.live < launch.config.resident_blocks.max(1);
        if may_begin && (self.paused.is_empty() || self.slices.is_multiple_of(NEW_EVERY)) {
            self.next += 1;
            self.live += 1;
            return Some(Cluster::new(launch, self.next - 1));
        }
        self.paused.pop_front()
    }

    fn change(&mut self) {
        self.changes += 1;
        self.starved = 0;
    }

    /// A cluster waited in a slice that began at a time; whether all do, and those for which they may have no room.
    fn wait(&mut self, cluster: &mut Cluster, began: u64, launch: &Launch<'_>, clusters: u32) -> bool {
        let (since, slices) = &mut cluster.waited;
        if *since != self.changes {
            (*since, *slices) = (self.changes, 0);
        }
        if began == self.changes {
            *slices += 1;
            self.starved += usize::from(*slices == PATIENCE);
        }
        self.next < clusters && self.live >= launch.config.resident_blocks && self.starved == self.live
    }
}

impl Emulator {
    /// An emulator without allocations.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { config, ..Self::default() }
    }

    /// Device memory.
    #[must_use]
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Device memory, to allocate and write.
    pub fn memory_mut(&mut self) -> &mut DeviceMemory {
        &mut self.memory
    }

    /// Whether all blocks of a grid are resident at one time, as a cooperative launch promises them.
    ///
    /// # Errors
    /// [`EmulatorError::Launch`] when there are more than [`Config::resident_blocks`] of them, or of their clusters.
    pub fn check_cooperative(&self, kernel: &str, grid: [u32; 3], cluster: u32) -> Result<(), EmulatorError> {
        let blocks: u64 = grid.into_iter().map(u64::from).product();
        let most = self.config.resident_blocks as u64 * u64::from(cluster);
        if blocks <= most {
            return Ok(());
        }
        let reason = format!("a cooperative grid of {blocks} blocks, at most {most} are resident");
        Err(EmulatorError::Launch { kernel: kernel.into(), reason })
    }

    /// Runs a kernel to its end. `params` are the bytes of its parameters, in order, each at its alignment.
    ///
    /// # Errors
    /// [`EmulatorError::NoKernel`], [`EmulatorError::Launch`] when it cannot be started, [`EmulatorError::Findings`]
    /// when it did something that it must not; memory then holds what had been written.
    pub fn launch(
        &mut self,
        module: &Module,
        kernel: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<LaunchReport, EmulatorError> {
        self.launch_clusters(module, kernel, None, [grid, block], shared_bytes, params)
    }

    /// As [`Self::launch`], with a launch attribute: how many blocks along x are a cluster; none leaves it to the kernel.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub fn launch_clusters(
        &mut self,
        module: &Module,
        kernel: &str,
        cluster: Option<u32>,
        [grid, block]: [[u32; 3]; 2],
        shared_bytes: u32,
        params: &[u8],
    ) -> Result<LaunchReport, EmulatorError> {
        let kernel = module.kernel(kernel)?;
        let impossible = |reason: String| EmulatorError::Launch { kernel: kernel.name.clone(), reason };
        let threads = block.iter().try_fold(1u32, |product, &n| product.checked_mul(n)).unwrap_or(0);
        if threads == 0 || threads > 1024 || kernel.max_threads != 0 && threads > kernel.max_threads {
            return Err(impossible(format!("blocks of {block:?} threads")));
        }
        let blocks = grid.iter().try_fold(1u32, |product, &n| product.checked_mul(n)).unwrap_or(0);
        if blocks == 0 || blocks > i32::MAX as u32 - 2 {
            return Err(impossible(format!("a grid of {grid:?} blocks")));
        }
        let cluster = kernel.cluster_size(cluster, grid[0]).map_err(impossible)?;
        if params.len() != kernel.param_bytes {
            return Err(impossible(format!("{} bytes of parameters, not {}", params.len(), kernel.param_bytes)));
        }
        let shared = kernel.dynamic_shared - crate::memory::SHARED_BASE;
        if u64::from(shared) + u64::from(shared_bytes) > u64::from(self.config.max_shared_bytes) {
            return Err(impossible(format!("{shared} + {shared_bytes} bytes of shared memory")));
        }
        if !self.variables.contains_key(&module.id) {
            let addresses = module.allocate(&mut self.memory)?;
            self.variables.insert(module.id, addresses);
        }
        let launch = Launch {
            module,
            kernel,
            config: &self.config,
            memory: &self.memory,
            races: GlobalRaces::new(self.memory.sizes(), kernel.narrow_stores),
            releases: kernel.releases.then(Releases::default),
            params,
            variables: &self.variables[&module.id],
            grid,
            block,
            cluster,
            dynamic_shared_bytes: shared_bytes,
            shared_end: kernel.dynamic_shared + shared_bytes,
            spare_registers: Mutex::default(),
            stop: AtomicBool::new(false),
        };
        let workers = match self.config.threads {
            0 => rayon::current_num_threads(),
            threads => threads,
        };
        let queue = Mutex::new(Queue::default());
        let clusters = blocks / cluster;
        let workers = workers.min(clusters as usize);
        if workers == 1 {
            work(&launch, &queue, clusters);
        } else {
            rayon::scope(|scope| (0..workers).for_each(|_| scope.spawn(|_| work(&launch, &queue, clusters))));
        }
        let queue = queue.into_inner().unwrap_or_else(PoisonError::into_inner);
        if queue.findings.is_empty() {
            Ok(queue.report)
        } else {
            Err(EmulatorError::Findings { findings: queue.findings })
        }
    }
}

impl Kernel {
    /// Blocks of a cluster in a launch that asks for so many, or for none.
    fn cluster_size(&self, asked: Option<u32>, width: u32) -> Result<u32, String> {
        let size = match (self.cluster, asked) {
            (Some(declared), Some(asked)) if declared != asked => {
                return Err(format!("clusters of {asked} blocks, the kernel is for {declared}"));
            }
            (None, None) if self.explicit_cluster => return Err("without a size of its clusters".into()),
            (declared, asked) => declared.or(asked).unwrap_or(1),
        };
        let most = if self.max_cluster == 0 { PORTABLE_CLUSTER } else { self.max_cluster.min(PORTABLE_CLUSTER) };
        if size == 0 || size > most || !width.is_multiple_of(size) {
            return Err(format!("clusters of {size} blocks, at most {most}, in a grid {width} wide"));
        }
        Ok(size)
    }
}

/// Runs slices of clusters until none is left.
fn work(launch: &Launch<'_>, queue: &Mutex<Queue>, clusters: u32) {
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if launch.stopped() {
            return;
        }
        let (taken, began) = {
            let mut queue = lock();
            (queue.take(launch, clusters), queue.changes)
        };
        let Some(mut block) = taken else {
            // Others hold what is left; when one of them pauses a block it takes the next itself.
            return;
        };
        let ended = block.run(launch, TURNS);
        let mut queue = lock();
        match ended {
            Ok(Slice::Over) => {
                queue.change();
                queue.paused.push_back(block);
            }
            Ok(Slice::Waiting) if queue.wait(&mut block, began, launch, clusters) => {
                let others = clusters - queue.next;
                queue.findings.push(*block.starved(launch, others));
                launch.stop.store(true, Relaxed);
            }
            Ok(Slice::Waiting) => queue.paused.push_back(block),
            Ok(Slice::Ended) => {
                queue.change();
                queue.live -= 1;
                queue.report.thread_instructions += block.thread_instructions();
                drop(queue);
                block.recycle(launch);
            }
            Err(finding) => {
                queue.live -= 1;
                queue.findings.push(*finding);
                launch.stop.store(true, Relaxed);
            }
        }
    }
}
