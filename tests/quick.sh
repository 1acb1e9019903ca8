#!/usr/bin/env bash
# What a developer wants to know before a commit, in less than a minute where little has changed: the formatting,
# the repository's rules, and clippy and unit tests of the changed crates in the dev profile. A crate has changed if
# its folder holds a file that differs from BASE or is not committed. Crates above it are left to .ci/run.
#
#   tests/quick.sh [BASE]     BASE is where the branch left origin/main; without a remote, the last commit
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-$(git merge-base origin/main HEAD 2>/dev/null || echo HEAD)}
cargo fmt --all --check
# In release, where `cargo test --release` finds it compiled; its dependencies are none.
cargo test --release --quiet -p shardpack-layering

# crate_of FILE: the folder of the crate that holds it; nothing for documents, data and scripts.
crate_of() {
    local folder
    folder=$(dirname "$1")
    while [ "$folder" != . ] && [ ! -e "$folder/Cargo.toml" ]; do folder=$(dirname "$folder"); done
    case "$folder:$1" in
        # A workspace of its own, which needs a nightly compiler; and what was tested above.
        fuzz:* | tests/layering:*) ;;
        .:src/* | .:tests/*.rs | .:build.rs | .:Cargo.toml) echo . ;;
        .:*) ;;
        *) echo "$folder" ;;
    esac
}
changed=$({ git diff --name-only "$base" && git ls-files --others --exclude-standard; } |
    while read -r file; do crate_of "$file"; done | sort -u)
packages=() targets=()
for folder in $changed; do
    [ -e "$folder/Cargo.toml" ] || continue
    packages+=(-p "$(sed -n 's/^name = "\(.*\)"/\1/p' "$folder/Cargo.toml" | head -1)")
    # The root has no library; its tests are those of the program.
    if [ "$folder" = . ]; then targets+=(--bins); else targets+=(--lib); fi
done
if [ ${#packages[@]} = 0 ]; then
    echo "no crate differs from $base"
    exit
fi
echo "changed since $base: ${packages[*]}"
# The root too, whose dependencies are everybody's: so these have the same features whatever has changed, and are
# compiled once.
cargo clippy -p shardpack "${packages[@]}" "${targets[@]}" -- -D warnings
# With what is under `cfg(test)`.
cargo clippy -p shardpack "${packages[@]}" "${targets[@]}" --profile test -- -D warnings
cargo test --quiet -p shardpack "${packages[@]}" "${targets[@]}"
