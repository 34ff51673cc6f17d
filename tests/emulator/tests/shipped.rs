//! The shipped kernels on the emulator.

use nvfp4_moe_emulator::Module;

#[test]
fn everything_decodes() {
    let module = Module::parse(include_str!("../../../host/ptx/sm_80.ptx")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(module.kernels().count(), 14);
}
