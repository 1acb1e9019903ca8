//! The grammar of arguments in tags within tags (`MiniMax` M3): objects and lists of plain schemas
//! as the model writes them, others as JSON in their tag, which the model can write as well.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::{
    super::{
        minimax::{CALL_CLOSE, CALL_OPEN, ITEM, MARK},
        schema::{SchemaError, applicable::Applicable, enforceable},
        value::reading,
    },
    ConstrainedTool, Writer,
    arguments::{Close, Ending, Params, REMARKS, whole},
    quoted,
};

/// Tags of one tool; what is left after so many is written in JSON. Published tools have 60.
const TAGS_MAX: usize = 400;
/// Members of a list that the grammar counts.
const ITEMS_MAX: u64 = 1000;

/// How far the tags of one tool have come.
struct Nesting<'a> {
    /// What references point into.
    root: &'a Value,
    tags: usize,
    /// References that the tag at hand is within.
    open: Vec<&'a str>,
}

impl Writer<'_> {
    /// One call, from the mark before it.
    pub(super) fn minimax(&mut self, tool: &ConstrainedTool) -> Result<String, SchemaError> {
        let params = Params::of(&tool.schema)?;
        if params.rest().is_some() {
            let reason =
                "this model names arguments by tags, of which a grammar has to know the names";
            return Err(SchemaError::new("additionalProperties", reason));
        }
        let mark = self.marker(MARK);
        let head = quoted(&format!("{CALL_OPEN}{}\">", tool.name));
        let mut body = format!("{mark} {head} WS?");
        let mut nesting = Nesting { root: &tool.schema, tags: 0, open: Vec::new() };
        for param in &params.list {
            let optional = if param.required { "" } else { "?" };
            let tag = self.tagged(param.name, param.schema, &mut nesting)?;
            let _ = write!(body, " ({tag} WS?){optional}");
        }
        let _ = write!(body, " {mark} {}", quoted(CALL_CLOSE));
        Ok(body)
    }

    /// A value in the tag of this name.
    fn tagged<'a>(
        &mut self,
        name: &str,
        schema: &'a Value,
        nesting: &mut Nesting<'a>,
    ) -> Result<String, SchemaError> {
        nesting.tags += 1;
        let depth = nesting.open.len();
        let target = nesting.follow(schema);
        let inner = match target.map(shape) {
            Some(Some(shape)) if nesting.tags < TAGS_MAX => Some(self.nested(shape, nesting)?),
            _ => None,
        };
        nesting.open.truncate(depth);
        let mark = self.marker(MARK);
        let open = format!("{mark} {}", quoted(&format!("<{name}>")));
        let close = format!("{mark} {}", quoted(&format!("</{name}>")));
        if let Some(inner) = inner {
            return Ok(format!("{open} {inner} {close}"));
        }
        let whole = whole(schema, nesting.root);
        if reading(Some(&Applicable::root(&whole))).is_json() {
            return Ok(format!("{open} {} {close}", self.json(&enforceable(&whole)?)));
        }
        let ending = match self.format.marker_token(MARK) {
            Some(_) => Ending::Token,
            None => Ending::Letters(escaped(&format!("{MARK}</{name}>"))),
        };
        // A text of a certain length holds no beginning of the mark.
        let close = Close { rule: close, ending, forbidden: "<\\]" };
        Ok(format!("{open} {}", self.bare_text(&close, &whole)?))
    }

    /// The tags of an object or a list.
    fn nested<'a>(
        &mut self,
        shape: Shape<'a>,
        nesting: &mut Nesting<'a>,
    ) -> Result<String, SchemaError> {
        match shape {
            Shape::Object(properties, required) => {
                let mut body = "\"\"".to_owned();
                for (name, schema) in properties {
                    let optional = if required.contains(&name.as_str()) { "" } else { "?" };
                    let tag = self.tagged(name, schema, nesting)?;
                    let _ = write!(body, " ({tag}){optional}");
                }
                Ok(body)
            }
            Shape::List { items, min, max } => {
                let item = self.tagged(ITEM, items, nesting)?;
                let max = max.map_or_else(String::new, |max| max.to_string());
                Ok(format!("({item}){{{min},{max}}}"))
            }
        }
    }
}

impl<'a> Nesting<'a> {
    /// The schema that references lead to; nothing where they lead nowhere or back.
    fn follow(&mut self, schema: &'a Value) -> Option<&'a Value> {
        let mut schema = schema;
        while let Some(object) = schema.as_object()
            && let Some(reference) = object.get("$ref").and_then(Value::as_str)
        {
            let is_alone =
                object.keys().all(|key| key == "$ref" || REMARKS.contains(&key.as_str()));
            if !is_alone || self.open.contains(&reference) {
                return None;
            }
            self.open.push(reference);
            schema = self.root.pointer(reference.strip_prefix('#')?)?;
        }
        Some(schema)
    }
}

/// A schema that tags can enforce.
enum Shape<'a> {
    /// Members by name, and which of them must be there.
    Object(&'a Map<String, Value>, Vec<&'a str>),
    /// The schema of each item, and how many there may be.
    List { items: &'a Value, min: u64, max: Option<u64> },
}

/// The shape of a schema that tags can enforce in full.
fn shape(schema: &Value) -> Option<Shape<'_>> {
    const OBJECT: [&str; 4] = ["type", "properties", "required", "additionalProperties"];
    const LIST: [&str; 4] = ["type", "items", "minItems", "maxItems"];
    let object = schema.as_object()?;
    let holds = |known: [&str; 4]| {
        object.keys().all(|key| known.contains(&key.as_str()) || REMARKS.contains(&key.as_str()))
    };
    match object.get("type")?.as_str()? {
        "object" if holds(OBJECT) => {
            let properties = object.get("properties")?.as_object()?;
            let required = object.get("required").and_then(Value::as_array);
            let required: Vec<&str> =
                required.into_iter().flatten().filter_map(Value::as_str).collect();
            let is_plain = |name: &str| !name.is_empty() && !name.contains(['<', '>', '/', '\n']);
            let is_whole = required.iter().all(|name| properties.contains_key(*name));
            (is_whole && !properties.is_empty() && properties.keys().all(|name| is_plain(name)))
                .then_some(Shape::Object(properties, required))
        }
        "array" if holds(LIST) => {
            let items = object.get("items").filter(|items| items.is_object())?;
            let bound =
                |key: &str| object.get(key).map(|bound| bound.as_u64().filter(|n| *n <= ITEMS_MAX));
            let (min, max) = (bound("minItems"), bound("maxItems"));
            if min == Some(None) || max == Some(None) {
                return None;
            }
            Some(Shape::List { items, min: min.flatten().unwrap_or(0), max: max.flatten() })
        }
        _ => None,
    }
}

/// An expression that matches this text alone.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if "\\.+*?()|[]{}^$/#&-~".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
