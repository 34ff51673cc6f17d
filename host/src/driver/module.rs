//! Kernels: compiled by the driver from PTX, asked about their resources, and launched.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::{fmt, mem, ptr};

use cust::sys::{CUfunction, CUfunction_attribute_enum as Attribute, CUjit_option_enum as JitOption, CUmodule};

use super::device::Device;
use super::error::DriverError;
use super::loader::Failed;
use super::stream::StreamHandle;
use super::symbols::{api, name_and_text};

/// Room for each of the PTX compiler's two logs, in bytes. It cuts off what does not fit.
const LOG_BYTES: usize = 16 << 10;

/// Kernels that are loaded on one device, unloaded when the last clone and [`Function`] is dropped.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    raw: CUmodule,
    target: String,
}

// SAFETY: module handles may be used from any thread; the driver's calls on them take its own locks.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it is ever modified.
unsafe impl Sync for Inner {}

impl Module {
    /// Compiles `ptx` for the device and loads it. `target` names the architecture that the PTX was built
    /// for, such as `sm_90a`, and is only used in errors.
    ///
    /// # Errors
    ///
    /// [`DriverError::DriverTooOld`] if the PTX is of a newer version than the driver knows,
    /// [`DriverError::ModuleLoad`] with the compiler's log if the driver does not accept it for any other
    /// reason.
    pub fn load(device: &Device, ptx: &str, target: &str) -> Result<Module, DriverError> {
        let refused = |code: u32, name: &str, log: String| DriverError::ModuleLoad {
            target: target.to_owned(),
            code,
            name: name.to_owned(),
            log,
        };
        let image = CString::new(ptx).map_err(|error| {
            let log = format!("the PTX text has a zero byte at {}", error.nul_position());
            refused(0, "not given to the driver", log)
        })?;
        let mut errors = vec![0u8; LOG_BYTES];
        let mut notes = vec![0u8; LOG_BYTES];
        let mut options = [
            JitOption::CU_JIT_ERROR_LOG_BUFFER,
            JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            JitOption::CU_JIT_INFO_LOG_BUFFER,
            JitOption::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
        ];
        // Numbers travel in the pointers themselves; the driver overwrites the sizes with what it used.
        let mut values: [*mut c_void; 4] = [
            errors.as_mut_ptr().cast(),
            ptr::without_provenance_mut(LOG_BYTES),
            notes.as_mut_ptr().cast(),
            ptr::without_provenance_mut(LOG_BYTES),
        ];
        let mut raw: CUmodule = ptr::null_mut();
        let result = {
            let _current = device.enter()?;
            // SAFETY: `raw` is a live variable, the image ends in a zero byte, there are as many values as
            // options, and each log buffer is as long as its size says.
            unsafe {
                api::cuModuleLoadDataEx(
                    &mut raw,
                    image.as_ptr().cast(),
                    options.len() as u32,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            }
        };
        match result {
            Ok(()) => Ok(Module { inner: Arc::new(Inner { device: device.clone(), raw, target: target.to_owned() }) }),
            Err(Failed::Code { code, .. }) => {
                // 222: the PTX version is not supported; some drivers call it invalid PTX, 218.
                if let (218 | 222, Some(needed)) = (code, cuda_needed(ptx)) {
                    device.require_driver(needed)?;
                }
                let log = [text_of(&errors), text_of(&notes)]
                    .into_iter()
                    .filter(|log| !log.is_empty())
                    .collect::<Vec<_>>()
                    .join("\n");
                Err(refused(code, &name_and_text(code).0, log))
            }
            Err(other) => Err(other.into()),
        }
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the module has no such kernel.
    pub fn function(&self, name: &'static str) -> Result<Function, DriverError> {
        let failed = |failed| DriverError::of_kernel(name, failed);
        let symbol = CString::new(name).map_err(|_| failed(Failed::Code { call: "cuModuleGetFunction", code: 500 }))?;
        let _current = self.inner.device.enter()?;
        let mut raw: CUfunction = ptr::null_mut();
        // SAFETY: `raw` is a live variable, the module is alive, and the name ends in a zero byte.
        unsafe { api::cuModuleGetFunction(&mut raw, self.inner.raw, symbol.as_ptr()) }.map_err(failed)?;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is alive, and both numbers are live variables. Drivers before CUDA 12.4 do
        // not have this call; then the size is not known, and is not checked.
        let parameter_bytes = unsafe { api::cuFuncGetParamInfo(raw, 0, &mut offset, &mut size) }.map(|()| size);
        Ok(Function { module: self.clone(), raw, name, parameter_bytes: parameter_bytes.ok() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // An error cannot be reported from here.
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this owns the module, and every `Function` of it holds a share of this.
            let _ = unsafe { api::cuModuleUnload(self.raw) };
        }
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("target", &self.inner.target).finish_non_exhaustive()
    }
}

/// One kernel. It keeps its module loaded.
#[derive(Clone)]
pub struct Function {
    module: Module,
    raw: CUfunction,
    name: &'static str,
    /// The size of the parameter that the kernel declares, where the driver tells.
    parameter_bytes: Option<usize>,
}

// SAFETY: function handles may be used from any thread, as module handles may.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Registers that one thread uses.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver fails.
    pub fn registers(&self) -> Result<u32, DriverError> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Statically allocated shared memory that one block uses, in bytes.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver fails.
    pub fn static_shared_bytes(&self) -> Result<u32, DriverError> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    }

    /// Local memory (stack and spilled registers) that one thread uses, in bytes.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver fails.
    pub fn local_bytes(&self) -> Result<u32, DriverError> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    }

