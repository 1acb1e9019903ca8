//! Tokenize, detokenize, count tokens and render the chat template.

use std::sync::Arc;

use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_chat::text::Detokenizer;
use shardpack_engine_api::TokenId;

use super::{AppState, generate::prompt_error};
use crate::{
    dialect::{Dialect, Fields, ParsedRequest, parse_object, parse_token},
    error::ApiError,
};

/// Runs `work` on a body, away from the threads that serve connections.
async fn answer(
    app: Arc<AppState>,
    request: Request<Body>,
    work: impl FnOnce(&AppState, &Bytes) -> Result<Value, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = app.read_body(request).await?;
    let value = app.blocking(move |app| work(app, &body)).await?;
    Ok(Json(value).into_response())
}

/// Tokens of a conversation, as messages of the Anthropic API.
pub(super) async fn count_tokens(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |app, body| {
        let parsed = Dialect::Messages.parse_counted(body)?;
        app.known_name(parsed.model.as_deref())?;
        Ok(json!({"input_tokens": app.tokens(&parsed)?.len()}))
    })
    .await
}

/// `{prompt}`, `{content}` or `{messages}` to `{tokens, count, max_model_len}`.
pub(super) async fn tokenize(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |app, body| {
        let object = parse_object(body)?;
        let tokens = if object.get("messages").is_some() {
            app.tokens(&Dialect::Chat.parse(body)?)?
        } else {
            let mut fields = Fields::new(object);
            let text = match fields.string("prompt")? {
                Some(text) => text,
                None => fields.string("content")?.ok_or_else(|| {
                    ApiError::param("prompt", "prompt: expected a string, or messages")
                })?,
            };
            let tokens = app.model.encode(&text);
            tokens.map_err(|error| ApiError::param("prompt", error.to_string()))?
        };
        Ok(json!({
            "tokens": tokens, "count": tokens.len(), "max_model_len": app.model.max_positions(),
        }))
    })
    .await
}

/// `{tokens}` to `{prompt, content}`.
pub(super) async fn detokenize(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |app, body| {
        let mut fields = Fields::new(parse_object(body)?);
        let tokens = fields
            .array("tokens")?
            .ok_or_else(|| ApiError::param("tokens", "tokens: expected an array of numbers"))?;
        let tokens =
            tokens.iter().enumerate().map(|(index, token)| parse_token(token, "tokens", index));
        let tokens: Vec<TokenId> = tokens.collect::<Result<_, _>>()?;
        let mut detokenizer = Detokenizer::new(app.model.vocabulary().clone());
        let mut text: String = tokens.into_iter().map(|token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        Ok(json!({"prompt": text, "content": text}))
    })
    .await
}

/// The tokenizer's settings, as vLLM has them.
pub(super) async fn tokenizer_info(State(app): State<Arc<AppState>>) -> Response {
    Json(app.model.tokenizer_info()).into_response()
}

/// A chat completion request to `{prompt}`.
pub(super) async fn apply_template(
    State(app): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |app, body| {
        let parsed = Dialect::Chat.parse(body)?;
        let text = app.model.render(&parsed.request);
        let text = text.map_err(|error| prompt_error(&error, &parsed.writer_options))?;
        Ok(json!({"prompt": text.text, "adjustments": text.adjustments}))
    })
    .await
}

impl AppState {
    /// The tokens of a conversation, however long.
    fn tokens(&self, parsed: &ParsedRequest) -> Result<Vec<TokenId>, ApiError> {
        let text = self.model.render(&parsed.request);
        let tokens = text.and_then(|rendered| self.model.encode(&rendered.text));
        tokens.map_err(|error| prompt_error(&error, &parsed.writer_options))
    }
}
