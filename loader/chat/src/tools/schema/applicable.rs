//! The schemas that may apply to a value, however a schema comes to them: by `properties`,
//! `patternProperties` and `additionalProperties`, `items` and `prefixItems`, references,
//! `allOf`, alternatives and conditions. Formats whose values are bare text read each value by them.
//!
//! References are plain pointers here: [`super::references`] has made them so.

use std::cell::Cell;

use serde_json::{Map, Value, json};

use super::advice::type_name;
use crate::tools::{argument_validator::matches_name, value::Types};

/// Schemas looked at for one value. References can lead in circles, and alternatives multiply: what
/// is left after so many means anything. Published tools need some dozens.
const STEPS_MAX: u32 = 2000;

/// Keywords of which each schema by name may apply to the whole object.
const DEPENDENT: [&str; 2] = ["dependentSchemas", "dependencies"];

/// The schemas that may apply to one value, and what their references point into.
#[derive(Clone, Debug)]
pub(in crate::tools) struct Applicable<'a> {
    root: &'a Value,
    schemas: Schemas<'a>,
}

#[derive(Clone, Debug)]
enum Schemas<'a> {
    One(&'a Value),
    /// Every one of them holds.
    All(Vec<Self>),
    /// One or more of them hold; which ones, the rest of the value tells.
    Any(Vec<Self>),
}

/// What schemas say of a member or an item.
enum Said<'a> {
    Nothing,
    /// There is none.
    Forbidden,
    Something(Schemas<'a>),
}

/// A member of an object, or an item of a list.
#[derive(Clone, Copy)]
enum Child<'n> {
    Member(&'n str),
    Item(usize),
}

impl<'a> Applicable<'a> {
    /// The schema of a whole value.
    pub(in crate::tools) const fn root(schema: &'a Value) -> Self {
        Self { root: schema, schemas: Schemas::One(schema) }
    }

    /// What applies to an object's member; nothing where nothing is said of it.
    pub(in crate::tools) fn member(&self, name: &str) -> Option<Self> {
        self.child(Child::Member(name))
    }

    /// What applies to a list's item.
    pub(in crate::tools) fn item(&self, index: usize) -> Option<Self> {
        self.child(Child::Item(index))
    }

    /// The types that the value may have.
    pub(in crate::tools) fn types(&self) -> Types {
        Steps::new(self.root).types(&self.schemas)
    }

    /// Whether nothing more is said of its texts, numbers and literals than their types.
    pub(in crate::tools) fn is_bare(&self) -> bool {
        fn is_bare(schemas: &Schemas<'_>) -> bool {
            match schemas {
                Schemas::One(schema) => bare(schema),
                Schemas::All(parts) | Schemas::Any(parts) => parts.iter().all(is_bare),
            }
        }
        is_bare(&self.schemas)
    }

    fn child(&self, child: Child<'_>) -> Option<Self> {
        match Steps::new(self.root).child(&self.schemas, child) {
            Said::Something(schemas) => Some(Self { root: self.root, schemas }),
            Said::Nothing | Said::Forbidden => None,
        }
    }
}

/// What a grammar can hold an object to whose schema it cannot enforce: the names of its members and
/// their plain types; any members where names are not all that the schema says of them.
pub(crate) fn outline(schema: &Value) -> Value {
    let whole = Applicable::root(schema);
    let mut names = Names::default();
    Steps::new(schema).names(schema, &mut names);
    if names.is_open || names.found.is_empty() {
        return json!({ "type": "object", "additionalProperties": true });
    }
    let kind = |name: &str| whole.member(name).and_then(|member| member.types().name());
    let member = |name: &str| {
        let schema = kind(name).map_or(Value::Bool(true), |kind| json!({ "type": kind }));
        (name.to_owned(), schema)
    };
    let properties: Map<String, Value> = names.found.into_iter().map(member).collect();
    json!({ "type": "object", "properties": properties })
}

/// Names of members, in the order in which a schema has them.
#[derive(Default)]
struct Names<'a> {
    found: Vec<&'a str>,
    /// Whether members of other names have schemas, too.
    is_open: bool,
}

