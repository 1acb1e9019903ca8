//! Mistral's `tekken.json`: byte tokens with ranks, a pattern, and special tokens whose ids come
//! first.

use serde::Deserialize;
use serde_json::Value;

use super::{
    MAX_TOKEN_BYTES, MAX_TOKENS, TokenizerError, base64, damaged,
    document::{Added, Document, byte_level_decoder, byte_level_model, byte_level_split, surround},
};

/// Longest pattern in bytes: the longest published one has about 300.
const MAX_PATTERN_BYTES: usize = 4096;

/// Special tokens of files that list none (versions below 7).
const EARLY_SPECIAL: &[&str] = &[
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

#[derive(Deserialize)]
struct File {
    config: Config,
    vocab: Vec<Token>,
    special_tokens: Option<Vec<Special>>,
}

#[derive(Deserialize)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct Token {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct Special {
    rank: usize,
    token_str: String,
}

/// The tokenizer of a `tekken.json`. As mistral-common does, `<s>` is put before a text.
pub fn tekken(bytes: &[u8]) -> Result<Value, TokenizerError> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    let Config { pattern, default_vocab_size: size, default_num_special_tokens: special } =
        &file.config;
    let wanted = size.checked_sub(*special).filter(|_| *size <= MAX_TOKENS);
    let Some(wanted) = wanted.filter(|wanted| (1..=file.vocab.len()).contains(wanted)) else {
        let problem =
            format!("{size} tokens, {special} of them special, and a list of {}", file.vocab.len());
        return Err(damaged(problem));
    };
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(damaged(format!("its pattern has {} bytes", pattern.len())));
    }
    let mut ranked = Vec::with_capacity(wanted);
    for (index, token) in file.vocab.iter().take(wanted).enumerate() {
        let bytes = base64::decode(token.token_bytes.as_bytes());
        let bytes = bytes.filter(|bytes| (1..=MAX_TOKEN_BYTES).contains(&bytes.len()));
        match bytes {
            Some(bytes) if token.rank == index => ranked.push(bytes),
            _ => {
                return Err(damaged(format!(
                    "entry {index} of its vocabulary is no token of that rank"
                )));
            }
        }
    }
    let names = special_names(&file, *special)?;
    let added = names.iter().enumerate().map(|(id, name)| Added {
        id: id as u32,
        content: name.clone(),
        is_special: true,
    });
    let begin = names.iter().position(|name| name == "<s>");
    let begin = begin.map(|id| ("<s>", id as u32));
    Ok(Document {
        added: added.collect(),
        normalizer: Value::Null,
        pre_tokenizer: byte_level_split(pattern),
        post_processor: surround(begin, None),
        decoder: byte_level_decoder(),
        model: byte_level_model(&ranked, &names)?,
    }
    .into_json())
}

/// Special tokens by id, those without a name filled in.
fn special_names(file: &File, count: usize) -> Result<Vec<String>, TokenizerError> {
    let listed: Vec<String> = match &file.special_tokens {
        None => EARLY_SPECIAL.iter().map(|name| (*name).to_owned()).collect(),
        Some(tokens) => {
            let in_order = tokens.iter().enumerate().all(|(id, token)| token.rank == id);
            if !in_order {
                return Err(damaged("its special tokens do not stand in the order of their ranks"));
            }
            tokens.iter().map(|token| token.token_str.clone()).collect()
        }
    };
    if listed.len() > count {
        return Err(damaged(format!("{} special tokens where {count} have a place", listed.len())));
    }
    let filler = (listed.len()..count).map(|id| format!("<SPECIAL_{id}>"));
    let mut names = listed.clone();
    names.extend(filler);
    let mut sorted = names.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(damaged(format!("the special token {:?} is there twice", pair[0]))),
        None => Ok(names),
    }
}
