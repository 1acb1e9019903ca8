//! Rewrites a client's JSON schema so that the grammar compiler enforces it exactly: keywords that
//! the compiler lacks are expressed by others, or refused by name. The result allows nothing that
//! the client's schema forbids.

pub(crate) mod advice;
pub(super) mod applicable;
mod exact_numbers;
mod negation;
pub(super) mod pattern_limit;
pub(crate) mod references;

use serde_json::{Map, Value, json};

use negation::{negate, one_of};

/// Bytes of a schema as JSON; the longest published ones for calls have 30 KB.
pub(super) const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Deepest nesting of a schema.
const DEPTH_MAX: usize = 64;
/// Schemas within one schema, those that come from rewriting among them.
const NODES_MAX: usize = 20_000;

/// A schema that cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{keyword:?} cannot be enforced: {reason}")]
pub struct SchemaError {
    /// The keyword at fault.
    pub keyword: String,
    /// Why, and what to do.
    pub reason: String,
}

impl SchemaError {
    pub fn new(keyword: &str, reason: impl Into<String>) -> Self {
        Self { keyword: keyword.to_owned(), reason: reason.into() }
    }
}

/// Formats that the grammar compiler enforces; by the standard others are remarks.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Formats that it does not know but validators check, by patterns that allow only what is of the
/// format, though not all of it.
const PATTERNS: [(&str, &str); 9] = [
    ("uri-reference", "^[a-zA-Z0-9/._~-]*$"),
    ("iri", "^https?://[a-z0-9]+(\\.[a-z0-9]+)*(/[a-zA-Z0-9._~-]*)*$"),
    ("iri-reference", "^[a-zA-Z0-9/._~-]*$"),
    ("uri-template", "^[a-zA-Z0-9/._~-]*$"),
    ("idn-email", "^[a-zA-Z0-9]+@[a-z0-9]+(\\.[a-z]+)+$"),
    ("idn-hostname", "^[a-z0-9]+(\\.[a-z]+)*$"),
    ("json-pointer", "^(/[a-zA-Z0-9_-]*)*$"),
    ("relative-json-pointer", "^[0-9](/[a-zA-Z0-9_-]*)*$"),
    ("regex", "^[a-zA-Z0-9 _]*$"),
];

/// Keywords that name a schema, a list of schemas, or schemas by name.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
const LIST: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords that the compiler has no counterpart for.
const REFUSED: [&str; 9] = [
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "contentSchema",
    "extends",
];

/// The schema in terms that are enforced to the letter.
pub(super) fn enforceable(schema: &Value) -> Result<Value, SchemaError> {
    let bytes = schema.to_string().len();
    if bytes > SCHEMA_BYTES_MAX {
        let reason = format!("the schema has {bytes} bytes: at most {SCHEMA_BYTES_MAX}");
        return Err(SchemaError::new("schema", reason));
    }
    let schema = &references::localised(schema);
    let mut rewriter = Rewriter { root: schema, nodes: 0 };
    let mut out = rewriter.schema(schema, 0)?;
    // Local references are paths into the whole: a rewritten place may have moved.
    if let (Some(out), Some(old)) = (out.as_object_mut(), schema.as_object()) {
        for key in ["$defs", "definitions"] {
            if let Some(Value::Object(defs)) = old.get(key)
                && !out.contains_key(key)
            {
                out.insert(key.to_owned(), Value::Object(defs.clone()));
            }
        }
    }
    pattern_limit::check(&out)?;
    Ok(out)
}

struct Rewriter<'a> {
    root: &'a Value,
    nodes: usize,
}

