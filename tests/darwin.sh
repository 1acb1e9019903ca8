#!/usr/bin/env bash
# Checks the whole workspace for Apple silicon from any machine. BLAKE3's NEON code is C; zig
# compiles it, from PyPI into a virtual environment of its own.
#
#   tests/darwin.sh
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-apple-darwin
rustup target add "$target"
if [ "$(uname -s)" != Darwin ]; then
    tools=target/darwin-tools
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools"
    "$tools/bin/python" -c 'import ziglang' 2>/dev/null || "$tools/bin/pip" install --quiet 'ziglang==0.15.2'
    tools=$(cd "$tools" && pwd)
    # The cc crate passes Apple's spelling of the target, which zig does not know.
    cat >"$tools/zigcc" <<EOF
#!/usr/bin/env bash
args=()
for arg in "\$@"; do
    case "\$arg" in
        --target=*|-mmacosx-version-min=*) ;;
        *) args+=("\$arg") ;;
    esac
done
exec "$tools/bin/python" -m ziglang cc -target aarch64-macos "\${args[@]}"
EOF
    printf '#!/usr/bin/env bash\nexec "%s/bin/python" -m ziglang ar "$@"\n' "$tools" >"$tools/zigar"
    chmod +x "$tools/zigcc" "$tools/zigar"
    export CC_aarch64_apple_darwin="$tools/zigcc" AR_aarch64_apple_darwin="$tools/zigar"
    # There is no SDK to ask xcrun for, and checking needs none.
    export SDKROOT=/ CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
fi
cargo check --workspace --all-targets --target "$target" "$@"
