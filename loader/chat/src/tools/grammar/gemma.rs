//! The grammar of calls as Gemma 4 writes them: JSON's values with bare keys and texts between
//! marks. Schemas are taken as `enforceable` leaves them; what such texts cannot be held to is
//! refused.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{
    super::{
        gemma::{HEAD, QUOTE},
        schema::SchemaError,
    },
    ConstrainedTool, Writer,
    arguments::REMARKS,
    calls::closed,
    lark::BARE,
    quoted,
};

/// Deepest nesting of a schema that is written out.
const DEPTH_MAX: usize = 24;

impl Writer<'_> {
    /// `call:name{…}`.
    pub(super) fn gemma(&mut self, tool: &ConstrainedTool) -> Result<String, SchemaError> {
        let schema = closed(&tool.schema)?;
        let head = quoted(&format!("{HEAD}{}", tool.name));
        // References of one tool are not those of another.
        self.named.iter_mut().for_each(String::clear);
        let arguments = self.gemma_value(&schema, &schema, 0)?;
        Ok(format!("{head} {arguments}"))
    }

    fn gemma_value(
        &mut self,
        schema: &Value,
        root: &Value,
        depth: usize,
    ) -> Result<String, SchemaError> {
        let object = match schema {
            Value::Bool(true) => return Ok(self.gemma_any()),
            Value::Object(object) if depth < DEPTH_MAX => object,
            _ => {
                return Err(SchemaError::new(
                    "schema",
                    "it allows nothing or is nested too deeply",
                ));
            }
        };
        if let Some(Value::String(path)) = object.get("$ref") {
            return self.gemma_reference(path, object, root, depth);
        }
        if let Some(value) = object.get("const") {
            return Ok(self.gemma_literal(value));
        }
        if let Some(Value::Array(values)) = object.get("enum") {
            let values: Vec<String> =
                values.iter().map(|value| self.gemma_literal(value)).collect();
            return Ok(format!("({})", values.join(" | ")));
        }
        if let Some(Value::Array(options)) = object.get("anyOf") {
            only(object, &["anyOf"])?;
            let options: Result<Vec<String>, SchemaError> =
                options.iter().map(|option| self.gemma_value(option, root, depth + 1)).collect();
            return Ok(format!("({})", options?.join(" | ")));
        }
        match object.get("type") {
            Some(Value::String(kind)) => self.gemma_type(kind, object, root, depth),
            Some(Value::Array(kinds)) => {
                let kinds: Result<Vec<String>, SchemaError> = kinds
                    .iter()
                    .filter_map(Value::as_str)
                    .map(|kind| self.gemma_type(kind, &of_type(object, kind), root, depth))
                    .collect();
                Ok(format!("({})", kinds?.join(" | ")))
            }
            _ if object.contains_key("properties") => self.gemma_mapping(object, root, depth),
            _ => {
                only(object, &[])?;
                Ok(self.gemma_any())
            }
        }
    }

    fn gemma_type(
        &mut self,
        kind: &str,
        object: &Map<String, Value>,
        root: &Value,
        depth: usize,
    ) -> Result<String, SchemaError> {
        match kind {
            "string" => self.gemma_text(object),
            "array" => self.gemma_list(object, root, depth),
            "object" => self.gemma_mapping(object, root, depth),
            kind => {
                const BOUNDS: [&str; 6] = [
                    "type",
                    "minimum",
                    "maximum",
                    "exclusiveMinimum",
                    "exclusiveMaximum",
                    "multipleOf",
                ];
                only(object, &BOUNDS)?;
                let mut schema = object.clone();
                schema.retain(|key, _| BOUNDS.contains(&key.as_str()));
                schema.insert("type".to_owned(), kind.into());
                Ok(self.json(&Value::Object(schema)))
            }
        }
    }

    fn gemma_text(&mut self, object: &Map<String, Value>) -> Result<String, SchemaError> {
        let quote = self.marker(QUOTE);
        if let Some(text) = object.get(BARE).and_then(Value::as_str) {
            let text = self.lark(text);
            return Ok(format!("{quote} {text} {quote}"));
        }
        only(object, &["type", "minLength", "maxLength"])?;
        let bounds = ["minLength", "maxLength"].map(|key| object.get(key).and_then(Value::as_u64));
        Ok(match (bounds, self.format.marker_token(QUOTE)) {
            ([None, None], Some(_)) => format!("{quote} ANY? {quote}"),
            ([None, None], None) => {
                let rest = self.lazy("(?s:.*)<\\|\"\\|>");
                format!("{quote} {rest}")
            }
            ([min, max], _) => {
                let max = max.map_or_else(String::new, |max| max.to_string());
                // Without the first letter of marks, so that length and end cannot disagree.
                format!("{quote} /[^<]{{{},{max}}}/ {quote}", min.unwrap_or(1).max(1))
            }
        })
    }

    fn gemma_list(
        &mut self,
        object: &Map<String, Value>,
        root: &Value,
        depth: usize,
    ) -> Result<String, SchemaError> {
        only(object, &["type", "items", "minItems", "maxItems"])?;
        let item = match object.get("items") {
            Some(items) => self.gemma_value(items, root, depth + 1)?,
            None => self.gemma_any(),
        };
        let bound = |key: &str| object.get(key).and_then(Value::as_u64);
        let (min, max) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        if max == Some(0) {
            return Ok("\"[]\"".to_owned());
        }
        let most = max.map_or_else(String::new, |max| (max - 1).to_string());
        let more = match (min.saturating_sub(1), max) {
            (0, None) => "*".to_owned(),
            (least, _) => format!("{{{least},{most}}}"),
        };
        let items = format!("{item} (\",\" {item}){more}");
        let optional = if min == 0 { "?" } else { "" };
        Ok(format!("\"[\" ({items}){optional} \"]\""))
    }

    /// Members in the order in which the template shows them, so that the model is not led away
    /// from what it has learnt.
    fn gemma_mapping(
        &mut self,
        object: &Map<String, Value>,
        root: &Value,
        depth: usize,
    ) -> Result<String, SchemaError> {
        only(object, &["type", "properties", "required", "additionalProperties"])?;
        let properties = object.get("properties").and_then(Value::as_object);
        let mut members: Vec<(&String, &Value)> = properties.into_iter().flatten().collect();
        members.sort_by_key(|(name, _)| name.to_lowercase());
        let required = object.get("required").and_then(Value::as_array);
        let required: Vec<&str> =
            required.into_iter().flatten().filter_map(Value::as_str).collect();
        if let Some(name) = required.iter().find(|name| members.iter().all(|(own, _)| own != *name))
        {
            let reason = format!("{name:?} is not among the properties");
            return Err(SchemaError::new("required", reason));
        }
        if members.is_empty() {
            let value = match object.get("additionalProperties") {
                Some(Value::Bool(false)) => return Ok("\"{}\"".to_owned()),
                Some(schema) => self.gemma_value(schema, root, depth + 1)?,
                None => self.gemma_any(),
            };
            return Ok(format!("\"{{\" (GKEY {value} (\",\" GKEY {value})*)? \"}}\""));
        }
        let number = self.text.lines().count();
        let rule = |at: usize, has: bool| {
            format!("map_{number}_{at}_{}", if has { "more" } else { "first" })
        };
        // Taken before the rules of the members, which have numbers of their own.
        self.rule(&format!("map_{number}"), &format!("\"{{\" {} \"}}\"", rule(0, false)));
        for (at, (name, schema)) in members.iter().enumerate() {
            let value = self.gemma_value(schema, root, depth + 1)?;
            let key = self.gemma_key(name);
            for has in [false, true] {
                let comma = if has { "\",\" " } else { "" };
                let mut body = format!("{comma}{key} {value} {}", rule(at + 1, true));
                if !required.contains(&name.as_str()) {
                    let _ = write!(body, " | {}", rule(at + 1, has));
                }
                self.rule(&rule(at, has), &body);
            }
        }
        for has in [false, true] {
            self.rule(&rule(members.len(), has), "\"\"");
        }
        Ok(format!("map_{number}"))
    }

    fn gemma_key(&self, name: &str) -> String {
        let is_bare = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '$');
        if !name.is_empty() && name.chars().all(is_bare) {
            return quoted(&format!("{name}:"));
        }
        let quote = self.marker(QUOTE);
        format!("{quote} {} {quote} \":\"", quoted(name))
    }

    fn gemma_literal(&self, value: &Value) -> String {
        match value {
            Value::String(text) => {
                let quote = self.marker(QUOTE);
                let text = if text.is_empty() { String::new() } else { quoted(text) };
                format!("{quote} {text} {quote}")
            }
            Value::Array(items) => {
                let items: Vec<String> =
                    items.iter().map(|item| self.gemma_literal(item)).collect();
                format!("\"[\" {} \"]\"", items.join(" \",\" "))
            }
            Value::Object(members) => {
                let member = |(key, value): (&String, &Value)| {
                    format!("{} {}", self.gemma_key(key), self.gemma_literal(value))
                };
                let members: Vec<String> = members.iter().map(member).collect();
                format!("\"{{\" {} \"}}\"", members.join(" \",\" "))
            }
            other => quoted(&other.to_string()),
        }
    }

    /// A rule of its own, which may refer to itself.
    fn gemma_reference(
        &mut self,
        path: &str,
        object: &Map<String, Value>,
        root: &Value,
        depth: usize,
    ) -> Result<String, SchemaError> {
        only(object, &["$ref"])?;
        if let Some(place) = self.named.iter().position(|named| named == path) {
            return Ok(format!("ref_{place}"));
        }
        let target = path.strip_prefix('#').and_then(|path| root.pointer(path));
        let Some(target) = target else {
            return Err(SchemaError::new("$ref", format!("{path:?} is not within the schema")));
        };
        let name = format!("ref_{}", self.named.len());
        self.named.push(path.to_owned());
        let body = self.gemma_value(target, root, depth + 1)?;
        self.rule(&name, &body);
        Ok(name)
    }

    /// Any value at all.
    fn gemma_any(&mut self) -> String {
        if !self.text.contains("\ngany: ") {
            let text = self.gemma_text(&Map::new()).expect("a text without bounds is always one");
            let scalar = self.json(&json!({ "type": ["number", "boolean", "null"] }));
            self.text.push('\n');
            self.rule("gany", &format!("{text} | {scalar} | gmap | glist"));
            self.rule("gmap", "\"{\" (GKEY gany (\",\" GKEY gany)*)? \"}\"");
            self.rule("glist", "\"[\" (gany (\",\" gany)*)? \"]\"");
        }
        "gany".to_owned()
    }
}

