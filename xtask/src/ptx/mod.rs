//! From the device crate to PTX: how it is compiled, what a module may contain, and what the manifest says.

pub(crate) mod compiler;
pub(crate) mod manifest;
pub(crate) mod module_text;
pub(crate) mod recipe;
