//! Reranking: documents ordered by their relevance to a query, as Cohere, Jina and TEI have it.

use serde::Serialize;
use serde_json::{Value, json};
use shardpack_chat::json::Json;

use super::{
    embeddings::INPUTS_MAX,
    fields::{Fields, mismatch},
    parse_object, to_json,
};
use crate::error::ApiError;

/// A request to order documents by their relevance to a query.
#[derive(Debug)]
pub(crate) struct RerankRequest {
    pub(crate) query: String,
    pub(crate) documents: Vec<String>,
    pub(crate) model: Option<String>,
    pub(crate) top_n: Option<usize>,
    pub(crate) instruction: Option<String>,
    pub(crate) form: RerankForm,
    pub(crate) returns_documents: bool,
    pub(crate) ignored: Vec<String>,
}

/// Whose form a rerank request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RerankForm {
    /// Cohere's and Jina's: `documents`, and results in an object.
    Cohere,
    /// TEI's: `texts`, and a bare list.
    Tei,
}

impl RerankRequest {
    /// Parses a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::new(parse_object(body)?);
        let query = fields.string("query")?;
        let query = query.ok_or_else(|| ApiError::param("query", "query: expected a string"))?;
        let (name, form, listed) = match fields.array("documents")? {
            Some(documents) => ("documents", RerankForm::Cohere, Some(documents)),
            None => ("texts", RerankForm::Tei, fields.array("texts")?),
        };
        let listed = listed.ok_or_else(|| {
            ApiError::param("documents", "documents: expected an array of strings")
        })?;
        if listed.is_empty() || listed.len() > INPUTS_MAX {
            let found = listed.len();
            let message = format!("{name}: expected 1 to {INPUTS_MAX} documents, found {found}");
            return Err(ApiError::param(name, message));
        }
        let document = |(index, document): (usize, Json)| match document {
            Json::String(text) => Ok(text),
            Json::Object(mut object) => {
                if let Some(Json::String(text)) = object.remove("text") {
                    return Ok(text);
                }
                let path = format!("{name}[{index}].text");
                Err(ApiError::param(path.clone(), format!("{path}: expected a string")))
            }
            other => Err(mismatch(&format!("{name}[{index}]"), "a string", &other)),
        };
        let documents = listed.into_iter().enumerate().map(document).collect::<Result<_, _>>()?;
        let top_n = fields.integer("top_n")?.map(|most| usize::try_from(most.max(0)).unwrap_or(0));
        let returned = ["return_documents", "return_text"];
        let mut returns_documents = false;
        for name in returned {
            returns_documents |= fields.boolean(name)?.unwrap_or(false);
        }
        let instruction = fields.string("instruction")?.or(fields.string("instruct")?);
        let model = fields.string("model")?.filter(|model| !model.is_empty());
        for accepted in ["user", "max_chunks_per_doc", "max_tokens_per_doc", "truncate"] {
            fields.take(accepted);
        }
        Ok(Self {
            query,
            documents,
            model,
            top_n,
            instruction,
            form,
            returns_documents,
            ignored: fields.into_names(),
        })
    }

    /// The body of the answer: documents by their scores, the highest first.
    pub(crate) fn write(&self, [id, model]: [&str; 2], scores: &[f32], tokens: u32) -> String {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(self.top_n.unwrap_or(usize::MAX));
        let text = |index: usize| self.returns_documents.then(|| self.documents[index].as_str());
        if self.form == RerankForm::Tei {
            let results = order.iter().map(|&index| TeiResult {
                index,
                score: scores[index],
                text: text(index),
            });
            return to_json(&results.collect::<Vec<_>>());
        }
        let results = order.iter().map(|&index| RerankResult {
            index,
            relevance_score: scores[index],
            document: text(index).map(|text| RerankDocument { text }),
        });
        to_json(&RerankList {
            id,
            object: "list",
            model,
            results: results.collect(),
            usage: json!({"prompt_tokens": tokens, "total_tokens": tokens}),
        })
    }
}

#[derive(Serialize)]
struct RerankList<'a> {
    id: &'a str,
    object: &'static str,
    model: &'a str,
    results: Vec<RerankResult<'a>>,
    usage: Value,
}

#[derive(Serialize)]
struct RerankResult<'a> {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<RerankDocument<'a>>,
}

#[derive(Serialize)]
struct RerankDocument<'a> {
    text: &'a str,
}

#[derive(Serialize)]
struct TeiResult<'a> {
    index: usize,
    score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
}
