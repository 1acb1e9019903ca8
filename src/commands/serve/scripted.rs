//! `serve --engine scripted`: a file of answers instead of ranks. The answers use a package's
//! tokenizer and chat template, or a built-in byte tokenizer if no package is named.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::mpsc::Receiver,
    thread,
};

use anyhow::{Context, anyhow};
use serde_json::{Map, Value, json};
use shardpack_chat::ChatModel;
use shardpack_engine_api::{Command, EngineHandle, EngineState};
use shardpack_server::Script;

use crate::{
    args::{EngineName, ServeArgs},
    failure::Failure,
};

/// A file of answers, and the package set whose tokenizer they use.
pub(super) struct Scripted {
    pub(super) file: PathBuf,
    /// The package set; `None` for the built-in byte tokenizer.
    pub(super) set: Option<PathBuf>,
}

impl Scripted {
    /// What the arguments say: `SET --script FILE`, with or without `--engine scripted`, or
    /// `--engine scripted FILE`, whose `set` is a path from the file's folder.
    pub(super) fn of(args: &ServeArgs) -> Result<Option<Self>, Failure> {
        if let Some(file) = &args.script {
            return Ok(Some(Self { file: file.clone(), set: Some(args.set.clone()) }));
        }
        if args.engine.engine != EngineName::Scripted {
            return Ok(None);
        }
        let file = args.set.clone();
        if file.is_dir() {
            let error = anyhow!("{}: a folder, not a file of answers", file.display());
            return Err(Failure::from(error)
                .hint("serve SET --script FILE, or serve --engine scripted FILE"));
        }
        let shown = || file.display().to_string();
        let bytes = fs::read(&file).with_context(shown)?;
        let json: Value = serde_json::from_slice(&bytes)
            .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown())))?;
        let folder = file.parent().unwrap_or_else(|| Path::new(""));
        let set = json["set"].as_str().map(|set| folder.join(set));
        Ok(Some(Self { file, set }))
    }

    /// The script for a model.
    pub(super) fn parse(&self, model: &ChatModel) -> Result<Script, Failure> {
        let shown = || self.file.display().to_string();
        let bytes = fs::read(&self.file).with_context(shown)?;
        Script::parse(&bytes, model)
            .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown())))
    }
}

/// Plays on a thread of its own, with a tokenizer of its own.
pub(super) fn play(
    script: Script,
    model: ChatModel,
    handle: &EngineHandle,
    commands: Receiver<Command>,
) -> anyhow::Result<thread::JoinHandle<()>> {
    // Before the server is ready: requests wait for the player.
    handle.update_status(|status| status.state = EngineState::Ready);
    let handle = handle.clone();
    let play = move || script.play(&model, handle, &commands);
    Ok(thread::Builder::new().name("script".to_owned()).spawn(play)?)
}

/// Marks of turns, calls and thinking, after the 256 bytes.
const MARKS: [&str; 6] =
    ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"];

/// Long enough for requests of coding tools, byte by byte.
const MAX_POSITIONS: u32 = 1 << 20;

/// A model whose tokens are bytes, so that it can produce any text.
pub(super) fn model_of_bytes() -> anyhow::Result<ChatModel> {
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let write = |file: &str, text: String| {
        fs::write(folder.path().join(file), text).with_context(|| file.to_owned())
    };
    write("tokenizer.json", tokenizer().to_string())?;
    write("chat_template.jinja", include_str!("scripted/chatml.jinja").to_owned())?;
    write("tokenizer_config.json", json!({ "eos_token": "<|im_end|>" }).to_string())?;
    let vocab_size = 256 + MARKS.len();
    let config = json!({ "vocab_size": vocab_size, "max_position_embeddings": MAX_POSITIONS });
    write("config.json", config.to_string())?;
    ChatModel::open(folder.path()).context("the tokenizer of bytes")
}

/// A `tokenizer.json` whose tokens are bytes and [`MARKS`].
fn tokenizer() -> Value {
    let vocab: Map<String, Value> =
        (0..=255).map(|byte| (letter(byte).to_string(), u32::from(byte).into())).collect();
    let added = MARKS.iter().zip(256..).map(|(content, id)| {
        json!({
            "id": id, "content": content, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        })
    });
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": bytes, "decoder": bytes, "post_processor": null,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// GPT-2's alphabet: printable Latin-1 characters are themselves, the other 68 bytes are the
/// characters from U+0100.
fn letter(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x00..=0x20 => 0x100 + code,
        0x7f..=0xa0 => 0x121 + code - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(code).expect("below the surrogates")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_bytes_says_every_text() {
        let model = model_of_bytes().unwrap();
        let answers = r#"{"answers": [{"text": "Grüße \u0000 <tool_call>\n{}"}]}"#;
        Script::parse(answers.as_bytes(), &model).unwrap();
        let letters: std::collections::BTreeSet<char> = (0..=255).map(letter).collect();
        assert_eq!(letters.len(), 256);
    }
}
