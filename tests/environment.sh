# shellcheck shell=bash
# Sourced by test scripts that need other people's software. Needs tests/skip.sh.

# Makes the virtual environment "$1" with the packages "$3…" from PyPI, unless it has them already;
# "$2" names a module that must be importable then.
environment() {
    local venv=$1 module=$2
    shift 2
    if [ "$(cat "$venv/packages" 2>/dev/null)" = "$*" ] && "$venv/bin/python" -c "import $module" 2>/dev/null; then
        return
    fi
    rm -rf "$venv"
    python3 -m venv "$venv" || skip python-venv "$module: python3 cannot make a virtual environment"
    "$venv/bin/pip" install --quiet "$@" 2>"$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        skip pypi "$module: PyPI does not give it"
    }
    echo "$*" >"$venv/packages"
}

# debian PACKAGE...: installs Debian's packages, where that is allowed without asking anyone; else fails.
debian() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    timeout 300 apt-get update -qq >/dev/null || return 1
    # Another test script may be installing, too.
    DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o DPkg::Lock::Timeout=600 \
        install -y -qq --no-install-recommends "$@" >/dev/null
}
