//! What a client is told when a request fails: a status and an error in the `OpenAI` shape. The
//! other dialects dress the same [`ApiError`] differently.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

/// An error for a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct ApiError {
    /// The class, from which the status follows.
    pub(super) kind: ErrorKind,
    /// A sentence for people.
    pub(super) message: String,
    /// The parameter at fault, as a path (`messages[3].content`).
    pub(super) param: Option<String>,
    /// A machine-readable name, where clients know one.
    pub(super) code: Option<&'static str>,
}

/// Classes of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// The request can never succeed as it is.
    Invalid,
    /// Nothing lives at this address or by this name.
    NotFound,
    /// The address exists, the method does not.
    MethodNotAllowed,
    /// The body is larger than the server takes.
    TooLarge,
    /// The client was too slow to send its request.
    SlowClient,
    /// The same request may succeed later.
    Unavailable,
    /// The engine gave no answer in time.
    Timeout,
    /// A fault of the server's own.
    Internal,
}

/// Seconds after which a client should ask again.
const RETRY_AFTER_SECONDS: u32 = 2;

impl ErrorKind {
    const fn status(self) -> StatusCode {
        match self {
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowClient => StatusCode::REQUEST_TIMEOUT,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `type` that `OpenAI` clients know.
    const fn name(self) -> &'static str {
        match self {
            Self::Invalid | Self::NotFound | Self::MethodNotAllowed | Self::TooLarge => {
                "invalid_request_error"
            }
            Self::Unavailable => "service_unavailable",
            Self::SlowClient | Self::Timeout => "timeout",
            Self::Internal => "server_error",
        }
    }
}

impl ApiError {
    /// An error without parameter and code.
    #[must_use]
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None }
    }

    /// A parameter that cannot be honoured.
    #[must_use]
    pub(super) fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::Invalid, message) }
    }

    /// Adds the machine-readable name.
    #[must_use]
    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The body in the `OpenAI` shape: `{"error": {message, type, param, code}}`.
    #[must_use]
    pub(super) fn body(&self) -> impl Serialize + '_ {
        #[derive(Serialize)]
        struct Body<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            #[serde(rename = "type")]
            kind: &'static str,
            param: Option<&'a str>,
            code: Option<&'static str>,
        }
        Body {
            error: Inner {
                message: &self.message,
                kind: self.kind.name(),
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.kind.status(), axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        // Clients of OpenAI repeat every 408 and 5xx unless told: most of ours are deterministic.
        let retry = matches!(self.kind, ErrorKind::Unavailable | ErrorKind::SlowClient);
        headers.insert(
            "x-should-retry",
            HeaderValue::from_static(if retry { "true" } else { "false" }),
        );
        if self.kind == ErrorKind::Unavailable {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER_SECONDS.into());
        }
        if matches!(self.kind, ErrorKind::TooLarge | ErrorKind::SlowClient) {
            // The rest of the body is not read, so the connection cannot serve another request.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
