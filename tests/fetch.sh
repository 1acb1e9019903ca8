#!/usr/bin/env bash
# Installs and downloads what the test scripts need, in the order in which .ci/run needs it, so that it compiles
# meanwhile. What cannot be fetched fails nothing here: each script tries again, and says what it skips.
#
#   tests/fetch.sh [SCRIPT…]     darwin, neon, dist, rdma, interop/run: all without one
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- darwin neon dist rdma interop/run
for script in "$@"; do
    began=$SECONDS
    "tests/$script.sh" --fetch || echo "tests/$script.sh: not all of what it needs could be fetched"
    echo "== fetched for tests/$script.sh in $((SECONDS - began)) s"
done
