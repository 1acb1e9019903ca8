# shellcheck shell=bash
# Sourced by what compiles for Apple silicon: sets $tools to a virtual environment with zig, from
# PyPI, which compiles and links for macOS on any machine. Nothing of Apple's is needed.
tools=target/darwin-tools
[ -x "$tools/bin/python" ] || python3 -m venv "$tools"
"$tools/bin/python" -c 'import ziglang' 2>/dev/null ||
    "$tools/bin/python" -m pip install --quiet 'ziglang==0.15.2'
tools=$(cd "$tools" && pwd)
# Itself: Python takes longer to start than most files take to compile.
zig_program=$("$tools/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')

# Stubs of Apple's libraries, for rustc's linker.
"$tools/bin/python" dist/apple_stubs.py "$tools/apple"

# compiler TARGET ZIG: writes TARGET-cc and TARGET-ar. The cc crate and rustc pass what zig does not
# know (the target as others spell it, the symbols of a dependency's dynamic library, which is not
# used) and libraries that zig's one stub of Apple's system holds already.
compiler() {
    cat >"$tools/$1-cc" <<END
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
exec "$zig_program" cc -target $2 -fno-sanitize=undefined "\${args[@]}"
END
    printf '#!/usr/bin/env bash\nexec "%s" ar "$@"\n' "$zig_program" >"$tools/$1-ar"
    chmod +x "$tools/$1-cc" "$tools/$1-ar"
}
