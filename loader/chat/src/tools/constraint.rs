//! Constrained decoding: grammars of tool calls and structured output as token masks. Reasoning and
//! the text before a call stay free: they are only watched for the trigger of a lazy grammar.

mod budget;
mod cache;
mod compiler;
mod numbers;
mod processor_time;
mod trigger;

use std::{sync::Arc, time::Duration};

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv},
};
use serde::{Deserialize, Serialize};
use shardpack_engine_api::{
    Constraint, ConstraintError, ConstraintFactory, ConstraintSource, TokenId, TokenMask,
};
use shardpack_formats::{ThinkingStyle, ToolFamily};

use super::{
    grammar::{ConstrainedTool, TextForm, Writer},
    parser::{GENERIC, OutputFormat},
    schema::SchemaError,
};
use crate::conversation::PlainText;
pub use budget::CompileBudget;
use cache::{Cache, Compiled};
use compiler::{CompileError, CompileTime, Compiler};
use numbers::NumberEnd;
use trigger::{Trigger, Triggers, call_opener};

/// Longest processor time that a grammar may take to compile. Real ones take some milliseconds.
pub(crate) const COMPILE_TIMEOUT: Duration = Duration::from_millis(1500);

/// Longest time on the clock: compiling has a low priority.
const COMPILE_CLOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes in memory for each of a grammar's text, besides its lexer: 45 KB of Unicode classes were measured
/// to take 2.5 MB.
const GRAMMAR_FACTOR: usize = 64;

/// The constraint of an output; the server writes it, rank 0 reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConstraintSpec {
    /// What the model may call, by name and schema.
    pub tools: Vec<ConstrainedTool>,
    /// Whether it must call one.
    pub required: bool,
    /// Whether one call is all.
    pub one_call: bool,
    /// The form of the text, where there is no call.
    pub text: Option<TextForm>,
    /// Whether the answer begins within thinking.
    pub in_thinking: bool,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<TokenId>,
}

impl ConstraintSpec {
    /// As it travels to rank 0.
    #[must_use]
    pub fn source(&self) -> ConstraintSource {
        ConstraintSource(serde_json::to_string(self).expect("names and numbers are always JSON"))
    }
}

/// A grammar cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A schema says what cannot be enforced.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The grammar itself is at fault.
    #[error("{0}")]
    Grammar(String),
    /// It takes too long.
    #[error("the grammar takes over {} ms to compile: simplify it", COMPILE_TIMEOUT.as_millis())]
    Timeout,
    /// Other grammars are being compiled, and take long.
    #[error("the server is busy compiling other grammars: try again")]
    Busy,
    /// It would have to be compiled, and that was not allowed.
    #[error("the grammar is not compiled yet")]
    Uncompiled,
}

impl GrammarError {
    /// Whether it says nothing about the grammar.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Busy | Self::Uncompiled)
    }
}

/// A tokenizer's tokens as the grammar compiler wants them.
struct Tokens(TokTrie);

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.0.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        // Which tokens spell a text is the model's choice.
        false
    }
}

/// Compiles the grammars of one model.
pub struct Grammars {
    format: Arc<OutputFormat>,
    compiler: Compiler,
    tokens: TokEnv,
    /// A token that no model has: where the grammar may end.
    end: u32,
    cache: Cache,
    /// What one grammar may take to compile.
    compile_time: CompileTime,
}

/// One token of a vocabulary.
#[derive(Clone, Debug)]
pub enum TokenText {
    /// It stands for these bytes.
    Bytes(Vec<u8>),
    /// It was added to the vocabulary: a mark, not text, whatever its name spells.
    Added(String),
    /// It stands for nothing.
    Nothing,
}

