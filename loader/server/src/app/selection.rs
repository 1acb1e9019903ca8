//! The model of a request: found by its name, and waited for where it has to be loaded first.

use std::sync::Arc;

use axum::http::Uri;
use tokio::task::spawn_blocking;

use super::{AppState, generate::failed};
use crate::{
    error::ApiError,
    registry::{Entered, Found, Need, Waiting},
    served_model::ServedModel,
};

/// Runs blocking work away from the threads that serve connections.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    spawn_blocking(work).await.unwrap_or_else(|_| Err(failed()))
}

/// How a request is read: what it is, which model it names, and what it is for that model.
pub(super) struct Reading<P, R, M> {
    /// Parses it.
    pub(super) parse: P,
    /// The model that it names, if any.
    pub(super) name: fn(&R) -> Option<&str>,
    /// Prepares it.
    pub(super) prepare: M,
}

impl AppState {
    /// Reads a request, away from the threads that serve connections, and waits for its model.
    pub(super) async fn read<R, T>(
        self: &Arc<Self>,
        need: Need,
        reading: Reading<
            impl FnOnce(&Self) -> Result<R, ApiError> + Send + 'static,
            R,
            impl FnOnce(&Self, &Entered, R) -> Result<T, ApiError> + Send + 'static,
        >,
    ) -> Result<(Entered, T), ApiError>
    where
        R: Send + 'static,
        T: Send + 'static,
    {
        let Reading { parse, name, prepare } = reading;
        let app = Arc::clone(self);
        // In one go where the model is there.
        let read = blocking(move || {
            let parsed = parse(&app)?;
            Ok(match app.models.find(name(&parsed), need)? {
                Found::Entered(entered) => {
                    let prepared = prepare(&app, &entered, parsed)?;
                    Read::Whole(entered, prepared)
                }
                Found::Waits(waiting) => Read::Waits(waiting, parsed, prepare),
            })
        });
        match read.await? {
            Read::Whole(entered, prepared) => Ok((entered, prepared)),
            Read::Waits(waiting, parsed, prepare) => {
                let entered = self.enter(waiting).await?;
                let app = Arc::clone(self);
                blocking(move || {
                    let prepared = prepare(&app, &entered, parsed)?;
                    Ok((entered, prepared))
                })
                .await
            }
        }
    }

    /// Waits until a model is loaded.
    pub(super) async fn enter(&self, waiting: Waiting) -> Result<Entered, ApiError> {
        self.models.enter(waiting, self.draining.subscribe()).await
    }
}

enum Read<R, T, M> {
    Whole(Entered, T),
    Waits(Waiting, R, M),
}

impl AppState {
    /// The model that a query names (`?model=NAME`), for what needs only its text side.
    pub(super) async fn of_query(&self, uri: &Uri) -> Result<Arc<ServedModel>, ApiError> {
        let asked = uri.query().into_iter().flat_map(|query| query.split('&'));
        let asked = asked.filter_map(|part| part.strip_prefix("model=")).map(decoded).next();
        match self.models.find(asked.as_deref(), Need::Text)? {
            Found::Entered(entered) => Ok(entered.served),
            Found::Waits(waiting) => Ok(self.enter(waiting).await?.served),
        }
    }
}

/// The text of a query's value: `%2F` is a slash, and what is no such escape stays as it is.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(value) if byte == b'%' => {
                bytes.push(value);
                rest = &after[2..];
            }
            _ => {
                bytes.push(if byte == b'+' { b' ' } else { byte });
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
