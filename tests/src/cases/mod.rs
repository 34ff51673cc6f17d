//! What users of such systems have reported, as checks that run on any device: `cargo test` runs them on the CPU, the
//! binary `cases` and `cargo xtask verify` on whatever they are given.
//!
//! A check's name is `row/what it hunts`. One that needs a GPU (or the absence of a driver) is not listed elsewhere, so
//! that nothing that did not run counts as passed.

mod activations;
mod against_cpu;
mod determinism;
mod device_kernels;
mod device_layout;
mod devices;
mod empty_experts;
mod extremes;
mod fp4;
mod gate_and_up;
mod global_scale;
mod graphs;
mod loading;
mod memory;
mod non_finite;
mod precision;
mod routing;
mod setup;
mod shapes;
mod stages;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use nvfp4_moe::cuda::Engine;
use nvfp4_moe::driver::{DriverError, driver_available};
use nvfp4_moe::harness::{Runner, Target};
use nvfp4_moe::kernel_family::KernelFamily;

pub use setup::{Batch, Expert, Hidden, Lab, Layer, Matrix, Size};

/// What a check needs to be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// Any device.
    Any,
    /// A GPU.
    Gpu,
    /// A GPU that runs the kernels for FP4 tensor cores.
    Fp4,
    /// A GPU that runs this variant of the grouped GEMM.
    Variant(&'static str),
    /// A GPU whose memory nothing else takes and gives back: no sanitizer.
    WholeGpu,
    /// A GPU behind the CUDA driver: no emulator.
    Driver,
    /// A machine without an NVIDIA driver.
    NoDriver,
}

/// One check.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    needs: Needs,
    check: fn(&Lab<'_>) -> anyhow::Result<()>,
}

const fn any(name: &'static str, check: fn(&Lab<'_>) -> anyhow::Result<()>) -> Case {
    Case { name, needs: Needs::Any, check }
}

const fn gpu(name: &'static str, check: fn(&Lab<'_>) -> anyhow::Result<()>) -> Case {
    Case { name, needs: Needs::Gpu, check }
}

const fn variant(name: &'static str, kernel: &'static str, check: fn(&Lab<'_>) -> anyhow::Result<()>) -> Case {
    Case { name, needs: Needs::Variant(kernel), check }
}

const fn fp4(name: &'static str, check: fn(&Lab<'_>) -> anyhow::Result<()>) -> Case {
    Case { name, needs: Needs::Fp4, check }
}

const fn whole_gpu(name: &'static str, check: fn(&Lab<'_>) -> anyhow::Result<()>) -> Case {
    Case { name, needs: Needs::WholeGpu, check }
}

