//! The text side of a package: tokenizer, chat template, stop tokens and limits. The engine loads
//! packages without these files too.

mod embedding;
mod first_tokens;
mod prompt_length;
mod tokenizer_info;

pub use embedding::LongText;
pub use prompt_length::PromptLength;

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use serde::Deserialize;
use shardpack_engine_api::{ConstraintFactory, TokenId};
use shardpack_formats::{OutputStyle, ThinkingStyle, ToolFamily, spec::Embedding};

use embedding::EmbeddingPrompts;
use first_tokens::ConfiguredBos;

use super::{
    conversation::{ChatRequest, Reasoning, ReasoningOption},
    json::{Json, Object},
    prompt::{
        Conversation, OpenPromptsError, PromptFailure, PromptFiles, TemplateTexts, TextMarks,
    },
    prompt_side::{OpenSideError, PromptHome, PromptSide, PromptSideError},
    sandbox::SandboxError,
    template::{Rendered, TemplateError},
    text::{TOKENS_MAX, Vocabulary, VocabularyError},
    tools::{Grammars, OutputFormat},
};

/// Bytes of `tokenizer.json`; the longest published ones have 35 MiB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Bytes of any other file; the longest published ones have 300 KiB.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// The text side of a model.
pub struct ChatModel {
    vocabulary: Arc<Vocabulary>,
    /// Executes template and tokenizer.
    prompts: Arc<PromptSide>,
    templates: Option<TemplateTexts>,
    shows_tools: bool,
    output: Arc<OutputFormat>,
    /// Built on first use: most requests need none, and it takes up to a second.
    grammars: OnceLock<Option<Grammars>>,
    stop_tokens: Vec<TokenId>,
    default_sampling: DefaultSampling,
    max_positions: u32,
    vocab_size: u32,
    tokenizer_info: Object,
    /// What the tokenizer puts before a text; asked for on first use.
    first_tokens: OnceLock<Vec<TokenId>>,
    configured_bos: Option<ConfiguredBos>,
    embedding: Option<Embedding>,
    embedding_prompts: EmbeddingPrompts,
}

/// The package cannot be served. Each names the file and what is wrong in it.
#[derive(Debug, thiserror::Error)]
pub enum OpenModelError {
    /// A file cannot be read.
    #[error("{file}: cannot be read from {}", folder.display())]
    Read {
        /// The package.
        folder: PathBuf,
        /// The file's name.
        file: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A file that is far larger than any of its kind.
    #[error("{file}: over {limit} bytes")]
    TooLarge {
        /// The file's name.
        file: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A file that is not JSON of the expected shape.
    #[error("{file}: not the expected JSON")]
    Json {
        /// The file's name.
        file: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A value that cannot be.
    #[error("{file}: {message}")]
    Value {
        /// The file's name.
        file: &'static str,
        /// The key, what was expected and found.
        message: String,
    },
    /// The tokenizer.
    #[error("{TOKENIZER}")]
    Tokenizer(#[source] VocabularyError),
    /// The chat template.
    #[error("{file}")]
    Template {
        /// The file's name.
        file: &'static str,
        /// Why.
        source: TemplateError,
    },
    /// What the sandbox of template and tokenizer says of them.
    #[error("{0}")]
    Refused(String),
    /// The sandbox of template and tokenizer ended, or cannot be started.
    #[error(transparent)]
    Sandbox(SandboxError),
}

/// A conversation cannot become a prompt; every variant is a client error.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// Template or tokenizer make none of it.
    #[error(transparent)]
    Made(#[from] PromptSideError),
    /// The template rendered nothing.
    #[error("the prompt is empty: the model needs at least one token to continue")]
    Empty,
    /// A token that the model has no embedding for.
    #[error("token {token} of the prompt is outside the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// The token.
        token: u32,
        /// The model's.
        vocab_size: u32,
    },
    /// The prompt leaves no room for output.
    #[error(
        "this model's maximum context length is {max_positions} tokens, but the messages have \
         {prompt_tokens}: shorten them"
    )]
    TooLong {
        /// The model's context length.
        max_positions: u32,
        /// The prompt's tokens.
        prompt_tokens: PromptLength,
    },
}

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const GENERATION: &str = "generation_config.json";
const CONFIG: &str = "config.json";

impl ChatModel {
    /// Opens a package directory or a model directory as Hugging Face has it, and executes its
    /// template and tokenizer in this process: for what is trusted.
    pub fn open(folder: &Path) -> Result<Self, OpenModelError> {
        Self::open_in(folder, PromptHome::InProcess)
    }

