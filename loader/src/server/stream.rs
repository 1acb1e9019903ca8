//! Server-sent events: an answer written piece by piece while it is made.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use futures_core::Stream;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

use super::{
    chat::Writer,
    error::ApiError,
    generation::{Generation, Piece},
};

/// Frames between the writing task and the connection: enough to fill a packet, few enough that a
/// slow client is noticed.
const FRAMES_AHEAD: usize = 16;

/// How a stream is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamOptions {
    /// Whether a chunk with the usage follows the last.
    pub(super) include_usage: bool,
    /// Longest silence towards the client.
    pub(super) keep_alive: Duration,
    /// Longest time in which a client takes nothing.
    pub(super) write_timeout: Duration,
}

/// Answers with the stream of an answer whose first piece may be known already.
pub(super) fn respond(
    generation: Generation,
    first: Option<Piece>,
    writer: Writer,
    options: StreamOptions,
) -> Response {
    let (frames, receiver) = mpsc::channel(FRAMES_AHEAD);
    let task = Task { generation, writer, frames, options };
    tokio::spawn(async move {
        // `None`: the client has left, and dropping the task's generation cancels the request.
        let _: Option<()> = task.run(first).await;
    });
    let mut response = Response::new(Body::from_stream(Frames(receiver)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies must not collect events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Task {
    generation: Generation,
    writer: Writer,
    frames: mpsc::Sender<Bytes>,
    options: StreamOptions,
}

impl Task {
    async fn run(mut self, first: Option<Piece>) -> Option<()> {
        self.data(&self.writer.start()).await?;
        let mut piece = first.map(Ok);
        loop {
            let next = match piece.take() {
                Some(next) => next,
                None => self.next().await?,
            };
            match next {
                Ok(Piece::Text(text)) => self.data(&self.writer.text(&text)).await?,
                Ok(Piece::End(reason, usage)) => {
                    self.data(&self.writer.end(reason)).await?;
                    if self.options.include_usage {
                        self.data(&self.writer.usage(usage)).await?;
                    }
                    return self.data("[DONE]").await;
                }
                Err(error) => return self.data(&error_json(&error)).await,
            }
        }
    }

    /// The next piece; comments keep the connection alive until then.
    async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        loop {
            let deadline = Instant::now() + self.options.keep_alive;
            tokio::select! {
                biased;
                () = self.frames.closed() => return None,
                piece = timeout_at(deadline, self.generation.next()) => match piece {
                    Ok(piece) => return Some(piece),
                    Err(_) => self.send(Bytes::from_static(b": keep-alive\n\n")).await?,
                },
            }
        }
    }

    async fn data(&self, data: &str) -> Option<()> {
        self.send(Bytes::from(format!("data: {data}\n\n"))).await
    }

    async fn send(&self, frame: Bytes) -> Option<()> {
        timeout(self.options.write_timeout, self.frames.send(frame)).await.ok()?.ok()
    }
}

fn error_json(error: &ApiError) -> String {
    serde_json::to_string(&error.body()).expect("strings are always JSON")
}

/// The frames as a body.
struct Frames(mpsc::Receiver<Bytes>);

impl Stream for Frames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}
