//! A client's stream, plain or encrypted, as one type, so that HTTP is compiled once for both.

use std::{
    io::{IoSlice, Result},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

/// A client's stream.
pub(crate) enum ClientStream {
    /// TCP.
    Plain(TcpStream),
    /// TLS over TCP.
    Encrypted(Box<TlsStream<TcpStream>>),
}

/// Calls a method of the inner stream.
macro_rules! forward {
    ($stream:ident.$method:ident($($argument:expr),*)) => {
        match $stream.get_mut() {
            Self::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Self::Encrypted(stream) => Pin::new(stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        forward!(self.poll_read(context, buffer))
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        forward!(self.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        forward!(self.poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        forward!(self.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        forward!(self.poll_shutdown(context))
    }
}
