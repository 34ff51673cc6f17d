//! The grouped GEMM: for every local expert, its weights times its slots' activations. L1 (gate and up) and L2 (down)
//! are the same kernel with another epilogue.

pub mod sm80;
