//! Grammars for llguidance: of structured output here, of tool calls in the modules below.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shardpack_formats::AnswerFrame;

use super::{
    parser::OutputFormat,
    schema::{SchemaError, enforceable},
    tagged_arguments::DSML,
};

mod arguments;
mod calls;
mod gemma;
pub(crate) mod lark;
mod minimax;

/// A tool as a constraint knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConstrainedTool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub schema: Value,
}

/// The form of an answer's text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextForm {
    /// JSON of this schema.
    Schema(Value),
    /// Text that the expression matches in whole.
    Regex(String),
    /// A grammar in llguidance's Lark.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// White space between lexemes of JSON: one space, or a line break with its indentation. Without a
/// bound a model may write nothing else for ever.
const SPACE: &str = r"[ ]|\n[ \t]{0,24}";

/// A grammar's text in the making.
pub(super) struct Writer<'a> {
    format: &'a OutputFormat,
    text: String,
    subgrammars: Vec<GrammarWithLexer>,
    /// Paths of schemas that have a rule of their own.
    named: Vec<String>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(format: &'a OutputFormat) -> Self {
        Self { format, text: String::new(), subgrammars: Vec::new(), named: Vec::new() }
    }

    /// The whole, with its start rule.
    pub(super) fn finish(mut self, start: &str) -> TopLevelGrammar {
        let text = format!(
            "start: {start}\n{}WS: /[ \\n]{{1,4}}/\nANY: /(?s:.+)/\n\
             GKEY: /[a-zA-Z0-9_.$-]{{1,64}}:/\nPNAME: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/\n",
            self.text
        );
        let mut grammars = vec![GrammarWithLexer::from_lark(text)];
        grammars.append(&mut self.subgrammars);
        TopLevelGrammar { grammars, max_tokens: None }
    }

    fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.text, "{name}: {body}").expect("strings take any text");
    }

    /// A marker: its token, or its letters.
    fn marker(&self, name: &str) -> String {
        match self.format.marker_token(name) {
            Some(token) => format!("<[{}]>", token.0),
            None => quoted(name),
        }
    }

    /// A tag of DeepSeek V3.2: letters about a marker.
    fn tag(&self, text: &str) -> String {
        let letters: Vec<String> = text.split(DSML).map(quoted).collect();
        match self.format.marker_token(DSML) {
            Some(_) => format!("({})", letters.join(&format!(" {} ", self.marker(DSML)))),
            None => quoted(text),
        }
    }

    /// JSON of a schema that is enforceable already.
    fn json(&mut self, schema: &Value) -> String {
        if let Some(text) = schema.get(lark::WITHIN_JSON).and_then(Value::as_str) {
            let text = self.lark(text);
            return format!("\"\\\"\" {text} \"\\\"\"");
        }
        if let Some(input) = schema.get("properties").and_then(|members| members.get("input"))
            && input.get(lark::WITHIN_JSON).is_some()
        {
            let input = self.json(input);
            return format!("\"{{\" WS? \"\\\"input\\\"\" WS? \":\" WS? {input} WS? \"}}\"");
        }
        let name = format!("json_{}", self.subgrammars.len());
        let schema = match schema {
            Value::Object(object) => {
                let mut object = object.clone();
                object.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": SPACE }));
                Value::Object(object)
            }
            Value::Bool(false) => json!({ "not": {} }),
            _ => json!({ "x-guidance": { "whitespace_pattern": SPACE } }),
        };
        let mut grammar = GrammarWithLexer::from_json_schema(schema);
        grammar.name = Some(name.clone());
        self.subgrammars.push(grammar);
        format!("@{name}")
    }

    /// A grammar in Lark as a part of this one.
    fn lark(&mut self, text: &str) -> String {
        let name = format!("lark_{}", self.subgrammars.len());
        let mut grammar = GrammarWithLexer::from_lark(text.to_owned());
        grammar.name = Some(name.clone());
        self.subgrammars.push(grammar);
        format!("@{name}")
    }

    /// A text of this form.
    pub(super) fn text_form(&mut self, form: &TextForm) -> Result<String, SchemaError> {
        Ok(match form {
            TextForm::Schema(schema) => {
                let schema = enforceable(schema)?;
                self.json(&schema)
            }
            TextForm::Regex(expression) => {
                let mut grammar = GrammarWithLexer::from_regex(expression);
                grammar.name = Some("form".to_owned());
                self.subgrammars.push(grammar);
                "@form".to_owned()
            }
            TextForm::Grammar(text) => {
                let mut grammar = GrammarWithLexer::from_lark(text.clone());
                grammar.name = Some("form".to_owned());
                self.subgrammars.push(grammar);
                "@form".to_owned()
            }
            TextForm::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                format!("({})", texts.join(" | "))
            }
        })
    }

    /// Harmony's text: in the final channel, after thinking if the model likes.
    pub(super) fn in_final_channel(&mut self, text: &str) -> String {
        let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
        let constrain = self.marker("<|constrain|>");
        let thinking = self.analysis();
        format!("{thinking} {channel} \"final\" (\" \"? {constrain} \"json\")? {message} {text}")
    }

    /// A text with what the model writes around its answer.
    pub(super) fn framed(&self, frame: AnswerFrame, text: &str) -> String {
        let head = |name: &str| format!("({} \"assistant\")?", self.marker(name));
        let optional = |name: &str| self.marker(name) + "?";
        match frame {
            AnswerFrame::SolarTurns => {
                format!("{} {} {text}", head("<|begin|>"), self.marker("<|content|>"))
            }
            AnswerFrame::HyperclovaTurns => format!("{} \"\\n\" {text}", head("<|im_start|>")),
            AnswerFrame::CohereResponse => format!(
                "{} {text} {}",
                optional("<|START_RESPONSE|>"),
                optional("<|END_RESPONSE|>")
            ),
            AnswerFrame::CohereText => {
                format!("{} {text} {}", optional("<|START_TEXT|>"), optional("<|END_TEXT|>"))
            }
            AnswerFrame::AnswerTags | AnswerFrame::ResponseTags => {
                let (open, close) = frame.tags().unwrap_or_default();
                format!("({} WS?)? {text} (WS? {})?", self.marker(open), self.marker(close))
            }
        }
    }

    fn analysis(&mut self) -> String {
        let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
        let (end, start) = (self.marker("<|end|>"), self.marker("<|start|>"));
        format!("({channel} \"analysis\" {message} ANY? {end} {start} \"assistant\")*")
    }

    /// The shortest text that an expression matches.
    fn lazy(&mut self, expression: &str) -> String {
        let name = format!("lazy_{}", self.text.lines().count());
        self.rule(&format!("{name}[lazy]"), &format!("/{expression}/"));
        name
    }
}

/// A text of Lark that stands for this one.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