impl Rewriter<'_> {
    fn schema(&mut self, schema: &Value, depth: usize) -> Result<Value, SchemaError> {
        self.nodes += 1;
        if depth > DEPTH_MAX || self.nodes > NODES_MAX {
            return Err(SchemaError::new("schema", "it is nested too deeply or too large"));
        }
        let object = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(object) => object,
            _ => return Err(SchemaError::new("schema", "a schema is an object or a boolean")),
        };
        let mut out = Map::new();
        // What must hold besides.
        let mut also = Vec::new();
        for (key, value) in object {
            self.keyword(key, value, object, &mut out, &mut also, depth)?;
        }
        self.conditions(object, &mut also, depth)?;
        out.extend(exact_numbers::bounds(object)?);
        if also.is_empty() {
            return Ok(Value::Object(out));
        }
        if let Some(Value::Array(parts)) = out.remove("allOf") {
            also.splice(0..0, parts);
        }
        out.insert("allOf".to_owned(), Value::Array(also));
        Ok(Value::Object(out))
    }

    fn keyword(
        &mut self,
        key: &str,
        value: &Value,
        object: &Map<String, Value>,
        out: &mut Map<String, Value>,
        also: &mut Vec<Value>,
        depth: usize,
    ) -> Result<(), SchemaError> {
        match key {
            "format" => {
                let format = value.as_str().unwrap_or_default();
                let pattern = PATTERNS.iter().find(|(name, _)| *name == format);
                if FORMATS.contains(&format) {
                    out.insert(key.to_owned(), value.clone());
                } else if let Some((_, pattern)) = pattern {
                    also.push(json!({ "pattern": pattern }));
                }
            }
            "uniqueItems" if *value == Value::Bool(true) => {
                if object.get("maxItems").and_then(Value::as_u64).is_none_or(|max| max > 1) {
                    let reason = "a grammar cannot compare items with each other; leave it out";
                    return Err(SchemaError::new(key, reason));
                }
            }
            // Remarks, what is looked at elsewhere, and options of the compiler, which are not the
            // client's to set.
            "x-guidance" | "uniqueItems" | "if" | "then" | "else" | "$schema" | "$id" | "id"
            | "default" | "examples" | "example" | "deprecated" | "readOnly" | "writeOnly" => {}
            "not" => {
                let negated = negate(value, self.root, 0).ok_or_else(|| {
                    SchemaError::new(key, "its negation cannot be expressed in a grammar")
                })?;
                also.push(self.schema(&negated, depth + 1)?);
            }
            "dependencies" | "dependentRequired" | "dependentSchemas" => {
                for alternative in dependencies(key, value)? {
                    also.push(self.schema(&alternative, depth + 1)?);
                }
            }
            "propertyNames" => {
                let (pattern, rest) = property_names(value, object)?;
                out.insert(
                    "patternProperties".to_owned(),
                    json!({ pattern: self.schema(&rest, depth + 1)? }),
                );
                out.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
            "additionalProperties" if object.contains_key("propertyNames") => {}
            "oneOf" => also.push(self.one_of(value, depth)?),
            "const" | "enum" | "$ref" => {
                self.check(key, value)?;
                out.insert(key.to_owned(), value.clone());
            }
            key if REFUSED.contains(&key) => {
                return Err(SchemaError::new(key, "it is not supported; leave it out"));
            }
            key if ONE.contains(&key) && !value.is_array() => {
                out.insert(key.to_owned(), self.schema(value, depth + 1)?);
            }
            key if LIST.contains(&key) || key == "items" => {
                out.insert(key.to_owned(), self.list(key, value, depth)?);
            }
            key if NAMED.contains(&key) => {
                let Value::Object(named) = value else {
                    return Err(SchemaError::new(key, "it must be an object of schemas"));
                };
                let named = named
                    .iter()
                    .map(|(name, schema)| Ok((name.clone(), self.schema(schema, depth + 1)?)));
                let named: Result<Map<_, _>, _> = named.collect();
                out.insert(key.to_owned(), Value::Object(named?));
            }
            _ => {
                out.insert(key.to_owned(), value.clone());
            }
        }
        Ok(())
    }

    /// Refuses values and references that cannot be held to.
    fn check(&self, key: &str, value: &Value) -> Result<(), SchemaError> {
        match (key, value) {
            ("$ref", Value::String(reference)) => references::check(reference, self.root),
            ("$ref", _) => Err(SchemaError::new(key, "it must be a string")),
            _ => exact_numbers::check_values(key, value),
        }
    }

    fn list(&mut self, key: &str, value: &Value, depth: usize) -> Result<Value, SchemaError> {
        let Value::Array(items) = value else {
            return Err(SchemaError::new(key, "it must be an array of schemas"));
        };
        let items = items.iter().map(|item| self.schema(item, depth + 1));
        Ok(Value::Array(items.collect::<Result<_, _>>()?))
    }

    /// Exactly one of several: alternatives of which each excludes the others.
    fn one_of(&mut self, value: &Value, depth: usize) -> Result<Value, SchemaError> {
        let Value::Array(options) = value else {
            return Err(SchemaError::new("oneOf", "it must be an array of schemas"));
        };
        let options = one_of(options, self.root).ok_or_else(|| {
            SchemaError::new("oneOf", "its alternatives overlap; use anyOf, or tell them apart by a property with a const")
        })?;
        let options = Value::Array(options);
        Ok(json!({ "anyOf": self.list("oneOf", &options, depth + 1)? }))
    }

    /// `if`, `then` and `else`.
    fn conditions(
        &mut self,
        object: &Map<String, Value>,
        also: &mut Vec<Value>,
        depth: usize,
    ) -> Result<(), SchemaError> {
        let Some(condition) = object.get("if") else { return Ok(()) };
        let (then, otherwise) = (object.get("then"), object.get("else"));
        if then.is_none() && otherwise.is_none() {
            return Ok(());
        }
        let any = Value::Bool(true);
        let negated = negate(condition, self.root, 0).ok_or_else(|| {
            SchemaError::new("if", "its negation cannot be expressed in a grammar")
        })?;
        let alternatives = json!({ "anyOf": [
            { "allOf": [condition, then.unwrap_or(&any)] },
            { "allOf": [negated, otherwise.unwrap_or(&any)] },
        ] });
        also.push(self.schema(&alternatives, depth + 1)?);
        Ok(())
    }
}

