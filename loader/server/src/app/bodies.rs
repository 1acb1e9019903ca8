//! Request bodies, within a budget of memory: whoever sends large ones waits for others that do, and
//! small ones never wait.

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

use super::AppState;
use crate::{
    error::{ApiError, ErrorKind},
    keys::KeySlot,
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
    /// there are, else as they come.
    pub(super) async fn read_charged(
        &self,
        request: Request<Body>,
        key: Option<&KeySlot>,
    ) -> Result<Bytes, ApiError> {
        let limit = self.limits.body_bytes;
        let mut body = request.into_body();
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
        let part =
            timeout(self.limits.body_timeout, self.bodies.part(if is_kept { size } else { 0 }));
        let part = part.await.map_err(|_| {
            let message = "the server has no memory left for large requests".to_owned();
            ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full")
        })?;
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
        match part {
            _ if !is_kept => Err(too_large()),
            Some(part) => Ok(Bytes::from_owner(Held { body: bytes, _part: part })),
            None => Ok(bytes.into()),
        }
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
