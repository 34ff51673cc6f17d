pub mod activation;
pub mod checkpoint;
pub mod shape;
