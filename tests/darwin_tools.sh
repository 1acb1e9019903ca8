# Sourced by what compiles for Apple silicon: the target, and on other machines a C compiler, an
# archiver and a linker for it. BLAKE3's NEON code is C; zig compiles it and links, from PyPI in a
# virtual environment of its own.
target=aarch64-apple-darwin
rustup target add "$target"
if [ "$(uname -s)" != Darwin ]; then
    # shellcheck source=tests/zig.sh
    source tests/zig.sh
    # The cc crate and rustc pass what zig does not know (the target as Apple spells it, the symbols
    # of a dependency's dynamic library, which is not used) and libraries that zig's one stub of the
    # system holds already.
    cat >"$tools/zigcc" <<EOF
#!/usr/bin/env bash
args=()
skip=
for arg in "\$@"; do
    if [ -n "\$skip" ]; then
        skip=
        continue
    fi
    case "\$arg" in
        --target=* | -mmacosx-version-min=* | -liconv) ;;
        -arch | -isysroot | -Wl,-exported_symbols_list) skip=1 ;;
        *) args+=("\$arg") ;;
    esac
done
exec "$tools/bin/python" -m ziglang cc -target aarch64-macos "\${args[@]}"
EOF
    printf '#!/usr/bin/env bash\nexec "%s/bin/python" -m ziglang ar "$@"\n' "$tools" >"$tools/zigar"
    chmod +x "$tools/zigcc" "$tools/zigar"
    export CC_aarch64_apple_darwin="$tools/zigcc" AR_aarch64_apple_darwin="$tools/zigar"
    export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER="$tools/zigcc"
    # There is no SDK to ask xcrun for; zig has what is needed of one, and any folder will do.
    export SDKROOT="$tools" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
fi
