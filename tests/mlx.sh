#!/usr/bin/env bash
# Installs MLX below target/ and tests with it: the runtime itself, the demo, logits against `cpu`,
# lost ranks. Kept between runs; needs Python with pip and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
export SHARDPACK_ENGINES=${SHARDPACK_ENGINES:-$PWD/target/engines}
cargo run --release -- engine install mlx
cargo test --release -p shardpack-mlx
cargo run --release -- demo --engine mlx
cargo test --release --test e2e mlx
