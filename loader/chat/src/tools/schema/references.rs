//! References of a client's schema, made plain: pointers with escapes, anchors and references
//! relative to `$id` become `#/$defs/NAME`, which the grammar compiler, the validator and the readers
//! of bare texts follow. What cannot be resolved stays as it is, to be refused by name.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::SchemaError;

/// Schemas within a schema with the targets of its references: copies of places within each other
/// could grow without end. [`super::NODES_MAX`] would refuse a larger one anyway.
const NODES_MAX: usize = super::NODES_MAX;
/// References from one to the next without a keyword between.
const CHAIN_MAX: usize = 64;

/// Keywords whose values are schemas by name, and those whose values are data.
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];
/// Where references of the result lead.
const DEFINITIONS: &str = "$defs";

/// The schema with plain references. It means the same to every validator.
pub(crate) fn localised(schema: &Value) -> Value {
    if !has_others(schema, 0) {
        return schema.clone();
    }
    let mut index = Index { root: schema, resources: HashMap::new(), anchors: HashMap::new() };
    index.add(schema, "", 0);
    let mut rewriter =
        Rewriter { index, names: HashMap::new(), targets: Vec::new(), nodes: 0, is_over: false };
    let out = rewriter.whole();
    // As it came it is refused with the place of the reference.
    if rewriter.is_over { schema.clone() } else { out }
}

/// Refuses a reference that leads nowhere, or to itself without a keyword between: both mean nothing.
pub(super) fn check(reference: &str, root: &Value) -> Result<(), SchemaError> {
    let refused = |reason: &str| Err(SchemaError::new("$ref", format!("{reference}: {reason}")));
    let mut next = reference;
    for _ in 0..CHAIN_MAX {
        let Some(pointer) = next.strip_prefix('#') else {
            return refused("it leads out of the schema; put its target into $defs");
        };
        let Some(target) = root.pointer(pointer) else {
            return refused("it leads to nothing in the schema");
        };
        match target.get("$ref").and_then(Value::as_str) {
            None => return Ok(()),
            Some(target) => next = target,
        }
    }
    refused("it leads back to itself; a reference needs a schema at its end")
}

/// The schema that one leads to which says nothing by itself: it is a reference, or joins one schema.
pub(in crate::tools) fn followed<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    const REMARKS: [&str; 7] =
        ["description", "title", "default", "examples", "$schema", "$defs", "definitions"];
    let mut schema = schema;
    for _ in 0..CHAIN_MAX {
        let mut said = schema.as_object().into_iter().flatten();
        let mut said = said.by_ref().filter(|(key, _)| !REMARKS.contains(&key.as_str()));
        let (Some((key, value)), None) = (said.next(), said.next()) else { break };
        let next = match (key.as_str(), value) {
            ("$ref", Value::String(reference)) => {
                reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer))
            }
            ("allOf" | "anyOf" | "oneOf", Value::Array(parts)) if parts.len() == 1 => parts.first(),
            _ => None,
        };
        let Some(next) = next else { break };
        schema = next;
    }
    schema
}

/// Whether there is anything that is not plain: a reference elsewhere than into the root's
/// definitions, or an identifier that changes what references mean.
fn has_others(schema: &Value, depth: usize) -> bool {
    let Value::Object(object) = schema else {
        return schema.as_array().is_some_and(|list| list.iter().any(|it| has_others(it, depth)));
    };
    let reference = object.get("$ref").and_then(Value::as_str);
    let identifies = depth > 0 && object.get("$id").is_some_and(Value::is_string);
    reference.is_some_and(|reference| !is_plain(reference))
        || identifies
        || object.iter().any(|(key, value)| match value {
            _ if DATA.contains(&key.as_str()) => false,
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.values().any(|schema| has_others(schema, depth + 1))
            }
            value => has_others(value, depth + 1),
        })
}

fn is_plain(reference: &str) -> bool {
    let name = ["#/$defs/", "#/definitions/"].iter().find_map(|it| reference.strip_prefix(it));
    reference == "#" || name.is_some_and(is_plain_name)
}

fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.chars().all(is_plain)
}

/// Schemas by their identifiers and anchors.
struct Index<'a> {
    root: &'a Value,
    /// By URI, with what their own references are relative to.
    resources: HashMap<String, &'a Value>,
    /// By URI and name.
    anchors: HashMap<(String, String), (&'a Value, String)>,
}

/// A schema, and the URI that references in it are relative to.
type Target<'a> = (&'a Value, String);

impl<'a> Index<'a> {
    fn add(&mut self, schema: &'a Value, base: &str, depth: usize) {
        match schema {
            // Deeper ones are refused anyway.
            _ if depth > 2 * super::DEPTH_MAX => {}
            Value::Array(list) => list.iter().for_each(|schema| self.add(schema, base, depth + 1)),
            Value::Object(object) => {
                let base = base_of(object, base);
                let id = object.get("$id").and_then(Value::as_str);
                if depth == 0 || id.is_some_and(|id| !id.starts_with('#')) {
                    self.resources.entry(base.clone()).or_insert(schema);
                }
                // Drafts 6 and 7 write anchors as `$id`.
                let old = id.and_then(|id| id.strip_prefix('#'));
                let new = ["$anchor", "$dynamicAnchor"].map(|key| object.get(key)?.as_str());
                for name in new.into_iter().chain([old]).flatten() {
                    let key = (base.clone(), name.to_owned());
                    self.anchors.entry(key).or_insert((schema, base.clone()));
                }
                for (key, value) in object {
                    match value {
                        _ if DATA.contains(&key.as_str()) => {}
                        Value::Object(named) if NAMED.contains(&key.as_str()) => {
                            named.values().for_each(|schema| self.add(schema, &base, depth + 1));
                        }
                        value => self.add(value, &base, depth + 1),
                    }
                }
            }
            _ => {}
        }
    }

    /// What a reference leads to.
    fn target(&self, reference: &str, base: &str) -> Option<Target<'a>> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let uri = if uri.is_empty() { base.to_owned() } else { resolved(base, uri) };
        let fragment = unescaped(fragment);
        if !fragment.is_empty() && !fragment.starts_with('/') {
            let (schema, base) = self.anchors.get(&(uri, fragment))?;
            return Some((schema, base.clone()));
        }
        let mut target = *self.resources.get(&uri)?;
        let mut base = uri;
        for segment in fragment.split('/').skip(1) {
            // One segment at a time: a schema on the way may have an identifier.
            target = target.pointer(&format!("/{segment}"))?;
            if let Value::Object(object) = target {
                base = base_of(object, &base);
            }
        }
        (target.is_object() || target.is_boolean()).then_some((target, base))
    }
}

/// The URI that references in a schema are relative to.
fn base_of(object: &Map<String, Value>, base: &str) -> String {
    match object.get("$id").and_then(Value::as_str) {
        Some(id) if !id.starts_with('#') => {
            let uri = resolved(base, id);
            uri.split('#').next().unwrap_or_default().to_owned()
        }
        _ => base.to_owned(),
    }
}

/// A URI relative to another one (RFC 3986, section 5.2, without its dot segments in queries).
fn resolved(base: &str, uri: &str) -> String {
    let scheme = |uri: &str| {
        let (name, _) = uri.split_once(':')?;
        let is_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        (name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(is_scheme))
            .then(|| name.len() + 1)
    };
    if scheme(uri).is_some() {
        return uri.to_owned();
    }
    let head = scheme(base).unwrap_or(0);
    if uri.starts_with("//") {
        return format!("{}{uri}", &base[..head]);
    }
    let rest = &base[head..];
    let authority = rest
        .strip_prefix("//")
        .map_or(0, |after| after.find('/').map_or(rest.len(), |path| path + 2));
    let (origin, path) = base.split_at(head + authority);
    let root = if authority > 0 { "/" } else { "" };
    let folder = path.rfind('/').map_or(root, |end| &path[..=end]);
    let folder = if uri.starts_with('/') { "" } else { folder };
    let mut segments: Vec<&str> = Vec::new();
    let whole = format!("{folder}{uri}");
    for segment in whole.split('/') {
        match segment {
            // The first is empty where the path begins with a slash.
            ".." if segments.len() > 1 => drop(segments.pop()),
            "." | ".." => {}
            segment => segments.push(segment),
        }
    }
    format!("{origin}{}", segments.join("/"))
}

