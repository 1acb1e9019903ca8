#!/usr/bin/env bash
# Checks the whole workspace for Apple silicon from any machine.
#
#   tests/darwin.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/darwin_tools.sh
# Warnings are errors, as they are for this machine's own code.
export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS="-D warnings"
cargo check --workspace --all-targets --target "$target" "$@"