fn bare(schema: &Value) -> bool {
    const PLAIN: [&str; 6] = ["type", "description", "title", "default", "examples", "anyOf"];
    schema.as_object().is_none_or(|object| {
        object.iter().all(|(key, value)| match (key.as_str(), value) {
            ("anyOf", Value::Array(options)) => options.iter().all(bare),
            (key, _) => PLAIN.contains(&key),
        })
    })
}

/// One walk through schemas.
struct Steps<'a> {
    root: &'a Value,
    left: Cell<u32>,
}

impl<'a> Steps<'a> {
    const fn new(root: &'a Value) -> Self {
        Self { root, left: Cell::new(STEPS_MAX) }
    }

    /// The members of a schema, while steps are left.
    fn open(&self, schema: &'a Value) -> Option<&'a Map<String, Value>> {
        let left = self.left.get().checked_sub(1)?;
        self.left.set(left);
        schema.as_object()
    }

    fn target(&self, object: &'a Map<String, Value>) -> Option<&'a Value> {
        self.root.pointer(object.get("$ref")?.as_str()?.strip_prefix('#')?)
    }

    fn child(&self, schemas: &Schemas<'a>, child: Child<'_>) -> Said<'a> {
        match schemas {
            Schemas::One(schema) => self.child_of(schema, child),
            Schemas::All(parts) => all(parts.iter().map(|part| self.child(part, child))),
            Schemas::Any(parts) => any(parts.iter().map(|part| self.child(part, child))),
        }
    }

    fn child_of(&self, schema: &'a Value, child: Child<'_>) -> Said<'a> {
        let Some(object) = self.open(schema) else { return Said::Nothing };
        let of = |schema: &'a Value| self.child_of(schema, child);
        let list = |key: &str| object.get(key).and_then(Value::as_array).into_iter().flatten();
        let mut said = vec![Self::own(object, child)];
        said.extend(self.target(object).map(of));
        said.extend(list("allOf").map(of));
        said.push(any(list("anyOf").map(of)));
        said.push(any(list("oneOf").map(of)));
        said.push(any(["then", "else"].into_iter().filter_map(|key| object.get(key)).map(of)));
        let dependent = DEPENDENT.into_iter().filter_map(|key| object.get(key)?.as_object());
        said.push(any(dependent.flat_map(Map::values).map(of)));
        match all(said.into_iter()) {
            // What only a condition speaks of has its type there.
            Said::Nothing => object.get("if").map_or(Said::Nothing, of),
            said => said,
        }
    }

