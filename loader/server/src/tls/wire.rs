//! A client's connection, encrypted or not, as one type: HTTP is compiled once for both.

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

/// A connection.
pub(crate) enum Wire {
    /// TCP.
    Plain(TcpStream),
    /// TLS over TCP.
    Encrypted(Box<TlsStream<TcpStream>>),
}

/// Calls a method of the connection that there is.
macro_rules! forward {
    ($wire:ident.$method:ident($($argument:expr),*)) => {
        match $wire.get_mut() {
            Self::Plain(wire) => Pin::new(wire).$method($($argument),*),
            Self::Encrypted(wire) => Pin::new(wire).$method($($argument),*),
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        forward!(self.poll_read(context, buffer))
    }
}

impl AsyncWrite for Wire {
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
            Self::Plain(wire) => wire.is_write_vectored(),
            Self::Encrypted(wire) => wire.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        forward!(self.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        forward!(self.poll_shutdown(context))
    }
}
