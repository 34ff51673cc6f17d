//! What the test suites compare the library with.

pub mod reference;
