#!/usr/bin/env bash
# Links the program for Apple silicon, from any machine, and has `file` say what came out. Nothing
# of Apple's is needed: zig, from PyPI, has the linker and the stubs of the system's library.
#
#   tests/macho.sh            writes target/aarch64-apple-darwin/release/shardpack
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/darwin_tools.sh
cargo build --release --target "$target" --bin shardpack "$@"
program=${CARGO_TARGET_DIR:-target}/$target/release/shardpack
command -v file >/dev/null || { [ "$(id -u)" = 0 ] && apt-get install -y -qq file >/dev/null; }
kind=$(file --brief "$program")
echo "$program: $kind"
case "$kind" in
    "Mach-O 64-bit "*arm64*executable* | "Mach-O 64-bit executable arm64"*) ;;
    *) echo "expected a Mach-O executable for arm64" >&2 && exit 1 ;;
esac
