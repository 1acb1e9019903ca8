//! HTTP/2: requests that share a connection, and connections that ask for nothing.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    http::{Request, StatusCode, Version},
};
use h2::{RecvStream, client::SendRequest};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
};

use super::{
    STOP, ServerLimits, kjv,
    scripted::{HANG, PATIENT, Scripted, Step, start_at, start_changed, start_with},
};
use crate::Tls;
use shardpack_chat::ChatModel;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An empty frame of settings.
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// `GET /health` as the headers of stream 1: method and scheme by their indices, path and authority as literals.
const GET_HEALTH: [u8; 31] =
    *b"\x00\x00\x16\x01\x05\x00\x00\x00\x01\x82\x86\x04\x07/health\x01\x09localhost";

/// A client's end of a connection. The task ends when the connection does.
async fn shake(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    (sender, tokio::spawn(connection))
}

async fn connect(server: &Scripted) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    shake(TcpStream::connect(server.address).await.unwrap()).await
}

/// A chat completion's status and body.
async fn chat(sender: &SendRequest<Bytes>, authority: &str, more: &str) -> (StatusCode, String) {
    let body = format!(r#"{{"messages":[{{"role":"user","content":"a"}}],{more}}}"#);
    let uri = format!("http://{authority}/v1/chat/completions");
    let request = Request::post(uri).version(Version::HTTP_2);
    let request = request.header("content-type", "application/json").body(()).unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    let (response, mut sent) = sender.send_request(request, false).unwrap();
    sent.send_data(body.into(), true).unwrap();
    let response = timeout(HANG, response).await.unwrap().unwrap();
    (response.status(), read(response.into_body()).await)
}

async fn read(mut body: RecvStream) -> String {
    let mut text = Vec::new();
    while let Some(piece) = timeout(HANG, body.data()).await.unwrap() {
        let piece = piece.unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        text.extend_from_slice(&piece);
    }
    String::from_utf8(text).unwrap()
}

fn says(limits: ServerLimits) -> Scripted {
    let script = vec![Step::Say("Jesus"), Step::Say(" wept."), STOP];
    start_with(script, limits, ChatModel::open(kjv()).unwrap())
}

#[tokio::test]
async fn requests_share_a_connection() {
    let server = says(PATIENT);
    let (sender, connection) = connect(&server).await;
    let authority = server.address.to_string();
    let whole = chat(&sender, &authority, r#""max_tokens":5"#);
    let stream = chat(&sender, &authority, r#""stream":true"#);
    let stranger = chat(&sender, "evil.example", r#""max_tokens":5"#);
    let (whole, stream, stranger) = tokio::join!(whole, stream, stranger);
    assert_eq!(whole.0, StatusCode::OK);
    assert!(whole.1.contains("Jesus wept."), "{}", whole.1);
    assert!(stream.1.ends_with("data: [DONE]\n\n"), "{}", stream.1);
    // The name stands in the address here, and not in `Host`.
    assert_eq!(stranger.0, StatusCode::FORBIDDEN);
    assert!(stranger.1.contains("host_not_allowed"), "{}", stranger.1);
    drop(sender);
    timeout(HANG, connection).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn tls_negotiates_it() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let files = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
    std::fs::write(&files[0], made.cert.pem()).unwrap();
    std::fs::write(&files[1], made.signing_key.serialize_pem()).unwrap();
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_changed(vec![STOP], PATIENT, model, |server| {
        server.with_tls(Tls::open(&files[0], &files[1], Box::new(|_| {})).unwrap())
    });
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    // A client that knows both takes the second version.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = TcpStream::connect(server.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
    let (sender, _connection) = shake(stream).await;
    assert_eq!(chat(&sender, "localhost", r#""max_tokens":5"#).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_connection_that_asks_for_nothing_ends() {
    let limits = ServerLimits { head_timeout: Duration::from_millis(100), ..PATIENT };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // A part of the preface, the preface and nothing else, and a client that asks once. Its request is there before
    // the server is, so it never waits for it.
    let mut half = TcpStream::connect(address).await.unwrap();
    half.write_all(&PREFACE[..10]).await.unwrap();
    let mut silent = TcpStream::connect(address).await.unwrap();
    silent.write_all(PREFACE).await.unwrap();
    let mut once = TcpStream::connect(address).await.unwrap();
    once.write_all(&[PREFACE, &SETTINGS, &GET_HEALTH[..]].concat()).await.unwrap();
    let _server = start_at(listener, vec![STOP], limits, ChatModel::open(kjv()).unwrap(), |it| it);
    let mut answer = Vec::new();
    // Closed or reset: what it sent was not read.
    let _ = timeout(HANG, half.read_to_end(&mut answer)).await.unwrap();
    assert!(answer.is_empty(), "{answer:?}");
    let _ = timeout(HANG, silent.read_to_end(&mut answer)).await.unwrap();
    // It is answered, and told that the connection ends: it may ask on another one.
    let (mut kinds, mut answer) = (Vec::new(), Vec::new());
    let _ = timeout(HANG, once.read_to_end(&mut answer)).await.unwrap();
    let mut rest = &answer[..];
    while let [high, middle, low, kind, _flags, _, _, _, _, after @ ..] = rest {
        let size = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
        if *kind == 7 {
            assert_eq!(after[4..size], [0; 4], "no error");
        }
        kinds.push(*kind);
        rest = &after[size..];
    }
    let at = |wanted: u8| kinds.iter().position(|kind| *kind == wanted);
    assert!(at(1).is_some() && at(1) < at(7), "HEADERS, then GOAWAY: {kinds:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_give_way_and_those_with_a_request_stay() {
    let limits = ServerLimits { connections: 16, ..PATIENT };
    let script = vec![Step::Say("Jesus"), Step::Gate, Step::Say(" wept."), STOP];
    let server = start_with(script, limits, ChatModel::open(kjv()).unwrap());
    let (sender, _connection) = connect(&server).await;
    let authority = server.address.to_string();
    let running = tokio::spawn(async move { chat(&sender, &authority, r#""stream":true"#).await });
    tokio::task::block_in_place(|| server.submitted());
    let mut others = Vec::new();
    for _ in 0..40 {
        others.push(connect(&server).await);
    }
    let ended = |other: &(_, JoinHandle<Result<(), h2::Error>>)| other.1.is_finished();
    timeout(HANG, async {
        while others.iter().filter(|other| !ended(other)).count() > 15 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    server.gate.send(()).unwrap();
    let (status, body) = running.await.unwrap();
    assert!(status == StatusCode::OK && body.ends_with("data: [DONE]\n\n"), "{body}");
}

#[tokio::test]
async fn a_client_that_leaves_within_the_preface_leaves_nothing_behind() {
    let server = says(PATIENT);
    let mut half = TcpStream::connect(server.address).await.unwrap();
    half.write_all(&PREFACE[..1]).await.unwrap();
    half.shutdown().await.unwrap();
    // It is closed from the other side too, long before a head would have to be there.
    let _ = timeout(HANG, half.read_to_end(&mut Vec::new())).await.unwrap();
}
