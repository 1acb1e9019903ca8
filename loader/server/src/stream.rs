//! Streaming responses.

use std::{
    convert::Infallible,
    future::Future,
    pin::{Pin, pin},
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
    runtime::Handle,
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

use super::{
    dialect::Writer,
    error::ApiError,
    generation::{ChoiceUpdate, Generation},
    tasks,
};

/// Frames between the writing task and the connection: enough to fill a packet, few enough that a
/// slow client is noticed.
const FRAMES_AHEAD: usize = 16;
/// Updates of one frame: some hundredths of a millisecond of work.
const STEPS_PER_FRAME: u32 = 32;

/// Timeouts of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamOptions {
    /// Interval of keep-alive frames.
    pub(super) keep_alive: Duration,
    /// Longest time in which the client may read nothing.
    pub(super) write_timeout: Duration,
}

/// Responds with a stream; its first update may be known already.
pub(super) fn respond(
    generation: Generation,
    first: Option<ChoiceUpdate>,
    writer: Box<dyn Writer>,
    options: StreamOptions,
    writers: &Handle,
) -> Response {
    let (frames, receiver) = mpsc::channel(FRAMES_AHEAD);
    let content_type = HeaderValue::from_static(writer.content_type());
    let task = Task { generation, writer, frames, options };
    writers.spawn(tasks::task(async move {
        // `None`: the client has left, and dropping the task's generation cancels the request.
        let _: Option<()> = task.run(first).await;
    }));
    events(content_type, Body::from_stream(Frames(receiver)))
}

/// Responds with a stream whose generation begins later, or ends with an error before. Comments keep
/// it open, where its form has any.
pub(super) fn respond_later(
    begin: impl Future<Output = Result<(Generation, Box<dyn Writer>), (ApiError, Box<dyn Writer>)>>
    + Send
    + 'static,
    [content_type, comment]: [&'static str; 2],
    options: StreamOptions,
    writers: &Handle,
) -> Response {
    let (frames, receiver) = mpsc::channel(FRAMES_AHEAD);
    writers.spawn(tasks::task(async move {
        // As for a generation that has begun.
        let _: Option<()> = wait(begin, comment, frames, options).await;
    }));
    events(HeaderValue::from_static(content_type), Body::from_stream(Frames(receiver)))
}

async fn wait(
    begin: impl Future<Output = Result<(Generation, Box<dyn Writer>), (ApiError, Box<dyn Writer>)>>
    + Send
    + 'static,
    comment: &str,
    frames: mpsc::Sender<Bytes>,
    options: StreamOptions,
) -> Option<()> {
    let mut begin = pin!(begin);
    let begun = loop {
        send(&frames, &mut comment.to_owned(), options).await?;
        let deadline = Instant::now() + options.keep_alive;
        tokio::select! {
            biased;
            () = frames.closed() => return None,
            begun = timeout_at(deadline, &mut begin) => if let Ok(begun) = begun { break begun; },
        }
    };
    match begun {
        Ok((generation, writer)) => Task { generation, writer, frames, options }.run(None).await,
        Err((error, mut writer)) => {
            let mut out = String::new();
            writer.begin(&mut out);
            writer.fail(&error, &mut out);
            send(&frames, &mut out, options).await
        }
    }
}

/// Responds with a stream that holds only an error.
pub(super) fn refuse(mut writer: Box<dyn Writer>, error: &ApiError) -> Response {
    let mut out = String::new();
    writer.begin(&mut out);
    writer.fail(error, &mut out);
    events(HeaderValue::from_static(writer.content_type()), Body::from(out))
}

fn events(content_type: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, content_type);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx must not buffer events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Task {
    generation: Generation,
    writer: Box<dyn Writer>,
    frames: mpsc::Sender<Bytes>,
    options: StreamOptions,
}

impl Task {
    async fn run(mut self, first: Option<ChoiceUpdate>) -> Option<()> {
        let mut out = String::new();
        self.writer.begin(&mut out);
        if let Some(update) = first {
            self.writer.update(update, &mut out);
        }
        self.send(&mut out).await?;
        loop {
            let mut update = self.next().await?;
            // Updates that are ready go into the same frame, up to a limit for fairness.
            let mut left = STEPS_PER_FRAME;
            loop {
                match update {
                    Ok(Some(update)) => self.writer.update(update, &mut out),
                    Ok(None) => break,
                    Err(error) => {
                        self.generation.drain();
                        self.generation.record().streamed(Some(&error));
                        self.writer.fail(&error, &mut out);
                        return self.send(&mut out).await;
                    }
                }
                left -= 1;
                if left == 0 {
                    break;
                }
                update = self.generation.next_ready();
            }
            if self.generation.is_done() {
                // Before its client can know that it is complete.
                self.generation.record().streamed(None);
                self.writer.end(&mut out);
                return self.send(&mut out).await;
            }
            self.send(&mut out).await?;
        }
    }

    /// The next update; sends keep-alive frames until then.
    async fn next(&mut self) -> Option<Result<Option<ChoiceUpdate>, ApiError>> {
        loop {
            let deadline = Instant::now() + self.options.keep_alive;
            tokio::select! {
                biased;
                () = self.frames.closed() => return None,
                update = timeout_at(deadline, self.generation.next()) => {
                    if let Ok(update) = update {
                        return Some(update);
                    }
                    let mut frame = self.writer.keep_alive().to_owned();
                    self.send(&mut frame).await?;
                }
            }
        }
    }

    async fn send(&mut self, out: &mut String) -> Option<()> {
        send(&self.frames, out, self.options).await
    }
}

async fn send(
    frames: &mpsc::Sender<Bytes>,
    out: &mut String,
    options: StreamOptions,
) -> Option<()> {
    if out.is_empty() {
        return Some(());
    }
    let frame = Bytes::from(std::mem::take(out));
    timeout(options.write_timeout, frames.send(frame)).await.ok()?.ok()
}

/// The frames as a body.
pub(super) struct Frames(pub(super) mpsc::Receiver<Bytes>);

impl Stream for Frames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}
