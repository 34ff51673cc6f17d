//! Runs a layer on any device from host memory: for the program, for `cargo xtask verify` and for the test suites.
//!
//! A server that has its tensors in device memory already uses [`crate::cuda`] itself.
//!
//! ```
//! use nvfp4_moe::activation::Activation;
//! use nvfp4_moe::harness::{Runner, Target};
//! use nvfp4_moe::io::{HiddenRows, Inputs, ScaleMode};
//! use nvfp4_moe::shape::{ExpertRange, MoeShape};
//! use nvfp4_moe::spec::LayerSpec;
//! use nvfp4_moe::weights::{RandomExperts, RandomInputScales};
//!
//! let shape = MoeShape::new(64, 32, 4, 2)?;
//! let source = RandomExperts::new(shape, true, RandomInputScales::Missing, 0);
//! let spec = LayerSpec {
//!     shape,
//!     experts: ExpertRange::all(shape.experts),
//!     activation: Activation::SwiGlu { limit: None },
//!     scales: ScaleMode::PerToken,
//!     shared_l1_scale: true,
//! };
//! let mut layer = Runner::new(Target::Cpu)?.load(&spec, &source, 16, &mut |_done, _all| {})?;
//! let hidden = vec![half::bf16::ONE; 64];
//! let inputs = Inputs { hidden: HiddenRows::Bf16(&hidden), topk_ids: &[3, 1], topk_weights: &[0.75, 0.25], topk: 2 };
//! assert_eq!(layer.forward_f32(&inputs)?.len(), 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod comparison;
mod gpu;
mod ranks;
mod target;

use std::time::Instant;

use half::bf16;
use nvfp4_moe_device::params::Element;
use thiserror::Error;

use crate::activation::ActivationError;
use crate::checkpoint::CheckpointError;
use crate::cpu;
use crate::cuda::{CallError, Engine};
use crate::driver::{Device, DriverError};
use crate::io::{HiddenRows, Inputs, LengthError, OutputRows};
use crate::load::LoadError;
use crate::memory::{self, OutOfMemory};
use crate::plan::{Plan, PlanError};
use crate::shape::ShapeError;
use crate::spec::LayerSpec;
use crate::weights::ExpertSource;

pub use comparison::{Comparison, Difference};
pub use gpu::{CapturedForward, GpuLayer};
pub use ranks::{LayerRequest, run_ranks};
pub use target::{DeviceChoice, DeviceChoiceError, Target};

/// The oldest GPUs that the kernels run on.
const OLDEST_ARCHITECTURE: (u32, u32) = (8, 0);

