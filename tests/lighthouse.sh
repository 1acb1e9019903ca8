#!/usr/bin/env bash
# Lighthouse on the page of a server with two ranks: performance and accessibility, on a desk.
#
#   tests/lighthouse.sh [LEAST]      LEAST: the lowest score of 100 that passes, 95 by default
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/skip.sh
least=${1:-95}
command -v npm >/dev/null || skip npm "lighthouse: there is no npm"
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    skip chromium "lighthouse: there is no Chromium"
cargo build --release --quiet
folder=target/lighthouse
mkdir -p "$folder"
npm install --prefix "$folder" --no-audit --no-fund --silent lighthouse@12.8.2
rm -rf "$folder/set"
target/release/shardpack convert tests/data/kjv-4m -o "$folder/set" --nodes 2 >"$folder/convert.log" 2>&1
target/release/shardpack serve "$folder/set" --listen 127.0.0.1:0 --json >"$folder/server.json" 2>"$folder/serve.log" &
server=$!
trap 'kill $server' EXIT
until [ -s "$folder/server.json" ]; do
    kill -0 $server || { cat "$folder/serve.log" >&2; exit 1; }
    sleep 0.2
done
url=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["url"].removesuffix("v1"))' "$folder/server.json")
CHROME_PATH=$browser "$folder/node_modules/.bin/lighthouse" "$url" --preset=desktop --quiet \
    --only-categories=performance,accessibility --chrome-flags="--headless=new --no-sandbox" \
    --output=json --output-path="$folder/report.json"
python3 - "$folder/report.json" "$least" <<'END'
import json, sys

report, least = json.load(open(sys.argv[1])), float(sys.argv[2])
scores = {name: round(it["score"] * 100) for name, it in report["categories"].items()}
print("lighthouse:", ", ".join(f"{name} {score}" for name, score in scores.items()))
print(f"lighthouse: this machine's benchmark index is {report['environment']['benchmarkIndex']:.0f}")
low = [f"{it['title']}: {it.get('displayValue', it['score'])}" for it in report["audits"].values() if (it.get("score") or 1) < 0.9]
if min(scores.values()) < least:
    sys.exit(f"lighthouse: expected {least:.0f} of 100 at least:\n" + "\n".join(low))
END