/// The part of a schema with several types that is about one of them.
fn of_type(object: &Map<String, Value>, kind: &str) -> Map<String, Value> {
    let own: &[&str] = match kind {
        "string" => &["minLength", "maxLength", "pattern", "format"],
        "array" => &["items", "minItems", "maxItems", "prefixItems", "uniqueItems"],
        "object" => &["properties", "required", "additionalProperties", "patternProperties"],
        "null" | "boolean" => &[],
        _ => &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    };
    let of_others =
        ["minLength", "maxLength", "pattern", "format", "items", "minItems", "maxItems"]
            .into_iter()
            .chain(["prefixItems", "uniqueItems", "properties", "required", "additionalProperties"])
            .chain(["patternProperties", "minimum", "maximum", "exclusiveMinimum"])
            .chain(["exclusiveMaximum", "multipleOf"]);
    let mut object = object.clone();
    for key in of_others.filter(|key| !own.contains(key)) {
        object.remove(key);
    }
    object
}

/// That a schema says nothing else.
fn only(object: &Map<String, Value>, keys: &[&str]) -> Result<(), SchemaError> {
    let says_nothing = |key: &str| key == "nullable" || REMARKS.contains(&key);
    let known = |key: &&String| keys.contains(&key.as_str()) || says_nothing(key);
    match object.keys().find(|key| !known(key)) {
        None => Ok(()),
        Some(key) => {
            let reason = "this model's tool-call format is not JSON, and a grammar for it cannot enforce this";
            Err(SchemaError::new(key, reason))
        }
    }
}
