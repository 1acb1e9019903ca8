//! What Apple's tools print, as values: parsers only, which run and are tested on every system.
//! Nothing is run here.

pub(super) mod rdma;
pub(super) mod system;
pub(super) mod thunderbolt;

/// Reads a file of outputs; see its README.
#[cfg(test)]
pub(super) fn sample(name: &str) -> String {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/apple");
    std::fs::read_to_string(folder.join(name)).unwrap()
}
