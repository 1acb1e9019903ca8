//! Embeddings: texts to vectors, of models that were trained for it and of others.

use std::{borrow::Cow, sync::Arc, time::Instant};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, Request, header},
    response::{IntoResponse, Response},
};
use shardpack_chat::model::{LongText, PromptError};
use shardpack_engine_api::{GenerateRequest, PromptOutput, Tenant, TokenId};
use shardpack_formats::spec::Embedding;

use super::{AppState, generate::made_none, middleware::Caller, selection::Reading};
use crate::{
    batch::{Batch, Outcome},
    dialect::{EmbeddingAnswer, EmbeddingDialect, EmbeddingRequest, PromptChoice, RawPrompt},
    error::{ApiError, CONTEXT_LENGTH_EXCEEDED},
    registry::{Entered, Need},
    served_model::ServedModel,
};

/// Says how vectors were pooled by a model that was not trained for embeddings.
const POOLING: &str = "x-shardpack-pooling";

/// Answers one request.
pub(super) async fn embed(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    dialect: EmbeddingDialect,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let begun = Instant::now();
    let key = caller.begin()?;
    let body = app.read_charged(request, key.as_ref()).await?;
    caller.record.body(body.len());
    let _permit = app.slots.try_take(caller.tenant, 1).ok_or_else(|| app.busy())?;
    let reading = Reading {
        parse: move |_: &AppState| dialect.parse(&body),
        name: |request: &EmbeddingRequest| request.model.as_deref(),
        prepare: move |_: &AppState, entered: &Entered, request: EmbeddingRequest| {
            let prompts = entered.served.embedded_prompts(dialect.input(), &request)?;
            Ok((request, prompts))
        },
    };
    let (entered, (request, prompts)) = app.read(&caller, Need::Engine, reading).await?;
    let Entered { served, name: model, share: _share } = entered;
    let tokens = total(&prompts);
    if let Some(key) = &key {
        key.spend(tokens);
    }
    caller.record.submitted(served.name(), tokens);
    served.metrics.ignored(request.ignored.len());
    let form = served.model.embedding().cloned();
    let untrained = form.is_none();
    let form = form.unwrap_or(Embedding::UNTRAINED);
    let normalize = request.normalize.unwrap_or(form.normalize);
    let vectors = served.embedded(caller.tenant, prompts).await?;
    let vectors = vectors.into_iter().map(|vector| {
        let vector = shortened(vector, request.dimensions)?;
        // A part of a vector of length one has another length.
        Ok(if normalize || (form.normalize && request.dimensions.is_some()) {
            unit(vector)
        } else {
            vector
        })
    });
    let answer = EmbeddingAnswer {
        model: &model,
        vectors: vectors.collect::<Result<_, ApiError>>()?,
        format: request.format,
        tokens,
        seconds: begun.elapsed().as_secs_f64(),
    };
    let mut headers = super::headers_of_ignored(&request.ignored);
    if untrained {
        headers.insert(HeaderName::from_static(POOLING), HeaderValue::from_static("last"));
    }
    Ok(json(headers, dialect.write(&answer)))
}

/// A body of JSON.
pub(super) fn json(headers: HeaderMap, body: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    (headers, [(header::CONTENT_TYPE, json)], body).into_response()
}

/// Tokens of all prompts.
pub(super) fn total(prompts: &[Vec<TokenId>]) -> u32 {
    u32::try_from(prompts.iter().map(Vec::len).sum::<usize>()).unwrap_or(u32::MAX)
}

