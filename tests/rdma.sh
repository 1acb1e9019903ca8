#!/usr/bin/env bash
# Collectives over real RDMA verbs and a model that is served over them, in a virtual machine
# (tests/rdma_vm.sh) with two devices.
#
#   tests/rdma.sh
#   tests/rdma.sh --fetch       installs what it needs, and ends
set -euo pipefail
# shellcheck source=tests/rdma_vm.sh
source "$(dirname "$0")/rdma_vm.sh"
machine_ready
[ "${1:-}" != --fetch ] || exit 0

bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
# Of all crates, as `cargo test --release` builds them: of one crate alone, its dependencies would have fewer
# features and be compiled once more.
cargo test --release --lib --test rdma_machine --no-run --message-format=json >"$bin/built"
# program NAME TARGET: the test program of a target, as bin/NAME.
program() {
    local found
    found=$(grep "\"name\":\"$2\"" "$bin/built" | grep -o '"executable":"[^"]*"' | tail -1 | cut -d'"' -f4) || true
    [ -n "$found" ] || { echo "cargo built no tests of $2" >&2 && return 1; }
    # Symbols would be most of the machine's memory.
    strip -o "$bin/$1" "$found" 2>/dev/null || cp "$found" "$bin/$1"
}
program links shardpack_collectives
program collectives rdma_machine

# Nothing is skipped in there.
machine -t 230 "$bin/links" "$bin/collectives" -- '
    set -e
    export SHARDPACK_SKIPS= RUST_BACKTRACE=1
    collectives --test-threads=1 --nocapture
    links --test-threads=1 rdma::tests::real rdma::signals
    SHARDPACK_PULL_CABLE=1 collectives --test-threads=1 --nocapture cable_is_pulled
'

# A model on two nodes with a device each: the same answer over RDMA and over TCP.
cargo build --release --quiet
program=${CARGO_TARGET_DIR:-target}/release/shardpack
mkdir "$bin/served"
"$program" convert tests/data/kjv-4m --output "$bin/served/set" --nodes 2 --bits 8 >/dev/null
cat >"$bin/served/run" <<'GUEST'
# The same answer over RDMA and over TCP, from two nodes with a device each.
set -e
export HOME=/tmp RUST_BACKTRACE=0
for node in a b; do
    SHARDPACK_RDMA_DEVICES=rxe_$node shardpack node --listen 127.0.0.1:0 --json --threads 1 --store /tmp/store-$node \
        >/tmp/node-$node 2>&1 &
done
address() { sed -n 's/.*"listening":"\([^"]*\)".*/\1/p' /tmp/node-$1; }
# Waits up to 30 s for a command to succeed.
until_true() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || { echo "waited too long for $*"; cat /tmp/said /tmp/node-*; exit 1; }
        sleep 0.1
    done
}
has_address() { [ -n "$(address $1)" ]; }
until_true has_address a
until_true has_address b
nodes=$(address a),$(address b)
shardpack push /bin/served/set --to $nodes >/dev/null 2>/tmp/said
for collectives in rdma tcp; do
    shardpack serve /bin/served/set --nodes $nodes --collectives $collectives --listen 127.0.0.1:0 --json \
        >/tmp/url 2>/tmp/said &
    server=$!
    url() { sed -n 's/.*"url":"\([^"]*\)\/v1".*/\1/p' /tmp/url; }
    is_up() { [ -n "$(url)" ] || ! kill -0 $server; }
    until_true is_up
    echo 'John 3:16' | shardpack chat "$(url)" --temperature 0 >/tmp/answer-$collectives
    kill $server
    wait $server || true
    grep -E 'RDMA|warning' /tmp/said || true
    cp /tmp/said /tmp/said-$collectives
done
cat /tmp/answer-rdma
grep -q 'For God so loved the world' /tmp/answer-rdma
cmp /tmp/answer-rdma /tmp/answer-tcp
grep -q 'linked by RDMA' /tmp/said-rdma
! grep -q 'linked by RDMA' /tmp/said-tcp
GUEST
machine -t 120 -m 1024 "$program" "$bin/served" -- 'sh /bin/served/run'
