#!/usr/bin/env bash
# The C layer of the MLX engine for Apple silicon, checked on any machine: it links against each of
# MLX's wheels for macOS; every name that the program looks up is there; whatever the layer asks of
# MLX, that wheel's build has; it is signed and made for the oldest macOS; the build embeds it and
# refuses another; an old pip fetches a wheel. Downloads stay below target/.
#
#   tests/mlx_layer.sh        writes target/layer/TAG/libshardpack_mlx.dylib
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/zig.sh
source tests/zig.sh
layers=target/layer
tags=(macosx_14_0_arm64 macosx_15_0_arm64 macosx_26_0_arm64)
# The first brings the tools along; the others then link at the same time.
links=()
for tag in "${tags[@]}"; do
    rm -f "$layers/$tag/libshardpack_mlx.dylib"
    dist/native_layer.sh "$layers/$tag/libshardpack_mlx.dylib" "$tag" &
    if [ "$tag" = "${tags[0]}" ]; then wait "$!"; else links+=("$!"); fi
done
for link in "${links[@]}"; do wait "$link"; done
for tag in "${tags[@]}"; do
    mlx=$(ls -d target/wheels/"$tag"-*/mlx/lib)
    "$tools/bin/python" tests/mlx_layer.py "$layers/${tags[0]}/libshardpack_mlx.dylib" "$mlx/libmlx.dylib"
    cmp "$layers/${tags[0]}/libshardpack_mlx.dylib" "$layers/$tag/libshardpack_mlx.dylib" ||
        { echo "the layer for $tag is another one: their headers differ" >&2 && exit 1; }
done

# The build script by itself: it takes the layer, and nothing that is not this source's.
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
rustc --edition 2024 -o "$work/build" loader/mlx/build.rs
embed() {
    (cd loader/mlx && OUT_DIR=$work CARGO_CFG_TARGET_OS=macos CARGO_CFG_TARGET_ARCH=aarch64 \
        SHARDPACK_MLX_LAYER=$1 "$work/build" 2>&1)
}
refused() { # LAYER WORDS
    local said
    if said=$(embed "$1"); then echo "the build takes $1" >&2 && exit 1; fi
    case "$said" in *"$2"*) ;; *) echo "expected \"$2\": $said" >&2 && exit 1 ;; esac
}
embed "$PWD/$layers/${tags[0]}/libshardpack_mlx.dylib" >/dev/null
cmp "$work/layer.dylib" "$layers/${tags[0]}/libshardpack_mlx.dylib"
cp "$layers/${tags[0]}/libshardpack_mlx.dylib" "$work/other.dylib"
{ cat "$layers/${tags[0]}/libshardpack_mlx.dylib.source" && echo; } >"$work/other.dylib.source"
refused "$work/other.dylib" "another source"
refused "$work/build" "not a dynamic library for arm64 macOS"
echo "the build embeds the layer, and refuses another source's and what is no layer"

# A pip of 2021, asked as the program asks.
old=target/old-pip
[ -x "$old/bin/python" ] || python3 -m venv "$old"
"$old/bin/python" -m pip --version | grep -q "^pip 21.2.4 " ||
    "$old/bin/python" -m pip install --quiet --disable-pip-version-check 'pip==21.2.4'
version=$(sed -n 's/^pub const MLX_VERSION: &str = "\(.*\)";/\1/p' loader/mlx/src/runtime.rs)
old_pip() {
    "$old/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --only-binary=:all: --platform macosx_14_0_arm64 "$@" --dest "$work" "mlx-metal==$version"
}
# Without the version it takes itself for the Python that asks: a Mac's own is older than MLX wants.
if old_pip --python-version 3.9 2>/dev/null; then
    echo "pip takes the wheel for Python 3.9: the flag is not needed any more" >&2 && exit 1
fi
old_pip --python-version 3.12
cmp "$work"/mlx_metal-*.whl target/wheels/mlx_metal-"$version"-py3-none-macosx_14_0_arm64.whl
echo "pip 21.2.4 finds the wheel with --python-version 3.12, and not for Python 3.9"
