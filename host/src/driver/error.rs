//! What can go wrong with the driver, each with what was found, what was expected and what to do.

use super::loader::Failed;
use super::symbols::{load_problem, name_and_text};

/// An error of the CUDA driver, or of a request that was refused before it reached the driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver library could not be loaded.
    #[error(
        "a GPU was asked for, but no NVIDIA driver is installed here: libcuda.so.1 could not be loaded \
         ({detail}); use --device cpu, or install the NVIDIA driver"
    )]
    NoDriver {
        /// The system loader's message.
        detail: String,
    },

    /// The driver library is there, but lacks a function that is needed.
    #[error(
        "the installed NVIDIA driver has no function {symbol}, so it is too old; install a newer driver, \
         or use --device cpu"
    )]
    MissingSymbol {
        /// The driver function.
        symbol: &'static str,
    },

    /// There is no GPU with this number.
    #[error(
        "GPU {requested} was asked for, but the driver sees {found} GPU(s), numbered from 0; choose one of \
         those (CUDA_VISIBLE_DEVICES may be hiding some), or use --device cpu"
    )]
    NoDevice {
        /// The device number that was asked for.
        requested: u32,
        /// How many devices the driver sees.
        found: u32,
    },

    /// The driver is older than the PTX that it would have to compile.
    #[error(
        "the installed NVIDIA driver supports CUDA {}.{}, but CUDA {}.{} or newer is needed to load these \
         kernels; install a newer driver, or use --device cpu",
        driver_cuda.0, driver_cuda.1, needed.0, needed.1
    )]
    DriverTooOld {
        /// The CUDA version that the driver supports, major and minor.
        driver_cuda: (u32, u32),
        /// The oldest CUDA version that would do, major and minor.
        needed: (u32, u32),
    },

    /// The device memory asked for could not be had.
    #[error(
        "{requested_bytes} bytes of GPU memory were asked for, but the GPU has {free_bytes} bytes free of \
         {total_bytes}; free some of it (another process may hold it), or ask for fewer experts or tokens"
    )]
    OutOfMemory {
        /// The size of the allocation that failed, in bytes.
        requested_bytes: u64,
        /// Device memory that was free right after the failure, in bytes.
        free_bytes: u64,
        /// All of the device's memory, in bytes.
        total_bytes: u64,
    },

    /// A backend other than the CUDA driver failed.
    #[error("{backend}: {detail}")]
    Backend {
        /// Its name.
        backend: String,
        /// What went wrong, as a sentence.
        detail: String,
    },

    /// A copy or fill would leave its buffer.
    #[error(
        "{operation} of {len_bytes} bytes at offset {offset_bytes} does not fit into a buffer of \
         {buffer_bytes} bytes; use a smaller range, or a larger buffer"
    )]
    OutOfRange {
        /// What was asked for.
        operation: &'static str,
        /// Where the range starts, in bytes.
        offset_bytes: usize,
        /// How long the range is, in bytes.
        len_bytes: usize,
        /// How long the buffer is, in bytes.
        buffer_bytes: usize,
    },

    /// A copy inside a buffer would overwrite what it has still to read.
    #[error(
        "a copy of {len_bytes} bytes from offset {from_bytes} to offset {to_bytes} overlaps itself; copy less, or \
         further away"
    )]
    Overlap {
        /// Where it starts to read, in bytes.
        from_bytes: usize,
        /// Where it starts to write, in bytes.
        to_bytes: usize,
        /// How much is copied, in bytes.
        len_bytes: usize,
    },

    /// The argument struct given to a kernel is not the one that the kernel was compiled with.
    #[error(
        "kernel {kernel} takes a parameter struct of {expected_bytes} bytes, but was given one of \
         {found_bytes} bytes; the kernels and this program are from different builds: rebuild both"
    )]
    ParameterSize {
        /// The kernel.
        kernel: &'static str,
        /// The size of the struct that was given, in bytes.
        found_bytes: usize,
        /// The size of the struct that the kernel declares, in bytes.
        expected_bytes: usize,
    },

    /// A call that concerns one kernel failed.
    #[error(
        "{call} failed for kernel {kernel} with {name} (code {code}: {text}), where success was expected; {}",
        advice(*code)
    )]
    Kernel {
        /// The kernel.
        kernel: &'static str,
        /// The driver function.
        call: &'static str,
        /// The driver's error code.
        code: u32,
        /// The driver's name for the code.
        name: String,
        /// The driver's description of the code.
        text: String,
    },

    /// Any other driver call failed.
    #[error("{call} failed with {name} (code {code}: {text}), where success was expected; {}", advice(*code))]
    Call {
        /// The driver function.
        call: &'static str,
        /// The driver's error code.
        code: u32,
        /// The driver's name for the code.
        name: String,
        /// The driver's description of the code.
        text: String,
    },

    /// The driver could not compile or load a module.
    #[error(
        "the driver did not accept the kernels built for {target}: {name} (code {code}); its compiler said: \
         {}; build the kernels for this GPU's architecture, or report this message",
        if log.is_empty() { "nothing" } else { log }
    )]
    ModuleLoad {
        /// The architecture that the module was built for.
        target: String,
        /// The driver's error code.
        code: u32,
        /// The driver's name for the code.
        name: String,
        /// The log of the driver's PTX compiler.
        log: String,
    },
}

/// What to do about an error code of the driver.
fn advice(code: u32) -> &'static str {
    match code {
        1 => "a number handed in is outside what this GPU allows: check grid, block and memory sizes",
        2 => "free GPU memory (another process may hold it) and try again",
        3 | 100 | 101 | 802 | 803 | 804 => "check with nvidia-smi that the driver works, or use --device cpu",
        201 | 400 | 709 => {
            "a context or stream handed in was destroyed or belongs to another device; keep it alive while \
             it is in use"
        }
        209 | 218 | 222 => "build the kernels for this GPU, or install a newer driver",
        700 | 702 | 710..=719 => {
            "work queued earlier on this GPU failed, and its context is lost: restart the process; \
             compute-sanitizer finds the failing kernel"
        }
        701 => "this launch needs more registers, threads or shared memory than the GPU has",
        900..=908 => "this call is not possible while a stream is being captured; make it before or after capture",
        _ => "look the code up in the CUDA driver's documentation",
    }
}

impl From<Failed> for DriverError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::NoLibrary => {
                DriverError::NoDriver { detail: load_problem().unwrap_or("no reason given").to_owned() }
            }
            Failed::NoSymbol(symbol) => DriverError::MissingSymbol { symbol },
            Failed::Code { call, code } => {
                let (name, text) = name_and_text(code);
                DriverError::Call { call, code, name, text }
            }
        }
    }
}

impl DriverError {
    /// The error of a call that concerns one kernel.
    pub(super) fn of_kernel(kernel: &'static str, failed: Failed) -> Self {
        match DriverError::from(failed) {
            DriverError::Call { call, code, name, text } => DriverError::Kernel { kernel, call, code, name, text },
            other => other,
        }
    }

    /// The error of a driver call made through `cust`.
    pub(super) fn of_cust(call: &'static str, error: cust::error::CudaError) -> Self {
        Failed::Code { call, code: error as u32 }.into()
    }
}
