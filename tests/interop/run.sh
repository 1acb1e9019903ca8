#!/usr/bin/env bash
# Our packages in other people's software, in a virtual environment of its own from PyPI.
# Says what it skips and why; anything else that goes wrong is a failure.
#
#   tests/interop/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --quiet
venv=target/interop
skip() {
    echo "interop: skipped, $1"
    exit 0
}
command -v python3 >/dev/null || skip "there is no python3"
case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) mlx='mlx[cpu]==0.32.4' ;;
    Darwin-arm64) mlx='mlx==0.32.4' ;;
    *) skip "MLX has no wheels for $(uname -s) on $(uname -m)" ;;
esac
if ! "$venv/bin/python" -c 'import mlx_lm' 2>/dev/null; then
    python3 -m venv "$venv" || skip "python3 cannot make a virtual environment"
    "$venv/bin/pip" install --quiet "$mlx" 'mlx-lm==0.32.2' 2>"$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        skip "PyPI does not give MLX"
    }
fi
exec "$venv/bin/python" tests/interop/mlx_loads_packages.py target/release/shardpack
