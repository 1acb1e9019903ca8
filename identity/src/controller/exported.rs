//! A controller in a file, for a second machine: the authority's key and the members, encrypted with a
//! key that is made of a passphrase. The second machine makes a key of its own when it takes over.
//!
//! ```text
//! {"format": 1, "kdf": "argon2id", "memory_kib", "passes", "lanes", "salt",
//!  "cipher": "chacha20-poly1305", "nonce", "sealed"}
//! ```

use std::path::Path;

use argon2::{Algorithm, Argon2, Params, Version};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};

use crate::{
    Authority, CredentialsError, HomeError, Member, certificate::parse_key, files,
    mandate::SignedMandate, message::Bytes,
};

use super::{AUTHORITY_FILE, DOCUMENT_FILE, Document, FORMAT_OF_MANDATES, Home, LOCK_FILE};

/// Version of the file.
const FORMAT: u32 = 1;

const KDF: &str = "argon2id";
const CIPHER: &str = "chacha20-poly1305";

/// Cost of a guess: RFC 9106's second recommendation (section 4), 64 MiB, three passes, four lanes.
const MEMORY_KIB: u32 = 64 << 10;
const PASSES: u32 = 3;
const LANES: u32 = 4;

/// Most memory that a file may ask for, so that a strange one exhausts nothing.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// Most passes, for the same reason.
const MAX_PASSES: u32 = 16;

const SALT_BYTES: usize = 16;
const KEY_BYTES: usize = 32;

/// Shortest passphrase. The file is meant to travel, so it can be guessed at without limit.
pub const MIN_PASSPHRASE_BYTES: usize = 12;

/// Binds the ciphertext to its purpose.
const PURPOSE: &[u8] = b"shardpack exported controller";

/// An exported controller that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The folder, or a file of it.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A passphrase that is too easily guessed.
    #[error("the passphrase has {found} bytes, at least {MIN_PASSPHRASE_BYTES} are needed")]
    Short {
        /// Its length.
        found: usize,
    },
    /// Not such a file, or of a later version.
    #[error("not an exported controller that this program reads: {0}")]
    Malformed(String),
    /// Another passphrase, or bytes that were changed.
    #[error("the passphrase is wrong, or the file was changed")]
    Passphrase,
    /// Our bug, or no memory.
    #[error("the key cannot be made of the passphrase: {0}")]
    Derive(argon2::Error),
    /// The system gave no random bytes.
    #[error("the system gave no random bytes")]
    Random(#[source] getrandom::Error),
}

impl From<files::FileError> for ExportError {
    fn from(error: files::FileError) -> Self {
        Self::Home(error.into())
    }
}

#[derive(Serialize, Deserialize)]
struct ExportedFile {
    format: u32,
    kdf: String,
    memory_kib: u32,
    passes: u32,
    lanes: u32,
    salt: Bytes,
    cipher: String,
    nonce: Bytes,
    sealed: Bytes,
}

/// What is encrypted.
#[derive(Serialize, Deserialize)]
struct Controller {
    cluster: String,
    authority: Bytes,
    authority_key: Bytes,
    members: Vec<Member>,
    mandate: Option<SignedMandate>,
}

/// The controller in `folder`, encrypted; its own key stays there.
pub fn export_controller(folder: &Path, passphrase: &str) -> Result<Vec<u8>, ExportError> {
    if passphrase.len() < MIN_PASSPHRASE_BYTES {
        return Err(ExportError::Short { found: passphrase.len() });
    }
    let Document { cluster, authority, members, mandate, .. } = Home::read(folder)?;
    let authority_key = Bytes(files::read_private(&folder.join(AUTHORITY_FILE))?);
    let controller = Controller { cluster, authority, authority_key, members, mandate };
    let mut bytes = serde_json::to_vec(&controller).expect("a controller is JSON");
    let (mut salt, mut nonce) = ([0; SALT_BYTES], [0; NONCE_LEN]);
    getrandom::fill(&mut salt).map_err(ExportError::Random)?;
    getrandom::fill(&mut nonce).map_err(ExportError::Random)?;
    let key = derive(passphrase, &salt, [MEMORY_KIB, PASSES, LANES])?;
    key.seal_in_place_append_tag(
        Nonce::assume_unique_for_key(nonce),
        Aad::from(PURPOSE),
        &mut bytes,
    )
    .expect("a controller is shorter than the cipher's limit");
    let sealed = ExportedFile {
        format: FORMAT,
        kdf: KDF.to_owned(),
        memory_kib: MEMORY_KIB,
        passes: PASSES,
        lanes: LANES,
        salt: Bytes(salt.to_vec()),
        cipher: CIPHER.to_owned(),
        nonce: Bytes(nonce.to_vec()),
        sealed: Bytes(bytes),
    };
    let mut text = serde_json::to_vec_pretty(&sealed).expect("a sealed controller is JSON");
    text.push(b'\n');
    Ok(text)
}

fn derive(passphrase: &str, salt: &[u8], cost: [u32; 3]) -> Result<LessSafeKey, ExportError> {
    let [memory_kib, passes, lanes] = cost;
    let params = Params::new(memory_kib, passes, lanes, Some(KEY_BYTES));
    let argon =
        Argon2::new(Algorithm::Argon2id, Version::V0x13, params.map_err(ExportError::Derive)?);
    let mut key = [0; KEY_BYTES];
    argon.hash_password_into(passphrase.as_bytes(), salt, &mut key).map_err(ExportError::Derive)?;
    let key = UnboundKey::new(&CHACHA20_POLY1305, &key).expect("the cipher's keys have 32 bytes");
    Ok(LessSafeKey::new(key))
}