    /// Opens a directory, whose template and tokenizer are executed in `home`.
    ///
    /// `tokenizer.json` and `config.json` must be there; without a template the model opens and
    /// chat is refused.
    pub fn open_in(folder: &Path, home: PromptHome<'_>) -> Result<Self, OpenModelError> {
        let tokenizer = read(folder, TOKENIZER, TOKENIZER_BYTES_MAX)?.ok_or_else(|| {
            OpenModelError::Read { folder: folder.to_owned(), file: TOKENIZER, source: missing() }
        })?;
        let config: Config = parse(folder, CONFIG)?.ok_or_else(|| OpenModelError::Read {
            folder: folder.to_owned(),
            file: CONFIG,
            source: missing(),
        })?;
        let generation: GenerationConfig = parse(folder, GENERATION)?.unwrap_or_default();
        let tokenizer_config: Json = parse(folder, TOKENIZER_CONFIG)?.unwrap_or(Json::Null);

        let specials = special_tokens(&tokenizer_config);
        let (templates, template_file) = read_templates(folder, &tokenizer_config)?.unzip();
        let files = PromptFiles {
            tokenizer: tokenizer.clone(),
            templates: templates.clone(),
            specials: specials.clone(),
        };
        let (prompts, opened) = PromptSide::open(files, home)
            .map_err(|error| open_error(error, template_file.unwrap_or(TEMPLATE)))?;
        let mut vocabulary = Vocabulary::new(opened.tokens, &tokenizer)
            .map_err(|error| OpenModelError::Tokenizer(error.into()))?;
        for (name, token) in specials.iter() {
            // Unknown-word tokens are text; the others are structure.
            if let Some(token) = token.as_str().filter(|_| name != "unk_token") {
                vocabulary.hide(token);
            }
        }
        let bos = specials.get("bos_token").and_then(Json::as_str);
        let bos = bos.and_then(|bos| vocabulary.token_id(bos));
        let mut stop_tokens = generation.eos_token_id.ids();
        stop_tokens.extend(config.own.eos_token_id.ids());
        let text = config.text_config.as_ref().unwrap_or(&config.own);
        stop_tokens.extend(text.eos_token_id.ids());
        let eos = specials.get("eos_token").and_then(Json::as_str);
        stop_tokens.extend(eos.and_then(|eos| vocabulary.token_id(eos)));
        let positive = |value: Option<u32>, key: &str| {
            let found = || value.map_or("nothing".to_owned(), |value| value.to_string());
            value.filter(|&value| value > 0).ok_or_else(|| OpenModelError::Value {
                file: CONFIG,
                message: format!("{key}: expected a positive number, found {}", found()),
            })
        };
        let vocab_size = positive(text.vocab_size, "vocab_size")?;
        // No token has such an id, so none ends an answer.
        stop_tokens.retain(|token| token.0 < vocab_size);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let eos = stop_tokens.first().map(|eos| vocabulary.token_bytes(*eos));
        let eos = eos.and_then(|eos| String::from_utf8(eos).ok());
        let style = templates.as_ref().map(|own| OutputStyle::detect(own.of_tools()));
        let style = style.unwrap_or_default();
        let style = if templates.is_some() { with_calls(style) } else { style };
        let output = output_format(style, &vocabulary, opened.shows_tools);
        Ok(Self {
            prompts: Arc::new(prompts),
            shows_tools: opened.shows_tools,
            templates,
            output: Arc::new(output),
            grammars: OnceLock::new(),
            vocabulary: Arc::new(vocabulary),
            stop_tokens,
            default_sampling: generation.default_sampling()?,
            max_positions: positive(text.max_position_embeddings, "max_position_embeddings")?,
            vocab_size,
            tokenizer_info: tokenizer_info::tokenizer_info(&tokenizer_config, eos),
            first_tokens: OnceLock::new(),
            configured_bos: ConfiguredBos::of(&tokenizer_config, bos),
            embedding: None,
            embedding_prompts: parse(folder, embedding::PROMPTS)?.unwrap_or_default(),
        })
    }

