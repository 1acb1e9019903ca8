#!/usr/bin/env bash
# Checks the whole workspace for Apple silicon from any machine.
#
#   tests/darwin.sh [arguments for cargo check]
#   tests/darwin.sh --fetch     installs what it needs, and ends
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/darwin_tools.sh
[ "${1:-}" != --fetch ] || exit 0
# Warnings are errors, as they are for this machine's own code.
export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS="-D warnings"
# In release: what runs on this machine while it compiles is there already, from the other steps.
cargo check --workspace --all-targets --release --target "$target" "$@"
