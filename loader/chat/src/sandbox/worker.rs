//! The sandbox's side: executes what it is sent. It must not be called in a process that is not
//! confined.

use std::io::Write;

use shardpack_formats::chat::{TEMPLATE_FILE, Templates, probe_here, turn_end::after_answer_here};

use super::wire::{Frame, Reply, Request, VERSION, WireError, token_bytes};
use crate::{
    prompt::{
        Conversation, PromptFailure, PromptFiles, PromptMaker, TemplateTexts, TextMarks, shortened,
    },
    template::Rendered,
};

/// Answers requests until there are no more.
pub fn serve(
    requests: impl IntoIterator<Item = Frame>,
    output: &mut impl Write,
) -> Result<(), WireError> {
    Frame::new(&Reply::Hello { version: VERSION }, Vec::new())?.write(output)?;
    let mut maker = None;
    for request in requests {
        answer(&mut maker, request)?.write(output)?;
    }
    Ok(())
}

/// The answer to a request.
pub fn answer(maker: &mut Option<PromptMaker>, request: Frame) -> Result<Frame, WireError> {
    let Frame { head, body } = request;
    let (reply, body) = match serde_json::from_slice(&head)? {
        Request::Open { templates, specials } => {
            let files = PromptFiles { tokenizer: body, templates, specials };
            match PromptMaker::open(&files) {
                Ok((opened, facts)) => {
                    *maker = Some(opened);
                    (Reply::Opened { shows_tools: facts.shows_tools }, facts.tokens.encode())
                }
                Err(error) => (Reply::Refused(shortened(error.to_string())), Vec::new()),
            }
        }
        Request::Render(conversation) => {
            done(opened(maker.as_ref())?.render(&conversation), |Rendered { text, adjustments }| {
                (Reply::Rendered { adjustments: names(&adjustments) }, text.into_bytes())
            })
        }
        Request::Prompt(conversation) => {
            done(prompt(opened(maker.as_ref())?, &conversation), |(tokens, adjustments)| {
                (Reply::Prompted { adjustments: names(&adjustments) }, token_bytes(&tokens))
            })
        }
        Request::Encode(marks) => {
            let text = String::from_utf8(body)
                .map_err(|_| WireError::Body("a body that is no text".into()))?;
            let tokens = opened(maker.as_ref())?.encode(&text, marks);
            done(tokens, |tokens| (Reply::Encoded, token_bytes(&tokens)))
        }
        Request::Probe { templates, specials } => {
            let mut chat = probe_here(&templates_of(templates), &specials);
            chat.problem = chat.problem.map(shortened);
            (Reply::Probed(Box::new(chat)), Vec::new())
        }
        Request::AfterAnswer { templates, specials } => {
            let texts = after_answer_here(&templates_of(templates), &specials);
            (Reply::AfterAnswer(texts), Vec::new())
        }
    };
    Frame::new(&reply, body)
}

fn done<T>(
    made: Result<T, PromptFailure>,
    reply: impl FnOnce(T) -> (Reply, Vec<u8>),
) -> (Reply, Vec<u8>) {
    match made {
        Ok(made) => reply(made),
        Err(failure) => (Reply::Failed(failure), Vec::new()),
    }
}

fn prompt(
    maker: &PromptMaker,
    conversation: &Conversation<'_>,
) -> Result<(Vec<shardpack_engine_api::TokenId>, Vec<&'static str>), PromptFailure> {
    let Rendered { text, adjustments } = maker.render(conversation)?;
    Ok((maker.encode(&text, TextMarks::None)?, adjustments))
}

fn opened(maker: Option<&PromptMaker>) -> Result<&PromptMaker, WireError> {
    maker.ok_or_else(|| WireError::Body("a request before a package is open".into()))
}

fn names(adjustments: &[&'static str]) -> Vec<String> {
    adjustments.iter().map(|name| (*name).to_owned()).collect()
}

fn templates_of(texts: TemplateTexts) -> Templates {
    let TemplateTexts { default, tools } = texts;
    Templates { file: TEMPLATE_FILE, default, tools }
}
