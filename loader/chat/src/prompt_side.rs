//! Where a package's template and tokenizer are executed: in this process, for what is trusted, or in a
//! sandbox.

use std::borrow::Cow;

use shardpack_engine_api::TokenId;
use shardpack_formats::chat::{Chat, Prober, Templates};

use super::{
    prompt::{
        Conversation, OpenPromptsError, Opened, PromptFailure, PromptFiles, PromptMaker,
        TemplateTexts, TextMarks,
    },
    sandbox::{
        Sandbox, SandboxError, SandboxProgram, Work,
        wire::{Frame, Reply, Request, WireError},
    },
    template::{Rendered, adjustment},
    text::TokenTable,
};

/// Where templates and tokenizers are to be executed.
#[derive(Clone, Copy, Debug)]
pub enum PromptHome<'a> {
    /// In this process: a hostile one can end it.
    InProcess,
    /// In processes of this program.
    Sandboxed(&'a SandboxProgram),
}

/// A package's template and tokenizer.
pub enum PromptSide {
    /// In this process.
    InProcess(Box<PromptMaker>),
    /// In processes of their own.
    Sandboxed(Sandbox),
}

/// A package's template and tokenizer do not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenSideError {
    /// One of them is not what it should be.
    #[error(transparent)]
    Open(#[from] OpenPromptsError),
    /// The same, in the words of the sandbox.
    #[error("{0}")]
    Refused(String),
    /// The sandbox ended, or cannot be started.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// A template and a tokenizer make no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptSideError {
    /// Of this conversation.
    #[error(transparent)]
    Failed(#[from] PromptFailure),
    /// The sandbox gave no answer.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The request is too large for a sandbox, or its answer makes no sense.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl PromptSide {
    /// Opens the files.
    pub fn open(files: PromptFiles, home: PromptHome<'_>) -> Result<(Self, Opened), OpenSideError> {
        match home {
            PromptHome::InProcess => {
                let (maker, opened) = PromptMaker::open(&files)?;
                Ok((Self::InProcess(Box::new(maker)), opened))
            }
            PromptHome::Sandboxed(program) => {
                let PromptFiles { tokenizer, templates, specials } = files;
                let open = Frame::new(&Request::Open { templates, specials }, tokenizer);
                let open = open.map_err(|error| OpenSideError::Refused(error.to_string()))?;
                let (sandbox, frame) = Sandbox::open(program, open)?;
                let wrong = |error: &dyn std::fmt::Display| {
                    OpenSideError::Refused(format!("its tokens: {error}"))
                };
                match frame.owned().map_err(|error| wrong(&error))? {
                    Reply::Opened { shows_tools } => {
                        let tokens =
                            TokenTable::parse(&frame.body).map_err(|error| wrong(&error))?;
                        Ok((Self::Sandboxed(sandbox), Opened { tokens, shows_tools }))
                    }
                    Reply::Refused(message) => Err(OpenSideError::Refused(message)),
                    other => Err(wrong(&out_of_turn(&other))),
                }
            }
        }
    }

    /// The text of a conversation, and what was changed so that it was rendered.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Rendered, PromptSideError> {
        let sandbox = match self {
            Self::InProcess(maker) => return Ok(maker.render(conversation)?),
            Self::Sandboxed(sandbox) => sandbox,
        };
        let frame =
            sandbox.ask(&Frame::new(&Request::Render(borrowed(conversation)), Vec::new())?)?;
        match frame.owned()? {
            Reply::Rendered { adjustments } => {
                Ok(Rendered { text: frame.text()?, adjustments: known(&adjustments) })
            }
            other => Err(failure(other)),
        }
    }

    /// The tokens of a conversation, and what was changed so that it was rendered.
    pub fn prompt(
        &self,
        conversation: &Conversation<'_>,
    ) -> Result<(Vec<TokenId>, Vec<&'static str>), PromptSideError> {
        let sandbox = match self {
            Self::InProcess(maker) => {
                let Rendered { text, adjustments } = maker.render(conversation)?;
                return Ok((maker.encode(&text, TextMarks::None)?, adjustments));
            }
            Self::Sandboxed(sandbox) => sandbox,
        };
        let frame =
            sandbox.ask(&Frame::new(&Request::Prompt(borrowed(conversation)), Vec::new())?)?;
        match frame.owned()? {
            Reply::Prompted { adjustments } => Ok((frame.tokens()?, known(&adjustments))),
            other => Err(failure(other)),
        }
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, marks: TextMarks) -> Result<Vec<TokenId>, PromptSideError> {
        let sandbox = match self {
            Self::InProcess(maker) => return Ok(maker.encode(text, marks)?),
            Self::Sandboxed(sandbox) => sandbox,
        };
        let frame = sandbox.ask(&Frame::new(&Request::Encode(marks), text.as_bytes().to_vec())?)?;
        match frame.owned()? {
            Reply::Encoded => Ok(frame.tokens()?),
            other => Err(failure(other)),
        }
    }
}

/// The same conversation, whose messages stay where they are.
fn borrowed<'a>(conversation: &'a Conversation<'_>) -> Conversation<'a> {
    let Conversation { messages, tools, kwargs, continues } = conversation;
    Conversation {
        messages: Cow::Borrowed(messages),
        tools: tools.clone(),
        kwargs: kwargs.clone(),
        continues: *continues,
    }
}

/// Names of changes; a sandbox can only say those that there are.
fn known(adjustments: &[String]) -> Vec<&'static str> {
    adjustments.iter().filter_map(|name| adjustment(name)).collect()
}

fn failure(reply: Reply) -> PromptSideError {
    match reply {
        Reply::Failed(failure) => failure.into(),
        other => out_of_turn(&other).into(),
    }
}

fn out_of_turn(reply: &Reply) -> WireError {
    WireError::Body(format!("a reply out of turn: {reply:.200?}"))
}

/// Tries the templates of packages in sandboxes.
#[derive(Debug)]
pub struct SandboxedProber(pub SandboxProgram);

impl SandboxedProber {
    fn ask(&self, request: &Request<'_>) -> Result<Reply, String> {
        let frame = Frame::new(request, Vec::new()).map_err(|error| error.to_string())?;
        let reply = self.0.ask_once(&frame, Work::Opening);
        // Without a source a chain is one sentence.
        let reply = reply.map_err(|error| match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })?;
        reply.owned().map_err(|error| error.to_string())
    }
}

impl Prober for SandboxedProber {
    fn probe(
        &self,
        templates: &Templates,
        specials: &std::collections::BTreeMap<String, String>,
    ) -> Result<Chat, String> {
        let request = Request::Probe { templates: texts(templates), specials: specials.clone() };
        match self.ask(&request)? {
            Reply::Probed(chat) => Ok(Chat { file: templates.file.to_owned(), ..*chat }),
            other => Err(out_of_turn(&other).to_string()),
        }
    }

    fn after_answer(
        &self,
        templates: &Templates,
        specials: &std::collections::BTreeMap<String, String>,
    ) -> Result<Vec<String>, String> {
        let request =
            Request::AfterAnswer { templates: texts(templates), specials: specials.clone() };
        match self.ask(&request)? {
            Reply::AfterAnswer(texts) => Ok(texts),
            other => Err(out_of_turn(&other).to_string()),
        }
    }
}

fn texts(templates: &Templates) -> TemplateTexts {
    TemplateTexts { default: templates.default.clone(), tools: templates.tools.clone() }
}
