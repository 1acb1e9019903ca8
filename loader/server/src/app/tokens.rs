//! Tokenize, detokenize, count tokens and render the chat template.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::{Request, Uri},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shardpack_engine_api::TokenId;

use super::{
    AppState,
    generate::{made_none, prompt_error},
    middleware::Caller,
    selection::Reading,
};
use crate::{
    dialect::{Dialect, Fields, ParsedRequest, parse_object, parse_token},
    error::ApiError,
    registry::{Entered, Need},
    served_model::ServedModel,
};

/// Answers a request that needs only the text side of its model: `parse` reads it, `name` tells the
/// model that it names, and `work` makes the answer.
async fn answer<R: Send + 'static>(
    app: Arc<AppState>,
    caller: &Caller,
    request: Request<Body>,
    parse: fn(&[u8]) -> Result<R, ApiError>,
    name: fn(&R) -> Option<&str>,
    work: fn(&ServedModel, R) -> Result<Value, ApiError>,
) -> Result<Response, ApiError> {
    // What is counted is computed: it has the limits of what is generated.
    let key = caller.begin()?;
    let body = app.read_charged(request, key.as_ref()).await?;
    caller.record.body(body.len());
    let _permit = app.slots.try_take(caller.tenant, 1).ok_or_else(|| app.busy())?;
    let reading = Reading {
        parse: move |_: &AppState| parse(&body),
        name,
        prepare: move |_: &AppState, entered: &Entered, parsed| work(&entered.served, parsed),
    };
    let (_, value) = app.read(caller, Need::Text, reading).await?;
    Ok(Json(value).into_response())
}

/// Tokens of a conversation, as messages of the Anthropic API.
pub(super) async fn count_tokens(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let parse = |body: &[u8]| Dialect::Messages.parse_counted(body);
    let count =
        |served: &ServedModel, parsed| Ok(json!({"input_tokens": served.tokens(&parsed)?.len()}));
    answer(app, &caller, request, parse, |parsed| parsed.model.as_deref(), count).await
}

/// Tokens of a conversation, as the input of a response.
pub(super) async fn count_input_tokens(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let parse = |body: &[u8]| Dialect::Responses.parse_counted(body);
    let count = |served: &ServedModel, parsed| {
        let tokens = served.tokens(&parsed)?.len();
        Ok(json!({"object": "response.input_tokens", "input_tokens": tokens}))
    };
    answer(app, &caller, request, parse, |parsed| parsed.model.as_deref(), count).await
}

/// A text or a conversation, and whether the tokens that the tokenizer puts first are wanted.
enum Tokenized {
    Conversation(Box<ParsedRequest>, FirstTokens),
    Text { text: String, model: Option<String>, first: FirstTokens },
}

/// Whether the tokens stand first that the tokenizer puts before a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstTokens {
    Included,
    LeftOut,
}

impl FirstTokens {
    /// What a request says of it: in vLLM's field or in llama.cpp's.
    fn parse(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let asked = match fields.boolean("add_special_tokens")? {
            Some(asked) => Some(asked),
            None => fields.boolean("add_special")?,
        };
        Ok(asked.map(|asked| if asked { Self::Included } else { Self::LeftOut }))
    }
}

impl Tokenized {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_object(body)?;
        if object.get("messages").is_some() {
            // Templates write these tokens themselves.
            let first = FirstTokens::parse(&mut Fields::new(object))?;
            let parsed = Box::new(Dialect::Chat.parse(body)?);
            return Ok(Self::Conversation(parsed, first.unwrap_or(FirstTokens::LeftOut)));
        }
        let mut fields = Fields::new(object);
        // vLLM's clients send `prompt` and count what a completion would; llama.cpp's send `content`.
        let (text, usual) = if let Some(text) = fields.string("prompt")? {
            (text, FirstTokens::Included)
        } else {
            let text = fields.string("content")?.ok_or_else(|| {
                ApiError::param("prompt", "prompt: expected a string, or messages")
            })?;
            (text, FirstTokens::LeftOut)
        };
        let first = FirstTokens::parse(&mut fields)?.unwrap_or(usual);
        Ok(Self::Text { text, model: fields.string("model")?, first })
    }

    fn model(&self) -> Option<&str> {
        match self {
            Self::Conversation(parsed, _) => parsed.model.as_deref(),
            Self::Text { model, .. } => model.as_deref(),
        }
    }
}

/// `{prompt}`, `{content}` or `{messages}`, with `add_special_tokens`, to `{tokens, count, max_model_len}`.
pub(super) async fn tokenize(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, &caller, request, Tokenized::parse, Tokenized::model, |served, parsed| {
        let model = &served.model;
        let tokens = match parsed {
            Tokenized::Conversation(parsed, first) => {
                let tokens = served.tokens(&parsed)?;
                match first {
                    FirstTokens::Included => model.with_first_tokens(tokens),
                    FirstTokens::LeftOut => Ok(tokens),
                }
            }
            Tokenized::Text { text, first: FirstTokens::Included, .. } => model.encode_text(&text),
            Tokenized::Text { text, first: FirstTokens::LeftOut, .. } => model.encode(&text),
        };
        let tokens = tokens.map_err(|error| {
            made_none(&error, "prompt")
                .unwrap_or_else(|| ApiError::param("prompt", error.to_string()))
        })?;
        Ok(json!({
            "tokens": tokens, "count": tokens.len(), "max_model_len": served.model.max_positions(),
        }))
    })
    .await
}

/// Tokens, and the model that they are of.
type Parsed = (Vec<TokenId>, Option<String>);

/// `{tokens}` to `{prompt, content}`.
pub(super) async fn detokenize(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let parse = |body: &[u8]| {
        let mut fields = Fields::new(parse_object(body)?);
        let tokens = fields
            .array("tokens")?
            .ok_or_else(|| ApiError::param("tokens", "tokens: expected an array of numbers"))?;
        let tokens =
            tokens.iter().enumerate().map(|(index, token)| parse_token(token, "tokens", index));
        let tokens: Vec<TokenId> = tokens.collect::<Result<_, _>>()?;
        Ok((tokens, fields.string("model")?))
    };
    let text = |served: &ServedModel, (tokens, _): Parsed| {
        let text = served.text(&tokens);
        Ok(json!({"prompt": text, "content": text}))
    };
    answer(app, &caller, request, parse, |parsed: &Parsed| parsed.1.as_deref(), text).await
}

/// The tokenizer's settings, as vLLM has them; of the model that the query names.
pub(super) async fn tokenizer_info(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let served = app.of_query(caller.key.as_ref(), &uri).await?;
    Ok(Json(served.model.tokenizer_info()).into_response())
}

/// A chat completion request to `{prompt}`.
pub(super) async fn apply_template(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let parse = |body: &[u8]| Dialect::Chat.parse(body);
    answer(
        app,
        &caller,
        request,
        parse,
        |parsed| parsed.model.as_deref(),
        |served, parsed| {
            let text = served.model.render(&parsed.request);
            let text = text.map_err(|error| prompt_error(&error, &parsed.writer_options))?;
            Ok(json!({"prompt": text.text, "adjustments": text.adjustments}))
        },
    )
    .await
}

impl ServedModel {
    /// The tokens of a conversation, however long.
    fn tokens(&self, parsed: &ParsedRequest) -> Result<Vec<TokenId>, ApiError> {
        let tokens = self.model.tokens(&parsed.request).map(|(tokens, _)| tokens);
        tokens.map_err(|error| prompt_error(&error, &parsed.writer_options))
    }
}
