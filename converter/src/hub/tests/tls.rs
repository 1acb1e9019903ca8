//! A gate that speaks TLS, before a server that does not.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::Arc,
    thread,
};

use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// A file of this folder, see `tls/make.sh`.
pub(super) fn file(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src/hub/tests/tls")).join(name)
}

/// Listens on this machine and hands requests on to the server at this address; its own address.
pub(super) fn gate(server: &str) -> String {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let certificate = CertificateDer::from_pem_file(file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(file("server.key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let server = server.trim_start_matches("http://").to_owned();
    let gate = address.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (config, server) = (Arc::clone(&config), server.clone());
            let gate = gate.clone();
            // A client that trusts nobody hangs up.
            thread::spawn(move || hand_on(config, stream.unwrap(), [&server, &gate]));
        }
    });
    address
}

/// One request and its answer, which ends with the connection.
fn hand_on(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    [server, gate]: [&str; 2],
) -> std::io::Result<()> {
    let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut outside = BufReader::new(StreamOwned::new(connection, stream));
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if outside.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let mut inside = TcpStream::connect(server)?;
    inside.write_all(head.as_bytes())?;
    let mut answer = Vec::new();
    inside.read_to_end(&mut answer)?;
    // Pages follow one another under the name by which the first was asked for.
    let link = format!("<http://{server}").into_bytes();
    if let Some(at) = answer.windows(link.len()).position(|window| window == link) {
        answer.splice(at..at + link.len(), format!("<{gate}").into_bytes());
    }
    let outside = outside.get_mut();
    outside.write_all(&answer)?;
    outside.conn.send_close_notify();
    outside.flush()
}
