//! Calls of tools: how models write them, parsed from tokens and bytes and never an error. A call
//! reaches the client as it is written; what only looks like one is content.
//!
//! Reading order: `marker` (what frames calls), `input` and `json_scan` (text that is not all there
//! yet), `calls` (what the client gets), the kinds of formats (`json_calls` with `call_object`, `tagged_arguments`
//! with `value`, `minimax`, `pythonic`, `gemma`, `harmony`), `parser` (which of them when); then `schema` (what can be
//! enforced), `grammar` (what a call looks like), `constraint` (which tokens may come next) and
//! `argument_validator` (what is judged when it is complete).

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
pub use constraint::{ConstraintSpec, GrammarError, Grammars, TokenText};
pub use grammar::{ConstrainedTool, TextForm};
pub use parser::{OutputFormat, ParserOptions, ToolCallParser};
