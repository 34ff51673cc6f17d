//! The driver functions that this crate and `cust` 0.3.2 use.
//!
//! The first list is every function that `cust` refers to, so that any use of `cust` links, and a few
//! more that its bindings declare. The second list is for functions newer than those bindings.

// The names and the signatures are the driver's.
#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use std::sync::OnceLock;

use cust::sys::*;
use libloading::Library;

use super::loader::{Failed, LIBRARY, driver_api, known_code};

/// The loaded driver, or why it could not be loaded. Filled on first use and never changed.
static TABLE: OnceLock<Result<Table, String>> = OnceLock::new();

fn loaded() -> &'static Result<Table, String> {
    TABLE.get_or_init(Table::load)
}

fn table() -> Result<&'static Table, Failed> {
    loaded().as_ref().map_err(|_| Failed::NoLibrary)
}

/// The system loader's own words for why the driver library could not be loaded, if it could not.
pub(super) fn load_problem() -> Option<&'static str> {
    loaded().as_ref().err().map(String::as_str)
}

fn outcome(call: &'static str, code: c_int) -> Result<(), Failed> {
    match code {
        0 => Ok(()),
        code => Err(Failed::Code { call, code: code as u32 }),
    }
}

/// The driver's own name and description of an error code.
pub(super) fn name_and_text(code: u32) -> (String, String) {
    let (name, text) = match table() {
        Ok(table) => (
            table.cuGetErrorName.and_then(|ask| describe(ask, code)),
            table.cuGetErrorString.and_then(|ask| describe(ask, code)),
        ),
        Err(_) => (None, None),
    };
    (name.unwrap_or_else(|| format!("{:?}", known_code(code))), text.unwrap_or_else(|| "no description".to_owned()))
}

/// A driver function that turns an error code into a static string, as the bindings declare it.
type Describe = unsafe extern "C" fn(CUresult, *mut *const c_char) -> c_int;

/// The same, but for any code: one that is newer than the bindings has no value in their enum.
type DescribeAny = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

fn describe(ask: Describe, code: u32) -> Option<String> {
    // SAFETY: the types differ in the first argument only, and the enum is stored as a C integer.
    let ask = unsafe { std::mem::transmute::<Describe, DescribeAny>(ask) };
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: any integer is allowed as a code, and `text` is a live variable.
    let result = unsafe { ask(code as c_int, &mut text) };
    if result != 0 || text.is_null() {
        return None;
    }
    // SAFETY: the driver reported success, so this is one of its static strings.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// `CUlaunchConfig` of cuda.h, CUDA 12.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// `CUlaunchAttribute` of cuda.h: a number, padding to 8 bytes, a union of 64 bytes.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LaunchAttribute {
    pub(super) id: c_uint,
    pub(super) padding: c_uint,
    pub(super) value: [c_uint; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may start before the one in front of it on the
    /// stream is done, and waits for it itself.
    pub(super) const OVERLAP: Self = {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, padding: 0, value }
    };
}