/// A fragment, in which any byte may be written as `%` and two digits.
fn unescaped(fragment: &str) -> String {
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
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Writes the schema anew, with a definition for each place that a reference leads to.
struct Rewriter<'a> {
    index: Index<'a>,
    /// By the places of their targets.
    names: HashMap<*const Value, String>,
    targets: Vec<(String, Target<'a>)>,
    nodes: usize,
    is_over: bool,
}

impl<'a> Rewriter<'a> {
    fn whole(&mut self) -> Value {
        let root = self.index.root;
        let mut out = self.schema(root, "", 0);
        let mut written = BTreeMap::new();
        while let Some((name, (target, base))) = self.targets.pop() {
            written.insert(name, self.schema(target, &base, 1));
        }
        if let Value::Object(object) = &mut out
            && !written.is_empty()
        {
            let definitions = object.entry(DEFINITIONS).or_insert_with(|| Map::new().into());
            if let Value::Object(definitions) = definitions {
                definitions.extend(written);
            }
        }
        out
    }

    fn schema(&mut self, schema: &'a Value, base: &str, depth: usize) -> Value {
        self.nodes += 1;
        self.is_over |= self.nodes > NODES_MAX || depth > 2 * super::DEPTH_MAX;
        match schema {
            _ if self.is_over => Value::Null,
            Value::Array(list) => {
                list.iter().map(|schema| self.schema(schema, base, depth + 1)).collect()
            }
            Value::Object(object) => {
                let base = base_of(object, base);
                let mut out = Map::new();
                for (key, value) in object {
                    let value = match (key.as_str(), value) {
                        // Nothing refers to them any more.
                        ("$id" | "$anchor", Value::String(_)) => continue,
                        ("$ref", Value::String(reference)) => {
                            self.reference(reference, &base).into()
                        }
                        (key, Value::Object(named)) if NAMED.contains(&key) => named
                            .iter()
                            .map(|(name, it)| (name.clone(), self.schema(it, &base, depth + 1)))
                            .collect(),
                        (key, value) if DATA.contains(&key) => value.clone(),
                        (_, value) => self.schema(value, &base, depth + 1),
                    };
                    out.insert(key.clone(), value);
                }
                Value::Object(out)
            }
            other => other.clone(),
        }
    }

    fn reference(&mut self, reference: &str, base: &str) -> String {
        let Some((target, base)) = self.index.target(reference, base) else {
            // Without the identifier around it, it must not lead into the root.
            let is_own = reference.starts_with('#');
            return if is_own { format!("{base}{reference}") } else { reference.to_owned() };
        };
        let root = self.index.root;
        if std::ptr::eq(target, root) {
            return "#".to_owned();
        }
        for key in ["$defs", "definitions"] {
            let named = root.get(key).and_then(Value::as_object).into_iter().flatten();
            let mut named = named.filter(|(name, _)| is_plain_name(name));
            if let Some((name, _)) = named.find(|(_, schema)| std::ptr::eq(*schema, target)) {
                return format!("#/{key}/{name}");
            }
        }
        let place = std::ptr::from_ref(target);
        if let Some(name) = self.names.get(&place) {
            return format!("#/{DEFINITIONS}/{name}");
        }
        let taken =
            |name: &String| root.get(DEFINITIONS).is_some_and(|own| own.get(name).is_some());
        let mut names = (self.names.len()..).map(|number| format!("ref-{number}"));
        let used = |name: &String| self.names.values().any(|own| own == name);
        let name = names.find(|name| !taken(name) && !used(name)).unwrap_or_default();
        self.names.insert(place, name.clone());
        self.targets.push((name.clone(), (target, base)));
        format!("#/{DEFINITIONS}/{name}")
    }
}

#[cfg(test)]
mod tests;
