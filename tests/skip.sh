# Sourced by test scripts; tests/harness/skip.rs is the same for Rust.

# skip CAPABILITY REASON: says why something is not tested and ends the shell. It fails if
# $SHARDPACK_SKIPS is set and does not name the capability.
skip() {
    echo "skipped: $2 [$1]" >&2
    [ -n "${SHARDPACK_SKIPS+set}" ] || exit 0
    case " ${SHARDPACK_SKIPS//,/ } " in
        *" $1 "*) exit 0 ;;
    esac
    echo "error: \$SHARDPACK_SKIPS (\"$SHARDPACK_SKIPS\") does not announce \"$1\"" >&2
    exit 1
}