    /// The tokenizer.
    #[must_use]
    pub const fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// What executes the model's template and tokenizer.
    #[must_use]
    pub const fn prompts(&self) -> &Arc<PromptSide> {
        &self.prompts
    }

    /// The model's output format: reasoning tags and tool-call format.
    #[must_use]
    pub const fn output(&self) -> &Arc<OutputFormat> {
        &self.output
    }

    /// The compiler of grammars for this model; nothing where its vocabulary allows none.
    pub fn grammars(&self) -> Option<&Grammars> {
        let make = || {
            // A size that only a config claims would fill the memory with tokens that are none.
            if self.vocab_size as usize > TOKENS_MAX {
                return None;
            }
            let tokens = self.vocabulary.grammar_tokens(self.vocab_size);
            Grammars::new(Arc::clone(&self.output), tokens).ok()
        };
        self.grammars.get_or_init(make).as_ref()
    }

    /// Whether a prompt ends within open reasoning tags, so that the output begins with reasoning.
    #[must_use]
    pub fn opens_thinking(&self, prompt: &[TokenId]) -> bool {
        // A marker that is no token has fewer tokens than letters.
        let tail = &prompt[prompt.len().saturating_sub(24)..];
        let bytes: Vec<u8> =
            tail.iter().flat_map(|token| self.vocabulary.token_bytes(*token)).collect();
        self.output.prompt_opens_thinking(&String::from_utf8_lossy(&bytes))
    }

    /// Tokens that end an answer: of the generation config, the config and the tokenizer's config.
    #[must_use]
    pub fn stop_tokens(&self) -> &[TokenId] {
        &self.stop_tokens
    }

    /// Sampling parameters of requests that name none.
    #[must_use]
    pub const fn default_sampling(&self) -> &DefaultSampling {
        &self.default_sampling
    }

    /// Whether conversations can have tools: by the template, or in the generic format.
    #[must_use]
    pub const fn has_tools(&self) -> bool {
        self.templates.is_some()
    }

    /// Whether the template itself shows the model its tools, and so how it calls several at once.
    #[must_use]
    pub const fn shows_tools(&self) -> bool {
        self.shows_tools
    }

    /// The template's text; empty where there is none.
    #[must_use]
    pub fn template_source(&self) -> &str {
        self.templates.as_ref().map_or("", TemplateTexts::of_tools)
    }

    /// The reasoning options of a request that change nothing: the template has no such variable,
    /// or the model does not reason at all. To reason not at all is what such a model does.
    #[must_use]
    pub fn unheard_reasoning(&self, reasoning: &Reasoning) -> Vec<ReasoningOption> {
        let names = |variable: &str| {
            let all = self.templates.iter();
            let mut sources =
                all.flat_map(|own| [Some(&own.default), own.tools.as_ref()]).flatten();
            sources.any(|template| template.contains(variable))
        };
        let turns_on = reasoning.enabled == Some(true);
        let effort = reasoning.effort.as_deref().filter(|effort| *effort != "none");
        let budget = reasoning.budget_tokens;
        let switch = turns_on && self.output.style().thinking.is_none() && effort.is_none();
        let options = [
            (ReasoningOption::Switch, switch),
            // Where a template has no efforts, one turns thinking on.
            (
                ReasoningOption::Effort,
                effort.is_some()
                    && !names("reasoning_effort")
                    && self.output.style().thinking.is_none(),
            ),
            (ReasoningOption::Budget, budget.is_some()),
        ];
        options.into_iter().filter_map(|(option, unheard)| unheard.then_some(option)).collect()
    }

    /// What the tokenizer says of itself, as vLLM's `/tokenizer_info` has it.
    #[must_use]
    pub fn tokenizer_info(&self) -> Object {
        let mut info = self.tokenizer_info.clone();
        if self.templates.is_some() {
            info.set("chat_template", self.template_source().into());
        }
        info
    }

    /// Context length, in tokens.
    #[must_use]
    pub const fn max_positions(&self) -> u32 {
        self.max_positions
    }

