//! Streams of text equal whole decodes.

use std::sync::LazyLock;

use proptest::prelude::*;
use tokenizers::Tokenizer;

use super::*;

const KJV: &[u8] = include_bytes!("../../../../tests/data/kjv-4m/tokenizer.json");

fn kjv() -> Arc<Vocabulary> {
    Arc::new(Vocabulary::parse(KJV).unwrap())
}

fn encode(text: &str) -> Vec<TokenId> {
    static ENCODER: LazyLock<Encoder> = LazyLock::new(|| Encoder::parse(KJV).unwrap());
    ENCODER.encode(text).unwrap()
}

/// A tokenizer in the manner of sentencepiece: words with `▁`, bytes as `<0xNN>`.
fn sentencepiece(decoder: &str) -> (Arc<Vocabulary>, Tokenizer) {
    let words = [
        "<unk>", "▁Hello", "▁", "wor", "ld", "▁▁x", "é", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>",
        "<0x41>",
    ];
    let vocab: Vec<String> =
        words.iter().enumerate().map(|(id, word)| format!("{word:?}:{id}")).collect();
    let text = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":null,"post_processor":null,"decoder":{decoder},
        "model":{{"type":"BPE","dropout":null,"unk_token":"<unk>","continuing_subword_prefix":null,
        "end_of_word_suffix":null,"fuse_unk":true,"byte_fallback":true,"ignore_merges":false,
        "vocab":{{{}}},"merges":[]}}}}"#,
        vocab.join(",")
    );
    let tokenizer = Tokenizer::from_bytes(text.as_bytes()).unwrap();
    (Arc::new(Vocabulary::parse(text.as_bytes()).unwrap()), tokenizer)
}

const LLAMA_2: &str = r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
const GEMMA: &str = r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"}]}"#;
const METASPACE: &str =
    r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":false}"#;
const METASPACE_NEVER: &str =
    r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"never","split":false}"#;

/// The stream of a sequence; asserts on the way that nothing broken is handed out early.
fn stream(vocabulary: &Arc<Vocabulary>, ids: &[u32]) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(vocabulary.clone());
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(TokenId(id))).collect();
    pieces.push(detokenizer.finish());
    pieces
}

fn decode(vocabulary: &Arc<Vocabulary>, tokens: &[TokenId]) -> String {
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    stream(vocabulary, &ids).concat()
}

#[test]
fn text_survives_the_way_there_and_back() {
    let vocabulary = kjv();
    for text in [
        "",
        "In the beginning",
        "  two  spaces\n\n",
        "naïve €5 日本語 🙂👩‍👩‍👧",
        "<tool_call>\n{}\n</tool_call>",
    ] {
        let encoded = encode(text);
        assert_eq!(decode(&vocabulary, &encoded), text);
    }
}

#[test]
fn characters_of_several_tokens_come_whole() {
    let vocabulary = kjv();
    let ids: Vec<u32> = encode("a🙂b").iter().map(|id| id.0).collect();
    assert_eq!(ids.len(), 6, "the emoji is four tokens in this vocabulary");
    assert_eq!(stream(&vocabulary, &ids), ["a", "", "", "", "🙂", "b", ""]);
    assert_eq!(stream(&vocabulary, &ids[..3]), ["a", "", "", "\u{fffd}"]);
}

#[test]
fn markers_of_calls_are_shown_and_turns_are_not() {
    let mut vocabulary = Vocabulary::parse(KJV).unwrap();
    vocabulary.hide("In"); // not a special token, so shown
    let vocabulary = Arc::new(vocabulary);
    let encoded = encode("<|im_start|>In<tool_call></tool_call><|im_end|><|endoftext|>");
    assert_eq!(decode(&vocabulary, &encoded), "In<tool_call></tool_call>");
    assert_eq!(decode(&vocabulary, &[TokenId(4_000_000_000)]), "", "ids outside the vocabulary");
}

#[test]
fn every_decoder_gives_what_the_tokenizers_library_gives() {
    let sequences: [&[u32]; 8] = [
        &[1, 2, 3, 4],
        &[2, 1, 5, 6],
        &[5, 1],
        &[3, 8, 9, 10, 4],
        &[8, 9, 10, 11, 7, 1],
        &[2, 2, 2],
        &[6, 7],
        &[],
    ];
    for decoder in [LLAMA_2, GEMMA, METASPACE, METASPACE_NEVER] {
        let (vocabulary, tokenizer) = sentencepiece(decoder);
        for ids in sequences {
            if decoder.contains("Metaspace") && ids.iter().any(|id| (7..=11).contains(id)) {
                continue; // this decoder has no bytes
            }
            let expected = tokenizer.decode(ids, false).unwrap();
            assert_eq!(stream(&vocabulary, ids).concat(), expected, "{decoder} {ids:?}");
        }
    }
}

#[test]
fn bytes_that_never_become_a_character_are_replaced_at_once() {
    let (vocabulary, _) = sentencepiece(GEMMA);
    // E2 82 cut short by "A"; a lone continuation byte; E2 82 at the end.
    let pieces = stream(&vocabulary, &[8, 9, 11, 9, 8, 9]);
    assert_eq!(pieces, ["", "", "\u{fffd}A", "\u{fffd}", "", "", "\u{fffd}"]);
}

proptest! {
    #[test]
    fn stream_joins_to_the_whole_decode(ids in prop::collection::vec(0u32..2048, 0..60)) {
        let vocabulary = kjv();
        let shown: Vec<u32> =
            ids.iter().copied().filter(|id| !vocabulary.hidden.contains(id)).collect();
        let expected = Tokenizer::from_bytes(KJV).unwrap().decode(&shown, false).unwrap();
        prop_assert_eq!(stream(&vocabulary, &ids).concat(), expected);
    }

    #[test]
    fn text_streams_without_broken_characters(text in "\\PC{0,40}") {
        let vocabulary = kjv();
        let ids: Vec<u32> = encode(&text).iter().map(|id| id.0).collect();
        let pieces = stream(&vocabulary, &ids);
        prop_assume!(!text.contains('\u{fffd}'));
        prop_assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)));
        prop_assert_eq!(pieces.concat(), text);
    }
}
