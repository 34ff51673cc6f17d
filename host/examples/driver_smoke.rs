//! Exercises the driver layer on GPU 0: memory, a kernel, a captured graph, events and two errors.
//! Exits with 0 only if every value is as expected.

use anyhow::{Context, Result, ensure};
use nvfp4_moe::driver::{
    Device, DeviceBuffer, DriverError, Event, Module, PinnedBuffer, Stream, StreamHandle, capture, driver_available,
};

const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry add_constant(.param .align 8 .b8 params[16])
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;

    ld.param.u64 %rd1, [params];
    ld.param.u32 %r1, [params+8];
    ld.param.u32 %r2, [params+12];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.u32 %rd2, %r6, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r7, [%rd3];
    add.u32 %r7, %r7, %r2;
    st.global.u32 [%rd3], %r7;
DONE:
    ret;
}
";

#[repr(C)]
#[derive(Clone, Copy)]
struct AddConstant {
    data: u64,
    len: u32,
    addend: u32,
}

const LEN: usize = 1000;

fn main() -> Result<()> {
    driver_available()?;
    let device = Device::open(0)?;
    let (major, minor) = device.driver_version();
    println!("{} with a driver for CUDA {major}.{minor}", device.name());
    println!("{:?}", device.limits());
    let (free, total) = device.free_memory()?;
    println!("{free} of {total} bytes free");

    // Copies and fills.
    let stream = Stream::new(&device)?;
    let buffer = DeviceBuffer::alloc(&device, LEN * 4)?;
    let start: Vec<u32> = (0..LEN as u32).collect();
    buffer.write(0, bytemuck::cast_slice(&start))?;
    check(&buffer, |i| i)?;
    buffer.fill(4, 8, 0x11)?;
    check(&buffer, |i| if i == 1 || i == 2 { 0x1111_1111 } else { i })?;
    let mut pinned = PinnedBuffer::zeroed(&device, LEN * 4)?;
    ensure!(pinned.as_slice().iter().all(|byte| *byte == 0));
    pinned.as_mut_slice().copy_from_slice(bytemuck::cast_slice(&start));
    // SAFETY: both buffers live, untouched, until the stream has been waited for.
    unsafe { buffer.write_async(0, &pinned, 0, LEN * 4, stream.handle()) }?;
    // SAFETY: not captured.
    unsafe { buffer.fill_async(0, 4, 0xff, stream.handle()) }?;
    stream.synchronize()?;
    check(&buffer, |i| if i == 0 { u32::MAX } else { i })?;
    let empty = DeviceBuffer::alloc(&device, 0)?;
    empty.write(0, &[])?;
    ensure!(empty.address() == 0 && empty.read(0, &mut [0]).is_err());
    println!("copies and fills: ok");

    // A kernel, launched at once.
    buffer.write(0, bytemuck::cast_slice(&start))?;
    let module = Module::load(&device, PTX, "sm_80")?;
    let add = module.function("add_constant")?;
    println!(
        "registers {}, static shared {} bytes, local {} bytes, {} blocks of 256 a multiprocessor",
        add.registers()?,
        add.static_shared_bytes()?,
        add.local_bytes()?,
        add.max_active_blocks(256, 0)?
    );
    add.set_max_dynamic_shared(device.limits().shared_bytes_per_block)?;
    let params = AddConstant { data: buffer.address(), len: LEN as u32, addend: 7 };
    let queue = |handle: StreamHandle<'_>| {
        // SAFETY: the kernel takes this struct; the buffer lives, and is used by this stream only.
        unsafe { add.launch([4, 1, 1], [256, 1, 1], 64 << 10, handle, &params) }
    };
    let (before, after) = (Event::new(&device)?, Event::new(&device)?);
    before.record(stream.handle())?;
    queue(stream.handle())?;
    after.record(stream.handle())?;
    println!("one launch: {} ms", before.elapsed_ms(&after)?);
    check(&buffer, |i| i + 7)?;

    // The same in a graph, replayed twice, once from another thread; capture that fails ends cleanly.
    let graph = capture(&device, &stream, |handle| {
        queue(handle)?;
        queue(handle)
    })?;
    check(&buffer, |i| i + 7)?;
    graph.launch(stream.handle())?;
    stream.synchronize()?;
    check(&buffer, |i| i + 21)?;
    let graph = std::thread::scope(|scope| {
        scope.spawn(|| graph.launch(stream.handle()).map(|()| graph)).join().expect("the thread does not panic")
    })?;
    stream.synchronize()?;
    check(&buffer, |i| i + 35)?;
    drop(graph);
    let refused = capture(&device, &stream, |_| stream.synchronize());
    println!("{}", refused.expect_err("waiting cannot be captured"));
    let failed = capture(&device, &stream, |handle| {
        queue(handle)?;
        anyhow::bail!("an error of the closure")
    });
    ensure!(failed.is_err_and(|error| error.to_string() == "an error of the closure"));
    queue(stream.handle())?;
    stream.synchronize()?;
    check(&buffer, |i| i + 42)?;
    println!("kernel and graph: ok");

    // The context of somebody else.
    // SAFETY: `device` keeps the context alive until the end of `main`.
    let borrowed = unsafe { Device::from_raw_context(device.raw_context()) }?;
    ensure!(borrowed.limits() == device.limits() && borrowed.ordinal() == 0);
    drop(borrowed);

    // Errors.
    let error = DeviceBuffer::alloc(&device, 1 << 50).expect_err("too much memory");
    println!("{error}");
    ensure!(matches!(error, DriverError::OutOfMemory { .. }));
    let broken = PTX.replace("mul.wide.u32", "mull.wide.u32");
    let error = Module::load(&device, &broken, "sm_80").expect_err("broken PTX");
    println!("{error}");
    ensure!(matches!(&error, DriverError::ModuleLoad { log, .. } if log.contains("mull")));
    let future = PTX.replace(".version 7.0", ".version 99.0");
    println!("{}", Module::load(&device, &future, "sm_80").expect_err("a PTX version of the future"));
    println!("{}", module.function("absent").expect_err("no such kernel"));
    // SAFETY: the launch is refused: too many threads.
    let error = unsafe { add.launch([1; 3], [4096, 1, 1], 0, stream.handle(), &params) };
    println!("{}", error.expect_err("too many threads"));
    // SAFETY: the launch is refused or, on drivers that do not tell sizes, takes the first 16 bytes: no numbers.
    let error = unsafe { add.launch([1; 3], [1; 3], 0, stream.handle(), &[0u64; 8]) };
    println!("wrong parameter struct: {error:?}");
    let found = Device::count()?;
    println!("{}", Device::open(found).expect_err("no such device"));
    println!("all ok");
    Ok(())
}

/// Compares every number in the buffer with what it should be.
fn check(buffer: &DeviceBuffer, expected: impl Fn(u32) -> u32) -> Result<()> {
    let mut found = vec![0u32; LEN];
    buffer.read(0, bytemuck::cast_slice_mut(&mut found)).context("reading back")?;
    for (i, value) in found.iter().enumerate() {
        ensure!(*value == expected(i as u32), "number {i} is {value}, expected {}", expected(i as u32));
    }
    Ok(())
}