const CASES: &[Case] = &[
    any("expert_counts/odd_counts", shapes::odd_expert_counts),
    any("dimensions/pairs", shapes::dimension_pairs),
    any("dimensions/every_tail", shapes::every_tail),
    any("dimensions/not_a_multiple_of_16", shapes::not_a_multiple_of_16),
    any("tokens/few", shapes::few_tokens),
    any("tokens/none", shapes::no_tokens),
    any("tokens/300000", shapes::many_tokens),
    any("tokens/more_than_planned", shapes::more_tokens_than_planned),
    any("padding/poisoned_output_and_workspace", shapes::poisoned_padding),
    any("padding/pack_writes_zeros", device_layout::pack_model),
    gpu("padding/packed_weights", device_layout::packed_weights),
    any("gate_and_up/zero_half", gate_and_up::zero_half),
    any("gate_and_up/different_scales", gate_and_up::different_scales),
    any("gate_and_up/swapped", gate_and_up::swapped),
    any("gate_and_up/different_input_scales", gate_and_up::different_input_scales),
    any("global_scale/large_and_small", global_scale::large_and_small),
    any("global_scale/missing_input_scale", global_scale::missing_input_scale),
    any("global_scale/bad_value", global_scale::bad_value),
    any("global_scale/bad_block_scale", global_scale::bad_block_scale),
    any("routing/ids_outside_the_range", routing::outside),
    any("routing/repeated_expert", routing::repeated_expert),
    any("routing/all_on_one_expert", routing::all_on_one),
    any("routing/rank_with_nothing", routing::rank_with_nothing),
    any("routing/one_expert_a_token", routing::one_expert_a_token),
    any("routing/sum_over_ranks", routing::sum_over_ranks),
    any("routing/accumulate", routing::accumulate),
    gpu("routing/slots_on_the_device", device_kernels::slots),
    any("clamp/limits", activations::limits),
    any("clamp/gate_far_below", activations::gate_far_below),
    any("clamp/swigluoai", activations::swigluoai),
    any("clamp/relu2_without_gate", activations::relu2),
    any("clamp/bad_limit", activations::bad_limit),
    any("extremes/largest_weights", extremes::largest_weights),
    any("extremes/smallest_scales", extremes::smallest_scales),
    any("extremes/wide_range_of_scales", extremes::wide_range),
    any("extremes/underflowing_block", extremes::underflowing_block),
    any("extremes/all_zero", extremes::all_zero),
    any("extremes/large_activations", extremes::large_activations),
    any("extremes/not_finite_in_one_row", non_finite::one_row),
    any("extremes/not_finite_without_experts", non_finite::without_experts),
    any("extremes/not_finite_in_bf16", non_finite::in_bf16),
    any("empty_experts/never_read", empty_experts::never_read),
    any("empty_experts/none_has_tokens", empty_experts::none_has_tokens),
    any("determinism/alone_and_elsewhere", determinism::alone_and_elsewhere),
    any("determinism/two_runs", determinism::two_runs),
    gpu("determinism/gemm_variants", determinism::gemm_variants),
    gpu("determinism/graph_replay", graphs::replay),
    gpu("determinism/graph_without_tokens", graphs::without_tokens),
    gpu("determinism/graph_accumulates", graphs::accumulating),
    any("memory/plans_are_exact", memory::plans_are_exact),
    any("memory/largest_and_smallest_plan", memory::largest_and_smallest_plan),
    whole_gpu("memory/layer_after_layer", memory::layer_after_layer),
    whole_gpu("memory/forward_allocates_nothing", memory::forward_allocates_nothing),
    any("loading/first_error_counts", loading::first_error_counts),
    any("loading/progress_in_order", loading::progress_in_order),
    gpu("loading/packed_bytes", loading::packed_bytes),
    gpu("loading/nothing_is_left", loading::nothing_is_left),
    any("precision/f16_hidden", precision::f16_hidden),
    any("precision/bf16_output", precision::bf16_output),
    gpu("precision/quantizer_on_the_device", device_kernels::quantizer),
    gpu("precision/layers_against_the_cpu", against_cpu::layers),
    gpu("stages/route", stages::route::check),
    gpu("stages/quantize", stages::quantize::check),
    gpu("stages/pack", stages::weights::pack),
    gpu("stages/read_all", stages::weights::read_all),
    gpu("stages/combine", stages::combine::check),
    variant("stages/grouped_gemm_stream", "grouped_gemm_stream", stages::grouped_gemm::check::<0>),
    variant("stages/grouped_gemm_n64", "grouped_gemm_n64", stages::grouped_gemm::check::<1>),
    variant("stages/grouped_gemm_n128", "grouped_gemm_n128", stages::grouped_gemm::check::<2>),
    variant("stages/quantize_tiles", "grouped_gemm_wgmma_n192", stages::quantize_tiles::check),
    variant("stages/grouped_gemm_few_m16", "grouped_gemm_few_m16", stages::grouped_gemm::check::<3>),
    variant("stages/grouped_gemm_few_m32", "grouped_gemm_few_m32", stages::grouped_gemm::check::<4>),
    variant("stages/grouped_gemm_wgmma_n96", "grouped_gemm_wgmma_n96", stages::grouped_gemm::check::<5>),
    variant("stages/grouped_gemm_wgmma_n192", "grouped_gemm_wgmma_n192", stages::grouped_gemm::check::<6>),
    fp4("stages/grouped_gemm_fp4", stages::grouped_gemm_fp4::check),
    fp4("fp4/fragment_maps", fp4::instruction::fragment_maps),
    fp4("fp4/scale_lanes", fp4::instruction::scale_lanes),
    fp4("fp4/conversion", fp4::conversion::every_number),
    fp4("fp4/packed_weights", fp4::places::packed_weights),
    fp4("fp4/grouped_gemm", fp4::places::grouped_gemm),
    Case { name: "devices/no_driver", needs: Needs::NoDriver, check: devices::no_driver },
    Case { name: "devices/no_such_gpu", needs: Needs::Driver, check: devices::no_such_gpu },
    gpu("devices/driver_too_old", devices::driver_too_old),
    whole_gpu("devices/memory_cannot_be_had", devices::memory_cannot_be_had),
    gpu("devices/a_copy_inside_a_buffer", devices::a_copy_inside_a_buffer),
    any("devices/architecture_without_kernels", devices::architecture_without_kernels),
    any("devices/not_enough_memory", devices::not_enough_memory),
    any("devices/not_enough_shared_memory", devices::not_enough_shared_memory),
    any("devices/wrong_calls_write_nothing", devices::wrong_calls_write_nothing),
];

