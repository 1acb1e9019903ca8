#!/usr/bin/env bash
# The previous release beside this one, over real sockets: each pushes to nodes of the other and serves
# over them. `tests/previous.sh` builds the last tag (the last commit, where there is none) in
# target/previous; an argument names another commit, or a program that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."

previous=${1:-$(git describe --tags --abbrev=0 2>/dev/null || echo HEAD~1)}
if [ -f "$previous" ]; then
    old=$(realpath "$previous")
else
    tree=$PWD/target/previous
    [ -d "$tree" ] || git worktree add --detach "$tree" "$previous"
    git -C "$tree" checkout --detach --quiet "$(git rev-parse "$previous^{commit}")"
    (cd "$tree" && cargo build --release)
    old=$tree/target/release/shardpack
fi
cargo build --release
new=$PWD/target/release/shardpack

folder=$(mktemp -d)
pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$folder"
}
trap finish EXIT
export XDG_CONFIG_HOME=$folder/config
unset SHARDPACK_CLUSTER SHARDPACK_PAUSE_AT

# The value of a key in the first line of JSON that a process writes to a file.
value() {
    for _ in $(seq 600); do
        found=$(sed -n "s/.*\"$2\":\"\([^\"]*\)\".*/\1/p" "$1" 2>/dev/null | head -n 1)
        [ -n "$found" ] && { echo "$found"; return; }
        sleep 0.1
    done
    echo "$1 never named $2" >&2
    cat "${1%.json}.log" >&2
    return 1
}

# check NAME CONTROLLER NODE: one program controls nodes of the other.
check() {
    name=$1 controller=$2 node=$3
    "$controller" convert tests/data/kjv-4m -o "$folder/$name-set" --bits 4 --nodes 2 2>/dev/null
    addresses=()
    for rank in 0 1; do
        "$node" node --listen 127.0.0.1:0 --json --threads 1 --store "$folder/$name-$rank" \
            >"$folder/$name-$rank.json" 2>"$folder/$name-$rank.log" &
        pids+=($!)
        addresses+=("$(value "$folder/$name-$rank.json" listening)")
    done
    nodes=$(IFS=,; echo "${addresses[*]}")
    "$controller" push "$folder/$name-set" --to "$nodes"
    "$controller" cluster status "${addresses[@]}"
    "$controller" serve "$folder/$name-set" --nodes "$nodes" --listen 127.0.0.1:0 --json \
        >"$folder/$name-serve.json" 2>"$folder/$name-serve.log" &
    pids+=($!)
    url=$(value "$folder/$name-serve.json" url)
    answer=$(curl -fsS "$url/chat/completions" -H 'content-type: application/json' -d \
        '{"messages":[{"role":"user","content":"John 11:35"}],"temperature":0,"max_tokens":40}')
    case $answer in
    *"Jesus wept."*) echo "$name: pushed, served and answered" ;;
    *) echo "$name: $answer" >&2; exit 1 ;;
    esac
}

check this-controls-previous "$new" "$old"
check previous-controls-this "$old" "$new"