    /// What a schema's own keywords say of a child.
    fn own(object: &'a Map<String, Value>, child: Child<'_>) -> Said<'a> {
        let (found, rest) = match child {
            Child::Member(name) => {
                let named = object.get("properties").and_then(|named| named.get(name));
                let patterns = object.get("patternProperties").and_then(Value::as_object);
                let patterns = patterns.into_iter().flatten();
                let matching = patterns.filter(|(pattern, _)| matches_name(pattern, name));
                let found = named.into_iter().chain(matching.map(|(_, schema)| schema));
                (found.collect::<Vec<_>>(), ["additionalProperties", "unevaluatedProperties"])
            }
            Child::Item(index) => {
                let at = |key: &str| object.get(key).and_then(Value::as_array)?.get(index);
                // Before 2020 `items` was a list, and `additionalItems` what follows it.
                let found = at("prefixItems").or_else(|| at("items"));
                let found = found
                    .or_else(|| object.get("items").filter(|items| items.is_object()))
                    .or_else(|| object.get("items").and(object.get("additionalItems")));
                (found.into_iter().collect(), ["items", "unevaluatedItems"])
            }
        };
        if !found.is_empty() {
            return all(found.into_iter().map(says));
        }
        let rest = rest.into_iter().filter_map(|key| object.get(key)).find(|rest| !rest.is_array());
        rest.map_or(Said::Nothing, says)
    }

    fn names(&self, schema: &'a Value, names: &mut Names<'a>) {
        let Some(object) = self.open(schema) else { return };
        for name in
            object.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys)
        {
            if !names.found.contains(&name.as_str()) {
                names.found.push(name);
            }
        }
        let has = |key: &str| object.get(key).and_then(Value::as_object);
        names.is_open |= has("patternProperties").is_some_and(|named| !named.is_empty());
        let rest = ["additionalProperties", "unevaluatedProperties"];
        names.is_open |= rest.into_iter().any(|key| has(key).is_some());
        self.target(object).into_iter().for_each(|target| self.names(target, names));
        for key in ["allOf", "anyOf", "oneOf"] {
            let parts = object.get(key).and_then(Value::as_array).into_iter().flatten();
            parts.for_each(|part| self.names(part, names));
        }
        for key in ["if", "then", "else"] {
            object.get(key).into_iter().for_each(|part| self.names(part, names));
        }
        let dependent = DEPENDENT.into_iter().filter_map(has).flat_map(Map::values);
        dependent.for_each(|part| self.names(part, names));
    }

    fn types(&self, schemas: &Schemas<'a>) -> Types {
        match schemas {
            Schemas::One(schema) => self.types_of(schema),
            Schemas::All(parts) => {
                parts.iter().map(|part| self.types(part)).fold(Types::ALL, Types::and)
            }
            Schemas::Any(parts) => {
                parts.iter().map(|part| self.types(part)).fold(Types::default(), Types::or)
            }
        }
    }

    fn types_of(&self, schema: &'a Value) -> Types {
        let Some(object) = self.open(schema) else { return Types::ALL };
        let of = |schema: &'a Value| self.types_of(schema);
        let union = |list: &'a [Value]| list.iter().map(of).fold(Types::default(), Types::or);
        let mut found = Types::ALL;
        match object.get("type") {
            Some(Value::String(name)) => found = named(name),
            Some(Value::Array(names)) if !names.is_empty() => {
                let names = names.iter().filter_map(Value::as_str).map(named);
                found = names.fold(Types::default(), Types::or);
            }
            _ => {}
        }
        if object.get("nullable") == Some(&Value::Bool(true)) {
            found = found.or(Types::NULL);
        }
        if let Some(value) = object.get("const") {
            found = found.and(Types::of(value));
        }
        if let Some(Value::Array(values)) = object.get("enum") {
            found = found.and(values.iter().map(Types::of).fold(Types::default(), Types::or));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(options)) = object.get(key) {
                found = found.and(union(options));
            }
        }
        if let Some(Value::Array(parts)) = object.get("allOf") {
            found = parts.iter().map(of).fold(found, Types::and);
        }
        if let (Some(then), Some(otherwise)) = (object.get("then"), object.get("else"))
            && object.contains_key("if")
        {
            found = found.and(of(then).or(of(otherwise)));
        }
        self.target(object).map(of).map_or(found, |target| found.and(target))
    }
}

/// The types of a name; one that is unknown allows anything.
fn named(name: &str) -> Types {
    type_name(name).map_or(Types::ALL, Types::named)
}

/// What one schema says by standing where it stands.
const fn says(schema: &Value) -> Said<'_> {
    match schema {
        Value::Bool(false) => Said::Forbidden,
        Value::Bool(true) => Said::Nothing,
        schema => Said::Something(Schemas::One(schema)),
    }
}

/// What several schemas say of which every one holds.
fn all<'a>(parts: impl Iterator<Item = Said<'a>>) -> Said<'a> {
    let mut found = Vec::new();
    for part in parts {
        match part {
            Said::Forbidden => return Said::Forbidden,
            Said::Something(schemas) => found.push(schemas),
            Said::Nothing => {}
        }
    }
    match found.len() {
        0 => Said::Nothing,
        1 => found.pop().map_or(Said::Nothing, Said::Something),
        _ => Said::Something(Schemas::All(found)),
    }
}

/// What several schemas say of which one holds. One that forbids the child or is silent about it is
/// not the one that the model has in mind.
fn any<'a>(parts: impl Iterator<Item = Said<'a>>) -> Said<'a> {
    let (mut found, mut is_silent, mut is_empty) = (Vec::new(), false, true);
    for part in parts {
        is_empty = false;
        match part {
            Said::Forbidden => {}
            Said::Something(schemas) => found.push(schemas),
            Said::Nothing => is_silent = true,
        }
    }
    match found.len() {
        0 if is_empty || is_silent => Said::Nothing,
        0 => Said::Forbidden,
        1 => found.pop().map_or(Said::Nothing, Said::Something),
        _ => Said::Something(Schemas::Any(found)),
    }
}

#[cfg(test)]
mod tests;
