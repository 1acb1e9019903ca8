#!/usr/bin/env bash
# Ranks and nodes that are killed, stopped, cut off and rebooted while eight streams are open: every
# stream goes on to its end with the text of an undisturbed run, and nothing is left behind.
#
#   unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc \
#       tests/faults.sh PROGRAM SET FOLDER ROUNDS SEED
#
# SET is for three nodes.
set -euo pipefail
program=$1 set=$2 folder=$3 rounds=$4 RANDOM=$5
export SHARDPACK_CLUSTER=$folder/cluster
url=http://10.9.1.254:8098

ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.9.1.254/24 dev bridge0
ip link set bridge0 up
"$program" cluster init 2>/dev/null

declare -a stacks nodes
start_node() { # number
    nsenter --target "${stacks[$1]}" --net "$program" node --listen "10.9.1.$1:7420" --threads 1 \
        --store "$folder/store-$1" 2>>"$folder/node-$1.log" &
    nodes[$1]=$!
}
for n in 1 2 3; do
    unshare --net sleep 3600 &
    stacks[n]=$!
    until [ "$(readlink /proc/${stacks[n]}/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add "cable$n" type veth peer name eth0 netns "${stacks[n]}"
    ip link set "cable$n" master bridge0 up
    nsenter --target "${stacks[n]}" --net sh -c \
        "ip link set lo up; ip addr add 10.9.1.$n/24 dev eth0; ip link set eth0 up"
    start_node $n
    until grep -qs "spj1_" "$folder/node-$n.log"; do sleep 0.05; done
    grep "spj1_" "$folder/node-$n.log" |
        "$program" cluster add "10.9.1.$n:7420" --name "studio-$n" 2>/dev/null
done
names=studio-1,studio-2,studio-3
"$program" push "$set" --to $names 2>/dev/null
"$program" serve "$set" --nodes $names --listen 10.9.1.254:8098 --insecure 2>"$folder/serve.log" &
server=$!

now() { date +%s%N | cut -c1-13; }
ready() { curl -sf --max-time 2 "$url/readyz" >/dev/null; }
ranks() { pgrep -c -P "${nodes[$1]}" || true; }
# A node that was cut off says nothing, so the server is ready until it misses the node's messages. The next
# fault needs a rank to hit.
whole() { for n in 1 2 3; do [ "$(ranks $n)" = 1 ] || return 1; done; }
await() {
    for _ in $(seq 1200); do whole && ready && return; sleep 0.05; done
    echo "not ready again; ranks of the nodes: $(ranks 1), $(ranks 2), $(ranks 3)"
    tail -n 20 "$folder"/*.log
    exit 1
}
stream() { # number, file
    # Greedy and seeded; every other one has a long prompt.
    local sampling='"temperature":0' words='John 3:16'
    [ $(($1 % 2)) = 1 ] && sampling='"temperature":0.9,"seed":'$1
    [ $(($1 / 2 % 2)) = 1 ] && words=$(printf 'In the beginning %.0s' $(seq 40))
    curl -sN --max-time 120 "$url/v1/chat/completions" -d '{"messages":[{"role":"user","content":"'"$words $1"'"}],
        "stream":true,"ignore_eos":true,"max_tokens":'"$tokens,$sampling"'}' >"$2"
}
# The text of a stream, and how it ended, whatever its pieces.
text() { sed -n 's/.*"content":"\(\([^"\\]\|\\.\)*\)".*/\1/p; s/.*"finish_reason":"\([a-z]*\)".*/<\1>/p; s/.*"error".*/&/p' "$1" | tr -d '\n'; }
run() { # where to
    local streams=()
    for s in $(seq 8); do
        stream "$s" "$folder/$1-$s" &
        streams+=($!)
    done
    # Elsewhere the fault happens meanwhile.
    "${2:-true}"
    wait "${streams[@]}"
}
rank_of() { pgrep -P "${nodes[$1]}" | head -n 1; }
descriptors() { ls "/proc/$1/fd" | wc -l; }

tokens=120
await
run undisturbed
begun=$(now)
run undisturbed
took=$(($(now) - begun))
for s in $(seq 8); do
    text "$folder/undisturbed-$s" >"$folder/expected-$s"
    grep -q '<length>' "$folder/expected-$s" || { echo "stream $s: $(head -c 300 "$folder/undisturbed-$s")"; exit 1; }
done
open=$(descriptors $server)
memory() { awk '/^VmRSS/ {print $2}' "/proc/$1/status"; } # KiB
echo "undisturbed: 8 streams in $took ms"

fault() {
    # Within prefill as well as in the middle of the answers.
    local after=$((RANDOM % took))
    sleep "$((after / 1000)).$(printf %03d $((after % 1000)))"
    local rank
    rank=$(rank_of "$victim")
    case $kind in
    kill) kill -KILL "$rank" ;;
    stop) kill -STOP "$rank" ;;
    cut)
        ip link set "cable$victim" down
        sleep 4
        ip link set "cable$victim" up
        ;;
    reboot)
        # No FIN reaches anybody.
        ip link set "cable$victim" down
        kill -KILL "${nodes[$victim]}" "$rank"
        sleep 1
        ip link set "cable$victim" up
        start_node "$victim"
        ;;
    esac
}
kinds=(kill stop cut reboot)
longest=0 before=0
for round in $(seq "$rounds"); do
    kind=${kinds[$((round % 4))]} victim=$((RANDOM % 3 + 1))
    begun=$(now)
    run "round" fault
    pause=$(($(now) - begun - took))
    # What a cable takes to be plugged in again is nobody's pause.
    case $kind in cut) pause=$((pause - 4000)) ;; reboot) pause=$((pause - 1000)) ;; esac
    for s in $(seq 8); do
        text "$folder/round-$s" | cmp -s - "$folder/expected-$s" || {
            echo "round $round, $kind of studio-$victim, stream $s differs:"
            tail -c 400 "$folder/round-$s"
            tail -n 30 "$folder"/*.log
            exit 1
        }
    done
    [ $pause -gt $longest ] && longest=$pause
    echo "round $round: $kind of studio-$victim, a pause of $pause ms"
    await
    # By then every kind has been once, and buffers have grown to what they stay at.
    [ "$round" != 4 ] || before=$(memory $server)
done
left=$(($(descriptors $server) - open))
[ $left -le 4 ] || { echo "$left descriptors are left in the server"; exit 1; }
grown=$(($(memory $server) - before))
[ $grown -le 8192 ] || { echo "the server grew by $grown KiB since the fourth round"; exit 1; }
echo "the server: $before KiB after four rounds, $grown KiB more since; $left descriptors more than before"
echo "$rounds rounds, $((rounds * 8)) streams whole, the longest pause $longest ms"