/// How one check ended.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseResult {
    /// `row/what it hunts`.
    pub name: &'static str,
    /// What is wrong, if something is.
    pub outcome: Result<(), String>,
    /// How long it took.
    pub seconds: f64,
}

/// Names of the checks that this lab can run, in order.
#[must_use]
pub fn names(lab: &Lab<'_>) -> Vec<&'static str> {
    listed(lab).map(|case| case.name).collect()
}

fn listed(lab: &Lab<'_>) -> impl Iterator<Item = &'static Case> + use<> {
    let gpu = lab.is_gpu();
    let kernels = lab.runner.engine().map(Engine::kernels);
    let whole_gpu = gpu && lab.is_full();
    let cuda = matches!(lab.runner.target(), Target::Cuda(_));
    let no_driver = matches!(driver_available(), Err(DriverError::NoDriver { .. }));
    CASES.iter().filter(move |case| match case.needs {
        Needs::Any => true,
        Needs::Gpu => gpu,
        Needs::Variant(kernel) => {
            kernels.is_some_and(|kernels| kernels.variants().iter().any(|variant| variant.kernel == kernel))
        }
        Needs::Fp4 => kernels == Some(KernelFamily::Fp4),
        Needs::WholeGpu => whole_gpu,
        Needs::Driver => cuda,
        Needs::NoDriver => no_driver && !gpu,
    })
}

/// Runs the checks whose names contain `filter`, all of them without one.
#[must_use]
pub fn run_all(runner: &Runner, filter: Option<&str>) -> Vec<CaseResult> {
    let mut results = Vec::new();
    run(&Lab { runner, size: Size::Full }, filter, &mut |result| results.push(result));
    results
}

/// [`run_all`], giving each result away as soon as it is there.
pub fn run(lab: &Lab<'_>, filter: Option<&str>, report: &mut dyn FnMut(CaseResult)) {
    for case in listed(lab).filter(|case| filter.is_none_or(|filter| case.name.contains(filter))) {
        let start = Instant::now();
        // A check that panics has failed; the others still run.
        let outcome = match catch_unwind(AssertUnwindSafe(|| (case.check)(lab))) {
            Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
            Err(panic) => Err(format!("panicked: {}", panic_message(&*panic))),
        };
        report(CaseResult { name: case.name, outcome, seconds: start.elapsed().as_secs_f64() });
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