/// One schema for each property that others depend on: it is absent, or its demand is met.
fn dependencies(key: &str, value: &Value) -> Result<Vec<Value>, SchemaError> {
    let Value::Object(members) = value else {
        return Err(SchemaError::new(key, "it must be an object"));
    };
    // Each doubles the alternatives.
    if members.len() > 6 {
        return Err(SchemaError::new(key, "more than 6 properties have dependents"));
    }
    let alternative = |(name, demand): (&String, &Value)| {
        let absent = json!({ "properties": { name.as_str(): false } });
        let met = match demand {
            Value::Array(names) => {
                let mut all = vec![Value::from(name.as_str())];
                all.extend(names.iter().cloned());
                json!({ "required": all })
            }
            schema => json!({ "allOf": [{ "required": [name] }, schema] }),
        };
        json!({ "anyOf": [absent, met] })
    };
    Ok(members.iter().map(alternative).collect())
}

/// Names by a pattern, where no property is named otherwise: the pattern and its values' schema.
fn property_names(
    value: &Value,
    object: &Map<String, Value>,
) -> Result<(String, Value), SchemaError> {
    let key = "propertyNames";
    if object.contains_key("properties") || object.contains_key("patternProperties") {
        return Err(SchemaError::new(key, "it stands beside properties; use patternProperties"));
    }
    let allowed = ["pattern", "type", "description"];
    let pattern =
        value.as_object().filter(|names| names.keys().all(|k| allowed.contains(&k.as_str())));
    let pattern = pattern.and_then(|names| names.get("pattern")).and_then(Value::as_str);
    let pattern = pattern.ok_or_else(|| SchemaError::new(key, "only a pattern is supported"))?;
    let rest = object.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
    Ok((pattern.to_owned(), rest))
}

#[cfg(test)]
mod tests;
