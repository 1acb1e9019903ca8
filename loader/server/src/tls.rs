//! TLS: certificate and key come from PEM files, which are reloaded when they change or on a
//! signal. No client certificates; API keys authenticate clients. Knows nothing of what is served.

mod client_stream;

pub(super) use client_stream::ClientStream;

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde_json::Value;
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
    },
    server::TlsStream,
};

use crate::{events::ServerEvents, tasks::blocking};

/// Bytes of a certificate's chain or a key: the longest in use have some ten KB.
const PEM_BYTES_MAX: u64 = 1 << 20;
/// Name of HTTP/2 in a handshake (ALPN).
pub(super) const HTTP2: &[u8] = b"h2";
/// Time for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the files are checked for changes.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Certificate and key cannot be used. Each names its file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{}: cannot be read", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file far larger than any of its kind.
    #[error("{}: over {PEM_BYTES_MAX} bytes: this is no certificate or key", file.display())]
    TooLarge {
        /// The file.
        file: PathBuf,
    },
    /// A file that is PEM only up to some point.
    #[error("{}: not PEM", file.display())]
    Pem {
        /// The file.
        file: PathBuf,
        /// What is wrong in it.
        source: pem::Error,
    },
    /// No certificate.
    #[error("{}: holds no certificate: expected PEM with -----BEGIN CERTIFICATE-----", file.display())]
    NoCertificate {
        /// The file.
        file: PathBuf,
    },
    /// No private key, or an encrypted one.
    #[error("{}: holds no private key: expected PEM with -----BEGIN PRIVATE KEY-----, not encrypted", file.display())]
    NoKey {
        /// The file.
        file: PathBuf,
    },
    /// Both parse but cannot be used, mostly since they do not belong together.
    #[error("{} and {}: cannot be used together", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's.
        key: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

/// Modification time and size of both files when they were last read.
type Seen = [Option<(SystemTime, u64)>; 2];

/// Receives messages for people.
pub type Report = Box<dyn Fn(&str) + Send + Sync>;

/// A certificate and its key.
pub struct Tls {
    files: [PathBuf; 2],
    state: Mutex<(Arc<ServerConfig>, Seen)>,
    report: Report,
    events: ServerEvents,
}

impl Tls {
    /// Reads a certificate (with its chain, its own first) and its key, both PEM. `report` is told
    /// when they were read again, and why that failed.
    pub fn open(certificate: &Path, key: &Path, report: Report) -> Result<Self, TlsError> {
        let files = [certificate.to_owned(), key.to_owned()];
        // Metadata first: a change while reading causes another reload.
        let seen = look(&files);
        let config = Arc::new(config(&files)?);
        let (state, events) = (Mutex::new((config, seen)), ServerEvents::default());
        Ok(Self { files, state, report, events })
    }

    /// Adds to these events when the files are read again.
    pub(crate) fn with_events(self, events: ServerEvents) -> Self {
        Self { events, ..self }
    }

    /// Answers a client's handshake, with the certificate that is in use now.
    pub(super) async fn accept(&self, connection: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let config = Arc::clone(&self.state.lock().unwrap_or_else(PoisonError::into_inner).0);
        let handshake = TlsAcceptor::from(config).accept(connection);
        timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(io::Error::other)?
    }

    /// Reads the files again, if they changed or `force` says so. What cannot be used leaves the
    /// present certificate in use.
    fn reload(&self, force: Force) -> Result<bool, TlsError> {
        let seen = look(&self.files);
        let known = self.state.lock().unwrap_or_else(PoisonError::into_inner).1;
        if force == Force::IfChanged && seen == known {
            return Ok(false);
        }
        let fresh = config(&self.files);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A bad pair is reported once, not at every check.
        state.1 = seen;
        state.0 = Arc::new(fresh?);
        Ok(true)
    }

    /// Reads the files again, whether they changed or not, and says what came of it.
    pub(super) fn reload_now(&self) {
        self.reload_and_tell(Force::Always);
    }

    fn reload_and_tell(&self, force: Force) {
        match self.reload(force) {
            Ok(false) => {}
            Ok(true) => {
                (self.report)("tls: certificate and key reloaded");
                let [certificate, key] = &self.files;
                let text = format!("{} and {} read again", certificate.display(), key.display());
                self.events.add("certificate_reloaded", None, &text, Value::Null);
            }
            Err(error) => {
                let mut text = format!("cannot reload, the certificate in use stays: {error}");
                let mut source = std::error::Error::source(&error);
                while let Some(error) = source {
                    text.push_str(": ");
                    text.push_str(&error.to_string());
                    source = error.source();
                }
                (self.report)(&format!("tls: {text}"));
                self.events.add("certificate_refused", None, &text, Value::Null);
            }
        }
    }

    /// Watches the files for changes, forever.
    pub(super) async fn watch(self: Arc<Self>) {
        loop {
            sleep(LOOK_AGAIN).await;
            let own = Arc::clone(&self);
            // Files may lie on a slow disk.
            let _ = blocking(move || own.reload_and_tell(Force::IfChanged)).await;
        }
    }
}

/// Whether unchanged files are reloaded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Force {
    IfChanged,
    Always,
}

fn look(files: &[PathBuf; 2]) -> Seen {
    [0, 1].map(|index| {
        let metadata = fs::metadata(&files[index]).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}

fn config([certificate, key]: &[PathBuf; 2]) -> Result<ServerConfig, TlsError> {
    let pem_error = |file: &Path, source| TlsError::Pem { file: file.to_owned(), source };
    let chain = CertificateDer::pem_slice_iter(&read(certificate)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|source| pem_error(certificate, source))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { file: certificate.clone() });
    }
    let private = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|source| match source {
        pem::Error::NoItemsFound => TlsError::NoKey { file: key.clone() },
        source => pem_error(key, source),
    })?;
    let pair_error = |source| {
        let (certificate, key) = (certificate.clone(), key.clone());
        TlsError::Pair { certificate, key, source }
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(pair_error)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(pair_error)?;
    config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn read(file: &Path) -> Result<Vec<u8>, TlsError> {
    let error = |source| TlsError::Read { file: file.to_owned(), source };
    let open = File::open(file).map_err(error)?;
    let mut bytes = Vec::new();
    open.take(PEM_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > PEM_BYTES_MAX {
        return Err(TlsError::TooLarge { file: file.to_owned() });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
