#!/usr/bin/env bash
# What a release holds, and that it runs where nothing is installed: the program for Linux in a root
# with nothing but itself, the install script against good and bad archives, the program for macOS as
# macOS reads it.
#
#   tests/dist.sh                   builds x86-64 Linux and macOS, hardly optimized, and tests them
#   tests/dist.sh --build FOLDER    builds them, and ends
#   tests/dist.sh FOLDER            tests what `just dist` or --build has written, for every target that is there
#   tests/dist.sh --fetch           installs what all this needs, and ends
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tests/skip.sh
source tests/skip.sh
# shellcheck source=tests/environment.sh
source tests/environment.sh
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || skip dist "a release is tested on Linux, x86-64"
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
fail() { echo "tests/dist.sh: $1" >&2 && exit 1; }
# build FOLDER: the release that is tested; made twice, it is the same.
build() {
    local targets=(x86_64-unknown-linux-musl aarch64-apple-darwin)
    # Level 0 compiles in a third of the time and is linked, packed and loaded as every other is.
    export SHARDPACK_DIST_UNOPTIMIZED=1
    SHARDPACK_DIST=$1 dist/build.sh "${targets[@]}"
    # Everything is compiled now; packed again, it is the same.
    if ! SHARDPACK_DIST=$work/again dist/build.sh "${targets[@]}" >"$work/again.log" 2>&1; then
        cat "$work/again.log" >&2
        fail "the release cannot be packed again"
    fi
    ! grep -q '^ *Compiling' "$work/again.log" || fail "packing again compiles: $(grep -m1 Compiling "$work/again.log")"
    diff -r "$1" "$work/again" || fail "packed twice, a release is not the same"
}
# What tests/macho.py and the check of the bills of materials import. Without it the test fails: a release is not
# published untested.
tools=target/dist-tools
python_tools() {
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools"
    "$tools/bin/python" -c 'import lief, cyclonedx.validation.json, jsonschema' 2>/dev/null ||
        "$tools/bin/python" -m pip install --quiet 'lief==1.0.0' 'cyclonedx-python-lib[json-validation]'
}
dist=$work/dist
case "${1:-}" in
    --fetch)
        # In shells of their own: each says for itself where its compiler is.
        for target in x86_64-unknown-linux-musl aarch64-apple-darwin; do
            # shellcheck source=dist/toolchain.sh
            (source dist/toolchain.sh && use_target "$target")
        done
        python_tools
        for program in curl wget; do command -v "$program" >/dev/null || debian "$program"; done
        command -v shasum >/dev/null || debian perl
        exit 0
        ;;
    --build)
        build "$2"
        exit 0
        ;;
    "") build "$dist" ;;
    *) dist=$(cd "$1" && pwd) ;;
esac
(cd "$dist" && sha256sum --check --quiet SHA256SUMS)
python_tools

# unpack TARGET: the program of an archive, or nothing where the archive is not there.
unpack() {
    local archive
    for archive in "$dist"/shardpack-*-"$1".tar.gz; do
        [ -e "$archive" ] || return 0
        mkdir -p "$work/$1"
        tar -xzf "$archive" -C "$work/$1" --strip-components=1
        [ -s "$work/$1/LICENSE" ] || fail "$archive: no licence"
        echo "$work/$1/shardpack"
    done
}

# Static: no interpreter, no library. No path of this machine inside.
check_elf() {
    ! readelf -lW "$1" | grep -q INTERP || fail "$1: has an interpreter"
    ! readelf -dW "$1" | grep NEEDED || fail "$1: needs a library"
    ! strings -n 8 "$1" | grep -E "^/(root|home|tmp|work)/|$PWD|${CARGO_HOME:-$HOME/.cargo}/" ||
        fail "$1: names a path of the machine that built it"
    ls -l "$1"
}

# bare PROGRAM ARGUMENT...: runs it as /shardpack in a root with nothing else but what the kernel
# has: /dev/null, /proc, and an empty /tmp.
bare() {
    local root=$work/root enter=(unshare --mount)
    if [ "$(id -u)" != 0 ]; then
        # Ubuntu keeps namespaces from users.
        enter=(sudo unshare --mount)
        ! unshare --map-root-user true 2>/dev/null || enter=(unshare --map-root-user --mount)
    fi
    rm -rf "$root" && mkdir -p "$root/dev" "$root/proc" "$root/tmp"
    : >"$root/dev/null"
    cp "$1" "$root/shardpack" && shift
    # shellcheck disable=SC2016
    "${enter[@]}" sh -c '
        root=$1 && shift
        mount --bind /dev/null "$root/dev/null" && mount --rbind /proc "$root/proc" &&
            exec env -i HOME=/ "$(command -v chroot)" "$root" /shardpack "$@"' sh "$root" "$@"
}

linux=$(unpack x86_64-unknown-linux-musl)
if [ -n "$linux" ]; then
    check_elf "$linux"
    began=$SECONDS
    bare "$linux" demo
    # Its processes end when they are asked to: a minute means that they were killed at last.
    [ $((SECONDS - began)) -lt 10 ] || fail "the demo took $((SECONDS - began)) s in a bare root"
    said=$(bare "$linux" demo --engine mlx 2>&1) && fail "a static program loads MLX"
    grep -q "static program" <<<"$said" || fail "a static program says of MLX: $said"
