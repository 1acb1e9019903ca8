#!/usr/bin/env bash
# Two nodes with network stacks of their own on one machine: they join, are pushed to and serve, one
# loses its cable while it answers, and the group comes back with the cable.
#
#   unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc \
#       tests/netns.sh PROGRAM SET FOLDER
set -euo pipefail
program=$1 set=$2 folder=$3
export SHARDPACK_CLUSTER=$folder/cluster
url=http://10.9.0.254:8098
# The caller ends a script that hangs; the logs say why. No step has a deadline of its own.
trap 'cat "$folder"/*.log >&2; exit 1' TERM

ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.9.0.254/24 dev bridge0
ip link set bridge0 up
"$program" cluster init 2>/dev/null
for n in 1 2; do
    unshare --net sleep 600 &
    stack=$!
    until [ "$(readlink /proc/$stack/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add cable$n type veth peer name eth0 netns $stack
    ip link set cable$n master bridge0 up
    inside=(nsenter --target "$stack" --net)
    "${inside[@]}" ip link set lo up
    "${inside[@]}" ip addr add 10.9.0.$n/24 dev eth0
    "${inside[@]}" ip link set eth0 up
    # The second one is found without being named.
    found=$([ $n = 1 ] || echo --announce)
    "${inside[@]}" "$program" node --listen 10.9.0.$n:7420 --threads 1 --store "$folder/store-$n" \
        $found 2>"$folder/node-$n.log" &
    until grep -qs "spj1_" "$folder/node-$n.log"; do sleep 0.05; done
    # The line that the node prints and its token, as a person would say them.
    read -ra line < <(grep "cluster add" "$folder/node-$n.log")
    if [ $n = 2 ]; then
        "$program" cluster discover --seconds 5 | grep -q "10.9.0.2:7420"
        echo "found on the network"
        line=(shardpack cluster add)
    fi
    grep "spj1_" "$folder/node-$n.log" | "$program" "${line[@]:1}" --name "studio-$n"
done
"$program" cluster discover --seconds 1 | grep -q "no node that waits"
echo "silent as a member"
"$program" push "$set" --to studio-1,studio-2
"$program" serve "$set" --nodes studio-1,studio-2 --listen 10.9.0.254:8098 --insecure \
    2>"$folder/serve.log" &

ready() { curl -sf --max-time 2 "$url/readyz" >/dev/null; }
await() { until ready; do sleep 0.05; done; }
ask() {
    curl -s "$url/v1/chat/completions" -d \
        '{"messages":[{"role":"user","content":"John 11:35"}],"temperature":0}'
}
await
ask | grep -q "Jesus wept."
echo "answered over the network"

curl -sN "$url/v1/chat/completions" -d \
    '{"messages":[{"role":"user","content":"John 3:16"}],"stream":true,"ignore_eos":true}' \
    >"$folder/stream" &
stream=$!
until [ "$(grep -cs "^data" "$folder/stream")" -gt 5 ] 2>/dev/null; do sleep 0.02; done
ip link set cable2 down
# The reason is part of the answer once the node is lost.
until curl -s "$url/readyz" | grep -o '"message":"[^"]*"'; do sleep 0.05; done
ip link set cable2 up
await
wait $stream
grep '"error"' "$folder/stream" && exit 1
grep -q '"finish_reason":"length"' "$folder/stream"
echo "the answer went on"
ask | grep -q "Jesus wept."
echo "answered after the cable was back"
