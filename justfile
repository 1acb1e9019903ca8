# The same recipes everywhere: here, in CI, on a newcomer's machine.

# Everything that a change must pass: 35 minutes on two cores from nothing.
ci:
    .ci/run

# Formatting, rules, and lints and unit tests of the crates that have changed (`just quick BASE`: since BASE):
# less than a minute.
quick *base:
    tests/quick.sh {{base}}

# Formatting.
fmt:
    cargo fmt --all --check

# Lints, warnings as errors.
lint:
    cargo clippy --workspace --all-targets --release -- -D warnings

# Documentation, warnings as errors.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --release

# The guide as a book, in target/guide.
book:
    tests/book.sh

# The main job, end to end.
demo:
    cargo run --release -- demo

# Unit, property and end-to-end tests; `just test formats` for those of one crate.
test crate="":
    cargo test --release {{ if crate == "" { "" } else { "-p shardpack-" + trim_start_match(crate, "shardpack-") } }}

# The repository's rules: imports, layers, dependencies, documents. Needs no other crate.
layering:
    cargo test --release -p shardpack-layering

# Random templates and tokenizers in the sandbox, the same ones each time.
sandbox:
    SHARDPACK_SOAK_SECONDS=60 SHARDPACK_SOAK_SEED=1000000 cargo test --release --test cli random_templates

# What the test scripts need of Debian, PyPI, npm and rustup, so that they find it there.
fetch:
    tests/fetch.sh

# Apple's MLX: installed, checked, compared with our own kernels.
mlx:
    tests/mlx.sh

# RDMA over real verbs, in a virtual machine with Soft-RoCE: collectives, faults, a served model.
rdma *tests:
    tests/rdma.sh {{tests}}

# The C layer of the MLX engine for macOS: linked and checked, from any machine.
mlx-layer:
    tests/mlx_layer.sh

# Formats and kernels as 64-bit Arm code, under qemu-user where there is no Arm.
neon:
    tests/neon.sh

# Types and lints for Apple silicon, from any machine.
darwin:
    tests/darwin.sh

# The program itself, linked for Apple silicon from any machine.
macho:
    tests/macho.sh

# The server's door under a flood of connections and large bodies.
flood *arguments:
    cargo build --release --quiet
    python3 tests/flood.py target/release/shardpack {{arguments}}

# 10,000 requests whose clients leave at any moment: nothing is left behind.
leaks requests="10000":
    cargo build --release --quiet
    python3 tests/interop/leaks.py target/release/shardpack {{requests}}

# The previous release and this one, each with nodes of the other (`just previous COMMIT|PROGRAM` for another
# one).
previous *which:
    tests/previous.sh {{which}}

# A release: archives for macOS and Linux, checksums, bills of materials, the install script and a
# Homebrew formula, in target/dist.
dist:
    dist/build.sh

# A release for x86-64 Linux and macOS, tested in a root with nothing else; `just dist-test target/dist` tests
# what `just dist` made.
dist-test *folder:
    tests/dist.sh {{folder}}

# Against other people's software; says what it skips and why.
interop:
    tests/interop/run.sh

# Lighthouse's scores of the web page, for a machine with nothing else to do; `just lighthouse 90` asks for less.
lighthouse *least:
    tests/lighthouse.sh {{least}}

# Coding agents, agent libraries and other clients from PyPI and npm, each to the end of a tool loop
# with scripted answers; `just clients codex` for one.
clients *names:
    tests/clients.sh {{names}}

# A real instruct model from PyPI: chat, tool calls and structured output, perplexity and lm-eval beside
# llama.cpp on the same file (builds llama.cpp); `just smollm2 perplexity` for one part.
smollm2 *parts:
    tests/smollm2.sh {{parts}}

# Quality for each bit beside llama.cpp's K-quants and mlx-lm's quantizers, on models that it trains first (builds
# llama.cpp; hours): target/quality/quality.md and .svg; `just quality kjv-4m` for one model.
quality *models:
    tests/quality/run.sh {{models}}

# Fifty kills of a conversion; every parser under the fuzzer for a minute each (needs nightly and
# cargo-fuzz).
soak:
    SHARDPACK_FAULTS=200 cargo test --release --test cli streams_survive -- --nocapture
    SHARDPACK_TENANT_REQUESTS=5000 cargo test --release --test cli usage_equals -- --nocapture
    SHARDPACK_KILLS=50 cargo test --release --test cli killed_at_random_moments -- --nocapture
    SHARDPACK_SOAK_SECONDS=60 cargo test --release --test cli random_templates -- --nocapture
    tests/fuzz.sh 60

# A client with one stream beside others' many streams, long prompts and fresh grammars, held to strict bounds:
# for a machine with nothing else to do; `just fairness grammars` for one of them.
fairness *case:
    SHARDPACK_FAIRNESS="{{case}}" cargo test --release --test cli a_quiet_stream -- --nocapture

# How a decode step grows with the delay of every message, against the messages that a step has.
latency:
    #!/usr/bin/env bash
    set -euo pipefail
    cargo build --release
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    target/release/shardpack convert tests/data/kjv-4m -o "$folder/set" --nodes 2
    unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc \
        tests/latency.py "$PWD/target/release/shardpack" "$folder/set" "$folder"

# Licences, advisories, sources (needs cargo-deny).
deny:
    cargo deny check

# All-reduce latency between threads, over loopback and in MLX's graph (`just mlx` first); products
# beside the memory's own speed.
bench:
    cargo run --release -p shardpack-collectives --example all_reduce
    cargo run --release -p shardpack-kernels --example matmul
    cargo run --release -p shardpack-engine --example mlx_all_reduce -- "${SHARDPACK_ENGINES:-target/engines}"
