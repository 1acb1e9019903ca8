#!/usr/bin/env bash
# Links the program for Apple silicon from any Linux machine, as a release has it, and reads it as
# macOS would. Nothing of Apple's is needed: zig, from PyPI, has the linker and the stubs of the
# system's library.
#
#   tests/macho.sh            writes target/macho
set -euo pipefail
cd "$(dirname "$0")/.."
export SHARDPACK_DIST=target/macho
dist/build.sh aarch64-apple-darwin
tests/dist.sh target/macho