impl ServedModel {
    fn embedded_prompts(
        &self,
        param: &str,
        request: &EmbeddingRequest,
    ) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let prefix = self.embedding_prefix(&request.prompt)?;
        let one = |input: &RawPrompt| match input {
            RawPrompt::Text(text) => {
                self.model.embedding_tokens(&joined(prefix, text), request.long)
            }
            RawPrompt::Tokens(tokens) => {
                let most = self.model.max_positions() as usize;
                let cut = request.long == LongText::Truncate;
                let len = if cut { tokens.len().min(most) } else { tokens.len() };
                self.model.check_embedded(tokens[..len].to_vec())
            }
        };
        let prompts = request.inputs.iter().enumerate().map(|(index, input)| {
            one(input).map_err(|error| refused(&error, &format!("{param}[{index}]")))
        });
        prompts.collect()
    }

    /// What stands before every text.
    fn embedding_prefix(&self, choice: &PromptChoice) -> Result<&str, ApiError> {
        let first =
            |names: &[&str]| names.iter().find_map(|name| self.model.embedding_prompt(name));
        Ok(match choice {
            PromptChoice::Default => self.model.default_embedding_prompt(),
            PromptChoice::Query => self.query_prefix(),
            PromptChoice::Document => first(&["document", "passage"]).unwrap_or_default(),
            PromptChoice::Named(name) => self.model.embedding_prompt(name).ok_or_else(|| {
                let names: Vec<&str> = self.model.embedding_prompt_names().collect();
                let message = format!("prompt_name: {name:?} is none of the model's: {names:?}");
                ApiError::param("prompt_name", message)
            })?,
        })
    }

    /// What stands before queries.
    pub(super) fn query_prefix(&self) -> &str {
        self.model.embedding_prompt("query").unwrap_or_default()
    }

    /// Pooled vectors of prompts.
    pub(super) async fn embedded(
        &self,
        tenant: Tenant,
        prompts: Vec<Vec<TokenId>>,
    ) -> Result<Vec<Vec<f32>>, ApiError> {
        let timeout_ms = self.timeout_ms();
        let request = |prompt| GenerateRequest {
            prompt_output: PromptOutput::Embedding,
            timeout_ms,
            ..GenerateRequest::greedy(prompt, 0)
        };
        let outcomes = self.batch(tenant).run(prompts.into_iter().map(request).collect()).await?;
        Ok(outcomes.into_iter().map(|Outcome { embedding, .. }| embedding).collect())
    }

    /// Runs requests whose results are read whole.
    pub(super) fn batch(&self, tenant: Tenant) -> Batch<'_> {
        Batch {
            tenant,
            engine: &self.engine,
            metrics: &self.metrics,
            closing: self.closing.subscribe(),
            event_timeout: self.limits.event_timeout,
            request_timeout: self.limits.request_timeout,
        }
    }
}

/// A text with what stands before it.
pub(super) fn joined<'a>(prefix: &str, text: &'a str) -> Cow<'a, str> {
    if prefix.is_empty() { text.into() } else { format!("{prefix}{text}").into() }
}

/// The error for a text.
pub(super) fn refused(error: &PromptError, param: &str) -> ApiError {
    if let Some(api) = made_none(error, param) {
        return api;
    }
    match error {
        PromptError::TooLong { max_positions, prompt_tokens } => {
            let message = format!(
                "{param}: {prompt_tokens} tokens are more than this model's context of \
                 {max_positions}: shorten the text, or say \"truncate\": true"
            );
            ApiError::param(param, message).with_code(CONTEXT_LENGTH_EXCEEDED)
        }
        PromptError::Empty => {
            ApiError::param(param, format!("{param}: expected a text of at least one token"))
        }
        error => ApiError::param(param, format!("{param}: {error}")),
    }
}

/// The first elements of a vector, as models of the matryoshka kind are trained for.
fn shortened(mut vector: Vec<f32>, dimensions: Option<u32>) -> Result<Vec<f32>, ApiError> {
    let Some(dimensions) = dimensions else { return Ok(vector) };
    if dimensions as usize > vector.len() {
        let most = vector.len();
        let message = format!("dimensions: {dimensions} of a vector of {most}: at most {most}");
        return Err(ApiError::param("dimensions", message));
    }
    vector.truncate(dimensions as usize);
    Ok(vector)
}

/// A vector of length one; of zeros nothing else can be made.
pub(super) fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let squares: f64 = vector.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    let length = squares.sqrt();
    if length > 0.0 {
        for value in &mut vector {
            *value = (f64::from(*value) / length) as f32;
        }
    }
    vector
}
