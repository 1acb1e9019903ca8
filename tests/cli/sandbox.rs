//! Hostile chat templates and tokenizers in the sandbox that the program runs them in: each is refused
//! when it is opened, or is an error for the request at hand within its deadline. The model answers the
//! next request, and so do the server's others.

mod overhead;
mod served;
mod soak;
mod templates;
mod tokenizers;

use std::{
    error::Error,
    fs, io,
    path::Path,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use shardpack_chat::{
    ChatModel, PromptHome, SandboxProgram,
    conversation::{ChatRequest, Message},
    json::Json,
    model::LongText,
};
use tempfile::tempdir;

use crate::harness::{causes, data};

/// What makes a template of these tests show what it is.
const TRIGGER: &str = "boom";

/// The program's sandbox.
fn program() -> SandboxProgram {
    SandboxProgram::new(|| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shardpack"));
        command.arg("text-worker");
        Ok::<_, io::Error>(command)
    })
}

/// A conversation of one message.
fn says(text: &str) -> ChatRequest {
    let message = serde_json::json!({ "role": "user", "content": text }).to_string();
    let message = Message::normalise(Json::parse(message.as_bytes()).unwrap()).unwrap();
    ChatRequest { messages: vec![message], ..ChatRequest::default() }
}

/// The folder of a small model with other text files.
fn write_model(folder: &Path, changes: &[(&str, &[u8])]) {
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"] {
        fs::copy(data("kjv-4m").join(file), folder.join(file)).unwrap();
    }
    for (file, bytes) in changes {
        fs::write(folder.join(file), bytes).unwrap();
    }
}

/// What became of a hostile package.
#[derive(Debug)]
enum Outcome {
    /// It did not open.
    Refused(String),
    /// It opened and made no prompt of the request.
    Failed(String),
    /// It did no harm.
    Harmless,
}

impl Outcome {
    fn shown(&self) -> String {
        match self {
            Self::Refused(error) => format!("refused: {error}"),
            Self::Failed(error) => format!("failed: {error}"),
            Self::Harmless => "harmless".to_owned(),
        }
    }
}

/// Opens a hostile model in the sandbox and asks it for a prompt, which must end; then for
/// another, which it must make if it makes prompts at all.
fn attack(name: &str, changes: &[(&str, &[u8])]) -> Outcome {
    let folder = tempdir().unwrap();
    write_model(folder.path(), changes);
    let program = program();
    let opened = ChatModel::open_in(folder.path(), PromptHome::Sandboxed(&program));
    let model = match opened {
        Ok(model) => model,
        Err(error) => return Outcome::Refused(causes(&error)),
    };
    let asked = model.prompt(&says(&format!("{TRIGGER} aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")));
    let embedded = || model.embedding_tokens("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", LongText::Refuse);
    let result = asked.map(|_| ()).and_then(|()| embedded().map(|_| ()));
    match result {
        Ok(()) => Outcome::Harmless,
        Err(error) => {
            let error: &dyn Error = &error;
            let error = causes(error);
            // What is made up at random may fail on every conversation.
            if !name.starts_with("seed") && changes[0].0 == "chat_template.jinja" {
                let next = model.prompt(&says("peace"));
                assert!(next.is_ok(), "{name}: {next:?} after {error}");
            }
            Outcome::Failed(error)
        }
    }
}

/// Runs a check of each case, a few at a time.
fn in_parallel<T: Sync>(cases: &[T], check: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    check(case);
                }
            });
        }
    });
}
