#!/usr/bin/env bash
# Checks the whole workspace for Apple silicon from any machine.
#
#   tests/darwin.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/darwin_tools.sh
cargo check --workspace --all-targets --target "$target" "$@"