    /// The most threads that one block of this kernel can have.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver fails.
    pub fn max_threads_per_block(&self) -> Result<u32, DriverError> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
    }

    /// Allows launches with up to `bytes` of dynamic shared memory a block. Without it, 48 KiB are.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the GPU has less.
    pub fn set_max_dynamic_shared(&self, bytes: u32) -> Result<(), DriverError> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        let _current = self.module.inner.device.enter()?;
        // SAFETY: the function is alive; the driver checks the value.
        unsafe { api::cuFuncSetAttribute(self.raw, attribute, bytes) }
            .map_err(|failed| DriverError::of_kernel(self.name, failed))
    }

    /// How many blocks of `block_threads` threads with `dynamic_shared_bytes` each fit on one
    /// multiprocessor at a time.
    ///
    /// # Errors
    ///
    /// [`DriverError::Kernel`] if the driver fails.
    pub fn max_active_blocks(&self, block_threads: u32, dynamic_shared_bytes: u32) -> Result<u32, DriverError> {
        let threads = i32::try_from(block_threads).unwrap_or(i32::MAX);
        let mut blocks = 0;
        let _current = self.module.inner.device.enter()?;
        // SAFETY: `blocks` is a live variable, and the function is alive.
        unsafe {
            api::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.raw,
                threads,
                dynamic_shared_bytes as usize,
            )
        }
        .map_err(|failed| DriverError::of_kernel(self.name, failed))?;
        Ok(blocks as u32)
    }

    /// Queues one run of the kernel: `grid` blocks of `block` threads (x, y, z), with `shared_bytes` of
    /// dynamic shared memory a block. `params` is copied before this returns.
    ///
    /// # Errors
    ///
    /// [`DriverError::ParameterSize`] if the kernel declares a parameter of another size than `P`, where
    /// the driver tells (CUDA 12.4 and newer), [`DriverError::Kernel`] if the launch fails. What goes
    /// wrong while the kernel runs is reported by a later call.
    ///
    /// # Safety
    ///
    /// - The kernel has exactly one parameter, the `#[repr(C)]` struct `P`, by value.
    /// - Every address in `params` is valid, for what the kernel does with it, until the run has finished;
    ///   in a captured graph, until the last replay has.
    /// - Nothing else accesses that memory in a conflicting way meanwhile.
    pub unsafe fn launch<P: Copy>(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: StreamHandle<'_>,
        params: &P,
    ) -> Result<(), DriverError> {
        let found_bytes = mem::size_of::<P>();
        if let Some(expected_bytes) = self.parameter_bytes
            && expected_bytes != found_bytes
        {
            return Err(DriverError::ParameterSize { kernel: self.name, found_bytes, expected_bytes });
        }
        // The driver reads the parameter only, but its type has no `const`.
        let mut parameters = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let _current = self.module.inner.device.enter()?;
        // SAFETY: function and stream are alive; the one parameter points to a live struct of the type that
        // the kernel takes, as the caller promises, and so do the addresses in it. The driver checks the
        // rest.
        unsafe {
            api::cuLaunchKernel(
                self.raw,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                stream.as_raw(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
        .map_err(|failed| DriverError::of_kernel(self.name, failed))
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, DriverError> {
        let mut value = 0;
        let _current = self.module.inner.device.enter()?;
        // SAFETY: `value` is a live variable, and the function is alive.
        unsafe { api::cuFuncGetAttribute(&mut value, attribute, self.raw) }
            .map_err(|failed| DriverError::of_kernel(self.name, failed))?;
        Ok(value as u32)
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The text in a log buffer, up to its first zero byte.
fn text_of(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim().to_owned()
}

/// The oldest CUDA version whose driver compiles PTX of the version that `ptx` declares.
fn cuda_needed(ptx: &str) -> Option<(u32, u32)> {
    let version = ptx.lines().find_map(|line| line.trim().strip_prefix(".version"))?;
    let (major, minor) = version.trim().split_once('.')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    Some(match (major, minor) {
        // The two numberings ran in step until CUDA 12.5, and again from 13.0.
        (8, 6..) => (12, minor + 1),
        (0..=6, _) => return None,
        _ => (major + 4, minor),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ptx_version_says_which_cuda_is_needed() {
        let needed = |version| cuda_needed(&format!("// a comment\n.version {version}\n.target sm_80\n"));
        assert_eq!(needed("7.0"), Some((11, 0)));
        assert_eq!(needed("7.8"), Some((11, 8)));
        assert_eq!(needed("8.5"), Some((12, 5)));
        assert_eq!(needed("8.6"), Some((12, 7)));
        assert_eq!(needed("8.8"), Some((12, 9)));
        assert_eq!(needed("9.0"), Some((13, 0)));
        assert_eq!(needed("6.4"), None);
        assert_eq!(needed("nonsense"), None);
        assert_eq!(cuda_needed(""), None);
    }

    #[test]
    fn a_log_ends_at_its_first_zero_byte() {
        assert_eq!(text_of(b"ptxas fatal\n\0\0garbage"), "ptxas fatal");
        assert_eq!(text_of(b"cut off"), "cut off");
        assert_eq!(text_of(&[0; 4]), "");
    }
}
