//! sentencepiece's `tokenizer.model`: pieces with scores, joined by the best score (BPE) or chosen
//! by the best sum (unigram). Field numbers are those of `sentencepiece_model.proto`.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{
    MAX_TOKEN_BYTES, MAX_TOKENS, TokenizerError, base64, damaged,
    document::{Added, Document, SPACE, surround},
    protobuf::Fields,
    refused,
};

/// Largest table of a normalisation: that of NFKC has 240 KB.
const MAX_CHARSMAP_BYTES: usize = 4 << 20;

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    /// By its number, which is the same in GGUF.
    pub(crate) const fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

pub(crate) struct Piece<'a> {
    pub(crate) text: &'a str,
    pub(crate) score: f32,
    pub(crate) kind: Kind,
}

/// How pieces are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Unigram,
    Bpe,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a field of the format")]
pub(crate) struct Model<'a> {
    pub(crate) pieces: Vec<Piece<'a>>,
    pub(crate) algorithm: Algorithm,
    pub(crate) byte_fallback: bool,
    pub(crate) space_as_suffix: bool,
    pub(crate) charsmap: &'a [u8],
    pub(crate) add_dummy_prefix: bool,
    pub(crate) remove_extra_spaces: bool,
    pub(crate) escape_spaces: bool,
}

/// The tokenizer of a sentencepiece model; `config` says what is put before and after a text
/// (`add_bos_token`, `add_eos_token`).
pub fn sentencepiece(bytes: &[u8], config: &Value) -> Result<Value, TokenizerError> {
    if bytes.iter().take(64).all(|byte| byte.is_ascii_graphic() || matches!(byte, b' ' | b'\n'))
        && !bytes.is_empty()
    {
        return Err(refused(
            "it holds ranks of tiktoken, and the pattern for splitting texts stands in code of the \
             repository; give a tokenizer.json",
        ));
    }
    let model = Model::parse(bytes)?;
    model.check()?;
    let place = |key: &str, name: &str, default: &'static str| {
        let content =
            |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
        let name = content(&config[name]).unwrap_or_else(|| default.to_owned());
        let id = model.pieces.iter().position(|piece| piece.text == name)?;
        (config[key].as_bool() == Some(true)).then_some((name, id as u32))
    };
    let (before, after) =
        (place("add_bos_token", "bos_token", "<s>"), place("add_eos_token", "eos_token", "</s>"));
    model.document(
        before.as_ref().map(|(name, id)| (name.as_str(), *id)),
        after.as_ref().map(|(name, id)| (name.as_str(), *id)),
    )
}

