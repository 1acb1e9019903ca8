//! API errors: HTTP status and body. Handlers know nothing of dialects: an [`ApiError`] travels
//! with its response, and `middleware` writes it in the format of the request's dialect.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::output::OutputPlanError;

/// The code of a prompt that is longer than the context.
pub(super) const CONTEXT_LENGTH_EXCEEDED: &str = "context_length_exceeded";

/// Codings in which request bodies may be compressed.
pub(super) const ACCEPTED_CODINGS: &str = "gzip, deflate, zstd";

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
    /// Milliseconds after which the same request may succeed, where that is known.
    pub(super) retry_after_ms: Option<u64>,
}

/// Classes of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// The request can never succeed as it is.
    Invalid,
    /// Missing or unknown API key.
    Unauthenticated,
    /// The API key lacks the scope.
    Forbidden,
    /// Unknown path, model or id.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The body is larger than the server takes.
    TooLarge,
    /// The body is compressed in a way that the server does not read.
    UnsupportedCoding,
    /// The client was too slow to send its request.
    SlowClient,
    /// The API key's rate limit is reached.
    RateLimited,
    /// The same request may succeed later.
    Unavailable,
    /// The engine gave no answer in time.
    Timeout,
    /// A bug in the server.
    Internal,
}

/// How a dialect writes its errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// `{"error": {message, type, param, code}}`.
    OpenAi,
    /// `{"type": "error", "error": {type, message}}`.
    Anthropic,
    /// `{"error": message}`.
    Ollama,
}

/// Milliseconds after which a client should ask a busy server again.
const RETRY_AFTER_MS: u64 = 2000;
/// The status with which Anthropic's service says that it has too much to do.
const OVERLOADED: u16 = 529;

impl ErrorKind {
    fn status(self, shape: Shape) -> StatusCode {
        match self {
            Self::Invalid => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedCoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::SlowClient => StatusCode::REQUEST_TIMEOUT,
            Self::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable if shape == Shape::Anthropic => {
                StatusCode::from_u16(OVERLOADED).expect("three digits")
            }
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `type` that `OpenAI` clients know.
    const fn name(self) -> &'static str {
        match self {
            Self::Invalid
            | Self::NotFound
            | Self::MethodNotAllowed
            | Self::TooLarge
            | Self::UnsupportedCoding => "invalid_request_error",
            Self::Unauthenticated => "authentication_error",
            Self::Forbidden => "permission_error",
            Self::RateLimited => "rate_limit_error",
            Self::Unavailable => "service_unavailable",
            Self::SlowClient | Self::Timeout => "timeout",
            Self::Internal => "server_error",
        }
    }

    /// The `type` that Anthropic clients know.
    const fn anthropic_name(self) -> &'static str {
        match self {
            Self::Invalid | Self::MethodNotAllowed | Self::UnsupportedCoding | Self::SlowClient => {
                "invalid_request_error"
            }
            Self::Unauthenticated => "authentication_error",
            Self::Forbidden => "permission_error",
            Self::NotFound => "not_found_error",
            Self::TooLarge => "request_too_large",
            Self::RateLimited => "rate_limit_error",
            Self::Unavailable => "overloaded_error",
            Self::Timeout => "timeout_error",
            Self::Internal => "api_error",
        }
    }
}

impl ApiError {
    /// An error without parameter and code.
    #[must_use]
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None, retry_after_ms: None }
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

    /// The body in a dialect's shape.
    #[must_use]
    pub(super) fn shaped(&self, shape: Shape) -> Value {
        let Self { kind, message, param, code, .. } = self;
        match shape {
            Shape::OpenAi => {
                let kind = kind.name();
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Shape::Anthropic => {
                let kind = kind.anthropic_name();
                json!({"type": "error", "error": {"type": kind, "message": message}})
            }
            Shape::Ollama => json!({"error": message}),
        }
    }

    /// The whole response in a dialect's shape.
    #[must_use]
    pub(super) fn response(self, shape: Shape) -> Response {
        let status = self.kind.status(shape);
        let mut response = (status, axum::Json(self.shaped(shape))).into_response();
        let headers = response.headers_mut();
        // Clients of OpenAI repeat every 408, 409, 429 and 5xx unless told: most of ours would
        // come again.
        let retry = matches!(
            self.kind,
            ErrorKind::Unavailable | ErrorKind::SlowClient | ErrorKind::RateLimited
        );
        headers.insert(
            "x-should-retry",
            HeaderValue::from_static(if retry { "true" } else { "false" }),
        );
        if matches!(self.kind, ErrorKind::Unavailable | ErrorKind::RateLimited) {
            let wait_ms = self.retry_after_ms.unwrap_or(RETRY_AFTER_MS);
            headers.insert("retry-after-ms", wait_ms.into());
            headers.insert(header::RETRY_AFTER, wait_ms.div_ceil(1000).max(1).into());
        }
        if self.kind == ErrorKind::Unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.kind == ErrorKind::UnsupportedCoding {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(ACCEPTED_CODINGS));
        }
        if matches!(self.kind, ErrorKind::TooLarge | ErrorKind::SlowClient) {
            // The rest of the body is not read, so the connection cannot serve another request.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<OutputPlanError> for ApiError {
    fn from(error: OutputPlanError) -> Self {
        match error {
            OutputPlanError::Param { param, message } => Self::param(param, message),
            OutputPlanError::Unenforceable { param, message } => {
                Self::param(param, message).with_code("unsupported_value")
            }
            OutputPlanError::Busy(message) => {
                Self::new(ErrorKind::Unavailable, message).with_code("queue_full")
            }
            // Who may not compile says so and tries again.
            OutputPlanError::Uncompiled => {
                Self::new(ErrorKind::Unavailable, error.to_string()).with_code("queue_full")
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(Shape::OpenAi)
    }
}
