# shellcheck shell=bash
# Sourced by what compiles for Apple silicon: sets $tools to a virtual environment with zig, from
# PyPI, which compiles and links for macOS on any machine. Nothing of Apple's is needed.
tools=target/darwin-tools
[ -x "$tools/bin/python" ] || python3 -m venv "$tools"
"$tools/bin/python" -c 'import ziglang' 2>/dev/null ||
    "$tools/bin/python" -m pip install --quiet 'ziglang==0.15.2'
tools=$(cd "$tools" && pwd)
