//! Runs PTX on the CPU and checks what a GPU does not: every access against its allocation and its alignment, every read
//! against what was written, threads and blocks against each other.
//!
//! ```
//! use nvfp4_moe_emulator::{Config, Emulator, Module};
//! let module = Module::parse(
//!     ".version 8.0 .target sm_80 .address_size 64
//!      .visible .entry double(.param .b64 data) {
//!          .reg .b64 %rd<4>; .reg .b32 %r<3>;
//!          ld.param.b64 %rd1, [data];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %rd2, %r1, 4;
//!          add.s64 %rd3, %rd1, %rd2;
//!          ld.global.b32 %r2, [%rd3];
//!          add.u32 %r2, %r2, %r2;
//!          st.global.b32 [%rd3], %r2;
//!          ret;
//!      }",
//! )?;
//! let mut emulator = Emulator::new(Config::default());
//! let data = emulator.memory_mut().alloc(64 * 4);
//! emulator.memory_mut().fill(data, 1, 64 * 4)?;
//! let report = emulator.launch(&module, "double", [1, 1, 1], [64, 1, 1], 0, &data.to_le_bytes())?;
//! assert_eq!(report.thread_instructions, 8 * 64);
//! assert_eq!(emulator.memory().read(data, 4)?, [2; 4]);
//! # Ok::<(), nvfp4_moe_emulator::EmulatorError>(())
//! ```
//!
//! [`parse`] reads text, `decode` turns each instruction once into an object that runs for a whole warp, `instructions`
//! has one file a family of the PTX ISA, `execute` schedules lanes, warps and blocks, [`memory`] holds the state spaces
//! with their shadows. An instruction, modifier or operand that is not known is an error that names it.

pub mod conformance;
mod decode;
mod error;
mod execute;
mod instructions;
pub mod memory;
pub mod parse;
mod types;

pub use decode::Module;
pub use error::{EmulatorError, Finding, FindingKind};
pub use execute::launch::{Accumulate, Config, Emulator, LaunchReport};
