#!/usr/bin/env bash
# Builds the guide with mdBook. Where mdBook is not installed, pip fetches a pinned build of it into
# target/; where that is not possible either, it is skipped: tests/layering checks pages and links, and
# tests/cli/guide.rs commands. `cargo install mdbook --locked` takes minutes and is left to whoever wants it.
#
#   tests/book.sh
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.5.4
tools=target/book-tools
. tests/skip.sh
mdbook=$(command -v mdbook || true)
if [ -z "$mdbook" ]; then
    mdbook=$tools/bin/mdbook
    if ! "$mdbook" --version 2>/dev/null | grep -q "$version"; then
        command -v python3 >/dev/null || skip mdbook "there is no mdbook, and no python3 to fetch it with"
        python3 -m venv "$tools" || skip mdbook "there is no mdbook, and python3 cannot make a virtual environment"
        "$tools/bin/pip" install --quiet --require-hashes --no-deps -r tests/book-requirements.txt \
            2>"$tools/pip.log" || {
            cat "$tools/pip.log" >&2
            skip mdbook "there is no mdbook, and pip cannot fetch it"
        }
    fi
fi
"$mdbook" --version
log=target/book.log
"$mdbook" build docs/guide 2>&1 | tee "$log"
if grep -q -E 'WARN|ERROR' "$log"; then
    echo "mdbook warns" >&2
    exit 1
fi
[ -s target/guide/index.html ]
