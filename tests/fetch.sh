#!/usr/bin/env bash
# Installs and downloads what the test scripts need, in the order in which .ci/run needs it, so that it compiles
# meanwhile. What cannot be fetched fails nothing here: each script tries again, and says what it skips.
#
#   tests/fetch.sh
set -euo pipefail
cd "$(dirname "$0")/.."
for script in tests/darwin.sh tests/neon.sh tests/dist.sh tests/rdma.sh tests/interop/run.sh; do
    began=$SECONDS
    "$script" --fetch || echo "$script: not all of what it needs could be fetched"
    echo "== fetched for $script in $((SECONDS - began)) s"
done
