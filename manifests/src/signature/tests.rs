//! Signatures on real packages: accepted as made, refused after any change.

use std::{fs, path::Path};

use tempfile::tempdir;

use super::*;
use crate::package_set::{OWN_FILE, SetPlan, write_set};

struct Scene {
    folder: tempfile::TempDir,
    key: SigningKey,
}

impl Scene {
    fn new() -> Self {
        let folder = tempdir().unwrap();
        write_set(folder.path(), &SetPlan::default());
        let key = SigningKey::generate().unwrap();
        sign_package(&folder.path().join("node-0"), &key, &|_| ()).unwrap();
        Self { folder, key }
    }

    fn package(&self) -> std::path::PathBuf {
        self.folder.path().join("node-0")
    }

    fn problems(&self) -> Vec<String> {
        let found = verify_signature(&self.package(), &self.key.verifying_key(), &|_| ());
        found.iter().map(ToString::to_string).collect()
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[track_caller]
fn check(damage: impl Fn(&Path), words: &[&str]) {
    let scene = Scene::new();
    damage(&scene.package());
    let found = scene.problems();
    assert_eq!(found.is_empty(), words.is_empty(), "{found:?}");
    for word in words {
        assert!(found.iter().any(|problem| problem.contains(word)), "{word:?} in {found:?}");
    }
}

#[test]
fn a_signed_package_is_accepted_and_any_change_is_refused_by_name() {
    check(|_| (), &[]);
    check(|package| fs::write(package.join(".DS_Store"), "x").unwrap(), &[]);
    check(|package| flip(&package.join(OWN_FILE), 5_000_000), &[OWN_FILE, "changed since"]);
    check(|package| flip(&package.join("manifest.json"), 40), &["manifest.json: changed"]);
    check(
        |package| fs::remove_file(package.join("config.json")).unwrap(),
        &["config.json: signed, but missing"],
    );
    check(|package| fs::write(package.join("notes.txt"), "x").unwrap(), &["notes.txt: not signed"]);
    check(|package| fs::remove_file(package.join("model.sig")).unwrap(), &["model.sig: missing"]);
    check(
        |package| {
            fs::remove_file(package.join("config.json")).unwrap();
            std::os::unix::fs::symlink("tokenizer.json", package.join("config.json")).unwrap();
        },
        &["config.json", "expected a regular file"],
    );
}

/// Changes the text of the signature.
fn edit(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    move |package| {
        let path = package.join("model.sig");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(path, text.replacen(from, to, 1)).unwrap();
    }
}

#[test]
fn a_changed_signature_is_refused() {
    check(edit("\"sig\":\"M", "\"sig\":\"N"), &["the signature is not the given key's"]);
    check(edit("\"payload\":\"ey", "\"payload\":\"ez"), &["the signature is not the given key's"]);
    check(edit("bundle.v0.3", "bundle.v0.1"), &["mediaType"]);
    check(edit("in-toto+json", "other+json"), &["payloadType"]);
    check(edit("\"payload\":\"", "\"payload\":\"*"), &["not base64"]);
    check(edit("\"signatures\":[", "\"signatures\":[],\"others\":["), &["0 signatures"]);
    check(edit("\"hint\":\"", "\"hint\":\"0"), &["made with another key"]);
    check(
        |package| fs::write(package.join("model.sig"), "[".repeat(100_000)).unwrap(),
        &["not a bundle"],
    );
    check(
        |package| {
            let file = fs::File::create(package.join("model.sig")).unwrap();
            file.set_len(1 << 34).unwrap();
        },
        &["at most"],
    );
}

#[test]
fn another_key_is_refused_with_both_hints() {
    let scene = Scene::new();
    let other = SigningKey::generate().unwrap().verifying_key();
    let found = verify_signature(&scene.package(), &other, &|_| ());
    let [problem @ SignatureProblem::OtherKey { .. }] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert!(problem.to_string().contains(&other.hint()), "{problem}");
    assert!(problem.to_string().contains(&scene.key.verifying_key().hint()), "{problem}");
}

#[test]
fn the_same_key_signs_with_the_same_bytes_again() {
    let scene = Scene::new();
    let signature = scene.package().join("model.sig");
    let first = fs::read(&signature).unwrap();
    sign_package(&scene.package(), &scene.key, &|_| ()).unwrap();
    assert_eq!(fs::read(&signature).unwrap(), first);
    assert!(!scene.package().join(".model.sig.partial").exists());
}

#[test]
fn a_package_that_is_not_as_its_manifest_says_is_not_signed() {
    let check = |damage: &dyn Fn(&Path), word: &str| {
        let folder = tempdir().unwrap();
        write_set(folder.path(), &SetPlan::default());
        let package = folder.path().join("node-1");
        damage(&package);
        let error = sign_package(&package, &SigningKey::generate().unwrap(), &|_| ()).unwrap_err();
        let text = format!(
            "{error}: {}",
            std::error::Error::source(&error).map_or_else(String::new, ToString::to_string)
        );
        assert!(error.is_wrong() && text.contains(word), "{text}");
        assert!(!package.join("model.sig").exists());
    };
    check(&|package| flip(&package.join(OWN_FILE), 5_000_000), OWN_FILE);
    check(&|package| fs::remove_file(package.join("config.json")).unwrap(), "config.json: missing");
    check(&|package| fs::write(package.join("config.json"), "").unwrap(), "config.json: 0 bytes");
    check(&|package| fs::write(package.join("notes.txt"), "").unwrap(), "notes.txt: not listed");
    check(&|package| fs::write(package.join("manifest.json"), "{}").unwrap(), "manifest.json");
}

#[test]
fn keys_are_read_as_they_were_written_and_never_overwritten() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempdir().unwrap();
    let path = folder.path().join("key");
    let key = SigningKey::generate().unwrap();
    key.write(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let public = VerifyingKey::read(&public_path(&path)).unwrap();
    assert_eq!(public, key.verifying_key());
    assert_eq!(SigningKey::read(&path).unwrap().verifying_key(), public);
    assert!(matches!(key.write(&path), Err(KeyError::Write { .. })));
    // Nor is a public half, whose private one may be elsewhere.
    fs::rename(&path, folder.path().join("moved")).unwrap();
    assert!(matches!(key.write(&path), Err(KeyError::Write { .. })));
    assert!(!path.exists());
    let path = folder.path().join("moved");
    fs::rename(folder.path().join("key.pub"), public_path(&path)).unwrap();
    // The halves are not taken for one another.
    assert!(SigningKey::read(&public_path(&path)).is_err_and(|error| error.is_wrong()));
    assert!(VerifyingKey::read(&path).is_err_and(|error| error.is_wrong()));
}

#[test]
fn the_hint_is_that_of_other_peoples_tools() {
    // Made with: openssl pkey -pubout, sha256sum.
    const PEM: &str = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEHhhTL9R1TALzBB2cdc6zO4P/2BrH\nzk/ogsyxyYvFiW6kbDEcTi/0DdlqNlPm5FRF0y3+SG7O11x6kMahiIHAow==\n-----END PUBLIC KEY-----\n";
    let folder = tempdir().unwrap();
    let path = folder.path().join("key.pub");
    fs::write(&path, PEM).unwrap();
    let key = VerifyingKey::read(&path).unwrap();
    assert_eq!(key.to_pem(), PEM);
    assert_eq!(key.hint(), "d9edd6aae988ddc86a7c1142a6ee5eb027c642e23a9b826b2194de64dea18de7");
}

#[test]
fn hostile_statements_are_refused() {
    let good =
        statement::write("m", &statement::Digests::from([("manifest.json".to_owned(), [7; 32])]));
    assert!(statement::parse(&good).is_ok());
    let text = String::from_utf8(good).unwrap();
    let check = |from: &str, to: &str, word: &str| {
        assert!(text.contains(from), "{text}");
        let problem = statement::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err();
        assert!(problem.contains(word), "{problem}");
    };
    check("manifest.json", "../manifest.json", "a file name");
    check("manifest.json", "manifest.JSON", "not listed");
    check("\"method\":\"files\"", "\"method\":\"shards\"", "method");
    check("\"hash_type\":\"sha256\"", "\"hash_type\":\"blake3\"", "hash_type");
    check("0707", "0708", "root digest");
    check("0707", "07", "not a SHA-256");
    check("Statement/v1", "Statement/v0", "_type");
    check("\"subject\":[", "\"subject\":[{\"name\":\"x\",\"digest\":{}},", "2 subjects");
    check(
        "{\"name\":\"manifest.json\"",
        "{\"name\":\"manifest.json\",\"algorithm\":\"sha256\",\"digest\":\"00\"},{\"name\":\"manifest.json\"",
        "SHA-256",
    );
}
