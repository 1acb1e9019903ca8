//! tiktoken's `tiktoken.model`: a line for each token, its bytes in base 64, a space, its rank.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    MAX_TOKEN_BYTES, MAX_TOKENS, TokenizerError, base64, damaged,
    document::{Added, Document, byte_level_decoder, byte_level_model, byte_level_split},
    refused,
};

/// How Kimi's tokenizer splits texts: that of o200k, with Han characters by themselves and without
/// a slash after punctuation (`tokenization_kimi.py`).
const KIMI_PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Special tokens behind the others, whatever the configuration names of them.
const KIMI_SPECIAL: u32 = 256;

/// Kimi's tokenizer: `tiktoken.model` with the special tokens of `tokenizer_config.json`.
pub fn kimi(bytes: &[u8], config: &Value) -> Result<Value, TokenizerError> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let code = config["auto_map"].to_string();
    if class != "TikTokenTokenizer" && !code.contains("tokenization_kimi") {
        return Err(refused(
            "its pattern for splitting texts stands in code of the repository, and only Kimi's is known; \
             give a tokenizer.json",
        ));
    }
    let ranked = parse(bytes)?;
    let names = config["added_tokens_decoder"].as_object();
    let names: BTreeMap<u32, &Value> = names
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| Some((id.parse().ok()?, token)))
        .collect();
    let first = ranked.len() as u32;
    let token = |id: u32| {
        let named = names.get(&id);
        let content = named.and_then(|token| token["content"].as_str());
        let content = content.map_or_else(|| format!("<|reserved_token_{id}|>"), str::to_owned);
        let is_special = named.is_none_or(|token| token["special"].as_bool().unwrap_or(true));
        Added { id, content, is_special }
    };
    Ok(Document {
        added: (first..first + KIMI_SPECIAL).map(token).collect(),
        normalizer: Value::Null,
        pre_tokenizer: byte_level_split(KIMI_PATTERN),
        post_processor: Value::Null,
        decoder: byte_level_decoder(),
        model: byte_level_model(&ranked, &[])?,
    }
    .into_json())
}

/// Tokens in the order of their ranks, which have no gaps.
fn parse(bytes: &[u8]) -> Result<Vec<Vec<u8>>, TokenizerError> {
    let mut by_rank: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let token = line.iter().position(|byte| *byte == b' ').and_then(|space| {
            let rank: usize = str::from_utf8(&line[space + 1..]).ok()?.parse().ok()?;
            Some((base64::decode(&line[..space])?, rank))
        });
        let Some((token, rank)) = token else {
            return Err(damaged(format!("line {} is no token with its rank", index + 1)));
        };
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES || rank >= MAX_TOKENS {
            let problem = format!("line {} has {} bytes and rank {rank}", index + 1, token.len());
            return Err(damaged(format!("{problem}; at most {MAX_TOKEN_BYTES} and {MAX_TOKENS}")));
        }
        if by_rank.insert(rank, token).is_some() {
            return Err(damaged(format!("rank {rank} is there twice")));
        }
    }
    match by_rank.keys().next_back() {
        Some(last) if last + 1 == by_rank.len() => Ok(by_rank.into_values().collect()),
        _ => Err(damaged(format!("{} tokens do not have ranks without gaps", by_rank.len()))),
    }
}
