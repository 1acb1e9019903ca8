#!/usr/bin/env bash
# Fuzzes every parser, each for so many seconds (60 by default), from the committed corpora. What
# is found beyond them is kept below fuzz/target, crashes in fuzz/artifacts.
#
#   tests/fuzz.sh [SECONDS [TARGET ...]]
#
# Needs a nightly compiler (rustup toolchain install nightly), cargo-fuzz (cargo install
# cargo-fuzz) and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=${1:-60}
shift || true
[ $# -gt 0 ] || set -- $(cargo +nightly fuzz list --fuzz-dir .)
failed=()
for target in "$@"; do
    found=target/found/$target
    mkdir -p "$found"
    # A parser that needs ten seconds or two gigabytes for an input of this size is a fault too.
    limits=(-max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048)
    echo "== $target"
    if ! cargo +nightly fuzz run --fuzz-dir . "$target" "$found" "corpus/$target" -- \
        "${limits[@]}" -print_final_stats=1 >"target/$target.log" 2>&1; then
        failed+=("$target")
        grep -E 'panicked|SUMMARY' "target/$target.log" || tail -n 5 "target/$target.log"
    fi
    grep -E 'number_of_executed_units|average_exec|peak_rss' "target/$target.log" || true
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}; see fuzz/target/NAME.log" >&2
    exit 1
fi
