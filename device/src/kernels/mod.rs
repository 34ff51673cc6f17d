//! The stages of the expert block, one file each. What both engines compute alike lives in [`activation`].

pub mod activation;
