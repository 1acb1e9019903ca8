//! Everything that parses foreign bytes, as functions of bytes, for `cargo fuzz`.

mod targets;

/// Runs one target on one input. Panics when the input has found a fault.
///
/// # Panics
/// Also when there is no such target.
pub fn run(name: &str, data: &[u8]) {
    let found = targets::TARGETS.iter().find(|(target, _)| *target == name);
    found.expect("every binary is named after a target").1(data);
}
