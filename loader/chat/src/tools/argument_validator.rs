//! Validates complete tool calls whose JSON schema no grammar can enforce: keywords such as
//! `uniqueItems` need the complete value. The call is held back until it is complete, and is a call
//! only if it validates.

use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use serde_json::{Map, Value};

use super::schema::{SchemaError, pattern_limit, references::localised};

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
        let schema = &localised(schema);
        let mut walk =
            Walk { root: schema, followed: Vec::new(), left: NODES_MAX, pattern_bytes: 0 };
        walk.visit(schema, 0)?;
        let validator = build(schema).map_err(|reason| SchemaError::new("schema", reason))?;
        Ok(Self(Arc::new(validator)))
    }

    /// Whether the arguments validate.
    #[must_use]
    pub fn accepts(&self, arguments: &Value) -> bool {
        self.0.is_valid(arguments)
    }
}

/// A validator with patterns without look-around, whose time is linear.
fn build(schema: &Value) -> Result<Validator, String> {
    let patterns =
        PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
    let built = jsonschema::options().with_pattern_options(patterns).build(schema);
    built.map_err(|error| error.to_string().chars().take(300).collect())
}

/// Whether a pattern of `patternProperties` is a name's; none is that cannot be compiled.
pub(super) fn matches_name(pattern: &str, name: &str) -> bool {
    let validator = build(&serde_json::json!({ "pattern": pattern }));
    validator.is_ok_and(|validator| validator.is_valid(&Value::from(name)))
}

/// Walks all that a schema consists of, references followed, as if it were a tree.
struct Walk<'a> {
    root: &'a Value,
    /// References on the way to here.
    followed: Vec<&'a str>,
    left: usize,
    /// Of patterns so far.
    pattern_bytes: usize,
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
                self.count_patterns(object)?;
                if let Some(Value::String(reference)) = object.get("$ref") {
                    self.follow(reference, depth)?;
                }
                object.values().try_for_each(|member| self.visit(member, depth + 1))
            }
            _ => Ok(()),
        }
    }

    /// Before any of them is compiled.
    fn count_patterns(&mut self, object: &Map<String, Value>) -> Result<(), SchemaError> {
        let own = object.get("pattern").and_then(Value::as_str).map_or(0, str::len);
        let named = object.get("patternProperties").and_then(Value::as_object);
        let named: usize = named.into_iter().flat_map(Map::keys).map(String::len).sum();
        self.pattern_bytes += own + named;
        pattern_limit::check_bytes(self.pattern_bytes)
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
        let Some(target) = self.root.pointer(pointer) else {
            return refused("it points to nothing in the schema");
        };
        self.followed.push(reference);
        self.visit(target, depth + 1)?;
        self.followed.pop();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
