# shellcheck shell=bash
# Sourced by what makes a release: a C compiler and a linker for every target, from any Linux
# machine. zig, from PyPI in a virtual environment of its own, compiles C for all targets; rustc's own
# linker links, for macOS too, and its C library makes the static programs for Linux.

# The oldest macOS that the program runs on.
minimum_macos=14.0

# use_target TARGET: has cargo compile for a target, with paths of this machine left out; rustc needs
# $link_arguments to link the program.
use_target() {
    link_arguments=()
    local root=$PWD target=$1 zig upper=${1//-/_} under=${1//-/_}
    upper=${upper^^}
    rustup target add "$target" 2>/dev/null || rustup target add "$target"
    # shellcheck source=tests/zig.sh
    source tests/zig.sh
    case "$target" in
        aarch64-apple-darwin) zig=aarch64-macos.$minimum_macos ;;
        *-unknown-linux-musl) zig=${target%%-*}-linux-musl ;;
        *) echo "no release is made for $target" >&2 && return 2 ;;
    esac
    compiler "$target" "$zig"
    export "CC_$under=$tools/$target-cc" "AR_$under=$tools/$target-ar"
    local home=${CARGO_HOME:-$HOME/.cargo} sysroot flags
    sysroot=$(rustc --print sysroot)
    export "CFLAGS_$under=-ffile-prefix-map=$home=/cargo -ffile-prefix-map=$root=/shardpack"
    flags="--remap-path-prefix=$home=/cargo --remap-path-prefix=$sysroot=/rust --remap-path-prefix=$root=/shardpack"
    if [ "$target" = aarch64-apple-darwin ]; then
        # There is no SDK to ask xcrun for; the stubs have what is needed of one, and any folder will
        # do. zig's linker ends with a fault where a program asks for the bounds of its sections.
        export MACOSX_DEPLOYMENT_TARGET=$minimum_macos SDKROOT=$tools
        printf '#!/usr/bin/env bash\nexec "%s/lib/rustlib/%s/bin/rust-lld" "$@" -dead_strip_dylibs --icf=all -F"%s" -L"%s"\n' \
            "$sysroot" "$(rustc -vV | sed -n 's/^host: //p')" "$tools/apple" "$tools/apple" >"$tools/rust-lld"
        chmod +x "$tools/rust-lld"
        export "CARGO_TARGET_${upper}_LINKER=$tools/rust-lld"
    else
        export "CARGO_TARGET_${upper}_LINKER=rust-lld"
        # libloading asks for libdl; musl has all of it in its C library.
        mkdir -p "$tools/musl" && printf '!<arch>\n' >"$tools/musl/libdl.a"
        # shellcheck disable=SC2034 # for whoever sources this
        link_arguments=(-Lnative="$tools/musl" -Clink-arg=--strip-all -Clink-arg=--icf=all
            -Clink-arg=--pack-dyn-relocs=relr)
        flags+=" -Clinker-flavor=ld.lld"
    fi
    export "CARGO_TARGET_${upper}_RUSTFLAGS=$flags"
}
