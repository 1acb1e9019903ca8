#!/usr/bin/env bash
# Runs the tests of quantize and kernels as 64-bit Arm code: natively there, elsewhere under qemu-user. Needs a
# cross linker and qemu-user; installs Debian's where it may, else says what is missing and skips.
#
#   tests/neon.sh [arguments for cargo test]
#   tests/neon.sh --fetch       installs what it needs, and ends
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/skip.sh
source tests/environment.sh
target=aarch64-unknown-linux-gnu
case "$(uname -s)-$(uname -m)" in
    *-aarch64 | *-arm64)
        [ "${1:-}" != --fetch ] || exit 0
        exec cargo test --release -p shardpack-quantize -p shardpack-kernels "$@"
        ;;
    Linux-*) ;;
    *) skip qemu-user "qemu-user runs on Linux only" ;;
esac
linker=aarch64-linux-gnu-gcc
have() { command -v "$linker" >/dev/null && command -v qemu-aarch64 >/dev/null; }
have || debian gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user || true
have || skip qemu-user "needs $linker and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user)"
rustup target add "$target"
[ "${1:-}" != --fetch ] || exit 0
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER="$linker"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
# Not as one unit, which is compiled on one core: the emulator's time is not that of the loops. What these crates
# stand upon is not tested here, and optimized less.
config=(--config profile.release.opt-level=1)
for crate in kernels quantize; do
    config+=(--config "profile.release.package.shardpack-$crate.opt-level=3"
        --config "profile.release.package.shardpack-$crate.codegen-units=16")
done
# Everything is compiled at once, which keeps all cores busy; what follows finds it done.
cargo test "${config[@]}" --release --target "$target" -p shardpack-quantize -p shardpack-kernels --lib --test goldens --no-run
# What has code of its own for Arm. The rest decides nothing by platform, and the largest quality
# test would take most of the time in the emulator.
cargo test "${config[@]}" --release --target "$target" -p shardpack-quantize --lib "$@" -- affine simd --skip trained
cargo test "${config[@]}" --release --target "$target" -p shardpack-quantize --test goldens "$@"
# Dot products of bytes are an extension that the emulator's largest processor has.
QEMU_CPU=max cargo test "${config[@]}" --release --target "$target" -p shardpack-kernels --lib "$@"
