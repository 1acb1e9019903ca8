#!/usr/bin/env bash
# Builds the C layer of the MLX engine for Apple silicon, on any machine: what shardpack-mlx embeds
# into the program for macOS, so that a user's Mac needs no compiler.
#
#   dist/native_layer.sh OUT.dylib [TAG]      TAG is MLX's wheel, macosx_14_0_arm64 unless given
#
# Writes OUT.dylib and OUT.dylib.source, a copy of the source that the build compares. The wheel
# comes from the Python package index, and must have the SHA-256 that the program pins. A layer that
# was made of the same is left as it is: OUT.dylib.made says what of, and what came out.
set -euo pipefail
case "$1" in /*) out=$1 ;; *) out=$PWD/$1 ;; esac
tag=${2:-macosx_14_0_arm64}
cd "$(dirname "$0")/.."
# shellcheck source=tests/zig.sh
source tests/zig.sh
"$tools/bin/python" -c 'import lief' 2>/dev/null ||
    "$tools/bin/python" -m pip install --quiet 'lief==1.0.0'
# The oldest macOS that the program runs on.
minimum_macos=14.0
runtime=loader/mlx/src/runtime
version=$(sed -n 's/^pub const MLX_VERSION: &str = "\(.*\)";/\1/p' $runtime.rs)
pin=$(grep -A1 "tag: \"$tag\"" $runtime/platform.rs | sed -n 's/.*sha256: "\(.*\)".*/\1/p')
abi=$(sed -n 's/.*const ABI: i32 = \([0-9]*\);/\1/p' loader/mlx/src/table.rs)
: "${version:?no MLX_VERSION}" "${pin:?no SHA-256 of $tag}" "${abi:?no ABI}"
sha256() { "$tools/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"; }

mkdir -p target/wheels
wheel=target/wheels/mlx_metal-$version-py3-none-$tag.whl
[ -e "$wheel" ] || "$tools/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --platform "$tag" --python-version 3.12 --dest target/wheels "mlx-metal==$version"
found=$(sha256 "$wheel")
if [ "$found" != "$pin" ]; then
    rm "$wheel"
    echo "$wheel: SHA-256 is $found, expected $pin" >&2 && exit 1
fi
mlx=target/wheels/$tag-${pin:0:16}
if [ ! -e "$mlx" ]; then
    "$tools/bin/python" -m zipfile -e "$wheel" "$mlx.new.$$"
    find target/wheels -maxdepth 1 -name "$tag-*" ! -name "*.new.$$" -exec rm -r {} +
    mv "$mlx.new.$$" "$mlx"
fi

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
# The parts as one file, as loader/mlx/build.rs makes it.
"$tools/bin/python" - loader/mlx/native >"$work/layer.cpp" <<'EOF'
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
for line in (folder / "parts.txt").read_text().splitlines():
    name, named, path = line.rpartition(" = ")
    text = (folder / path).read_text()
    sys.stdout.write(f'\nstatic const char {name}[] = R"metal(\n{text})metal";\n' if named else text)
EOF
# Left alone, so that cargo does not compile what embeds it again.
made="$({ cat dist/native_layer.sh dist/cxx_stub.py tests/zig.sh "$work/layer.cpp" && echo "$pin $abi"; } | sha256sum)"
if [ -e "$out" ] && [ "$(cat "$out.made" 2>/dev/null)" = "$made$(sha256 "$out")" ]; then
    exit 0
fi
zig() { "$tools/bin/python" -m ziglang "$@"; }
# Sized deallocation is off, as it is in Apple's own compiler. zig's headers take the newest of the
# system's C++ libraries for granted unless they are told to look at the oldest macOS.
zig c++ -target "aarch64-macos.$minimum_macos" -std=c++20 -O2 -fPIC -fvisibility=default -w \
    -fno-sized-deallocation -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1 \
    -ffile-prefix-map="$PWD=." -ffile-prefix-map="$work=." "-DSP_ABI=$abi" \
    -isystem "$mlx/mlx/include" -isystem "$mlx/mlx/include/metal_cpp" \
    -c "$work/layer.cpp" -o "$work/shim.o"
# Linked as C: zig's own C++ library would be a second one beside the system's, and what MLX throws
# would not be caught. The stub lists what MLX's build takes from the system's library: what the
# layer needs beyond that may not exist on the oldest macOS, and is an error here.
"$tools/bin/python" dist/cxx_stub.py "$mlx/mlx/lib/libmlx.dylib" "$work/libcxx.tbd"
zig cc -target "aarch64-macos.$minimum_macos" -s -dynamiclib -Wl,-rpath,@loader_path \
    -install_name @rpath/libshardpack_mlx.dylib -o "$work/libshardpack_mlx.dylib" \
    "$work/shim.o" -L"$mlx/mlx/lib" -lmlx "$work/libcxx.tbd"
mkdir -p "$(dirname "$out")"
mv "$work/libshardpack_mlx.dylib" "$out"
{ echo "// ABI $abi" && cat "$work/layer.cpp"; } >"$out.source"
echo "$made$(sha256 "$out")" >"$out.made"
