//! What the test suites compare the library with, and the checks that run on any device.

pub mod cases;
pub mod conformance;
pub mod emulated;
pub mod reference;
