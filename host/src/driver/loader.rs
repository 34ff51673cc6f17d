//! Loads the CUDA driver library on first use and turns a list of its functions into three things.
//!
//! For every function in the list, [`driver_api!`] makes
//!
//! 1. an entry of a table that holds the function's address in the loaded library, if it is there;
//! 2. a function in the module `api` that calls it and returns `Result<(), Failed>`;
//! 3. for functions that the crate `cust` declares: the exported symbol that `cust` links against.
//!    It forwards to the library, and without a library it returns an error code.
//!
//! So a program with this library in it has no link-time dependency on the driver, and starts anywhere.

use cust::sys::cudaError_enum::{self as CUresult, *};

/// The name under which every NVIDIA driver on Linux installs its library.
pub(super) const LIBRARY: &str = "libcuda.so.1";

/// Why a driver function did not do what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failed {
    /// The driver library could not be loaded.
    NoLibrary,
    /// The library is loaded, but has no function of this name.
    NoSymbol(&'static str),
    /// The function ran and returned an error code.
    Code {
        /// The driver function.
        call: &'static str,
        /// What it returned.
        code: u32,
    },
}

impl Failed {
    /// The code that `cust` gets to see. Both "not there" cases are ordinary error codes for it.
    pub(super) fn as_cuda_result(self) -> CUresult {
        match self {
            Failed::NoLibrary => CUDA_ERROR_NOT_INITIALIZED,
            Failed::NoSymbol(_) => CUDA_ERROR_NOT_FOUND,
            Failed::Code { code, .. } => known_code(code),
        }
    }
}

/// The enum value of a driver code. A code newer than the enum becomes `CUDA_ERROR_UNKNOWN`: an enum
/// that holds a number outside its list would be undefined behaviour.
pub(super) fn known_code(code: u32) -> CUresult {
    KNOWN_CODES.iter().copied().find(|known| *known as u32 == code).unwrap_or(CUDA_ERROR_UNKNOWN)
}

#[rustfmt::skip]
const KNOWN_CODES: &[CUresult] = &[
    CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_PROFILER_DISABLED, CUDA_ERROR_PROFILER_NOT_INITIALIZED,
    CUDA_ERROR_PROFILER_ALREADY_STARTED, CUDA_ERROR_PROFILER_ALREADY_STOPPED,
    CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_DEVICE_NOT_LICENSED, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT, CUDA_ERROR_MAP_FAILED, CUDA_ERROR_UNMAP_FAILED,
    CUDA_ERROR_ARRAY_IS_MAPPED, CUDA_ERROR_ALREADY_MAPPED, CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUDA_ERROR_ALREADY_ACQUIRED, CUDA_ERROR_NOT_MAPPED, CUDA_ERROR_NOT_MAPPED_AS_ARRAY,
    CUDA_ERROR_NOT_MAPPED_AS_POINTER, CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_UNSUPPORTED_LIMIT,
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_INVALID_PTX,
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT, CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUDA_ERROR_JIT_COMPILATION_DISABLED, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
    CUDA_ERROR_INVALID_SOURCE, CUDA_ERROR_FILE_NOT_FOUND,
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
    CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_ILLEGAL_STATE,
    CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_READY, CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_ASSERT, CUDA_ERROR_TOO_MANY_PEERS,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, CUDA_ERROR_MPS_CONNECTION_FAILED,
    CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_MPS_SERVER_NOT_READY,
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_MERGE, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_CAPTURED_EVENT,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, CUDA_ERROR_TIMEOUT,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CUDA_ERROR_EXTERNAL_DEVICE, CUDA_ERROR_UNKNOWN,
];

macro_rules! driver_api {
    (
        cust { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)* }
        newer { $(fn $new:ident($($new_arg:ident: $new_ty:ty),* $(,)?);)* }
    ) => {
        /// The addresses of the driver's functions, and the library that they are in.
        ///
        /// The functions return a plain integer here: a newer driver may return a code that the enum
        /// of the bindings does not list.
        struct Table {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> c_int>,)*
            $($new: Option<unsafe extern "C" fn($($new_ty),*) -> c_int>,)*
            /// Never unloaded: the addresses above point into it.
            _library: Library,
        }

        impl Table {
            fn load() -> Result<Table, String> {
                // SAFETY: this runs the initialisers of the NVIDIA driver library, which have no
                // precondition; the library is found by its fixed name as the system loader does.
                let library = unsafe { Library::new(LIBRARY) }.map_err(|error| error.to_string())?;
                Ok(Table {
                    // SAFETY: the type is the one that the driver's header declares for this name;
                    // for the first list the compiler compares it with the bindings (see below).
                    $($name: unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .ok().map(|symbol| *symbol),)*
                    // SAFETY: as above, from the header of the release that introduced the function.
                    $($new: unsafe { library.get(concat!(stringify!($new), "\0").as_bytes()) }
                        .ok().map(|symbol| *symbol),)*
                    _library: library,
                })
            }
        }

        /// The driver's functions under their own names, each with its driver documentation's contract.
        pub(super) mod api {
            use super::*;

            $(
                /// Calls the driver function of this name.
                ///
                /// # Safety
                ///
                /// The arguments satisfy the contract in the driver's documentation.
                pub(in crate::driver) unsafe fn $name($($arg: $ty),*) -> Result<(), Failed> {
                    let function = table()?.$name.ok_or(Failed::NoSymbol(stringify!($name)))?;
                    // SAFETY: the caller's promise, passed on.
                    outcome(stringify!($name), unsafe { function($($arg),*) })
                }
            )*
            $(
                /// Calls the driver function of this name.
                ///
                /// # Safety
                ///
                /// The arguments satisfy the contract in the driver's documentation.
                pub(in crate::driver) unsafe fn $new($($new_arg: $new_ty),*) -> Result<(), Failed> {
                    let function = table()?.$new.ok_or(Failed::NoSymbol(stringify!($new)))?;
                    // SAFETY: the caller's promise, passed on.
                    outcome(stringify!($new), unsafe { function($($new_arg),*) })
                }
            )*
        }

        /// The symbols that `cust` links against.
        mod exported {
            use super::*;

            $(
                /// # Safety
                ///
                /// As for the driver function of this name.
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
                    // SAFETY: the caller's promise, passed on.
                    match unsafe { api::$name($($arg),*) } {
                        Ok(()) => CUresult::CUDA_SUCCESS,
                        Err(failed) => failed.as_cuda_result(),
                    }
                }
                // A signature that differs from the bindings' does not compile.
                const _: unsafe extern "C" fn($($ty),*) -> CUresult = cust::sys::$name;
            )*
        }
    };
}
pub(super) use driver_api;