impl Grammars {
    /// For a vocabulary in the order of its ids.
    pub fn new(
        format: Arc<OutputFormat>,
        vocabulary: impl IntoIterator<Item = TokenText>,
    ) -> Result<Self, GrammarError> {
        let mut words: Vec<Vec<u8>> = vocabulary
            .into_iter()
            .map(|token| match token {
                TokenText::Bytes(bytes)
                    if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) =>
                {
                    bytes
                }
                TokenText::Added(name) => special(&name),
                _ => Vec::new(),
            })
            .collect();
        let end = words.len() as u32;
        words.push(special("end of answer"));
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &words);
        let tokens: TokEnv = Arc::new(Tokens(trie));
        let mut factory = ParserFactory::new_simple(&tokens)
            .map_err(|error| GrammarError::Grammar(error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let compile_time = CompileTime { processor: COMPILE_TIMEOUT, clock: COMPILE_CLOCK_TIMEOUT };
        let (compiler, cache) = (Compiler::new(factory), Cache::default());
        Ok(Self { format, compiler, tokens, end, cache, compile_time })
    }

    /// The constraint that a description asks for.
    pub fn constraint(&self, spec: &ConstraintSpec) -> Result<GrammarConstraint, GrammarError> {
        self.constraint_within(spec, Some(&CompileBudget::default()))
    }

    /// The same within a budget; without one, only from grammars that were compiled before.
    pub fn constraint_within(
        &self,
        spec: &ConstraintSpec,
        budget: Option<&CompileBudget>,
    ) -> Result<GrammarConstraint, GrammarError> {
        let style = self.format.style();
        let thinking = style.thinking.and_then(ThinkingStyle::tags);
        let tags = thinking.map(|(open, close)| {
            (self.format.marker_token(open), self.format.marker_token(close), close)
        });
        let phase = if spec.required || spec.text.is_some() {
            let matcher = self.matcher(self.whole(spec)?, budget)?;
            match tags {
                Some(_) if spec.in_thinking => Phase::Thinking(matcher),
                Some((Some(_), ..)) => Phase::Start(matcher),
                _ => Phase::Grammar(matcher),
            }
        } else {
            Phase::Free
        };
        let mut triggers = Triggers::default();
        if matches!(phase, Phase::Free) {
            triggers = self.triggers(spec, budget)?;
        }
        Ok(GrammarConstraint {
            tokens: self.tokens.clone(),
            end: self.end,
            stop_tokens: spec.stop_tokens.clone(),
            thinking_open: tags.and_then(|(open, ..)| open),
            closes_nothing: style.thinking.is_some_and(ThinkingStyle::closes_nothing),
            thinking_close: tags.map(|(_, close, text)| (close, text)),
            ends_after_call: spec.one_call || ends_after_call(style.tools),
            thinks: spec.in_thinking,
            tail: String::new(),
            text: PlainText::default(),
            number: bounds_numbers(spec).then(NumberEnd::default),
            phase,
            triggers,
        })
    }

    /// The grammar of the whole answer.
    fn whole(&self, spec: &ConstraintSpec) -> Result<TopLevelGrammar, GrammarError> {
        let mut writer = Writer::new(&self.format);
        let mut alternatives = Vec::new();
        if let (false, Some(family)) = (spec.tools.is_empty(), self.format.style().tools) {
            alternatives.push(writer.required(family, &spec.tools, spec.one_call)?);
        } else if spec.required {
            let reason = "this model's tool-call format is unknown".to_owned();
            return Err(GrammarError::Grammar(reason));
        }
        if let Some(form) = spec.text.as_ref().filter(|_| !spec.required) {
            let text = writer.text_form(form)?;
            let channels = self.format.style().thinking == Some(ThinkingStyle::Channels);
            alternatives.push(match self.format.style().answer {
                _ if channels => writer.in_final_channel(&text),
                Some(frame) => writer.framed(frame, &text),
                None => text,
            });
        }
        // Thinking is followed by empty lines.
        let tags = self.format.style().thinking.and_then(ThinkingStyle::tags);
        let space = if tags.is_some() { "WS? " } else { "" };
        Ok(writer.finish(&format!("{space}({})", alternatives.join(" | "))))
    }

    /// What begins a call in free text.
    fn triggers(
        &self,
        spec: &ConstraintSpec,
        budget: Option<&CompileBudget>,
    ) -> Result<Triggers, GrammarError> {
        let Some(family) = self.format.style().tools.filter(|_| !spec.tools.is_empty()) else {
            return Ok(Triggers::default());
        };
        let grammar = |family| -> Result<Arc<Matcher>, GrammarError> {
            let mut writer = Writer::new(&self.format);
            let start = writer.begun(family, &spec.tools, spec.one_call)?;
            self.matcher(writer.finish(&start), budget).map(Arc::new)
        };
        let names = spec.tools.iter().map(|tool| tool.name.clone()).collect();
        let mut triggers = Triggers::new(family, &self.format, names);
        triggers.matchers.push(grammar(family)?);
        if family == ToolFamily::LlamaPythonic {
            triggers.matchers.push(grammar(ToolFamily::LlamaJson)?);
        }
        if matches!(family, ToolFamily::QwenXml | ToolFamily::SeedXml | ToolFamily::MinimaxM2) {
            let mut writer = Writer::new(&self.format);
            writer.begun(family, &spec.tools, spec.one_call)?;
            triggers.matchers.push(Arc::new(self.matcher(writer.finish("call"), budget)?));
        } else if call_opener(family).is_some() {
            let mut writer = Writer::new(&self.format);
            let start = writer.begun_call(family, &spec.tools, spec.one_call)?;
            triggers.matchers.push(Arc::new(self.matcher(writer.finish(&start), budget)?));
        }
        if self.format.takes_generic_calls() {
            triggers.add_generic(&self.format, triggers.matchers.len());
            triggers.matchers.push(grammar(GENERIC)?);
        }
        Ok(triggers)
    }

    /// A matcher at the beginning of a grammar, compiled within the time allowed.
    fn matcher(
        &self,
        grammar: TopLevelGrammar,
        budget: Option<&CompileBudget>,
    ) -> Result<Matcher, GrammarError> {
        let key = serde_json::to_string(&grammar).expect("grammars are texts and JSON");
        if let Some(known) = self.cache.get(&key) {
            return known;
        }
        let budget = budget.ok_or(GrammarError::Uncompiled)?;
        let processor = self.compile_time.processor.min(budget.left());
        if processor.is_zero() {
            return Err(GrammarError::Timeout);
        }
        let most = CompileTime { processor, ..self.compile_time };
        let (compiled, took) = self.compiler.compile(grammar, most);
        budget.spend(took);
        let result = match compiled {
            Ok(compiled) => compiled.matcher.get_error().map_or_else(
                || {
                    let size_bytes = compiled.size_bytes + GRAMMAR_FACTOR * key.len();
                    Ok(Compiled { size_bytes, ..compiled.clone() })
                },
                |message| Err(explain(&message)),
            ),
            Err(CompileError::Refused(message)) => Err(explain(&message)),
            Err(CompileError::Timeout) => Err(GrammarError::Timeout),
            Err(CompileError::Busy) => Err(GrammarError::Busy),
        };
        self.cache.put(&key, &result);
        result.map(|compiled| compiled.matcher)
    }
}

