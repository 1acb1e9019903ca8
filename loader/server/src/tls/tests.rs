//! Certificates made here, and a client that checks them.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::mpsc,
};

use rcgen::generate_simple_self_signed;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, pki_types::ServerName,
};

use super::*;

/// A certificate and its key in files, and the certificate as clients trust it.
struct Pair {
    folder: TempDir,
    trusted: CertificateDer<'static>,
}

impl Pair {
    fn new() -> Self {
        let pair = Self { folder: tempfile::tempdir().unwrap(), trusted: Vec::new().into() };
        let trusted = pair.renew();
        Self { trusted, ..pair }
    }

    fn certificate(&self) -> PathBuf {
        self.folder.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    /// Writes another pair to the same files.
    fn renew(&self) -> CertificateDer<'static> {
        let made = generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        fs::write(self.certificate(), made.cert.pem()).unwrap();
        fs::write(self.key(), made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    }

    fn open(&self) -> Result<Tls, TlsError> {
        Tls::open(&self.certificate(), &self.key(), Box::new(|_| {}))
    }
}

/// What the server answers to a client that trusts this certificate alone.
fn get(address: SocketAddr, trusted: &CertificateDer<'static>, path: &str) -> io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(address)?);
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A server of connections behind TLS that says to each what it asked for.
fn echo(tls: Arc<Tls>) -> SocketAddr {
    let (told, address) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.send(listener.local_addr().unwrap()).unwrap();
            loop {
                let (connection, _) = listener.accept().await.unwrap();
                let tls = Arc::clone(&tls);
                tokio::spawn(async move {
                    let Ok(mut stream) = tls.accept(connection).await else { return };
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(stream.read_u8().await.unwrap());
                    }
                    let head = String::from_utf8(head).unwrap();
                    let path = head.split(' ').nth(1).unwrap();
                    let answer = format!("HTTP/1.1 200 OK\r\n\r\n{path}");
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    stream.shutdown().await.unwrap();
                });
            }
        });
    });
    address.recv().unwrap()
}

#[test]
fn clients_that_trust_the_certificate_are_served_and_silent_ones_keep_nobody_waiting() {
    let pair = Pair::new();
    let address = echo(Arc::new(pair.open().unwrap()));
    let _silent: Vec<TcpStream> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    let answer = get(address, &pair.trusted, "/hello").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("/hello"), "{answer}");
    let stranger = Pair::new();
    get(address, &stranger.trusted, "/hello").unwrap_err();
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[test]
fn a_new_pair_is_taken_and_a_bad_one_is_not() {
    let pair = Pair::new();
    let tls = Arc::new(pair.open().unwrap());
    let address = echo(Arc::clone(&tls));
    assert!(!tls.reload(Force::IfChanged).unwrap());
    assert!(tls.reload(Force::Always).unwrap());
    let renewed = pair.renew();
    tls.reload(Force::Always).unwrap();
    get(address, &renewed, "/").unwrap();
    get(address, &pair.trusted, "/").unwrap_err();
    fs::write(pair.key(), "half a file, longer or shorter than the one before").unwrap();
    let error = tls.reload(Force::IfChanged).unwrap_err();
    assert!(matches!(error, TlsError::NoKey { .. }), "{error}");
    assert!(!tls.reload(Force::IfChanged).unwrap(), "it is complained of once");
    get(address, &renewed, "/").unwrap();
}

#[test]
fn what_came_of_reading_the_files_again_is_an_event() {
    let (pair, events) = (Pair::new(), ServerEvents::default());
    let tls = pair.open().unwrap().with_events(events.clone());
    tls.reload_and_tell(Force::IfChanged);
    assert_eq!(events.last(), 0, "nothing has changed");
    tls.reload_now();
    fs::write(pair.certificate(), "").unwrap();
    tls.reload_and_tell(Force::IfChanged);
    // A bad pair is told of once.
    tls.reload_and_tell(Force::IfChanged);
    let told = events.after(0);
    let kinds: Vec<&str> = told.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, ["certificate_reloaded", "certificate_refused"]);
    assert!(told[0].text.contains("cert.pem and ") && told[0].text.ends_with("key.pem read again"));
    assert!(told[1].text.starts_with("cannot reload, the certificate in use stays: "), "{told:?}");
    assert!(told[1].text.contains("cert.pem: holds no certificate"), "{told:?}");
    assert!(told.iter().all(|event| event.model.is_none()), "it is the whole server's");
}

#[test]
fn what_cannot_be_used_is_named_with_its_file() {
    let check = |change: &dyn Fn(&Pair), words: &[&str]| {
        let pair = Pair::new();
        change(&pair);
        let error = pair.open().err().unwrap().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    check(&|pair| fs::remove_file(pair.certificate()).unwrap(), &["cert.pem", "cannot be read"]);
    check(&|pair| fs::remove_file(pair.key()).unwrap(), &["key.pem", "cannot be read"]);
    check(&|pair| fs::write(pair.certificate(), "").unwrap(), &["cert.pem", "no certificate"]);
    let swapped = |pair: &Pair| {
        fs::copy(pair.certificate(), pair.key()).unwrap();
    };
    check(&swapped, &["key.pem", "no private key"]);
    let broken = "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n";
    check(&|pair| fs::write(pair.certificate(), broken).unwrap(), &["cert.pem", "not PEM"]);
    let huge = |pair: &Pair| {
        fs::write(pair.key(), vec![b' '; PEM_BYTES_MAX as usize + 1]).unwrap();
    };
    check(&huge, &["key.pem", "over 1048576 bytes"]);
    let strangers = |pair: &Pair| {
        fs::copy(Pair::new().key(), pair.key()).unwrap();
    };
    check(&strangers, &["cert.pem", "key.pem", "together"]);
}
