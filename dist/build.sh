#!/usr/bin/env bash
# Makes a release on any Linux machine: archives for every target, their checksums, what each is
# made of, the install script and a Homebrew formula.
#
#   dist/build.sh [TARGET...]      writes target/dist (or $SHARDPACK_DIST)
#
# Without targets all three are built. $SHARDPACK_RELEASES is where the files will be
# published (…/releases/download/v1.2.3). With SHARDPACK_DIST_UNOPTIMIZED=1 nothing but the kernels is
# optimized: for a test of how the files are made, in half the time.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=dist/toolchain.sh
source dist/toolchain.sh
targets=("$@")
[ ${#targets[@]} != 0 ] || targets=(x86_64-unknown-linux-musl aarch64-unknown-linux-musl aarch64-apple-darwin)
out=${SHARDPACK_DIST:-target/dist}
rm -rf "$out" && mkdir -p "$out"
out=$(cd "$out" && pwd)
version=$(cargo metadata --format-version 1 --locked --no-deps |
    python3 -c 'import json, sys; print(next(p["version"] for p in json.load(sys.stdin)["packages"] if p["name"] == "shardpack"))')
releases=${SHARDPACK_RELEASES:-https://github.com/REPOSITORY/releases/download/v$version}
# Nothing in the files tells when they were made. Not exported: with every commit cargo would compile
# ring, and all that stands on it, once more.
time_of_files=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
build_folder=${CARGO_TARGET_DIR:-$PWD/target}
# The profile of Cargo.toml, and where cargo puts what it makes of it.
settings=(--profile dist)
profile=dist
compression=--best
if [ -n "${SHARDPACK_DIST_UNOPTIMIZED:-}" ]; then
    settings=(--release --config profile.release.opt-level=0)
    profile=release
    # Each by its name, which overrides "*".
    while read -r package; do
        settings+=(--config "profile.release.package.$package.opt-level=0")
    done < <(sed -n '/^\[profile.release.package\]/,/^\[profile.dist\]/s/^\([a-z][^ ]*\) = .*opt-level = [123].*/\1/p' Cargo.toml)
    for package in quantize kernels formats converter; do
        settings+=(--config "profile.release.package.shardpack-$package.opt-level=1")
    done
    for package in quantize kernels; do
        settings+=(--config "profile.release.package.shardpack-$package.codegen-units=16")
    done
    compression=--fast
fi

# archive TARGET PROGRAM: packs what a user gets; sorted, without owners and times.
archive() {
    local name=shardpack-$version-$1 staged
    staged=$out/$name
    mkdir "$staged"
    install -m 755 "$2" "$staged/shardpack"
    install -m 644 LICENSE README.md CHANGELOG.md "$staged"
    case "$1" in
        *-apple-darwin) install -m 644 docs/launchd/*.plist "$staged" ;;
        *) [ ! -d docs/systemd ] || install -m 644 docs/systemd/*.service "$staged" ;;
    esac
    tar --directory "$out" --sort=name --mtime="@$time_of_files" --owner=0 --group=0 --numeric-owner \
        --mode=go-w --format=ustar -cf - "$name" | gzip --no-name "$compression" >"$out/$name.tar.gz"
    rm -r "$staged"
}

for target in "${targets[@]}"; do
    began=$SECONDS
    use_target "$target"
    if [ "$target" = aarch64-apple-darwin ] && [ -x dist/native_layer.sh ]; then
        # Where its own test has it, too.
        SHARDPACK_MLX_LAYER=$build_folder/layer/macosx_14_0_arm64/libshardpack_mlx.dylib
        export SHARDPACK_MLX_LAYER
        dist/native_layer.sh "$SHARDPACK_MLX_LAYER"
    else
        unset SHARDPACK_MLX_LAYER
    fi
    cargo rustc --locked "${settings[@]}" --target "$target" --bin shardpack -- "${link_arguments[@]}"
    archive "$target" "$build_folder/$target/$profile/shardpack"
    cargo metadata --format-version 1 --locked --filter-platform "$target" |
        python3 dist/sbom.py "$target" "$out/shardpack-$version-$target.cdx.json"
    echo "== $target in $((SECONDS - began)) s"
done

# sum NAME: the SHA-256 of an archive, or none where it was not built.
sum() { [ ! -e "$out/$1" ] || sha256sum "$out/$1" | cut -d' ' -f1; }
fill=(-e "s|@VERSION@|$version|g" -e "s|@RELEASES@|$releases|g")
for target in x86_64-unknown-linux-musl aarch64-unknown-linux-musl aarch64-apple-darwin; do
    fill+=(-e "s|@SHA256 $target@|$(sum "shardpack-$version-$target.tar.gz")|")
done
sed "${fill[@]}" dist/homebrew/shardpack.rb >"$out/shardpack.rb"
sed "${fill[@]}" dist/install.sh >"$out/install.sh"
chmod 755 "$out/install.sh"
(cd "$out" && sha256sum -- *.tar.gz *.cdx.json >SHA256SUMS)
(cd "$out" && ls -l && cat SHA256SUMS)
