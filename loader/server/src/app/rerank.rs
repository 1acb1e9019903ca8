//! Reranking: documents by their relevance to a query. A reranker answers yes or no, and the
//! probability of yes is the score; an embedding model's score is the cosine of two embeddings.

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, http::Request, response::Response};
use shardpack_chat::model::LongText;
use shardpack_engine_api::{
    GenerateRequest, MAX_LOGPROBS, Sampling, Tenant, TokenId, TokenLogprobs,
};

use super::{
    AppState,
    embeddings::{joined, json, refused, total, unit},
    middleware::Caller,
    selection::Reading,
};
use crate::{
    batch::Outcome,
    dialect::RerankRequest,
    error::ApiError,
    registry::{Entered, Need},
    served_model::ServedModel,
};

/// What Qwen3-Reranker was trained on.
const BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on \
                      the Query and the Instruct provided. Note that the answer can only be \"yes\" or \
                      \"no\".<|im_end|>\n<|im_start|>user\n";
const AFTER: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// By this every chat template of such a reranker is known.
const YES_OR_NO: &str = "answer can only be \"yes\" or \"no\"";

/// Added to the logit of a token that is to be sampled.
const CERTAIN: f32 = 1e30;

/// Answers one request.
pub(super) async fn rerank(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    app.check_ready()?;
    let key = caller.begin()?;
    let body = app.read_charged(request, key.as_ref()).await?;
    caller.record.body(body.len());
    let _permit = app.slots.try_take(caller.tenant, 1).ok_or_else(|| app.busy())?;
    let reading = Reading {
        parse: move |_: &AppState| RerankRequest::parse(&body),
        name: |request: &RerankRequest| request.model.as_deref(),
        prepare: |_: &AppState, entered: &Entered, request| entered.served.prepare_rerank(request),
    };
    let (entered, prepared) = app.read(&caller, Need::Engine, reading).await?;
    let Entered { served, name: model, share: _share } = entered;
    let PreparedRerank { request, prompts, judge } = prepared;
    let tokens = total(&prompts);
    if let Some(key) = &key {
        key.spend(tokens);
    }
    caller.record.submitted(served.name(), tokens);
    served.metrics.ignored(request.ignored.len());
    let scores = match judge {
        Some(answers) => served.judged(caller.tenant, &prompts, answers).await?,
        None => similarities(served.embedded(caller.tenant, prompts).await?),
    };
    let id = format!("rerank-{}", caller.id);
    let headers = super::headers_of_ignored(&request.ignored);
    Ok(json(headers, request.write([&id, &model], &scores, tokens)))
}

struct PreparedRerank {
    request: RerankRequest,
    /// One of each document; before them that of the query, for an embedding model.
    prompts: Vec<Vec<TokenId>>,
    judge: Option<Answers>,
}

/// The answers of a reranker.
#[derive(Clone, Copy)]
struct Answers {
    yes: TokenId,
    no: TokenId,
}

impl ServedModel {
    /// The answers of the model, if it is a reranker: by its chat template, or by its name.
    fn reranker(&self) -> Option<Answers> {
        let named = self.card.names.iter().any(|name| name.to_lowercase().contains("reranker"));
        let says = self.model.template_source().contains(YES_OR_NO);
        let vocabulary = self.model.vocabulary();
        let answers =
            || Some(Answers { yes: vocabulary.token_id("yes")?, no: vocabulary.token_id("no")? });
        (named || says).then(answers).flatten()
    }

    fn prepare_rerank(&self, request: RerankRequest) -> Result<PreparedRerank, ApiError> {
        let judge = self.reranker();
        if judge.is_none() && self.model.embedding().is_none() {
            let message = "this model neither judges documents nor makes embeddings: serve a \
                           reranker or an embedding model";
            return Err(ApiError::param("model", message).with_code("unsupported_value"));
        }
        let encode = |text: &str, param: &str| {
            let tokens = self.model.embedding_tokens(text, LongText::Truncate);
            tokens.map_err(|error| refused(&error, param))
        };
        let mut prompts = Vec::with_capacity(request.documents.len() + 1);
        if judge.is_none() {
            prompts.push(encode(&joined(self.query_prefix(), &request.query), "query")?);
        }
        let prefix = ["document", "passage"];
        let prefix = prefix.iter().find_map(|name| self.model.embedding_prompt(name));
        for (index, document) in request.documents.iter().enumerate() {
            let param = format!("documents[{index}]");
            prompts.push(match judge {
                Some(_) => self.judged_prompt(&request, document, &param)?,
                None => encode(&joined(prefix.unwrap_or_default(), document), &param)?,
            });
        }
        Ok(PreparedRerank { request, prompts, judge })
    }

