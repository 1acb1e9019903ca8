//! Tool calls: the tool-call formats of the model families, their parsers and their grammars. A
//! parser takes tokens and bytes and never fails. A call is streamed to the client as it is
//! written; what only looks like one is content.
//!
//! Reading order: `marker` (special tokens and texts that delimit calls), `input` (buffered text),
//! `json_scan` (incremental JSON scanner), `calls` (ids and deltas of the calls so far), the kinds
//! of tool-call formats (`json_calls` with `call_object`; `tagged_arguments` with `value`;
//! `minimax`; `pythonic`; `gemma`; `harmony`), `parser` (picks the format and tells calls,
//! reasoning and content apart); then `schema` (which schemas apply to a value; JSON schema in terms
//! that the grammar compiler enforces), `grammar` (of calls and of structured output), `constraint` (token masks), and
//! `argument_validator` (complete calls whose schema no grammar enforces).

mod argument_validator;
mod call_object;
mod calls;
mod constraint;
mod gemma;
mod grammar;
mod harmony;
mod input;
mod json_calls;
mod json_scan;
mod marker;
mod minimax;
mod parser;
mod pythonic;
mod schema;
mod tagged_arguments;
mod value;

pub use argument_validator::ArgumentValidator;
pub use calls::ToolSpec;
pub use constraint::{CompileBudget, ConstraintSpec, GrammarError, Grammars, TokenText};
pub(crate) use grammar::lark;
pub use grammar::{ConstrainedTool, TextForm};
pub use parser::{OutputFormat, ParserOptions, ToolCallParser};
pub(crate) use schema::SchemaError;
pub(crate) use schema::advice;
pub(crate) use schema::applicable::outline;
pub(crate) use schema::references::localised;
