//! What is signed: an in-toto statement that lists every file with its SHA-256.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shardpack_formats::hex;

use super::{SIGNATURE_FILE, hash::root};
use crate::manifest::{MANIFEST_FILE, check_file_name};

const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
/// Each file is hashed whole.
const METHOD: &str = "files";
/// The only hash that the command line of other verifiers checks.
const HASH: &str = "sha256";

/// What a file manager or a later program may leave beside the files: other verifiers then do not
/// take it for a file that someone has slipped in.
const IGNORED: &[&str] = &[".DS_Store", ".shardpack", SIGNATURE_FILE];

/// SHA-256 of files by name.
pub(super) type Digests = BTreeMap<String, [u8; 32]>;

#[derive(Serialize, Deserialize)]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: Predicate,
}

#[derive(Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
}

#[derive(Serialize, Deserialize)]
struct Serialization {
    method: String,
    hash_type: String,
    #[serde(default)]
    allow_symlinks: bool,
    #[serde(default)]
    ignore_paths: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

/// What a signature states.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stated {
    pub(super) files: Digests,
    /// Names that may be there without being listed.
    pub(super) ignored: BTreeSet<String>,
}

/// The bytes that are signed for a package called `name`.
pub(super) fn write(name: &str, files: &Digests) -> Vec<u8> {
    let resource = |(name, digest): (&String, &[u8; 32])| Resource {
        name: name.clone(),
        algorithm: HASH.to_owned(),
        digest: hex::encode(digest),
    };
    let digest = BTreeMap::from([(HASH.to_owned(), hex::encode(&root(files.values())))]);
    let statement = Statement {
        kind: STATEMENT_TYPE.to_owned(),
        subject: vec![Subject { name: name.to_owned(), digest }],
        predicate_type: PREDICATE_TYPE.to_owned(),
        predicate: Predicate {
            serialization: Serialization {
                method: METHOD.to_owned(),
                hash_type: HASH.to_owned(),
                allow_symlinks: false,
                ignore_paths: IGNORED.iter().map(|name| (*name).to_owned()).collect(),
            },
            resources: files.iter().map(resource).collect(),
        },
    };
    serde_json::to_vec(&statement).expect("strings and lists are JSON")
}

/// Parses and checks a payload whose signature has been checked: it lists plain file names with
/// one digest each, `manifest.json` among them, and its root digest is theirs.
pub(super) fn parse(payload: &[u8]) -> Result<Stated, String> {
    let statement: Statement =
        serde_json::from_slice(payload).map_err(|error| format!("not a statement: {error}"))?;
    expect("_type", STATEMENT_TYPE, &statement.kind)?;
    expect("predicateType", PREDICATE_TYPE, &statement.predicate_type)?;
    let Predicate { serialization, resources } = statement.predicate;
    expect("method", METHOD, &serialization.method)?;
    expect("hash_type", HASH, &serialization.hash_type)?;
    let mut files = Digests::new();
    let mut in_order = Vec::new();
    for Resource { name, algorithm, digest } in resources {
        expect("algorithm", HASH, &algorithm)?;
        if let Err(problem) = check_file_name(&name) {
            return Err(format!("{name:?}: {problem}"));
        }
        let bytes = hex::decode(&digest).and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let digest = bytes.ok_or_else(|| format!("{name}: {digest:?} is not a SHA-256"))?;
        in_order.push(digest);
        if files.insert(name.clone(), digest).is_some() {
            return Err(format!("{name}: listed twice"));
        }
    }
    let [Subject { digest, .. }] = statement.subject.as_slice() else {
        return Err(format!("{} subjects, expected one", statement.subject.len()));
    };
    let found = digest.get(HASH).map_or("", String::as_str);
    expect("root digest", &hex::encode(&root(in_order.iter())), found)?;
    if !files.contains_key(MANIFEST_FILE) {
        return Err(format!("{MANIFEST_FILE} is not listed"));
    }
    Ok(Stated { files, ignored: serialization.ignore_paths.into_iter().collect() })
}

fn expect(what: &str, expected: &str, found: &str) -> Result<(), String> {
    if expected == found {
        return Ok(());
    }
    Err(format!("{what}: expected {expected:?}, found {found:?}"))
}