    /// Parses output in the style of the package's manifest; without one, in the style that was
    /// detected from the chat template.
    #[must_use]
    pub fn with_style(mut self, style: Option<OutputStyle>) -> Self {
        if let Some(style) = style.filter(|style| *style != OutputStyle::default()) {
            let style = if self.templates.is_some() { with_calls(style) } else { style };
            self.output = Arc::new(output_format(style, &self.vocabulary, self.shows_tools));
        }
        self
    }

    /// Lowers the context length to what the engine has memory for.
    pub fn limit_positions(&mut self, max_positions: u32) {
        self.max_positions = self.max_positions.min(max_positions);
    }

    /// The text of a conversation, as the model's template renders it, and what was changed so
    /// that it did.
    pub fn render(&self, request: &ChatRequest) -> Result<Rendered, PromptError> {
        Ok(self.prompts.render(&self.conversation(request)?)?)
    }

    /// The tokens of a conversation, however long, and what was changed in it.
    pub fn tokens(
        &self,
        request: &ChatRequest,
    ) -> Result<(Vec<TokenId>, Vec<&'static str>), PromptError> {
        Ok(self.prompts.prompt(&self.conversation(request)?)?)
    }

    /// The prompt of a conversation: at least one token, and room for one more; and what was
    /// changed in the conversation.
    pub fn prompt(
        &self,
        request: &ChatRequest,
    ) -> Result<(Vec<TokenId>, Vec<&'static str>), PromptError> {
        if self.may_be_far_too_long(request) {
            let Rendered { text, adjustments } = self.render(request)?;
            return Ok((self.encode_prompt(&text)?, adjustments));
        }
        let (tokens, adjustments) = self.tokens(request)?;
        Ok((self.check_prompt(tokens)?, adjustments))
    }

    /// A request as the template sees it.
    fn conversation<'a>(&self, request: &'a ChatRequest) -> Result<Conversation<'a>, PromptError> {
        if self.templates.is_none() {
            return Err(PromptSideError::from(PromptFailure::NoTemplate).into());
        }
        Ok(Conversation {
            messages: Cow::Borrowed(&request.messages),
            tools: request.visible_tools(),
            kwargs: template_kwargs(request, self.output.style().thinking),
            continues: request.continues,
        })
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        Ok(self.prompts.encode(text, TextMarks::None)?)
    }

    /// The tokens of a text by itself, with those that the tokenizer puts before and after one.
    fn encode_special(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        Ok(self.prompts.encode(text, TextMarks::Special)?)
    }

    /// Tokens that the model can continue: at least one, and room for one more.
    pub fn check_prompt(&self, prompt: Vec<TokenId>) -> Result<Vec<TokenId>, PromptError> {
        if prompt.is_empty() {
            return Err(PromptError::Empty);
        }
        if prompt.len() >= self.max_positions as usize {
            let max_positions = self.max_positions;
            let prompt_tokens = PromptLength::Exactly(prompt.len());
            return Err(PromptError::TooLong { max_positions, prompt_tokens });
        }
        self.check_vocabulary(prompt)
    }

    /// Tokens that the model has embeddings for.
    fn check_vocabulary(&self, prompt: Vec<TokenId>) -> Result<Vec<TokenId>, PromptError> {
        match prompt.iter().find(|token| token.0 >= self.vocab_size) {
            Some(token) => {
                Err(PromptError::Vocabulary { token: token.0, vocab_size: self.vocab_size })
            }
            None => Ok(prompt),
        }
    }
}

/// A style in which calls can be written: the generic format where the template has none that is
/// known.
fn with_calls(style: OutputStyle) -> OutputStyle {
    OutputStyle { tools: Some(style.tools.unwrap_or(ToolFamily::JsonTags)), ..style }
}

/// The output format of a model: where its template shows no tools, calls in the format that the prompt
/// teaches are taken besides its own.
fn output_format(style: OutputStyle, vocabulary: &Vocabulary, shows_tools: bool) -> OutputFormat {
    let token = |name: &str| vocabulary.added_token(name);
    if shows_tools {
        OutputFormat::new(style, token)
    } else {
        OutputFormat::with_generic_calls(style, token)
    }
}

