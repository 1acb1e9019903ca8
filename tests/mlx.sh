#!/usr/bin/env bash
# Installs MLX below target/ and tests with it: the runtime itself, the demo on two ranks, logits
# against our own kernels for every family. Kept between runs; needs a C++ compiler and the Python
# package index.
set -euo pipefail
cd "$(dirname "$0")/.."
export SHARDPACK_ENGINES=${SHARDPACK_ENGINES:-$PWD/target/engines}
cargo run --release -- engine install mlx
cargo run --release -- demo --engine mlx
# With MLX nothing that needs it may be skipped, but for what needs Linux.
export SHARDPACK_SKIPS=no-jaccl
# One command, so that nothing is built again with other features.
cargo test --release --lib --test runtime --test cli --test conformance -- mlx runtime