driver_api! {
    cust {
        fn cuArray3DCreate_v2(
            pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR,
        );
        fn cuArray3DGetDescriptor_v2(
            pArrayDescriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, hArray: CUarray,
        );
        fn cuArrayDestroy(hArray: CUarray);
        fn cuCtxCreate_v2(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice);
        fn cuCtxDestroy_v2(ctx: CUcontext);
        fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut c_uint);
        fn cuCtxGetCacheConfig(pconfig: *mut CUfunc_cache);
        fn cuCtxGetCurrent(pctx: *mut CUcontext);
        fn cuCtxGetDevice(device: *mut CUdevice);
        fn cuCtxGetFlags(flags: *mut c_uint);
        fn cuCtxGetLimit(pvalue: *mut usize, limit: CUlimit);
        fn cuCtxGetSharedMemConfig(pConfig: *mut CUsharedconfig);
        fn cuCtxGetStreamPriorityRange(leastPriority: *mut c_int, greatestPriority: *mut c_int);
        fn cuCtxPopCurrent_v2(pctx: *mut CUcontext);
        fn cuCtxPushCurrent_v2(ctx: CUcontext);
        fn cuCtxSetCacheConfig(config: CUfunc_cache);
        fn cuCtxSetCurrent(ctx: CUcontext);
        fn cuCtxSetLimit(limit: CUlimit, value: usize);
        fn cuCtxSetSharedMemConfig(config: CUsharedconfig);
        fn cuCtxSynchronize();
        fn cuDestroyExternalMemory(extMem: CUexternalMemory);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice);
        fn cuDevicePrimaryCtxReset_v2(dev: CUdevice);
        fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice);
        fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice);
        fn cuDriverGetVersion(driverVersion: *mut c_int);
        fn cuEventCreate(phEvent: *mut CUevent, Flags: c_uint);
        fn cuEventDestroy_v2(hEvent: CUevent);
        fn cuEventElapsedTime(pMilliseconds: *mut f32, hStart: CUevent, hEnd: CUevent);
        fn cuEventQuery(hEvent: CUevent);
        fn cuEventRecord(hEvent: CUevent, hStream: CUstream);
        fn cuEventSynchronize(hEvent: CUevent);
        fn cuExternalMemoryGetMappedBuffer(
            devPtr: *mut CUdeviceptr, extMem: CUexternalMemory,
            bufferDesc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
        );
        fn cuFuncGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, hfunc: CUfunction);
        fn cuFuncSetAttribute(hfunc: CUfunction, attrib: CUfunction_attribute, value: c_int);
        fn cuFuncSetCacheConfig(hfunc: CUfunction, config: CUfunc_cache);
        fn cuFuncSetSharedMemConfig(hfunc: CUfunction, config: CUsharedconfig);
        fn cuGetErrorName(error: CUresult, pStr: *mut *const c_char);
        fn cuGetErrorString(error: CUresult, pStr: *mut *const c_char);
        fn cuGraphAddKernelNode(
            phGraphNode: *mut CUgraphNode, hGraph: CUgraph, dependencies: *const CUgraphNode,
            numDependencies: usize, nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
        );
        fn cuGraphCreate(phGraph: *mut CUgraph, flags: c_uint);
        fn cuGraphDebugDotPrint(hGraph: CUgraph, path: *const c_char, flags: c_uint);
        fn cuGraphDestroy(hGraph: CUgraph);
        fn cuGraphExecDestroy(hGraphExec: CUgraphExec);
        fn cuGraphGetEdges(
            hGraph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, numEdges: *mut usize,
        );
        fn cuGraphGetNodes(hGraph: CUgraph, nodes: *mut CUgraphNode, numNodes: *mut usize);
        fn cuGraphKernelNodeGetParams(hNode: CUgraphNode, nodeParams: *mut CUDA_KERNEL_NODE_PARAMS);
        fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream);
        fn cuGraphNodeGetType(hNode: CUgraphNode, type_: *mut CUgraphNodeType);
        fn cuImportExternalMemory(
            extMem_out: *mut CUexternalMemory,
            memHandleDesc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
        );
        fn cuInit(Flags: c_uint);
        fn cuLaunchHostFunc(hStream: CUstream, fn_: CUhostFn, userData: *mut c_void);
        fn cuLaunchKernel(
            f: CUfunction, gridDimX: c_uint, gridDimY: c_uint, gridDimZ: c_uint, blockDimX: c_uint,
            blockDimY: c_uint, blockDimZ: c_uint, sharedMemBytes: c_uint, hStream: CUstream,
            kernelParams: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuLinkAddData_v2(
            state: CUlinkState, type_: CUjitInputType, data: *mut c_void, size: usize,
            name: *const c_char, numOptions: c_uint, options: *mut CUjit_option,
            optionValues: *mut *mut c_void,
        );
        fn cuLinkComplete(state: CUlinkState, cubinOut: *mut *mut c_void, sizeOut: *mut usize);
        fn cuLinkCreate_v2(
            numOptions: c_uint, options: *mut CUjit_option, optionValues: *mut *mut c_void,
            stateOut: *mut CUlinkState,
        );
        fn cuLinkDestroy(state: CUlinkState);
        fn cuMemAdvise(devPtr: CUdeviceptr, count: usize, advice: CUmem_advise, device: CUdevice);
        fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream);
        fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize);
        fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint);
        fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize);
        fn cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream);
        fn cuMemFreeHost(p: *mut c_void);
        fn cuMemFree_v2(dptr: CUdeviceptr);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemPrefetchAsync(
            devPtr: CUdeviceptr, count: usize, dstDevice: CUdevice, hStream: CUstream,
        );
        fn cuMemcpy2D_v2(pCopy: *const CUDA_MEMCPY2D);
        fn cuMemcpyAtoH_v2(
            dstHost: *mut c_void, srcArray: CUarray, srcOffset: usize, ByteCount: usize,
        );
        fn cuMemcpyDtoDAsync_v2(
            dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream,
        );
        fn cuMemcpyDtoD_v2(dstDevice: CUdeviceptr, srcDevice: CUdeviceptr, ByteCount: usize);
        fn cuMemcpyDtoHAsync_v2(
            dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize, hStream: CUstream,
        );
        fn cuMemcpyDtoH_v2(dstHost: *mut c_void, srcDevice: CUdeviceptr, ByteCount: usize);
        fn cuMemcpyHtoA_v2(
            dstArray: CUarray, dstOffset: usize, srcHost: *const c_void, ByteCount: usize,
        );
        fn cuMemcpyHtoDAsync_v2(
            dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize, hStream: CUstream,
        );
        fn cuMemcpyHtoD_v2(dstDevice: CUdeviceptr, srcHost: *const c_void, ByteCount: usize);
        fn cuMemsetD16Async(dstDevice: CUdeviceptr, us: c_ushort, N: usize, hStream: CUstream);
        fn cuMemsetD16_v2(dstDevice: CUdeviceptr, us: c_ushort, N: usize);
        fn cuMemsetD32Async(dstDevice: CUdeviceptr, ui: c_uint, N: usize, hStream: CUstream);
        fn cuMemsetD32_v2(dstDevice: CUdeviceptr, ui: c_uint, N: usize);
        fn cuMemsetD8Async(dstDevice: CUdeviceptr, uc: c_uchar, N: usize, hStream: CUstream);
        fn cuMemsetD8_v2(dstDevice: CUdeviceptr, uc: c_uchar, N: usize);
        fn cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char);
        fn cuModuleGetGlobal_v2(
            dptr: *mut CUdeviceptr, bytes: *mut usize, hmod: CUmodule, name: *const c_char,
        );
        fn cuModuleLoad(module: *mut CUmodule, fname: *const c_char);
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        fn cuModuleLoadDataEx(
            module: *mut CUmodule, image: *const c_void, numOptions: c_uint,
            options: *mut CUjit_option, optionValues: *mut *mut c_void,
        );
        fn cuModuleUnload(hmod: CUmodule);
        fn cuOccupancyAvailableDynamicSMemPerBlock(
            dynamicSmemSize: *mut usize, func: CUfunction, numBlocks: c_int, blockSize: c_int,
        );
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            numBlocks: *mut c_int, func: CUfunction, blockSize: c_int, dynamicSMemSize: usize,
        );
        fn cuOccupancyMaxPotentialBlockSize(
            minGridSize: *mut c_int, blockSize: *mut c_int, func: CUfunction,
            blockSizeToDynamicSMemSize: CUoccupancyB2DSize, dynamicSMemSize: usize,
            blockSizeLimit: c_int,
        );
        fn cuStreamBeginCapture_v2(hStream: CUstream, mode: CUstreamCaptureMode);
        fn cuStreamCreate(phStream: *mut CUstream, Flags: c_uint);
        fn cuStreamCreateWithPriority(phStream: *mut CUstream, flags: c_uint, priority: c_int);
        fn cuStreamDestroy_v2(hStream: CUstream);
        fn cuStreamEndCapture(hStream: CUstream, phGraph: *mut CUgraph);
        fn cuStreamGetFlags(hStream: CUstream, flags: *mut c_uint);
        fn cuStreamGetPriority(hStream: CUstream, priority: *mut c_int);
        fn cuStreamSynchronize(hStream: CUstream);
        fn cuStreamWaitEvent(hStream: CUstream, hEvent: CUevent, Flags: c_uint);
        fn cuSurfObjectCreate(pSurfObject: *mut CUsurfObject, pResDesc: *const CUDA_RESOURCE_DESC);
        fn cuSurfObjectDestroy(surfObject: CUsurfObject);
        fn cuSurfObjectGetResourceDesc(pResDesc: *mut CUDA_RESOURCE_DESC, surfObject: CUsurfObject);
        fn cuTexObjectCreate(
            pTexObject: *mut CUtexObject, pResDesc: *const CUDA_RESOURCE_DESC,
            pTexDesc: *const CUDA_TEXTURE_DESC, pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC,
        );
        fn cuTexObjectDestroy(texObject: CUtexObject);
        fn cuTexObjectGetResourceDesc(pResDesc: *mut CUDA_RESOURCE_DESC, texObject: CUtexObject);
        fn cuTexObjectGetResourceViewDesc(
            pResViewDesc: *mut CUDA_RESOURCE_VIEW_DESC, texObject: CUtexObject,
        );
    }
    newer {
        fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
        fn cuLaunchKernelEx(
            config: *const LaunchConfig, f: CUfunction, kernelParams: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuFuncGetParamInfo(func: CUfunction, index: usize, offset: *mut usize, size: *mut usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_is_newer_than_the_bindings_becomes_unknown() {
        assert_eq!(known_code(0), CUresult::CUDA_SUCCESS);
        assert_eq!(known_code(222), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        assert_eq!(known_code(999), CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(known_code(12_345), CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(known_code(u32::MAX), CUresult::CUDA_ERROR_UNKNOWN);
    }

    #[test]
    fn without_a_driver_cust_gets_an_error_code() {
        if load_problem().is_some() {
            let error = cust::init(cust::CudaFlags::empty()).unwrap_err();
            assert_eq!(error, cust::error::CudaError::NotInitialized);
        }
    }
}
