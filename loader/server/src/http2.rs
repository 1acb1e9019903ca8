//! HTTP/2: which connections speak it, and what one of them may take. Over TLS it is negotiated; without
//! TLS a client begins with its preface, since it knows that the server speaks it.
//!
//! The streams of a connection share its place. Heads, bodies, slots and deadlines are those of
//! requests over HTTP/1.1.

use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustix::net::{RecvFlags, recv};
use tokio::{
    io::{Interest, Ready},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{connections::Said, tls};

/// What a client sends first, as of section 3.4 of RFC 9113.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Pause before a preface is looked at again of which a part has come.
const PREFACE_PAUSE: Duration = Duration::from_millis(5);
/// Bytes of a first message that are looked at; one with more of them counts as whole.
const FIRST_BYTES: usize = 2048;
/// Requests at once on one connection.
const STREAMS: u32 = 128;
/// Bytes of a request's head.
const HEAD_BYTES: u32 = 64 << 10;
/// Bytes that a connection's requests may send before they are read, all streams together.
const WINDOW_BYTES: u32 = 256 << 10;
/// Bytes of a response that wait to be sent.
const SEND_BYTES: usize = 64 << 10;
/// Interval and deadline of pings: a client that is gone frees its streams.
const PING: Duration = Duration::from_secs(20);

/// The version of HTTP that a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpVersion {
    One,
    Two,
}

/// How much of a client's first message is there: the head of a request, or TLS's first record.
pub(super) fn said(connection: &TcpStream, over_tls: bool) -> Said {
    let mut bytes = [0_u8; FIRST_BYTES];
    // The runtime does not know it yet of a new connection.
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let count = recv(connection, &mut bytes, flags).map_or(0, |(count, _)| count);
    match &bytes[..count] {
        [] => Said::Nothing,
        _ if count == bytes.len() => Said::Message,
        [_, _, _, high, low, record @ ..] if over_tls => {
            let whole = record.len() >= usize::from(u16::from_be_bytes([*high, *low]));
            if whole { Said::Message } else { Said::Part }
        }
        head if !over_tls && head.windows(4).any(|end| end == b"\r\n\r\n") => Said::Message,
        _ => Said::Part,
    }
}

impl HttpVersion {
    /// The version that a TLS handshake ended with.
    pub(super) fn negotiated(alpn: Option<&[u8]>) -> Self {
        if alpn == Some(tls::HTTP2) { Self::Two } else { Self::One }
    }

    /// The version of a connection without TLS, by its first bytes; nothing if they do not come within
    /// `limit`.
    pub(super) async fn peek(connection: &TcpStream, limit: Duration) -> Option<Self> {
        let first = async {
            let mut bytes = [0; PREFACE.len()];
            loop {
                // Whoever reads next finds the error, or the end.
                let Ok(count @ 1..) = connection.peek(&mut bytes).await else { return Self::One };
                if bytes[..count] != PREFACE[..count] {
                    return Self::One;
                }
                if count == PREFACE.len() {
                    return Self::Two;
                }
                // Nothing follows what a client sent before it closed.
                let ready = connection.ready(Interest::READABLE).await;
                if ready.is_ok_and(Ready::is_read_closed) {
                    return Self::One;
                }
                sleep(PREFACE_PAUSE).await;
            }
        };
        timeout(limit, first).await.ok()
    }
}

/// How connections are served.
pub(super) fn builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buf_size(SEND_BYTES)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING);
    builder
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, net};

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn first_messages_are_seen_without_being_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        let (connection, _) = listener.accept().await.unwrap();
        // A record of 258 bytes, and no head's end.
        let first = [&[22, 3, 1, 1, 2][..], &[b'x'; 257]].concat();
        let steps: [(&[u8], _); 4] = [
            (b"", (Said::Nothing, Said::Nothing)),
            (&first, (Said::Part, Said::Part)),
            (b"x", (Said::Part, Said::Message)),
            (b"\r\n\r\n", (Said::Message, Said::Message)),
        ];
        for (bytes, expected) in steps {
            client.write_all(bytes).unwrap();
            let arrives = async {
                while (said(&connection, false), said(&connection, true)) != expected {
                    sleep(PREFACE_PAUSE).await;
                }
            };
            timeout(Duration::from_mins(10), arrives).await.expect("as much was sent");
        }
    }
}
