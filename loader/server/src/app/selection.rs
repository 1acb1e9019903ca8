//! The model of a request: found by its name, and waited for where it has to be loaded first.

use std::{borrow::Cow, sync::Arc};

use axum::http::Uri;
use shardpack_chat::sandbox::for_tenant;
use shardpack_engine_api::Tenant;

use super::{AppState, generate::failed, middleware::Caller};
use crate::{
    error::{ApiError, ErrorKind},
    keys::Key,
    registry::{Entered, Found, Need, Waiting},
    served_model::ServedModel,
    tasks,
};

/// Runs blocking work away from the threads that serve connections.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tasks::blocking(work).await.unwrap_or_else(|_| Err(failed()))
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
        caller: &Caller,
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
        let (app, key, tenant) = (Arc::clone(self), caller.key.clone(), caller.tenant);
        // In one go where the model is there.
        let read = self.reading(tenant, move || {
            let parsed = parse(&app)?;
            Ok(match app.find(key.as_deref(), name(&parsed), need)? {
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
                let prepared = self.reading(tenant, move || {
                    let prepared = prepare(&app, &entered, parsed)?;
                    Ok((entered, prepared))
                });
                prepared.await
            }
        }
    }

    /// Reads a request in its tenant's turn, away from the threads that serve connections.
    pub(super) async fn reading<T: Send + 'static>(
        &self,
        tenant: Tenant,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = self.reading.take(tenant.id).await;
        blocking(move || {
            // Held to the end, whether or not anybody waits for it.
            let _turn = turn;
            for_tenant(tenant.id, work)
        })
        .await
    }

    /// Waits until a model is loaded.
    pub(super) async fn enter(&self, waiting: Waiting) -> Result<Entered, ApiError> {
        self.models.enter(waiting, self.draining.subscribe()).await
    }
}

impl AppState {
    /// The name of the model that a key means. One that it may not use is unknown to it; where none is
    /// named, its first is meant.
    pub(super) fn permitted<'a>(
        &self,
        key: Option<&Key>,
        asked: Option<&'a str>,
    ) -> Result<Option<Cow<'a, str>>, ApiError> {
        let Some(key) = key.filter(|key| key.is_restricted()) else {
            return Ok(asked.map(Cow::Borrowed));
        };
        let own: Vec<Vec<String>> = self.models.names();
        let own: Vec<&Vec<String>> = own.iter().filter(|names| key.may_use(names)).collect();
        let found = match asked {
            None => own.first().map(|names| Cow::Owned(names[0].clone())),
            Some(asked) => own
                .iter()
                .any(|names| names.iter().any(|name| name == asked))
                .then_some(Cow::Borrowed(asked)),
        };
        found.map(Some).ok_or_else(|| {
            let names: Vec<&String> = own.into_iter().flatten().collect();
            let asked = asked.unwrap_or_default();
            let message = format!("model '{asked}' not found: expected one of {names:?}");
            let error = ApiError::new(ErrorKind::NotFound, message).with_code("model_not_found");
            ApiError { param: Some("model".to_owned()), ..error }
        })
    }

    /// The model that a request asks for with this key.
    pub(super) fn find(
        &self,
        key: Option<&Key>,
        asked: Option<&str>,
        need: Need,
    ) -> Result<Found, ApiError> {
        let permitted = self.permitted(key, asked)?;
        self.models.find(permitted.as_deref(), need)
    }
}

enum Read<R, T, M> {
    Whole(Entered, T),
    Waits(Waiting, R, M),
}

impl AppState {
    /// The model that a query names (`?model=NAME`), for what needs only its text side.
    pub(super) async fn of_query(
        &self,
        key: Option<&Arc<Key>>,
        uri: &Uri,
    ) -> Result<Arc<ServedModel>, ApiError> {
        let asked = query_value(uri, "model");
        match self.find(key.map(AsRef::as_ref), asked.as_deref(), Need::Text)? {
            Found::Entered(entered) => Ok(entered.served),
            Found::Waits(waiting) => Ok(self.enter(waiting).await?.served),
        }
    }
}

/// The first value of a name in a query.
pub(super) fn query_value(uri: &Uri, name: &str) -> Option<String> {
    let mut parts = uri.query().into_iter().flat_map(|query| query.split('&'));
    parts.find_map(|part| part.strip_prefix(name)?.strip_prefix('=')).map(decoded)
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
