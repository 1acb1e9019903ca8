# Sourced by what compiles for Apple silicon: the target, and on other machines a C compiler, an
# archiver and a linker for it. BLAKE3's NEON code is C; zig compiles it and links, from PyPI in a
# virtual environment of its own.
target=aarch64-apple-darwin
rustup target add "$target"
if [ "$(uname -s)" != Darwin ]; then
    # shellcheck source=tests/zig.sh
    source tests/zig.sh
    compiler "$target" aarch64-macos
    export CC_aarch64_apple_darwin="$tools/$target-cc" AR_aarch64_apple_darwin="$tools/$target-ar"
    export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER="$tools/$target-cc"
    # There is no SDK to ask xcrun for; zig has what is needed of one, and any folder will do.
    export SDKROOT="$tools" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
fi
