#!/usr/bin/env bash
# Our packages and our server in other people's software, in virtual environments of their own
# from PyPI.
# Says what it skips and why; anything else that goes wrong is a failure.
#
#   tests/interop/run.sh
#   tests/interop/run.sh --fetch    installs what it needs, and ends
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/skip.sh
source tests/environment.sh
fetch=
[ "${1:-}" != --fetch ] || fetch=--fetch
# check COMMAND…: runs it, unless packages are fetched only.
check() { [ -n "$fetch" ] || "$@"; }
check cargo build --release --quiet
program=${CARGO_TARGET_DIR:-target}/release/shardpack
# Each in a shell of its own, so that one skips and the next is run all the same.
signatures() (
    # model-signing needs pyOpenSSL and does not say so.
    environment target/interop-signatures model_signing.signing 'model-signing==1.1.1' pyOpenSSL
    check target/interop-signatures/bin/python tests/interop/signatures.py "$program"
)
mlx() (
    case "$(uname -s)-$(uname -m)" in
        Linux-x86_64 | Linux-aarch64) mlx='mlx[cpu]==0.32.4' ;;
        Darwin-arm64) mlx='mlx==0.32.4' ;;
        *) skip mlx-wheels "mlx_lm: MLX has no wheels for $(uname -s) on $(uname -m)" ;;
    esac
    environment target/interop mlx_lm "$mlx" 'mlx-lm==0.32.2'
    check target/interop/bin/python tests/interop/mlx_loads_packages.py "$program"
    check target/interop/bin/python tests/interop/mlx_families.py "$program"
)
transformers() (
    environment target/interop-transformers transformers 'transformers==5.23.0'
    check target/interop-transformers/bin/python -W ignore tests/interop/transformers_reads.py "$program"
)
tokenizers() (
    environment target/interop-tokenizers mistral_common 'mistral-common==1.13.1' 'sentencepiece==0.2.3' \
        'tiktoken==0.14.0' 'tokenizers==0.23.3'
    check target/interop-tokenizers/bin/python tests/interop/tokenizers_agree.py "$program"
)
clients() (
    environment target/interop-clients h2 'openai==3.54.0' 'anthropic==2.12.0' 'h2==4.4.1'
    check target/interop-clients/bin/python tests/interop/clients.py "$program"
)
agents() (
    tests/clients.sh ${fetch:+"$fetch"} agents
)
api() (
    environment target/interop-api schemathesis 'schemathesis==4.27.2'
    check target/interop-api/bin/python tests/interop/api.py "$program" target/interop-api/bin/schemathesis
)
# What the page is built with, from npm, in target/interop-web: fetched again only if it is another list.
page_packages() {
    local web=target/interop-web
    cmp -s loader/server/web/package-lock.json "$web/fetched" && return
    rm -rf "$web"
    mkdir -p "$web"
    cp loader/server/web/*.json "$web/"
    (cd "$web" && npm ci --no-audit --no-fund) >"$web/npm.log" 2>&1 || return 1
    cp loader/server/web/package-lock.json "$web/fetched"
}
# The committed page is what its sources give.
page_is_built() (
    web=target/interop-web
    rm -rf "$web/src" "$web/built"
    mkdir "$web/built"
    cp -r loader/server/web/src loader/server/web/*.json loader/server/web/*.mjs "$web/"
    (cd "$web" && npm run --silent check && node build.mjs built)
    cmp "$web/built/page.policy" loader/server/src/page.policy
    python3 -c 'import gzip, sys; a, b = (gzip.open(it).read() for it in sys.argv[1:]); sys.exit(a != b)' \
        "$web/built/page.html.gz" loader/server/src/page.html.gz || {
        echo "page: the committed page is not what its sources give: npm ci && npm run build in loader/server/web" >&2
        exit 1
    }
)
page() (
    axe=()
    if command -v npm >/dev/null; then
        if page_packages; then
            check page_is_built
            axe=(target/interop-web/node_modules/axe-core/axe.min.js)
        else
            echo "page: npm cannot fetch what the page is built with (target/interop-web/npm.log): not rebuilt" >&2
        fi
    fi
    environment target/interop-page playwright 'playwright==1.65.2'
    browser() { type -P chromium || type -P chromium-browser || type -P google-chrome; }
    browser >target/interop-page/browser.log || debian chromium >target/interop-page/browser.log 2>&1 || true
    if ! browser >/dev/null; then
        # The browser's own libraries need root.
        deps=$([ "$(id -u)" = 0 ] && echo --with-deps || true)
        target/interop-page/bin/playwright install $deps chromium >>target/interop-page/browser.log 2>&1 || {
            tail -5 target/interop-page/browser.log >&2
            skip chromium "page: there is no Chromium, and neither Debian nor playwright gives it"
        }
    fi
    chromium=$(browser || true)
    check target/interop-page/bin/python tests/interop/page.py "$program" "$chromium" target/interop-page/shots ${axe[@]+"${axe[@]}"}
)
package_format() (
    # Needs nothing but Python: its BLAKE3 is its own.
    check python3 tests/interop/read_package.py "$program"
)
load() (
    # Says what it measures; how long a busy machine takes is no failure.
    check python3 tests/interop/load.py "$program"
    [ "$(uname -s)" = Linux ] || return 0
    check python3 tests/interop/leaks.py "$program"
    check python3 tests/flood.py "$program" --quick --silent 1000 --heads 200 --bodies 100 --seconds 4 --health 1000
)
command -v python3 >/dev/null || skip python3 "interop: there is no python3"
for part in package_format clients agents api page load signatures tokenizers transformers mlx; do
    began=$SECONDS
    "$part"
    echo "== interop: $part in $((SECONDS - began)) s"
done