impl<'a> Model<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, TokenizerError> {
        let mut model = Self {
            pieces: Vec::new(),
            algorithm: Algorithm::Unigram,
            byte_fallback: false,
            space_as_suffix: false,
            charsmap: &[],
            add_dummy_prefix: true,
            remove_extra_spaces: true,
            escape_spaces: true,
        };
        for field in Fields(bytes) {
            match field? {
                (1, piece) => {
                    if model.pieces.len() == MAX_TOKENS {
                        return Err(damaged(format!("more than {MAX_TOKENS} pieces")));
                    }
                    model.pieces.push(Piece::parse(piece.bytes()?)?);
                }
                (2, trainer) => model.trainer(trainer.bytes()?)?,
                (3, normalizer) => model.normalization(normalizer.bytes()?)?,
                _ => {}
            }
        }
        if model.pieces.is_empty() {
            return Err(damaged("it has no pieces"));
        }
        Ok(model)
    }

    fn trainer(&mut self, bytes: &[u8]) -> Result<(), TokenizerError> {
        for field in Fields(bytes) {
            match field? {
                (3, kind) => {
                    self.algorithm = match kind.number()? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        3 => {
                            return Err(refused(
                                "models of whole words are not read; give a tokenizer.json",
                            ));
                        }
                        4 => {
                            return Err(refused(
                                "models of characters are not read; give a tokenizer.json",
                            ));
                        }
                        other => return Err(damaged(format!("model type {other}"))),
                    };
                }
                (24, suffix) => self.space_as_suffix = suffix.flag()?,
                (35, fallback) => self.byte_fallback = fallback.flag()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn normalization(&mut self, bytes: &'a [u8]) -> Result<(), TokenizerError> {
        for field in Fields(bytes) {
            match field? {
                (2, charsmap) => self.charsmap = charsmap.bytes()?,
                (3, prefix) => self.add_dummy_prefix = prefix.flag()?,
                (4, remove) => self.remove_extra_spaces = remove.flag()?,
                (5, escape) => self.escape_spaces = escape.flag()?,
                _ => {}
            }
        }
        if self.charsmap.len() > MAX_CHARSMAP_BYTES {
            return Err(damaged(format!("a table of {} bytes", self.charsmap.len())));
        }
        Ok(())
    }

    /// `tokenizer.json`, with tokens that are put before and after every text.
    pub(crate) fn document(
        &self,
        before: Option<(&str, u32)>,
        after: Option<(&str, u32)>,
    ) -> Result<Value, TokenizerError> {
        let added = self.pieces.iter().enumerate().filter(|(_, piece)| {
            matches!(piece.kind, Kind::Control | Kind::UserDefined | Kind::Unknown)
        });
        let added = added.map(|(id, piece)| Added {
            id: id as u32,
            content: piece.text.to_owned(),
            is_special: piece.kind != Kind::UserDefined,
        });
        Ok(Document {
            added: added.collect(),
            normalizer: self.normalizer(),
            // Pieces may be found anywhere: the text is one word.
            pre_tokenizer: Value::Null,
            post_processor: surround(before, after),
            decoder: self.decoder(),
            model: match self.algorithm {
                Algorithm::Bpe => self.bpe()?,
                Algorithm::Unigram => self.unigram()?,
            },
        }
        .into_json())
    }

    /// Refuses what `tokenizer.json` cannot say.
    fn check(&self) -> Result<(), TokenizerError> {
        if self.space_as_suffix || !self.escape_spaces {
            return Err(refused(
                "spaces at the ends of pieces are not read; give a tokenizer.json",
            ));
        }
        // Texts beside such a piece keep their spaces, and get none of their own.
        let tidies = self.add_dummy_prefix || self.remove_extra_spaces;
        let spaced = |piece: &&Piece<'_>| {
            piece.kind == Kind::UserDefined && (tidies || piece.text.contains(SPACE))
        };
        if let Some(piece) = self.pieces.iter().find(spaced) {
            return Err(refused(format!(
                "its piece {:?} is found before spaces are put in, which tokenizer.json cannot say; give the \
                 tokenizer.json of its publisher",
                piece.text
            )));
        }
        Ok(())
    }

    fn normalizer(&self) -> Value {
        let mut steps = Vec::new();
        if !self.charsmap.is_empty() {
            let table = base64::encode(self.charsmap);
            steps.push(json!({ "type": "Precompiled", "precompiled_charsmap": table }));
        }
        let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
        if self.remove_extra_spaces {
            steps.push(replace(json!({ "Regex": r"\A +" }), ""));
            steps.push(replace(json!({ "Regex": " {2,}" }), " "));
        }
        if self.add_dummy_prefix {
            steps.push(json!({ "type": "Prepend", "prepend": SPACE }));
        }
        steps.push(replace(json!({ "String": " " }), SPACE));
        if self.remove_extra_spaces {
            // The mark itself counts as a space at the end, as it does there.
            steps.push(replace(json!({ "Regex": format!("{SPACE}+\\z") }), ""));
        }
        json!({ "type": "Sequence", "normalizers": steps })
    }

    fn decoder(&self) -> Value {
        let mut steps = vec![
            json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if self.add_dummy_prefix {
            steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        json!({ "type": "Sequence", "decoders": steps })
    }

    fn unknown(&self) -> Result<usize, TokenizerError> {
        let found = self.pieces.iter().position(|piece| piece.kind == Kind::Unknown);
        found.ok_or_else(|| damaged("no piece stands for what is unknown"))
    }

    fn unigram(&self) -> Result<Value, TokenizerError> {
        let vocab: Vec<Value> =
            self.pieces.iter().map(|piece| json!([piece.text, f64::from(piece.score)])).collect();
        Ok(json!({
            "type": "Unigram",
            "unk_id": self.unknown()?,
            "vocab": vocab,
            "byte_fallback": self.byte_fallback,
        }))
    }

    /// Every pair of pieces whose union is one becomes a merge, the best score first.
    fn bpe(&self) -> Result<Value, TokenizerError> {
        let unknown = self.pieces[self.unknown()?].text;
        let mut ids: HashMap<&str, usize> = HashMap::new();
        let mut vocab = Map::new();
        for (id, piece) in self.pieces.iter().enumerate() {
            if vocab.insert(piece.text.to_owned(), id.into()).is_some() {
                return Err(damaged(format!("piece {:?} is there twice", piece.text)));
            }
            if piece.kind == Kind::Normal {
                ids.insert(piece.text, id);
            }
        }
        let mut pairs: Vec<(usize, usize, usize)> = Vec::new();
        for (id, piece) in self.pieces.iter().enumerate().filter(|(_, p)| p.kind == Kind::Normal) {
            for (at, _) in piece.text.char_indices().skip(1) {
                let (left, right) = piece.text.split_at(at);
                if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                    pairs.push((id, *left, *right));
                }
            }
        }
        pairs.sort_by(|a, b| {
            let score = |pair: &(usize, usize, usize)| self.pieces[pair.0].score;
            score(b).total_cmp(&score(a)).then(a.cmp(b))
        });
        let text = |id: usize| self.pieces[id].text;
        let merges: Vec<Value> =
            pairs.iter().map(|(_, left, right)| json!([text(*left), text(*right)])).collect();
        Ok(json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": self.byte_fallback,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        }))
    }
}

impl<'a> Piece<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, TokenizerError> {
        let mut piece = Self { text: "", score: 0.0, kind: Kind::Normal };
        for field in Fields(bytes) {
            match field? {
                (1, text) => piece.text = text.text()?,
                (2, score) => piece.score = score.float()?,
                (3, kind) => {
                    let number = kind.number()?;
                    piece.kind = Kind::from_number(number)
                        .ok_or_else(|| damaged(format!("a piece of kind {number}")))?;
                }
                _ => {}
            }
        }
        if piece.text.is_empty() || piece.text.len() > MAX_TOKEN_BYTES {
            return Err(damaged(format!("a piece of {} bytes", piece.text.len())));
        }
        Ok(piece)
    }
}
