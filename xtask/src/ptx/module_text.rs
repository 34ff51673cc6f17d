//! What a module must not contain: device code is inlined into its kernels and never panics. And what the compiler does
//! not write: how many threads a large block has at most.

use anyhow::{Result, bail};
use nvfp4_moe_device::kernels::grouped_gemm::{Variant, sm80, sm90, sm120};
use nvfp4_moe_device::kernels::route;

/// Fails on the first function, call or trap in `ptx`, and on a module without kernels.
///
/// A bound that the compiler cannot prove ends in a call to core's panic functions; everything else is inlined. So a
/// module without functions and calls cannot panic.
pub(crate) fn check(ptx: &str) -> Result<()> {
    let mut kernels = 0;
    let mut kernel = "";
    // Said only if nothing calls it: the call says which kernel is wrong.
    let mut function = None;
    for (number, line) in ptx.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim();
        let mut words = code.split(|c: char| c.is_whitespace() || "(;,".contains(c)).filter(|word| !word.is_empty());
        if code.contains(".entry") {
            kernels += 1;
            kernel = words.skip_while(|word| *word != ".entry").nth(1).unwrap_or("?");
            continue;
        }
        let at = || format!("line {} of the PTX (`{code}`)", number + 1);
        if words.clone().any(|word| word == ".func") {
            function.get_or_insert_with(at);
            continue;
        }
        // A predicate may come before the instruction.
        let instruction = words.find(|word| !word.starts_with('@') && *word != "{").unwrap_or_default();
        if instruction == "call" || instruction.starts_with("call.") {
            bail!("{} calls a function in kernel {kernel}, but device code never panics and calls nothing", at());
        }
        if instruction == "trap" {
            bail!("{} is a trap in kernel {kernel}, but device code never panics", at());
        }
    }
    if let Some(at) = function {
        bail!("{at} declares a function, but device code is inlined into kernels and never panics");
    }
    if kernels == 0 {
        bail!("the PTX has no kernel");
    }
    Ok(())
}

/// The module with `.maxntid` and `.maxnreg` for each kernel of large blocks, so that the driver's compiler knows how many
/// registers a thread may have; Rust has no way to say it.
pub(crate) fn with_thread_bounds(ptx: &str) -> String {
    let variants = sm80::VARIANTS.into_iter().chain(sm90::VARIANTS).chain(sm120::VARIANTS);
    let bounds: Vec<_> = variants
        .map(|Variant { kernel, threads, registers, .. }| (kernel, threads, registers))
        .chain([("route_single", route::SINGLE_THREADS, route::SINGLE_REGISTERS)])
        .collect();
    let mut bounded = String::with_capacity(ptx.len() + 64 * bounds.len());
    let mut bound = None;
    for line in ptx.lines() {
        if let Some((_, name)) = line.split_once(".entry ") {
            let name = name.split('(').next().unwrap_or_default();
            bound = bounds.iter().find(|(kernel, ..)| *kernel == name);
        }
        if line == "{"
            && let Some((_, threads, registers)) = bound.take()
        {
            bounded.push_str(&format!(".maxntid {threads}, 1, 1\n.maxnreg {registers}\n"));
        }
        bounded.push_str(line);
        bounded.push('\n');
    }
    bounded
}

#[cfg(test)]
mod tests {
    use super::{check, with_thread_bounds};

    const KERNEL: &str = ".version 8.0\n.visible .entry amax(\n\t.param .b64 p\n)\n{\n\tret;\n}\n";

    #[test]
    fn a_module_of_kernels_is_fine() {
        check(KERNEL).expect("nothing but a kernel");
        check(&KERNEL.replace("ret;", "ret; // call nothing, trap nothing")).expect("comments do not count");
    }

    #[test]
    fn functions_calls_and_traps_are_named() {
        for (line, part) in [
            ("\tcall.uni _RNvNtCs_4core9panicking, (p);", "calls a function in kernel amax"),
            ("\t@%p1 call panic, (p);", "calls a function in kernel amax"),
            ("\t{ call.uni panic; }", "calls a function in kernel amax"),
            ("\ttrap;", "trap in kernel amax"),
            (".func panic()", "declares a function"),
            (".extern .func (.param .b32 r) memcpy", "declares a function"),
        ] {
            let error = check(&KERNEL.replace("\tret;", line)).expect_err("the line is forbidden");
            assert!(error.to_string().contains(part), "{error}");
            assert!(error.to_string().contains("line 6"), "{error}");
        }
    }

    #[test]
    fn a_call_says_more_than_the_function_it_calls() {
        let text = format!(".func panic()\n{}", KERNEL.replace("ret;", "call.uni panic, (p);"));
        let error = check(&text).expect_err("a call");
        assert!(error.to_string().contains("panic, (p);`) calls a function in kernel amax"), "{error}");
    }

    #[test]
    fn kernels_of_large_blocks_have_a_bound() {
        assert_eq!(with_thread_bounds(KERNEL), KERNEL);
        let gemm = KERNEL.replace("amax", "grouped_gemm_stream");
        assert_eq!(with_thread_bounds(&gemm), gemm.replace(")\n{", ")\n.maxntid 512, 1, 1\n.maxnreg 128\n{"));
        let route = KERNEL.replace("amax", "route_single");
        assert_eq!(with_thread_bounds(&route), route.replace(")\n{", ")\n.maxntid 1024, 1, 1\n.maxnreg 64\n{"));
    }

    #[test]
    fn an_empty_module_is_an_error() {
        check(".version 8.0\n").expect_err("no kernel");
    }
}
