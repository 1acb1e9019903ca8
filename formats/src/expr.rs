//! A small expression language over configuration values, for the strings of rule files
//! (`"head_dim ?? hidden_size / num_attention_heads"`).
//!
//! It is total: every text parses to an expression or an error, every expression evaluates to a
//! value or an error, in time linear in its length. It knows nothing of models.
//!
//! | level | operators | operands |
//! |---|---|---|
//! | 1 | `c ? a : b` | `c` is a bool; one branch is evaluated |
//! | 2 | `a ?? b` | `b` if `a` is null |
//! | 3, 4 | `\|\|`, `&&` | bools; the right one is evaluated if it decides |
//! | 5 | `==` `!=` | anything; integers and floats compare by value |
//! | 6 | `<` `<=` `>` `>=` `in` | numbers; `x in list`, or in a text of integers (`'3,4,5'`) |
//! | 7, 8 | `+` `-`, `*` `/` `%` | numbers; integers stay integers and must divide exactly |
//! | 9 | `!` `-` | bool, number |
//! | 10 | `a.field`, `a[index]` | an object or null (null gives null); a list or a text, of letters |
//! | | `sqrt(a)`, `floor(a)` | a number of at least 0 to a float; a number to an integer |
//! | | `length(a)` | a list or a text, of letters |
//!
//! Literals: `12`, `1e-6`, `true`, `false`, `null`, `'text'`, `"text"`, `[1, 2]`.

use std::{collections::BTreeSet, fmt};

use serde::{Deserialize, Deserializer, de};

mod eval;
mod lex;
mod parse;
#[cfg(test)]
mod tests;
mod value;

pub use eval::Scope;
pub use value::Value;

/// Longest expression in bytes: the longest in use has about 100.
pub const MAX_LENGTH: usize = 1024;

/// Deepest nesting of brackets, choices and unary operators: nobody reads deeper ones.
pub const MAX_DEPTH: usize = 32;

/// A parsed expression.
#[derive(Clone, Debug, PartialEq)]
pub struct Expr {
    text: String,
    root: Node,
}

/// An expression that does not parse or cannot be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExprError {
    /// Longer than [`MAX_LENGTH`].
    #[error("an expression of {length} bytes is longer than {MAX_LENGTH}")]
    TooLong {
        /// Its bytes.
        length: usize,
    },
    /// Not an expression.
    #[error("in `{expression}` at byte {at}: {problem}")]
    Syntax {
        /// The whole text.
        expression: String,
        /// Where parsing stopped.
        at: usize,
        /// What is wrong there.
        problem: String,
    },
    /// A name that nothing declares.
    #[error("in `{expression}`: unknown name `{name}`")]
    UnknownName {
        /// The whole text.
        expression: String,
        /// The name.
        name: String,
    },
    /// An operator that its operands do not allow.
    #[error("in `{expression}`: {problem}")]
    Evaluate {
        /// The whole text.
        expression: String,
        /// The operation with its operands.
        problem: String,
    },
}

impl ExprError {
    /// The text of the expression, if it is short enough to be told.
    #[must_use]
    pub fn expression(&self) -> Option<&str> {
        match self {
            Self::TooLong { .. } => None,
            Self::Syntax { expression, .. }
            | Self::UnknownName { expression, .. }
            | Self::Evaluate { expression, .. } => Some(expression),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Literal(Value),
    List(Vec<Node>),
    Name(String),
    Field(Box<Node>, String),
    Index(Box<Node>, Box<Node>),
    Unary(Unary, Box<Node>),
    Call(Function, Box<Node>),
    Binary(Binary, Box<Node>, Box<Node>),
    Choose(Box<[Node; 3]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unary {
    Not,
    Negate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Sqrt,
    Floor,
    Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Binary {
    Coalesce,
    Or,
    And,
    Equal,
    Unequal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

impl Expr {
    /// Parses a text of at most [`MAX_LENGTH`] bytes.
    pub fn parse(text: &str) -> Result<Self, ExprError> {
        if text.len() > MAX_LENGTH {
            return Err(ExprError::TooLong { length: text.len() });
        }
        let root = parse::parse(text).map_err(|(at, problem)| ExprError::Syntax {
            expression: text.to_owned(),
            at,
            problem,
        })?;
        Ok(Self { text: text.to_owned(), root })
    }

    /// The expression as it was written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Every name it mentions, sorted; fields are not names.
    #[must_use]
    pub fn names(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        self.root.collect_names(&mut names);
        names
    }

    /// Its value in `scope`.
    pub fn evaluate(&self, scope: &Scope<'_>) -> Result<Value, ExprError> {
        eval::evaluate(&self.root, scope).map(std::borrow::Cow::into_owned).map_err(|failure| {
            let expression = self.text.clone();
            match failure {
                eval::Failure::UnknownName(name) => ExprError::UnknownName { expression, name },
                eval::Failure::Operands(problem) => ExprError::Evaluate { expression, problem },
            }
        })
    }
}

impl Node {
    fn collect_names<'a>(&'a self, names: &mut BTreeSet<&'a str>) {
        match self {
            Self::Literal(_) => {}
            Self::Name(name) => {
                names.insert(name);
            }
            Self::List(items) => items.iter().for_each(|item| item.collect_names(names)),
            Self::Field(inner, _) | Self::Unary(_, inner) | Self::Call(_, inner) => {
                inner.collect_names(names);
            }
            Self::Index(left, right) | Self::Binary(_, left, right) => {
                left.collect_names(names);
                right.collect_names(names);
            }
            Self::Choose(parts) => parts.iter().for_each(|part| part.collect_names(names)),
        }
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

/// From a string that is parsed, or from an integer or a bool that stands for itself.
impl<'de> Deserialize<'de> for Expr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Expr;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an expression, an integer or a bool")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Expr, E> {
                Expr::parse(text).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Expr, E> {
                Expr::parse(&number.to_string()).map_err(E::custom)
            }

            fn visit_bool<E: de::Error>(self, flag: bool) -> Result<Expr, E> {
                Expr::parse(&flag.to_string()).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
