//! The GPU engine: packs weights into device memory and launches the kernels of a [`Plan`](crate::plan::Plan) on the
//! caller's stream.

mod call;
mod engine;
mod layer;
mod loading;
mod measure;
mod staging;

pub use call::{Call, CallError, DeviceTokens};
pub use engine::Engine;
pub use layer::{MoeLayer, Workspace};
pub use measure::{ReadProbe, read_bandwidth, upload_bandwidth};
pub use nvfp4_moe_device::params::Element;
pub use staging::LoadMemory;

pub use crate::schedule::CallAddresses;