/// Variables of the template: the client's own, and its reasoning options under the names that
/// templates read, those of this style in particular.
fn template_kwargs(request: &ChatRequest, style: Option<ThinkingStyle>) -> Object {
    let mut kwargs = request.template_kwargs.clone();
    let mut add = |name: &str, value: Json| {
        if kwargs.get(name).is_none() {
            kwargs.set(name, value);
        }
    };
    if let Some(effort) = &request.reasoning.effort {
        add("reasoning_effort", effort.as_str().into());
    }
    let effort = request.reasoning.effort.as_deref();
    let enabled = request.reasoning.enabled.or_else(|| effort.map(|effort| effort != "none"));
    if let Some(enabled) = enabled {
        add("enable_thinking", Json::Bool(enabled));
        // DeepSeek's name for it.
        add("thinking", Json::Bool(enabled));
        if let Some((name, value)) = style.and_then(|style| style.switch(enabled)) {
            add(name, value.into());
        }
    }
    kwargs
}

/// The constraint factory of a package's model, for the engine of rank 0, in the style of its
/// manifest (see [`ChatModel::with_style`]); nothing where its vocabulary cannot be constrained.
pub fn constraints(
    folder: &Path,
    style: Option<OutputStyle>,
    home: PromptHome<'_>,
) -> Result<Option<Box<dyn ConstraintFactory>>, OpenModelError> {
    let model = ChatModel::open_in(folder, home)?.with_style(style);
    model.grammars();
    let grammars = model.grammars.into_inner().flatten();
    Ok(grammars.map(|grammars| Box::new(grammars) as Box<dyn ConstraintFactory>))
}

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    own: TextConfig,
    /// Multimodal configs keep the decoder's values here.
    text_config: Option<TextConfig>,
}

#[derive(Deserialize)]
struct TextConfig {
    #[serde(default)]
    eos_token_id: TokenIds,
    max_position_embeddings: Option<u32>,
    vocab_size: Option<u32>,
}

/// One id, several or none.
#[derive(Clone, Default, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    #[default]
    None,
    One(TokenId),
    Many(Vec<TokenId>),
}

impl TokenIds {
    fn ids(&self) -> Vec<TokenId> {
        match self {
            Self::None => Vec::new(),
            Self::One(id) => vec![*id],
            Self::Many(ids) => ids.clone(),
        }
    }
}

#[derive(Default, Deserialize)]
struct GenerationConfig {
    #[serde(default)]
    eos_token_id: TokenIds,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// Sampling parameters of requests that name none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DefaultSampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is no limit.
    pub top_k: u32,
    /// 1 is no limit.
    pub top_p: f32,
    /// 0 is no limit.
    pub min_p: f32,
    /// 1 is none.
    pub repetition_penalty: f32,
    /// Whether the model's publisher chose them (`generation_config.json`).
    pub is_publishers: bool,
}

impl DefaultSampling {
    /// Nothing is filtered.
    pub const OFF: Self = Self {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        is_publishers: true,
    };
    /// llama.cpp's, for models whose publisher chose none: at temperature 1 alone small models
    /// talk nonsense.
    pub const LLAMA_CPP: Self = Self {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        repetition_penalty: 1.0,
        is_publishers: false,
    };
}

impl GenerationConfig {
    /// `do_sample: false` means greedy, as for transformers. What a publisher who chose anything
    /// left out is off.
    fn default_sampling(&self) -> Result<DefaultSampling, OpenModelError> {
        let positive = |name: &str, value: Option<f32>, default: f32, least: f32| match value {
            None => Ok(default),
            Some(value) if value.is_finite() && value >= least => Ok(value),
            Some(found) => Err(OpenModelError::Value {
                file: GENERATION,
                message: format!("{name}: expected a number from {least}, found {found}"),
            }),
        };
        let off = DefaultSampling::OFF;
        let mut chosen = DefaultSampling {
            temperature: positive("temperature", self.temperature, off.temperature, 0.0)?,
            top_k: self.top_k.map_or(0, |k| u32::try_from(k.max(0)).unwrap_or(u32::MAX)),
            top_p: positive("top_p", self.top_p, off.top_p, f32::MIN_POSITIVE)?.min(1.0),
            min_p: positive("min_p", self.min_p, off.min_p, 0.0)?.min(1.0),
            repetition_penalty: positive(
                "repetition_penalty",
                self.repetition_penalty,
                off.repetition_penalty,
                f32::MIN_POSITIVE,
            )?,
            is_publishers: true,
        };
        let has_any = self.temperature.is_some()
            || self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some();
        if self.do_sample == Some(false) {
            chosen.temperature = 0.0;
        } else if !has_any {
            let repetition_penalty = chosen.repetition_penalty;
            return Ok(DefaultSampling { repetition_penalty, ..DefaultSampling::LLAMA_CPP });
        }
        Ok(chosen)
    }
}

