//! What `Cargo.lock` may hold: few packages, one stack of TLS and HTTP, and no second version of a
//! crate without a reason. `deny.toml` has the same bans for whoever runs cargo-deny.

use std::collections::{BTreeMap, BTreeSet};

use crate::read;

/// Every package of the lock file is downloaded, checked and compiled somewhere, and trusted.
const MAX_PACKAGES: usize = 380;

/// Second implementations of what `ring`, `rustls` and `ureq` do.
const BANNED: &[&str] =
    &["aws-lc-rs", "aws-lc-sys", "native-tls", "onig_sys", "openssl", "openssl-sys", "reqwest"];

/// Crates in more than one version, and who still needs the older one.
const DUPLICATES: &[(&str, &str)] = &[
    ("base64", "spm_precompiled, below tokenizers, needs 0.13"),
    ("bit-set", "fancy-regex needs 0.8, proptest 0.11"),
    ("bit-vec", "each of bit-set's versions needs its own, and yasna 0.9"),
    ("fancy-regex", "tokenizers needs 0.14, jsonschema 0.19"),
    ("getrandom", "ring needs 0.2, jsonschema and tokenizers 0.3"),
    ("hashbrown", "safetensors needs 0.16"),
    ("r-efi", "each of getrandom's versions needs its own; only on UEFI"),
    ("rand", "tokenizers needs 0.9, proptest 0.10"),
    ("rand_core", "each of rand's versions needs its own"),
    ("syn", "zerocopy-derive and macros below tokenizers need 2"),
    ("windows-sys", "ring needs 0.52; only on Windows"),
];

#[test]
fn the_lock_file_has_few_packages() {
    let count = packages().values().map(BTreeSet::len).sum::<usize>();
    assert!(count > 50, "Cargo.lock is read wrongly: {count} packages");
    assert!(count <= MAX_PACKAGES, "Cargo.lock has {count} packages, more than {MAX_PACKAGES}");
}

#[test]
fn there_is_one_stack_of_tls_and_http() {
    let packages = packages();
    let found: Vec<&&str> = BANNED.iter().filter(|name| packages.contains_key(**name)).collect();
    assert!(found.is_empty(), "Cargo.lock has {found:?}; TLS is rustls with ring, HTTP is ureq");
    let denied = read(".", "deny.toml");
    for name in BANNED {
        assert!(denied.contains(&format!("crate = \"{name}\"")), "deny.toml does not deny {name}");
    }
}

#[test]
fn a_crate_in_two_versions_has_a_reason() {
    let packages = packages();
    let found: BTreeSet<&str> = packages
        .iter()
        .filter(|(_, versions)| versions.len() > 1)
        .map(|(name, _)| name.as_str())
        .collect();
    let listed: BTreeSet<&str> = DUPLICATES.iter().map(|(name, _)| *name).collect();
    let new: Vec<_> = found.difference(&listed).map(|name| (name, &packages[*name])).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(new.is_empty(), "in several versions, and not in the table: {new:?}");
    assert!(gone.is_empty(), "in the table, and in one version only: {gone:?}");
    let denied = read(".", "deny.toml");
    for name in listed {
        let skipped = denied.contains(&format!("crate = \"{name}:<"));
        assert!(skipped, "deny.toml does not skip the older {name}");
    }
}

/// The packages of the lock file with their versions.
fn packages() -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for package in read(".", "Cargo.lock").split("[[package]]\n").skip(1) {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            line.expect("a package has a name and a version").trim_matches('"').to_owned()
        };
        found.entry(value("name")).or_default().insert(value("version"));
    }
    found
}
