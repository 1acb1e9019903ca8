//! Request bodies, within a budget of memory: whoever sends large ones waits for others that do, and
//! small ones never wait. Compressed bodies count as what they are decompressed.

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes, HttpBody as _},
    http::Request,
};
use hyper::body::Frame;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

use super::{
    AppState,
    content_coding::{Coding, decompress},
};
use crate::{
    error::{ApiError, ErrorKind},
    keys::KeySlot,
    tasks,
};

/// Memory of large bodies that are on their way or not parsed yet.
const BUDGET_KIB: u32 = 64 << 10;

/// Bodies up to this size are within no budget: connections bound their number.
const SMALL_BYTES: u64 = 64 << 10;

/// How long a body may take, whatever its size.
const GRACE: Duration = Duration::from_secs(5);

/// How fast the rest has to come, in bytes.
const LEAST_BYTES_PER_SECOND: f64 = 65_536.0;

/// What is left of the budget, in KiB.
pub(super) struct Budget(Arc<Semaphore>);

impl Default for Budget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET_KIB as usize)))
    }
}

impl Budget {
    /// Waits until there is memory for so many bytes.
    async fn part(&self, size: u64) -> Option<OwnedSemaphorePermit> {
        if size <= SMALL_BYTES {
            return None;
        }
        let kib = u32::try_from(size.div_ceil(1 << 10)).unwrap_or(BUDGET_KIB).min(BUDGET_KIB);
        // It is never closed.
        Arc::clone(&self.0).acquire_many_owned(kib).await.ok()
    }
}

/// A body that holds its part of the budget until it is dropped.
struct Held {
    body: Vec<u8>,
    _part: OwnedSemaphorePermit,
}

/// A body, and its part of the budget unless it is small.
type Charged = (Vec<u8>, Option<OwnedSemaphorePermit>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl AppState {
    /// Reads a request's body. One that says that it is far too large is refused before it is read; one
    /// that is a little too large is read and forgotten, so that its sender gets to read why.
    pub(super) async fn read_body(&self, request: Request<Body>) -> Result<Bytes, ApiError> {
        self.read_charged(request, None).await
    }

    /// The same, and the key pays for the bytes: before they are read where the request says how many
    /// there are, else as they come. It pays for what is decompressed as for what is sent.
    pub(super) async fn read_charged(
        &self,
        request: Request<Body>,
        key: Option<&KeySlot>,
    ) -> Result<Bytes, ApiError> {
        let codings = Coding::of(request.headers());
        // A body is read before its coding is refused: its sender is to read why.
        let (sent, part) = self.read_sent(request.into_body(), key).await?;
        let codings = codings?;
        let (body, part) = if codings.is_empty() {
            (sent, part)
        } else {
            self.decompressed(codings, sent, key).await?
        };
        Ok(match part {
            Some(part) => Bytes::from_owner(Held { body, _part: part }),
            None => body.into(),
        })
    }

    /// The bytes of a body as they are sent.
    async fn read_sent(&self, mut body: Body, key: Option<&KeySlot>) -> Result<Charged, ApiError> {
        let limit = self.limits.body_bytes;
        let size = body.size_hint().upper().unwrap_or(limit as u64);
        let too_large = || {
            let message = format!("the body is over {limit} bytes or was cut off");
            ApiError::new(ErrorKind::TooLarge, message)
        };
        if size > 2 * limit as u64 {
            return Err(too_large());
        }
        let known = body.size_hint().exact();
        if let (Some(key), Some(bytes)) = (key, known) {
            key.spend_bytes(bytes)?;
        }
        let pays = key.filter(|_| known.is_none());
        let is_kept = size <= limit as u64;
        let part = self.memory_of(if is_kept { size } else { 0 }).await?;
        let (begun, mut received) = (Instant::now(), 0);
        let mut bytes = Vec::new();
        while let Some(frame) = self.next_frame(&mut body, begun, received).await? {
            // The connection broke.
            let Ok(data) = frame.map_err(|_| too_large())?.into_data() else { continue };
            received += data.len();
            if let Some(key) = pays {
                key.spend_bytes(data.len() as u64)?;
            }
            if received > limit && is_kept {
                return Err(too_large());
            }
            if is_kept {
                bytes.extend_from_slice(&data);
            }
        }
        if is_kept { Ok((bytes, part)) } else { Err(too_large()) }
    }

    /// Part of the budget for so many bytes, unless they are few.
    async fn memory_of(&self, size: u64) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let part = timeout(self.limits.body_timeout, self.bodies.part(size)).await;
        part.map_err(|_| {
            let message = "the server has no memory left for large requests".to_owned();
            ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
        })
    }

    /// A body without its codings. What it will have is not known before, so there has to be memory for
    /// the largest; its part of the budget is given back where it turns out to be smaller.
    async fn decompressed(
        &self,
        codings: Vec<Coding>,
        sent: Vec<u8>,
        key: Option<&KeySlot>,
    ) -> Result<Charged, ApiError> {
        let (limit, sent_bytes) = (self.limits.body_bytes, sent.len() as u64);
        let mut part = self.memory_of(limit as u64).await?;
        // Megabytes take milliseconds, in which other connections are not served.
        let body = tasks::blocking(move || decompress(&codings, sent, limit)).await;
        let body = body.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
        let size = body.len() as u64;
        if let Some(key) = key {
            key.spend_bytes(size.saturating_sub(sent_bytes))?;
        }
        if size <= SMALL_BYTES {
            part = None;
        }
        if let Some(part) = &mut part {
            let kept = usize::try_from(size.div_ceil(1 << 10)).unwrap_or(usize::MAX);
            drop(part.split(part.num_permits().saturating_sub(kept)));
        }
        Ok((body, part))
    }

    /// The next piece of a body of which so many bytes have come.
    async fn next_frame(
        &self,
        body: &mut Body,
        begun: Instant,
        received: usize,
    ) -> Result<Option<Result<Frame<Bytes>, axum::Error>>, ApiError> {
        // Whoever trickles holds what others wait for.
        let pace = GRACE + Duration::from_secs_f64(received as f64 / LEAST_BYTES_PER_SECOND);
        let next = poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
        timeout_at(begun + pace.min(self.limits.body_timeout), next).await.map_err(|_| {
            let seconds = begun.elapsed().as_secs_f64();
            let message =
                format!("the body is too slow: {received} bytes came within {seconds:.0} seconds");
            ApiError::new(ErrorKind::SlowClient, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Waker},
    };

    use super::*;

    #[test]
    fn small_bodies_wait_for_no_memory() {
        let budget = Budget::default();
        let is_there = |size| {
            let part = pin!(budget.part(size)).poll(&mut Context::from_waker(Waker::noop()));
            part.is_ready()
        };
        let all = Arc::clone(&budget.0).try_acquire_many_owned(BUDGET_KIB).unwrap();
        assert!(is_there(0) && is_there(SMALL_BYTES) && !is_there(SMALL_BYTES + 1));
        drop(all);
        assert!(is_there(SMALL_BYTES + 1) && is_there(u64::MAX));
    }
}