/// Whether numbers have an end that no grammar sets: not in texts of a form that a client wrote.
const fn bounds_numbers(spec: &ConstraintSpec) -> bool {
    matches!(spec.text, None | Some(TextForm::Schema(_)))
}

fn special(name: &str) -> Vec<u8> {
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend_from_slice(name.as_bytes());
    bytes
}

/// Families whose turn ends with its calls.
const fn ends_after_call(family: Option<ToolFamily>) -> bool {
    matches!(family, Some(ToolFamily::LlamaJson | ToolFamily::LlamaPythonic | ToolFamily::Harmony))
}

/// Lines of the compiler's that a client is told.
const LINES_MAX: usize = 6;

/// The compiler's words for the client, with the keyword that they are about.
fn explain(message: &str) -> GrammarError {
    // The whole of it: the first line of a regex's error says nothing.
    let lines: Vec<&str> =
        message.lines().map(str::trim).filter(|line| !line.is_empty()).take(LINES_MAX).collect();
    let first: String = lines.join(" ").chars().take(600).collect();
    let keyword = if let Some(rest) = message.split("Unimplemented keys: [\"").nth(1) {
        rest.split('"').next().unwrap_or("schema")
    } else {
        const HINTS: [(&str, &str); 13] = [
            ("oneOf", "oneOf"),
            ("anyOf", "anyOf"),
            ("$ref", "$ref"),
            ("circular reference", "$ref"),
            ("Reference segment", "$ref"),
            ("patternProperty", "patternProperties"),
            ("Properties", "minProperties"),
            ("prefixItems", "prefixItems"),
            ("Items", "minItems"),
            ("Length", "minLength"),
            ("regex", "pattern"),
            ("Unsatisfiable", "schema"),
            ("schema too large", "schema"),
        ];
        match HINTS.iter().find(|(hint, _)| message.contains(hint)) {
            Some((_, keyword)) => keyword,
            None => return GrammarError::Grammar(first),
        }
    };
    GrammarError::Schema(SchemaError::new(keyword, first))
}

