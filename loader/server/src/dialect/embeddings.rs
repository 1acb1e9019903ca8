//! Embeddings: `OpenAI`'s, with what vLLM and TEI add, and both of Ollama's.

use base64ct::{Base64, Encoding as _};
use serde::Serialize;
use serde_json::{Value, json};
use shardpack_chat::{json::Json, model::LongText};

use super::{RawPrompt, completions, fields::Fields, parse_object, to_json};
use crate::error::ApiError;

/// Texts of one request, as in `OpenAI`'s API.
pub(crate) const INPUTS_MAX: usize = 2048;

/// An API of embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EmbeddingDialect {
    /// `OpenAI`'s.
    OpenAi,
    /// Ollama's `/api/embed`.
    Ollama,
    /// Ollama's older `/api/embeddings`.
    OllamaSingle,
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorFormat {
    /// As numbers.
    Float,
    /// The bytes of their little-endian f32 in base64.
    Base64,
}

/// Which of the model's prompts stands before the texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptChoice {
    /// The model's default.
    Default,
    /// That of this name.
    Named(String),
    /// That of queries, if there is one.
    Query,
    /// That of documents, if there is one.
    Document,
}

/// A parsed request.
#[derive(Debug)]
pub(crate) struct EmbeddingRequest {
    pub(crate) inputs: Vec<RawPrompt>,
    pub(crate) model: Option<String>,
    /// Elements that are kept of each vector.
    pub(crate) dimensions: Option<u32>,
    pub(crate) format: VectorFormat,
    pub(crate) prompt: PromptChoice,
    pub(crate) long: LongText,
    /// Whether vectors have length one; the model decides where nobody says.
    pub(crate) normalize: Option<bool>,
    pub(crate) ignored: Vec<String>,
}

impl EmbeddingDialect {
    /// Parses a body.
    pub(crate) fn parse(self, body: &[u8]) -> Result<EmbeddingRequest, ApiError> {
        let mut fields = Fields::new(parse_object(body)?);
        let inputs = match (self, fields.take(self.input())) {
            (Self::Ollama, Some(Json::Array(items))) if items.is_empty() => Vec::new(),
            // Ollama loads the model for whoever sends nothing.
            (Self::Ollama | Self::OllamaSingle, Some(Json::String(text))) if text.is_empty() => {
                Vec::new()
            }
            (Self::Ollama | Self::OllamaSingle, None) => Vec::new(),
            (_, input) => completions::parse_prompts(input, self.input(), INPUTS_MAX)?,
        };
        let dimensions = parse_dimensions(&mut fields)?;
        let format = match fields.string("encoding_format")?.as_deref() {
            None | Some("float") => VectorFormat::Float,
            Some("base64") if self == Self::OpenAi => VectorFormat::Base64,
            Some(other) => {
                let message =
                    format!("encoding_format: expected \"float\" or \"base64\", found {other:?}");
                return Err(ApiError::param("encoding_format", message));
            }
        };
        let prompt = parse_prompt_choice(&mut fields)?;
        let model = fields.string("model")?.filter(|model| !model.is_empty());
        let cuts = match self {
            Self::OpenAi => fields.boolean("truncate")?.unwrap_or(false),
            Self::Ollama | Self::OllamaSingle => fields.boolean("truncate")?.unwrap_or(true),
        };
        let cuts = cuts || fields.integer("truncate_prompt_tokens")? == Some(-1);
        let normalize = match self {
            Self::OpenAi => fields.boolean("normalize")?,
            Self::Ollama => Some(true),
            Self::OllamaSingle => None,
        };
        for accepted in ["user", "keep_alive", "options", "priority", "request_id"] {
            fields.take(accepted);
        }
        Ok(EmbeddingRequest {
            inputs,
            model: model.map(|name| self.without_tag(name)),
            dimensions,
            format,
            prompt,
            long: if cuts { LongText::Truncate } else { LongText::Refuse },
            normalize,
            ignored: fields.into_names(),
        })
    }

    /// The member that holds the texts.
    pub(crate) const fn input(self) -> &'static str {
        match self {
            Self::OpenAi | Self::Ollama => "input",
            Self::OllamaSingle => "prompt",
        }
    }

    fn without_tag(self, name: String) -> String {
        match (self, name.strip_suffix(":latest")) {
            (Self::Ollama | Self::OllamaSingle, Some(name)) => name.to_owned(),
            _ => name,
        }
    }

    /// The body of the answer.
    pub(crate) fn write(self, answer: &EmbeddingAnswer<'_>) -> String {
        let EmbeddingAnswer { model, vectors, format, tokens, seconds } = answer;
        match self {
            Self::OpenAi => to_json(&List {
                object: "list",
                data: vectors.iter().zip(0..).map(|it| Embedding::of(it, *format)).collect(),
                model,
                usage: json!({"prompt_tokens": tokens, "total_tokens": tokens}),
            }),
            Self::Ollama => to_json(&OllamaEmbeddings {
                model,
                embeddings: vectors,
                total_duration: (seconds * 1e9) as u64,
                load_duration: 0,
                prompt_eval_count: *tokens,
            }),
            Self::OllamaSingle => {
                to_json(&OllamaEmbedding { embedding: vectors.first().map_or(&[], Vec::as_slice) })
            }
        }
    }
}

fn parse_dimensions(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let Some(asked) = fields.integer("dimensions")? else { return Ok(None) };
    let dimensions = u32::try_from(asked).ok().filter(|dimensions| *dimensions > 0);
    dimensions.map(Some).ok_or_else(|| {
        let message = format!("dimensions: expected a positive number, found {asked}");
        ApiError::param("dimensions", message)
    })
}

/// TEI's name of a prompt; Cohere's type of input; Jina's task.
fn parse_prompt_choice(fields: &mut Fields) -> Result<PromptChoice, ApiError> {
    if let Some(name) = fields.string("prompt_name")? {
        return Ok(PromptChoice::Named(name));
    }
    let kind = fields.string("input_type")?;
    let task = fields.string("task")?;
    Ok(match kind.or(task).as_deref() {
        Some("query" | "search_query" | "retrieval.query") => PromptChoice::Query,
        Some("document" | "passage" | "search_document" | "retrieval.passage") => {
            PromptChoice::Document
        }
        _ => PromptChoice::Default,
    })
}

/// What an answer is written of.
pub(crate) struct EmbeddingAnswer<'a> {
    pub(crate) model: &'a str,
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) format: VectorFormat,
    pub(crate) tokens: u32,
    pub(crate) seconds: f64,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Embedding<'a>>,
    model: &'a str,
    usage: Value,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
struct Embedding<'a> {
    object: &'static str,
    index: u32,
    embedding: Vector<'a>,
}

impl<'a> Embedding<'a> {
    fn of((vector, index): (&'a Vec<f32>, u32), format: VectorFormat) -> Self {
        let embedding = match format {
            VectorFormat::Float => Vector::Floats(vector),
            VectorFormat::Base64 => Vector::Base64(base64(vector)),
        };
        Self { object: "embedding", index, embedding }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector<'a> {
    Floats(&'a [f32]),
    Base64(String),
}

#[derive(Serialize)]
struct OllamaEmbeddings<'a> {
    model: &'a str,
    embeddings: &'a [Vec<f32>],
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u32,
}

#[derive(Serialize)]
struct OllamaEmbedding<'a> {
    embedding: &'a [f32],
}

fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    Base64::encode_string(&bytes)
}