    /// What a reranker is asked; of a document that is too long the end is left out.
    fn judged_prompt(
        &self,
        request: &RerankRequest,
        document: &str,
        param: &str,
    ) -> Result<Vec<TokenId>, ApiError> {
        let instruction = request.instruction.as_deref().unwrap_or(INSTRUCTION);
        let query = &request.query;
        let text = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
        let encode = |text: &str| self.model.encode(text).map_err(|error| refused(&error, param));
        let (before, mut text, after) = (encode(BEFORE)?, encode(&text)?, encode(AFTER)?);
        let room = self.model.max_positions() as usize;
        text.truncate(room.saturating_sub(before.len() + after.len() + 1));
        let prompt = [before, text, after].concat();
        self.model.check_prompt(prompt).map_err(|error| refused(&error, param))
    }

    /// The probability of yes against no after each prompt.
    async fn judged(
        &self,
        tenant: Tenant,
        prompts: &[Vec<TokenId>],
        answers: Answers,
    ) -> Result<Vec<f32>, ApiError> {
        let yes = self.sampled(tenant, prompts, answers.yes).await?;
        // Of the few whose other answer is not among the likeliest it is asked for.
        let among = |found: &TokenLogprobs| {
            found.top.iter().find(|top| top.0 == answers.no).map(|top| top.1)
        };
        let mut no: Vec<Option<f32>> = yes.iter().map(among).collect();
        let missing: Vec<usize> = (0..no.len()).filter(|index| no[*index].is_none()).collect();
        let asked: Vec<Vec<TokenId>> =
            missing.iter().map(|index| prompts[*index].clone()).collect();
        let found = self.sampled(tenant, &asked, answers.no).await?;
        for (index, found) in missing.into_iter().zip(found) {
            no[index] = Some(found.logprob);
        }
        let score = |(yes, no): (&TokenLogprobs, Option<f32>)| {
            let difference = f64::from(no.unwrap_or_default()) - f64::from(yes.logprob);
            (1.0 / (1.0 + difference.exp())) as f32
        };
        Ok(yes.iter().zip(no).map(score).collect())
    }

    /// The log probability of a token after each prompt, with those of the likeliest.
    async fn sampled(
        &self,
        tenant: Tenant,
        prompts: &[Vec<TokenId>],
        token: TokenId,
    ) -> Result<Vec<TokenLogprobs>, ApiError> {
        let timeout_ms = self.timeout_ms();
        let request = |prompt: &Vec<TokenId>| GenerateRequest {
            sampling: Sampling { logit_bias: vec![(token, CERTAIN)], ..Sampling::GREEDY },
            logprobs: Some(MAX_LOGPROBS),
            timeout_ms,
            ..GenerateRequest::greedy(prompt.clone(), 1)
        };
        let outcomes = self.batch(tenant).run(prompts.iter().map(request).collect()).await?;
        let missing = || {
            let message = "the engine gave no log probabilities";
            ApiError::new(crate::error::ErrorKind::Internal, message)
        };
        let first = |Outcome { logprobs, .. }: Outcome| logprobs.into_iter().next();
        outcomes.into_iter().map(|outcome| first(outcome).ok_or_else(missing)).collect()
    }
}

/// Cosines of the first vector and each of the others.
fn similarities(vectors: Vec<Vec<f32>>) -> Vec<f32> {
    let mut vectors = vectors.into_iter().map(unit);
    let query = vectors.next().unwrap_or_default();
    let dot = |document: Vec<f32>| {
        let products = query.iter().zip(&document).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum::<f64>() as f32
    };
    vectors.map(dot).collect()
}
