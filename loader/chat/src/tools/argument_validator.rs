//! Validates complete tool calls whose JSON schema no grammar can enforce: keywords such as
//! `uniqueItems` need the complete value. The call is held back until it is complete, and is a call
//! only if it validates.

use std::{borrow::Cow, sync::Arc};

use jsonschema::{PatternOptions, Validator};
use serde_json::Value;

use super::schema::SchemaError;

/// Schemas within a schema with its references followed. Validating a call costs at most so
/// many steps for each value in it.
const NODES_MAX: usize = 20_000;
/// Deepest nesting, references followed.
const DEPTH_MAX: usize = 200;
/// Bytes of an automaton of `pattern`.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// Validates the arguments of complete calls of one tool.
#[derive(Clone, Debug)]
pub struct ArgumentValidator(Arc<Validator>);

impl ArgumentValidator {
    /// For a client's schema; refused if validation could take long or is undefined.
    pub fn new(schema: &Value) -> Result<Self, SchemaError> {
        let mut walk = Walk { root: schema, followed: Vec::new(), left: NODES_MAX };
        walk.visit(schema, 0)?;
        // Patterns without look-around, whose time is linear.
        let patterns =
            PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
        let validator = jsonschema::options().with_pattern_options(patterns).build(schema);
        let validator = validator.map_err(|error| {
            let reason: String = error.to_string().chars().take(300).collect();
            SchemaError::new("schema", reason)
        })?;
        Ok(Self(Arc::new(validator)))
    }

    /// Whether the arguments validate.
    #[must_use]
    pub fn accepts(&self, arguments: &Value) -> bool {
        self.0.is_valid(arguments)
    }
}

/// Walks all that a schema consists of, references followed, as if it were a tree.
struct Walk<'a> {
    root: &'a Value,
    /// References on the way to here.
    followed: Vec<&'a str>,
    left: usize,
}

impl<'a> Walk<'a> {
    fn visit(&mut self, value: &'a Value, depth: usize) -> Result<(), SchemaError> {
        let left = self.left.checked_sub(1).filter(|_| depth <= DEPTH_MAX);
        let Some(left) = left else {
            return Err(SchemaError::new("schema", "it is nested too deeply or too large"));
        };
        self.left = left;
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.visit(item, depth + 1)),
            Value::Object(object) => {
                if depth > 0 && object.get("$id").is_some_and(Value::is_string) {
                    return Err(SchemaError::new("$id", "only the root schema can have one"));
                }
                for keyword in ["$dynamicRef", "$recursiveRef"] {
                    if object.get(keyword).is_some_and(Value::is_string) {
                        return Err(SchemaError::new(keyword, "it is not supported; use $ref"));
                    }
                }
                if let Some(Value::String(reference)) = object.get("$ref") {
                    self.follow(reference, depth)?;
                }
                object.values().try_for_each(|member| self.visit(member, depth + 1))
            }
            _ => Ok(()),
        }
    }

    fn follow(&mut self, reference: &'a str, depth: usize) -> Result<(), SchemaError> {
        let refused =
            |reason: &str| Err(SchemaError::new("$ref", format!("{reference}: {reason}")));
        if self.followed.contains(&reference) {
            return refused("it is recursive, next to keywords that need the complete value");
        }
        let Some(pointer) = reference.strip_prefix('#') else {
            return refused("only references within the schema are supported");
        };
        let pointer = unescape(pointer);
        let Some(target) = self.root.pointer(&pointer) else {
            return refused("it points to nothing in the schema");
        };
        self.followed.push(reference);
        self.visit(target, depth + 1)?;
        self.followed.pop();
        Ok(())
    }
}

/// A pointer out of a URI's fragment, where any byte may be written as `%` and two digits.
fn unescape(fragment: &str) -> Cow<'_, str> {
    if !fragment.contains('%') {
        return fragment.into();
    }
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..2).filter(|_| *first == b'%');
        let byte = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned().into()
}

#[cfg(test)]
mod tests;
