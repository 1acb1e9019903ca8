//! The documents of a stored package, in pieces: a manifest may be longer than a message.

use serde::{Deserialize, Serialize};
use shardpack_manifests::{
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    signature::{MAX_SIGNATURE_BYTES, SIGNATURE_FILE},
    verify::{Problem, read_document},
};

use super::store::{Store, StoreError};
use crate::protocol::PackageKey;

/// The operation.
pub(crate) const DOCUMENT: &str = "package.document";

/// Most bytes of a piece: in JSON it may take twice as many, which is half of the longest message.
const PIECE_BYTES: usize = 256 << 10;

/// Documents that a package has beside the files that its manifest lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DocumentName {
    /// The manifest.
    #[serde(rename = "manifest.json")]
    Manifest,
    /// The signature, which not every package has.
    #[serde(rename = "model.sig")]
    Signature,
}

impl DocumentName {
    /// Its name.
    pub(crate) const fn file(self) -> &'static str {
        match self {
            Self::Manifest => MANIFEST_FILE,
            Self::Signature => SIGNATURE_FILE,
        }
    }

    /// Most bytes that one has.
    pub(crate) const fn limit_bytes(self) -> u64 {
        match self {
            Self::Manifest => MAX_MANIFEST_BYTES,
            Self::Signature => MAX_SIGNATURE_BYTES,
        }
    }
}

/// Which piece of which document.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct DocumentRequest {
    /// The package.
    pub(crate) package: PackageKey,
    /// The document.
    pub(crate) name: DocumentName,
    /// Its first byte.
    pub(crate) offset: u64,
}

/// A piece.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DocumentPiece {
    /// Bytes of the whole document; none of one that is not there.
    pub(crate) size_bytes: u64,
    /// The piece.
    pub(crate) text: String,
}

impl Store {
    /// Reads a piece of a document of a prepared package.
    pub(super) fn document(&self, request: DocumentRequest) -> Result<DocumentPiece, StoreError> {
        let DocumentRequest { package: key, name, offset } = request;
        let package = self.package(key)?;
        let unusable = |problem: String| StoreError::Unusable { key, problem };
        let bytes = match read_document(&package.path.join(name.file()), name.limit_bytes()) {
            Err(Problem::Missing { .. }) if name == DocumentName::Signature => Vec::new(),
            read => read.map_err(|problem| unusable(problem.to_string()))?,
        };
        let text = str::from_utf8(&bytes)
            .map_err(|error| unusable(format!("{} is not text: {error}", name.file())))?;
        let rest = usize::try_from(offset).ok().and_then(|offset| text.get(offset..));
        let rest =
            rest.ok_or_else(|| unusable(format!("{} has no piece at byte {offset}", name.file())))?;
        let text = rest[..rest.floor_char_boundary(PIECE_BYTES)].to_owned();
        Ok(DocumentPiece { size_bytes: bytes.len() as u64, text })
    }
}