fn open(text: &[u8], passphrase: &str) -> Result<Controller, ExportError> {
    let malformed = |problem: &str| ExportError::Malformed(problem.to_owned());
    let sealed: ExportedFile =
        serde_json::from_slice(text).map_err(|error| ExportError::Malformed(error.to_string()))?;
    let ExportedFile { format, kdf, memory_kib, passes, lanes, salt, cipher, nonce, sealed } =
        sealed;
    if format != FORMAT || kdf != KDF || cipher != CIPHER {
        return Err(malformed(&format!("format {format}, {kdf}, {cipher}")));
    }
    if memory_kib > MAX_MEMORY_KIB || passes > MAX_PASSES || lanes > LANES {
        return Err(malformed("it asks for more memory or time than this program gives"));
    }
    let nonce: [u8; NONCE_LEN] =
        nonce.0.try_into().map_err(|_| malformed("its nonce has another length"))?;
    let key = derive(passphrase, &salt.0, [memory_kib, passes, lanes])?;
    let mut bytes = sealed.0;
    let nonce = Nonce::assume_unique_for_key(nonce);
    let opened = key
        .open_in_place(nonce, Aad::from(PURPOSE), &mut bytes)
        .map_err(|_| ExportError::Passphrase)?;
    serde_json::from_slice(opened).map_err(|error| ExportError::Malformed(error.to_string()))
}

/// Makes `folder` the controller in the file, which does not act before a handover. Returns the
/// cluster's id and the number of its members.
pub fn import_controller(
    folder: &Path,
    text: &[u8],
    passphrase: &str,
) -> Result<(String, usize), ExportError> {
    let Controller { cluster, authority, authority_key, members, mandate } =
        open(text, passphrase)?;
    let unusable = |source: CredentialsError| {
        ExportError::Home(HomeError::Credentials { folder: folder.to_owned(), source })
    };
    let key = parse_key(&authority_key.0).map_err(unusable)?;
    Authority::new(cluster.clone(), key).certificate().map_err(unusable)?;
    files::create_folder(folder)?;
    let _lock = files::lock(&folder.join(LOCK_FILE), files::LOCK_TIMEOUT)?;
    if let Some(Document { cluster, .. }) = files::read_json(&folder.join(DOCUMENT_FILE))? {
        return Err(HomeError::Exists { folder: folder.to_owned(), cluster }.into());
    }
    files::write(&folder.join(AUTHORITY_FILE), &authority_key.0)?;
    let found = (cluster.clone(), members.len());
    let document = Document {
        format: FORMAT_OF_MANDATES,
        cluster,
        authority,
        controller: Bytes(Vec::new()),
        expires: 0,
        members,
        mandate,
        key_file: None,
        standby: true,
    };
    // Written last: a folder is a cluster once it has this file.
    files::write_json(&folder.join(DOCUMENT_FILE), &document)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::handover::Candidate;

    const PASSPHRASE: &str = "correct horse battery";

    #[test]
    fn an_exported_controller_is_read_with_its_passphrase_alone_and_acts_after_a_handover() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        let home = Home::init(&first).unwrap();
        let text = export_controller(&first, PASSPHRASE).unwrap();
        let wrong = import_controller(&second, &text, "correct horse batter");
        assert!(matches!(wrong, Err(ExportError::Passphrase)));
        assert!(!second.exists(), "nothing is left of what failed");
        let key = std::fs::read(first.join(AUTHORITY_FILE)).unwrap();
        let shows = |bytes: &[u8]| text.windows(bytes.len()).any(|window| window == bytes);
        assert!(!shows(&key) && !shows(home.cluster().as_bytes()), "nothing stands in the clear");
        let (cluster, members) = import_controller(&second, &text, PASSPHRASE).unwrap();
        assert_eq!((cluster.as_str(), members), (home.cluster(), 0));
        assert!(matches!(Home::open(&second), Err(HomeError::Standby { .. })));
        let again = import_controller(&second, &text, PASSPHRASE);
        assert!(matches!(again, Err(ExportError::Home(HomeError::Exists { .. }))));
        let candidate = Candidate::new(&second).unwrap();
        let mandate = candidate.mandate(1, "second").unwrap();
        let taken = candidate.keep(mandate).unwrap();
        assert_ne!(taken.credentials().key(), home.credentials().key());
        assert!(taken.credentials().mandate().is_some());
        // The key from before goes with its certificate.
        let candidate = Candidate::new(&second).unwrap();
        assert_eq!(candidate.epoch(), 1);
        let mandate = candidate.mandate(2, "second").unwrap();
        candidate.keep(mandate).unwrap();
        assert!(!second.join("controller-1.key").exists());
        Home::open(&second).unwrap();
    }

    #[test]
    fn what_is_bent_or_asks_for_too_much_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (home, other) = (folder.path().join("home"), folder.path().join("other"));
        Home::init(&home).unwrap();
        assert!(matches!(export_controller(&home, "short"), Err(ExportError::Short { found: 5 })));
        let text = export_controller(&home, PASSPHRASE).unwrap();
        let bend = |key: &str, value: serde_json::Value| {
            let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
            json[key] = value;
            import_controller(&other, json.to_string().as_bytes(), PASSPHRASE).unwrap_err()
        };
        assert!(matches!(bend("sealed", "AAAA".into()), ExportError::Passphrase));
        assert!(matches!(bend("passes", 2.into()), ExportError::Passphrase));
        for (key, value) in [
            ("memory_kib", u32::MAX.into()),
            ("passes", 1000.into()),
            ("format", 2.into()),
            ("cipher", "none".into()),
            ("nonce", "AAAA".into()),
        ] {
            assert!(matches!(bend(key, value), ExportError::Malformed(_)), "{key}");
        }
    }
}
