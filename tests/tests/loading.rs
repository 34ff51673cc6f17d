//! Loading on the emulator, whose queued work runs as late as it may: what is written or freed too early shows.

use nvfp4_moe_tests::cases::{self, Lab, Size};
use nvfp4_moe_tests::emulated::ARCHITECTURES;

#[test]
fn loading_on_every_architecture() {
    for architecture in ARCHITECTURES {
        let runner = architecture.runner().expect("an emulated device");
        let mut results = Vec::new();
        cases::run(&Lab { runner: &runner, size: Size::Small }, Some("loading/"), &mut |result| results.push(result));
        assert_eq!(results.len(), 4, "{results:?}");
        for result in results {
            assert_eq!(result.outcome, Ok(()), "{} on {}", result.name, architecture.name);
        }
    }
}