#[derive(Clone)]
enum Phase {
    /// Thinking that the prompt or the model has opened; then the grammar.
    Thinking(Matcher),
    /// The beginning: thinking or the grammar.
    Start(Matcher),
    /// Text, watched for triggers.
    Free,
    Grammar(Matcher),
    /// Nothing may follow.
    Over,
}

/// The state of one answer.
#[derive(Clone)]
pub struct GrammarConstraint {
    tokens: TokEnv,
    end: u32,
    stop_tokens: Vec<TokenId>,
    thinking_open: Option<TokenId>,
    thinking_close: Option<(Option<TokenId>, &'static str)>,
    /// Whether an answer without thinking may begin with that.
    closes_nothing: bool,
    ends_after_call: bool,
    /// Whether free text is within thinking.
    thinks: bool,
    /// The end of the text so far, where a text ends thinking.
    tail: String,
    /// Free text, whose characters may be spread over tokens.
    text: PlainText,
    /// The number that is being written; nothing where the client's own grammar bounds them.
    number: Option<NumberEnd>,
    phase: Phase,
    triggers: Triggers,
}

impl GrammarConstraint {
    /// The bytes of an ordinary token.
    fn bytes(&self, token: TokenId) -> &[u8] {
        let trie = self.tokens.tok_trie();
        if token.0 as usize >= trie.vocab_size() {
            return &[];
        }
        let bytes = trie.token(token.0);
        if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) { &[] } else { bytes }
    }

    /// Whether a token ends thinking.
    fn closes_thinking(&mut self, token: TokenId) -> bool {
        match self.thinking_close {
            Some((Some(close), _)) => close == token,
            Some((None, text)) => {
                let bytes = String::from_utf8_lossy(self.bytes(token)).into_owned();
                self.tail.push_str(&bytes);
                if self.tail.contains(text) {
                    self.tail.clear();
                    return true;
                }
                let keep = self.tail.ceil_char_boundary(self.tail.len().saturating_sub(64));
                self.tail.drain(..keep);
                false
            }
            None => false,
        }
    }

    fn free(&mut self, token: TokenId) -> Result<Phase, ConstraintError> {
        if self.thinks {
            self.thinks = !self.closes_thinking(token);
            return Ok(Phase::Free);
        }
        if self.thinking_open == Some(token) {
            self.thinks = true;
            return Ok(Phase::Free);
        }
        let bytes = self.bytes(token).to_vec();
        let bytes = self.text.text(&bytes);
        let Some(Trigger { matcher, feed }) = self.triggers.push(token, &bytes) else {
            return Ok(Phase::Free);
        };
        let mut matcher = self.triggers.matchers[matcher].as_ref().clone();
        let fed = self.tokens.tok_trie().greedy_tokenize(feed.as_bytes());
        let taken = matcher.try_consume_tokens(&fed).map_err(error)?;
        // What does not fit the grammar is no call to the parser either.
        Ok(if taken == fed.len() { Phase::Grammar(matcher) } else { Phase::Free })
    }

