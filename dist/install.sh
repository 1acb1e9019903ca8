#!/bin/sh
# Installs the shardpack program of a release: fetches the archive for this machine and the list of
# checksums, compares the SHA-256, and puts the program into ~/.local/bin. Needs curl or wget, tar
# and sha256sum or shasum; no root.
#
#   sh install.sh [--prefix FOLDER] [--url ADDRESS]
#
#   --prefix FOLDER   install into FOLDER/bin (default: ~/.local)
#   --url ADDRESS     where the files of the release are (or $SHARDPACK_RELEASES)
set -eu

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

# fetch ADDRESS FILE
fetch() {
    if command -v curl >/dev/null 2>&1; then
        curl --fail --location --silent --show-error --output "$2" "$1"
    elif command -v wget >/dev/null 2>&1; then
        wget --quiet --output-document="$2" "$1"
    else
        fail "neither curl nor wget is here; install one of them"
    fi || fail "cannot fetch $1"
}

# sum FILE: its SHA-256 in hex.
sum() {
    if command -v sha256sum >/dev/null 2>&1; then
        sha256sum "$1"
    elif command -v shasum >/dev/null 2>&1; then
        shasum -a 256 "$1"
    else
        fail "neither sha256sum nor shasum is here; without one the archive cannot be checked"
    fi | cut -d' ' -f1
}

# The release's name for this machine.
machine() {
    system=$(uname -s)
    processor=$(uname -m)
    # A shell under Rosetta calls an Apple processor x86_64.
    if [ "$system" = Darwin ] && [ "$(sysctl -n hw.optional.arm64 2>/dev/null || true)" = 1 ]; then
        processor=arm64
    fi
    case "$system-$processor" in
        Darwin-arm64 | Darwin-aarch64) echo aarch64-apple-darwin ;;
        Linux-x86_64 | Linux-amd64) echo x86_64-unknown-linux-musl ;;
        Linux-aarch64 | Linux-arm64) echo aarch64-unknown-linux-musl ;;
        *) fail "there is no build for $system on $processor; build from source: cargo install --path ." ;;
    esac
}

# All of it is a function, called on the last line: half a script does nothing.
main() {
    prefix=${HOME:-}/.local
    releases=${SHARDPACK_RELEASES:-@RELEASES@}
    while [ $# -gt 0 ]; do
        case "$1" in
            --prefix | --url) [ $# -gt 1 ] || fail "$1 needs a value" ;;
        esac
        case "$1" in
            --prefix) prefix=$2 && shift 2 ;;
            --url) releases=$2 && shift 2 ;;
            *) fail "unknown argument $1 (known: --prefix FOLDER, --url ADDRESS)" ;;
        esac
    done
    case "$releases" in
        @* | *REPOSITORY*) fail "give the address of the release's files: --url ADDRESS" ;;
    esac
    [ "$prefix" != /.local ] || fail "there is no home folder; give --prefix FOLDER"
    target=$(machine)
    work=$(mktemp -d)
    half=
    trap 'rm -rf "$work" ${half:+"$half"}' EXIT
    trap 'exit 1' HUP INT TERM
    fetch "$releases/SHA256SUMS" "$work/SHA256SUMS"
    # A line is 64 hex digits, two spaces and a name without folders.
    line=$(grep -E "^[0-9a-f]{64}  shardpack-[0-9A-Za-z.+-]+-$target\.tar\.gz\$" "$work/SHA256SUMS") ||
        fail "$releases/SHA256SUMS lists no archive for $target"
    [ "$(printf '%s\n' "$line" | wc -l)" -eq 1 ] || fail "$releases/SHA256SUMS lists several archives for $target"
    expected=${line%% *}
    archive=${line##* }
    echo "fetching $releases/$archive"
    fetch "$releases/$archive" "$work/$archive"
    found=$(sum "$work/$archive")
    [ "$found" = "$expected" ] ||
        fail "$archive: its SHA-256 is $found, expected $expected; nothing was installed"
    tar -xzf "$work/$archive" -C "$work" "${archive%.tar.gz}/shardpack"
    program=$work/${archive%.tar.gz}/shardpack
    "$program" --version >"$work/version" || fail "the program does not start on this machine; nothing was installed"
    mkdir -p "$prefix/bin"
    # Under its own name it appears complete or not at all.
    half=$(mktemp "$prefix/bin/.shardpack.XXXXXX")
    cp "$program" "$half"
    chmod 755 "$half"
    mv -f "$half" "$prefix/bin/shardpack"
    half=
    echo "installed $(cat "$work/version") as $prefix/bin/shardpack"
    case ":${PATH:-}:" in
        *":$prefix/bin:"*) ;;
        *) echo "$prefix/bin is not in \$PATH; add it: export PATH=\"$prefix/bin:\$PATH\"" ;;
    esac
    echo "try it: shardpack demo"
}

main "$@"