fi

arm=$(unpack aarch64-unknown-linux-musl)
if [ -n "$arm" ]; then
    check_elf "$arm"
    readelf -hW "$arm" | grep -q AArch64 || fail "$arm: not for aarch64"
    command -v qemu-aarch64-static >/dev/null || debian qemu-user-static
    qemu-aarch64-static "$arm" --version
    timeout 120 qemu-aarch64-static "$arm" convert tests/data/kjv-4m -o "$work/arm-set" --bits 4 --nodes 2
    timeout 120 qemu-aarch64-static "$arm" verify "$work/arm-set"
fi

mac=$(unpack aarch64-apple-darwin)
if [ -n "$mac" ]; then
    layer=${CARGO_TARGET_DIR:-target}/layer/macosx_14_0_arm64/libshardpack_mlx.dylib
    "$tools/bin/python" tests/macho.py "$mac" "$layer"
    grep -q '<string>node</string>' "$(dirname "$mac")"/*.plist || fail "the archive for macOS has no launchd file"
fi

# At the same time: each takes some ten seconds.
checks=()
for sbom in "$dist"/*.cdx.json; do
    "$tools/bin/python" - "$sbom" <<'PYTHON' &
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = open(sys.argv[1]).read()
problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
names = {it["name"] for it in json.loads(text)["components"]}
missing = {"shardpack-kernels", "blake3", "rustls", "ring"} - names
tests = {"proptest", "insta"} & names
if problem or missing or tests:
    sys.exit(f"{sys.argv[1]}: {problem}, missing {missing}, of tests {tests}")
print(f"{sys.argv[1]}: CycloneDX 1.6, {len(names)} packages")
PYTHON
    checks+=("$!")
done
for check in "${checks[@]}"; do wait "$check"; done

# The formula has each archive's SHA-256, and is Ruby where Ruby is.
for archive in "$dist"/*.tar.gz; do
    grep -A1 "/$(basename "$archive")\"" "$dist/shardpack.rb" | grep -q "$(sha256sum "$archive" | cut -d' ' -f1)" ||
        fail "the formula has not the SHA-256 of $archive"
done
! command -v ruby >/dev/null || ruby -c "$dist/shardpack.rb"

# The install script takes the archive for this machine from a server on it.
run_install() { env PATH="$path" sh "$dist/install.sh" --prefix "$work/prefix" --url "http://127.0.0.1:$port"; }

# refused WHAT WORDS: the script says so, and what was installed before is untouched.
refused() {
    echo old >"$work/prefix/bin/shardpack"
    run_install >"$work/said" 2>&1 && fail "$1 is installed"
    grep -q "$2" "$work/said" || fail "$1: the install script says: $(cat "$work/said")"
    [ "$(cat "$work/prefix/bin/shardpack")" = old ] || fail "$1: the old program was touched"
    [ "$(ls -A "$work/prefix/bin")" = shardpack ] || fail "$1: something half-written is left"
    echo "refused: $1"
}

test_install() {
    local port="" path has name real archive
    cp -r "$dist" "$work/releases"
    (cd "$work/releases" && exec python3 -u -m http.server --bind 127.0.0.1 0) >"$work/server.log" 2>&1 &
    server=$!
    for _ in $(seq 100); do
        port=$(sed -n 's/.* port \([0-9]*\).*/\1/p' "$work/server.log")
        [ -z "$port" ] || break
        sleep 0.1
    done
    [ -n "$port" ] || fail "the server of the test does not start"
    # Once with each of the programs that it can use.
    for has in curl:sha256sum wget:shasum; do
        path=$work/path-${has%:*}
        mkdir "$path"
        for name in ${has/:/ } sh uname mktemp rm cp mv mkdir chmod cat grep wc tar gzip cut env; do
            # shasum comes with perl; curl and wget are packages of their own.
            real=$(command -v "$name") ||
                { debian "${name/shasum/perl}" && real=$(command -v "$name"); }
            ln -s "$real" "$path/$name"
        done
        rm -rf "$work/prefix"
        run_install
        cmp "$work/prefix/bin/shardpack" "$linux"
    done
    path=$PATH
    archive=$(basename "$dist"/shardpack-*-x86_64-unknown-linux-musl.tar.gz)
    printf x >>"$work/releases/$archive"
    refused "an archive with a byte more" "expected $(sha256sum "$dist/$archive" | cut -d' ' -f1)"
    head -c 1000000 "$dist/$archive" >"$work/releases/$archive"
    refused "half an archive" "nothing was installed"
    rm "$work/releases/$archive"
    refused "an archive that is not there" "cannot fetch"
    sed -i "s/x86_64/riscv64/" "$work/releases/SHA256SUMS"
    refused "a release without this machine" "lists no archive"
    rm "$work/releases/SHA256SUMS"
    refused "a release without checksums" "cannot fetch"
}
[ -z "$linux" ] || test_install

echo "the release is good: $dist"
