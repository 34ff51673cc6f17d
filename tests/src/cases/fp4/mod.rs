//! Where the operands of the FP4 matrix instruction are, stated anew from the PTX ISA document: the instruction itself, the
//! packed weights and the grouped GEMM are each held against these maps. Nothing here uses the layouts of the library, nor
//! anything of the emulator.

pub(super) mod conversion;
mod document;
pub(super) mod instruction;
pub(super) mod places;