/// Why a layer could not be loaded or run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HarnessError {
    /// The driver failed, or there is no such GPU.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The layer cannot run on this device.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A size is not allowed.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An unusable activation parameter.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The checkpoint cannot give what is needed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An expert could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A buffer's length does not fit.
    #[error(transparent)]
    Length(#[from] LengthError),
    /// A GPU call was refused.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The CPU engine refused a call.
    #[error(transparent)]
    Cpu(#[from] cpu::ForwardError),
    /// The CPU engine has no workspace.
    #[error(transparent)]
    Workspace(#[from] cpu::WorkspaceError),
    /// Not enough host memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// More tokens than the layer was loaded for.
    #[error("the batch has {got} tokens, but the layer was loaded for at most {max}; load it for more")]
    TooManyTokens {
        /// Tokens of the batch.
        got: usize,
        /// Tokens that it was loaded for.
        max: usize,
    },
    /// Something that only a GPU does.
    #[error("{operation} needs a GPU, but the layer was loaded on the CPU; load it with --device cuda")]
    NeedsGpu {
        /// What was asked for.
        operation: &'static str,
    },
    /// A variant of the grouped GEMM that does not exist.
    #[error("grouped GEMM variant {got} was asked for, but there are {have}, numbered from 0; choose one of these")]
    NoSuchTile {
        /// Asked for.
        got: usize,
        /// Variants there are.
        have: usize,
    },
}

/// A device with its kernels loaded.
#[derive(Clone, Debug)]
pub struct Runner {
    target: Target,
    name: String,
    reason: String,
    engine: Option<Engine>,
}

impl Runner {
    /// Opens the device and loads the kernels, once for all layers.
    ///
    /// # Errors
    /// [`HarnessError::Driver`] without a driver or such a GPU, or with a driver that is too old;
    /// [`HarnessError::Plan`] for a GPU that the kernels do not run on.
    pub fn new(target: Target) -> Result<Self, HarnessError> {
        let reason = "asked for".to_owned();
        let Target::Cuda(ordinal) = target else {
            let name = format!("CPU with {} threads", rayon::current_num_threads());
            return Ok(Self { target, name, reason, engine: None });
        };
        let device = Device::open(ordinal)?;
        Self::with_engine(target, format!("GPU {ordinal}, {}", device.name()), reason, &device)
    }

    /// Loads the kernels on a device that is there already; reports call it `name`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_device(device: &Device, name: &'static str) -> Result<Self, HarnessError> {
        Self::with_engine(Target::Backend(name), device.name().to_owned(), "asked for".to_owned(), device)
    }

    fn with_engine(target: Target, name: String, reason: String, device: &Device) -> Result<Self, HarnessError> {
        let found = device.limits().compute_capability;
        if found < OLDEST_ARCHITECTURE {
            return Err(PlanError::UnsupportedArchitecture { found }.into());
        }
        Ok(Self { target, name, reason, engine: Some(Engine::new(device)?) })
    }

    /// The device of a choice; `auto` takes the first GPU that works, else the CPU, and never fails.
    ///
    /// # Errors
    /// As [`Self::new`], when a device was named.
    pub fn choose(choice: DeviceChoice) -> Result<Self, HarnessError> {
        match choice {
            DeviceChoice::Named(target) => Self::new(target),
            DeviceChoice::Auto => Self::automatic(),
        }
    }

    fn automatic() -> Result<Self, HarnessError> {
        let mut refused = match Device::count() {
            Ok(0) => "the driver sees no GPU".to_owned(),
            Ok(count) => {
                let mut refusals = Vec::new();
                for ordinal in 0..count {
                    match Self::new(Target::Cuda(ordinal)) {
                        Ok(runner) => return Ok(Self { reason: "the first GPU that works".to_owned(), ..runner }),
                        Err(error) => refusals.push(format!("GPU {ordinal}: {error}")),
                    }
                }
                refusals.join("; ")
            }
            Err(DriverError::NoDriver { .. }) => "no NVIDIA driver is installed".to_owned(),
            Err(error) => error.to_string(),
        };
        refused.insert_str(0, "no usable GPU: ");
        Ok(Self { reason: refused, ..Self::new(Target::Cpu)? })
    }

    /// Where layers run.
    #[must_use]
    pub const fn target(&self) -> Target {
        self.target
    }

    /// The device in words: `GPU 0, NVIDIA H200`, or `CPU with 16 threads`.
    #[must_use]
    pub fn device_name(&self) -> &str {
        &self.name
    }

    /// Why this device: `asked for`, or what `auto` found.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The kernels; `None` on the CPU.
    #[must_use]
    pub const fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    /// Loads a layer for up to `max_tokens` tokens a call. `progress` is told (experts done, experts in all).
    ///
    /// # Errors
    /// [`HarnessError`]: a layer that the device cannot run, experts that do not fit it, not enough memory.
    pub fn load(
        &self,
        spec: &LayerSpec,
        source: &dyn ExpertSource,
        max_tokens: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<LoadedLayer, HarnessError> {
        spec.activation.validated()?;
        let loaded = match &self.engine {
            Some(engine) => {
                let plan = Plan::new(*spec, &engine.device().limits(), max_tokens)?;
                Loaded::Gpu(Box::new(GpuLayer::load(engine, &plan, source, progress)?))
            }
            None => {
                let layer = cpu::MoeLayer::load(spec, source, progress)?;
                let workspace = cpu::Workspace::new(&layer, max_tokens)?;
                Loaded::Cpu { layer, workspace: Box::new(workspace) }
            }
        };
        Ok(LoadedLayer { spec: *spec, max_tokens, poison: false, forward_ms: 0.0, loaded })
    }
}

/// A layer on a device, with everything that a call needs.
#[derive(Debug)]
pub struct LoadedLayer {
    spec: LayerSpec,
    max_tokens: usize,
    poison: bool,
    forward_ms: f64,
    loaded: Loaded,
}

#[derive(Debug)]
enum Loaded {
    Cpu { layer: cpu::MoeLayer, workspace: Box<cpu::Workspace> },
    Gpu(Box<GpuLayer>),
}

impl LoadedLayer {
    /// What the layer computes.
    #[must_use]
    pub const fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// Most tokens of a call.
    #[must_use]
    pub const fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// The GPU's part: its plan, its weights, its buffers; `None` on the CPU.
    pub fn gpu(&mut self) -> Option<&mut GpuLayer> {
        match &mut self.loaded {
            Loaded::Gpu(layer) => Some(layer),
            Loaded::Cpu { .. } => None,
        }
    }

    /// Before every later call, fills the output (unless it accumulates) and on a GPU the workspace with NaN, so that
    /// nothing read before it was written goes unnoticed.
    pub const fn set_poison(&mut self, poison: bool) {
        self.poison = poison;
    }

    /// Forces one variant of the grouped GEMM in later calls, or with `None` leaves the choice to the plan.
    ///
    /// # Errors
    /// [`HarnessError::NeedsGpu`] or [`HarnessError::NoSuchTile`].
    pub fn set_tile(&mut self, tile: Option<usize>) -> Result<(), HarnessError> {
        match &mut self.loaded {
            Loaded::Gpu(layer) => layer.set_tile(tile),
            Loaded::Cpu { .. } => Err(HarnessError::NeedsGpu { operation: "a grouped GEMM variant" }),
        }
    }

    /// Milliseconds of the last forward: on a GPU of its kernels, without the copies.
    #[must_use]
    pub const fn forward_ms(&self) -> f64 {
        self.forward_ms
    }

    /// Runs the layer and waits for the result.
    ///
    /// # Errors
    /// [`HarnessError`]: lengths that do not fit, too many tokens, a driver failure.
    pub fn forward(
        &mut self,
        inputs: &Inputs<'_>,
        mut output: OutputRows<'_>,
        accumulate: bool,
    ) -> Result<(), HarnessError> {
        let tokens = self.checked_tokens(inputs, &output)?;
        if self.poison && !accumulate {
            match &mut output {
                OutputRows::Bf16(rows) => rows.fill(bf16::NAN),
                OutputRows::F32(rows) => rows.fill(f32::NAN),
            }
        }
        self.forward_ms = match &mut self.loaded {
            Loaded::Cpu { layer, workspace } => {
                let start = Instant::now();
                layer.forward(workspace, inputs, output, accumulate)?;
                start.elapsed().as_secs_f64() * 1e3
            }
            Loaded::Gpu(layer) => layer.forward(inputs, tokens, &mut output, accumulate, self.poison)?,
        };
        Ok(())
    }

    /// [`Self::forward`] with a new f32 output.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_f32(&mut self, inputs: &Inputs<'_>) -> Result<Vec<f32>, HarnessError> {
        let mut output = memory::zeros("the output", inputs.hidden.len())?;
        self.forward(inputs, OutputRows::F32(&mut output), false)?;
        Ok(output)
    }

    /// [`Self::forward`] with a new bf16 output.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_bf16(&mut self, inputs: &Inputs<'_>) -> Result<Vec<bf16>, HarnessError> {
        let mut output = memory::zeros("the output", inputs.hidden.len())?;
        self.forward(inputs, OutputRows::Bf16(&mut output), false)?;
        Ok(output)
    }

    /// Captures one forward for these element types as a CUDA graph, to be replayed with other inputs, other routing and
    /// any number of tokens up to [`Self::max_tokens`].
    ///
    /// # Errors
    /// [`HarnessError::NeedsGpu`] on the CPU, or a failure of the driver.
    pub fn forward_graph(
        &mut self,
        hidden: Element,
        output: Element,
        accumulate: bool,
    ) -> Result<CapturedForward<'_>, HarnessError> {
        match &mut self.loaded {
            Loaded::Gpu(layer) => layer.capture(hidden, output, accumulate, self.poison),
            Loaded::Cpu { .. } => Err(HarnessError::NeedsGpu { operation: "a captured graph" }),
        }
    }

    fn checked_tokens(&self, inputs: &Inputs<'_>, output: &OutputRows<'_>) -> Result<usize, HarnessError> {
        let shape = &self.spec.shape;
        let tokens = inputs.checked_tokens(shape.hidden, shape.topk)?;
        LengthError::check("output", output.len(), tokens * shape.hidden)?;
        if tokens > self.max_tokens {
            return Err(HarnessError::TooManyTokens { got: tokens, max: self.max_tokens });
        }
        Ok(tokens)
    }
}

/// Element type of hidden states.
const fn hidden_element(hidden: &HiddenRows<'_>) -> Element {
    match hidden {
        HiddenRows::Bf16(_) => Element::Bf16,
        HiddenRows::F16(_) => Element::F16,
    }
}

/// Element type of an output.
const fn output_element(output: &OutputRows<'_>) -> Element {
    match output {
        OutputRows::Bf16(_) => Element::Bf16,
        OutputRows::F32(_) => Element::F32,
    }
}
