//! What tests of several modules share: packages made from the reference models, hidden states, and a group of
//! ranks within one process.

pub(crate) mod group;
pub(crate) mod mlx;
pub(crate) mod models;
pub(crate) mod package;
pub(crate) mod streams;
