//! Kernels: compiled by the driver from PTX, and launched.

use std::ffi::{CString, c_void};
use std::ptr;

use cust::sys::{CUfunction, CUfunction_attribute_enum as Attribute, CUjit_option_enum as JitOption, CUmodule};

use super::super::backend::{Backend as _, Handle, KernelLaunch, Kernels};
use super::super::error::DriverError;
use super::super::loader::Failed;
use super::super::symbols::{LaunchAttribute, LaunchConfig, api, name_and_text};
use super::Cuda;

/// Room for each of the PTX compiler's two logs, in bytes. It cuts off what does not fit.
const LOG_BYTES: usize = 16 << 10;

impl Cuda {
    fn set_attribute(
        &self,
        kernel: Handle,
        name: &'static str,
        attribute: Attribute,
        value: i32,
    ) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the function is alive; the driver checks the value.
        unsafe { api::cuFuncSetAttribute(kernel.pointer(), attribute, value) }
            .map_err(|failed| DriverError::of_kernel(name, failed))
    }
}

impl Kernels for Cuda {
    fn load_module(&self, ptx: &str, target: &str) -> Result<Handle, DriverError> {
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
            let _current = self.enter()?;
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
            Ok(()) => Ok(Handle::of(raw)),
            Err(Failed::Code { code, .. }) => {
                // 222: the PTX version is not supported; some drivers call it invalid PTX, 218.
                if let (218 | 222, Some(needed)) = (code, cuda_needed(ptx))
                    && self.driver_version() < needed
                {
                    return Err(DriverError::DriverTooOld { driver_cuda: self.driver_version(), needed });
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

    fn unload_module(&self, module: Handle) {
        // An error cannot be reported from here.
        if let Ok(_current) = self.enter() {
            // SAFETY: the one owner of the module gives it up, and nobody uses its kernels any more.
            let _ = unsafe { api::cuModuleUnload(module.pointer()) };
        }
    }

    fn kernel(&self, module: Handle, name: &'static str) -> Result<(Handle, Option<usize>), DriverError> {
        let failed = |failed| DriverError::of_kernel(name, failed);
        let symbol = CString::new(name).map_err(|_| failed(Failed::Code { call: "cuModuleGetFunction", code: 500 }))?;
        let _current = self.enter()?;
        let mut raw: CUfunction = ptr::null_mut();
        // SAFETY: `raw` is a live variable, the module is alive, and the name ends in a zero byte.
        unsafe { api::cuModuleGetFunction(&mut raw, module.pointer(), symbol.as_ptr()) }.map_err(failed)?;
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is alive, and both numbers are live variables. Drivers before CUDA 12.4 do
        // not have this call; then the size is not known, and is not checked.
        let parameter_bytes = unsafe { api::cuFuncGetParamInfo(raw, 0, &mut offset, &mut size) }.map(|()| size);
        Ok((Handle::of(raw), parameter_bytes.ok()))
    }

    fn set_max_dynamic_shared(&self, kernel: Handle, name: &'static str, bytes: u32) -> Result<(), DriverError> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        self.set_attribute(kernel, name, Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
    }

    fn prefer_shared_memory(&self, kernel: Handle, name: &'static str) -> Result<(), DriverError> {
        // Percent of the most.
        self.set_attribute(kernel, name, Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
    }

    unsafe fn launch(&self, kernel: Handle, stream: Handle, launch: &KernelLaunch<'_>) -> Result<(), DriverError> {
        // The driver reads the parameter only, but its type has no `const`.
        let mut parameters = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let _current = self.enter()?;
        let (function, no_more) = (kernel.pointer(), ptr::null_mut());
        // SAFETY: function and stream are alive; the one parameter points to the bytes of the struct that the
        // kernel takes, as the caller promises, and so do the addresses in it. The driver checks the rest.
        unsafe {
            if launch.overlaps {
                let config = LaunchConfig {
                    grid: launch.grid,
                    block: launch.block,
                    shared_bytes: launch.shared_bytes,
                    stream: stream.pointer(),
                    attributes: &LaunchAttribute::OVERLAP,
                    attribute_count: 1,
                };
                api::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), no_more)
            } else {
                let (shared_bytes, stream) = (launch.shared_bytes, stream.pointer());
                let parameters = parameters.as_mut_ptr();
                api::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, no_more)
            }
        }
        .map_err(|failed| DriverError::of_kernel(launch.name, failed))
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
