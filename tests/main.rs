//! End-to-end tests: one target, so one link.
mod architecture;