    fn advance(&mut self, mut matcher: Matcher, token: TokenId) -> Result<Phase, ConstraintError> {
        matcher.consume_token(token.0).map_err(error)?;
        if !matcher.is_stopped() {
            return Ok(Phase::Grammar(matcher));
        }
        let is_lazy = !self.triggers.matchers.is_empty();
        if is_lazy && !self.ends_after_call {
            self.triggers.restart();
            return Ok(Phase::Free);
        }
        Ok(Phase::Over)
    }
}

fn error(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError(format!("the grammar matcher failed: {error}"))
}

impl Constraint for GrammarConstraint {
    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        let matcher = match &mut self.phase {
            Phase::Free => return Ok(()),
            Phase::Thinking(_) => {
                // The answer is still to come.
                for token in &self.stop_tokens {
                    mask.forbid(*token);
                }
                return Ok(());
            }
            Phase::Over => {
                let mut none = TokenMask::none(mask.vocab_size());
                for token in &self.stop_tokens {
                    none.allow(*token);
                }
                mask.intersect(none.words());
                return Ok(());
            }
            Phase::Start(matcher) | Phase::Grammar(matcher) => matcher,
        };
        let allowed: SimpleVob = matcher.compute_mask_or_eos().map_err(error)?;
        mask.intersect(allowed.as_slice());
        if let Some(number) = &self.number {
            number.bound(self.tokens.tok_trie(), &allowed, mask);
        }
        if allowed.is_allowed(self.end) {
            for token in &self.stop_tokens {
                mask.allow(*token);
            }
        }
        if let (Phase::Start(_), Some(open)) = (&self.phase, self.thinking_open) {
            mask.allow(open);
        }
        if let (Phase::Start(_), true, Some((Some(close), _))) =
            (&self.phase, self.closes_nothing, self.thinking_close)
        {
            mask.allow(close);
        }
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        if self.stop_tokens.contains(&token) {
            self.phase = Phase::Over;
            return Ok(());
        }
        if matches!(self.phase, Phase::Start(_) | Phase::Grammar(_))
            && let Some(mut number) = self.number.take()
        {
            match self.bytes(token) {
                [] => number = NumberEnd::default(),
                bytes => number.push(bytes),
            }
            self.number = Some(number);
        }
        self.phase = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Thinking(matcher) if self.closes_thinking(token) => Phase::Grammar(matcher),
            Phase::Thinking(matcher) => Phase::Thinking(matcher),
            Phase::Start(matcher) if self.thinking_open == Some(token) => Phase::Thinking(matcher),
            Phase::Start(matcher) if self.closes_nothing && self.closes_thinking(token) => {
                Phase::Grammar(matcher)
            }
            Phase::Start(matcher) | Phase::Grammar(matcher) => self.advance(matcher, token)?,
            Phase::Free => self.free(token)?,
            Phase::Over => Phase::Over,
        };
        Ok(())
    }

    fn must_stop(&mut self) -> bool {
        matches!(self.phase, Phase::Over)
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

impl Grammars {
    fn build_within(
        &self,
        source: &ConstraintSource,
        budget: &CompileBudget,
    ) -> Result<Box<dyn Constraint>, ConstraintError> {
        let spec: ConstraintSpec = serde_json::from_str(&source.0)
            .map_err(|error| ConstraintError(format!("not a constraint: {error}")))?;
        let constraint = self.constraint_within(&spec, Some(budget));
        Ok(Box::new(constraint.map_err(|error| ConstraintError(error.to_string()))?))
    }
}

impl ConstraintFactory for Grammars {
    fn build(&self, source: &ConstraintSource) -> Result<Box<dyn Constraint>, ConstraintError> {
        self.build_within(source, &CompileBudget::default())
    }

    fn build_timed(
        &self,
        source: &ConstraintSource,
    ) -> (Result<Box<dyn Constraint>, ConstraintError>, Duration) {
        let budget = CompileBudget::default();
        (self.build_within(source, &budget), budget.spent())
    }
}

#[cfg(test)]
mod tests;