/// The named special tokens of a `tokenizer_config.json`, as templates see them.
fn special_tokens(tokenizer_config: &Json) -> Object {
    const NAMES: [&str; 7] = [
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ];
    let config = tokenizer_config.as_object();
    let member = |name| {
        let text = match config?.get(name)? {
            Json::Object(token) => token.get("content")?.as_str()?,
            token => token.as_str()?,
        };
        Some((name.to_owned(), text.into()))
    };
    NAMES.into_iter().filter_map(member).collect()
}

/// `chat_template.jinja`, else `chat_template` of the tokenizer's config: one template or several
/// with names, of which transformers takes `tool_use` for requests with tools.
fn read_templates(
    folder: &Path,
    tokenizer_config: &Json,
) -> Result<Option<(TemplateTexts, &'static str)>, OpenModelError> {
    if let Some(bytes) = read(folder, TEMPLATE, CONFIG_BYTES_MAX)? {
        let default = String::from_utf8(bytes).map_err(|error| OpenModelError::Value {
            file: TEMPLATE,
            message: format!("expected UTF-8, found {}", error.utf8_error()),
        })?;
        return Ok(Some((TemplateTexts { default, tools: None }, TEMPLATE)));
    }
    let file = TOKENIZER_CONFIG;
    match tokenizer_config.as_object().and_then(|config| config.get("chat_template")) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => {
            Ok(Some((TemplateTexts { default: source.clone(), tools: None }, file)))
        }
        Some(Json::Array(entries)) => {
            let named = |name: &str| {
                entries.iter().filter_map(Json::as_object).find_map(|entry| {
                    let matches = entry.get("name")?.as_str()? == name;
                    entry.get("template")?.as_str().filter(|_| matches).map(str::to_owned)
                })
            };
            let default = named("default").ok_or_else(|| OpenModelError::Value {
                file,
                message: "chat_template: none of the list is named \"default\"".to_owned(),
            })?;
            Ok(Some((TemplateTexts { default, tools: named("tool_use") }, file)))
        }
        Some(other) => Err(OpenModelError::Value {
            file,
            message: format!("chat_template: expected a string or a list, found {}", other.kind()),
        }),
    }
}

/// The error of a package whose template, from `file`, or tokenizer does not open.
fn open_error(error: OpenSideError, file: &'static str) -> OpenModelError {
    match error {
        OpenSideError::Open(OpenPromptsError::Tokenizer(error)) => {
            OpenModelError::Tokenizer(error.into())
        }
        OpenSideError::Open(OpenPromptsError::Template(source)) => {
            OpenModelError::Template { file, source }
        }
        OpenSideError::Refused(message) => OpenModelError::Refused(message),
        OpenSideError::Sandbox(error) => OpenModelError::Sandbox(error),
    }
}

/// A file's bytes, or nothing where it does not exist.
fn read(folder: &Path, file: &'static str, limit: u64) -> Result<Option<Vec<u8>>, OpenModelError> {
    let error = |source| OpenModelError::Read { folder: folder.to_owned(), file, source };
    let open = match File::open(folder.join(file)) {
        Ok(open) => open,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(error(source)),
    };
    let mut bytes = Vec::new();
    open.take(limit + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > limit {
        return Err(OpenModelError::TooLarge { file, limit });
    }
    Ok(Some(bytes))
}

fn parse<T: for<'de> Deserialize<'de>>(
    folder: &Path,
    file: &'static str,
) -> Result<Option<T>, OpenModelError> {
    let Some(bytes) = read(folder, file, CONFIG_BYTES_MAX)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|source| OpenModelError::Json { file, source })
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no such file")
}

#[cfg(test)]
mod tests;
