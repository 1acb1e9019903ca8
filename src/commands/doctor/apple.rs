//! What Apple's tools print, as values: parsers only, which run and are tested on every system.
//! Nothing is run here.

pub(in crate::commands) mod rdma;
pub(super) mod system;
pub(in crate::commands) mod thunderbolt;

/// Reads a file of outputs; see its README.
#[cfg(test)]
pub(in crate::commands) fn sample(name: &str) -> String {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/apple");
    std::fs::read_to_string(folder.join(name)).unwrap()
}
