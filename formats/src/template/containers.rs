//! Lists and dictionaries that a template changes. minijinja's cannot be changed, and published templates
//! do so (Kimi K2 keeps the identifiers of calls in a list). Only a template that names such a method is
//! given them, by [`super::source`]; every other one computes with minijinja's own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;
use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind},
};

use super::arguments::{Arguments, invalid};

/// Functions and the filter that rewritten sources name. Two underscores keep them from a template's own.
pub(super) const LIST: &str = "__list";
pub(super) const DICT: &str = "__dict";
pub(super) const OWN: &str = "__own";
pub(super) const CALL: &str = "__call";

/// Methods that change a list or a dictionary.
const CHANGING: [&str; 11] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

/// Whether a tag calls such a method.
pub(super) fn is_changed_in(tag: &str) -> bool {
    let mut rest = tag;
    while let Some(at) = rest.find('.') {
        rest = rest[at + 1..].trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        if CHANGING.contains(&&rest[..end]) && rest[end..].trim_start().starts_with('(') {
            return true;
        }
    }
    false
}

/// Gives a template the functions that rewritten sources name.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_function(LIST, own);
    env.add_function(DICT, own);
    env.add_filter(OWN, own);
    env.add_function(CALL, call_of_any_arguments);
}

/// A list or a dictionary as one that can be changed; any other value as it is.
fn own(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable if is_plain(&value) => {
            Ok(Value::from_object(List(Mutex::new(value.try_iter()?.collect()))))
        }
        ValueKind::Map if is_plain(&value) => {
            let mut members = IndexMap::new();
            for key in value.try_iter()? {
                let member = value.get_item(&key)?;
                members.insert(key, member);
            }
            Ok(Value::from_object(Dict(Mutex::new(members))))
        }
        _ => Ok(value),
    }
}

/// Whether a container is one of minijinja's for data: no tuple, namespace, loop or macro, and none of ours.
fn is_plain(value: &Value) -> bool {
    let special = ["Namespace", "Loop", "Macro", "Module", "containers::"];
    let name = value.as_object().map_or("", |object| object.type_name());
    !value.is_tuple() && !special.iter().any(|special| name.contains(special))
}

/// What a request gives, at every depth.
pub(super) fn own_all(value: &Value) -> Value {
    match value.kind() {
        ValueKind::Seq => {
            let items = value.try_iter().into_iter().flatten().map(|item| own_all(&item));
            Value::from_object(List(Mutex::new(items.collect())))
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let members = keys.map(|key| {
                let member = own_all(&value.get_item(&key).unwrap_or_default());
                (key, member)
            });
            Value::from_object(Dict(Mutex::new(members.collect())))
        }
        _ => value.clone(),
    }
}

/// Calls a macro that asks for `varargs` and `kwargs`, which are its last two parameters.
#[expect(clippy::needless_pass_by_value, reason = "the signature that functions have")]
fn call_of_any_arguments(
    state: &mut State<'_, '_>,
    called: Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let parameters: Vec<String> = match called.get_attr("arguments") {
        Ok(names) if !names.is_undefined() => {
            names.try_iter()?.map(|name| name.to_string()).collect()
        }
        _ => Vec::new(),
    };
    let own = parameters.len().saturating_sub(2);
    let mut args = args.0;
    let more = args.split_off(own.min(args.len()));
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for name in kwargs.args() {
        let value: Value = kwargs.get(name)?;
        let is_parameter = parameters[..own].iter().any(|parameter| parameter == name);
        if is_parameter || name == "caller" { &mut known } else { &mut unknown }
            .push((name, value));
    }
    known.push(("varargs", Value::from(Tuple::from(more))));
    known.push(("kwargs", Value::from_pairs(unknown)));
    let known: Kwargs = known.into_iter().collect();
    args.push(known.into());
    called.call(state, &args)
}

/// A list.
#[derive(Debug)]
struct List(Mutex<Vec<Value>>);

impl List {
    fn items(&self) -> MutexGuard<'_, Vec<Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a value that equals `wanted`.
    fn find(&self, wanted: &Value) -> Result<usize, Error> {
        // Values are compared without the lock: the list may hold itself.
        let items = self.items().clone();
        let found = items.iter().position(|item| item == wanted);
        found.ok_or_else(|| invalid(format!("{wanted} is not in the list")))
    }
}

/// A place as Python counts it: from the end below zero.
fn place(index: i64, len: usize) -> Option<usize> {
    let len = i64::try_from(len).ok()?;
    let index = if index < 0 { index + len } else { index };
    usize::try_from(index).ok()
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let items = self.items();
        items.get(place(key.as_i64()?, items.len())?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items().clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items().len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        if !CHANGING.contains(&method) {
            return Err(Error::from(ErrorKind::UnknownMethod));
        }
        let args = Arguments::of(args)?;
        let argument = |place: usize| -> Result<Value, Error> {
            args.given(place).ok_or_else(|| Error::from(ErrorKind::MissingArgument))
        };
        let (mut result, mut places) = (Value::from(()), 1);
        match method {
            "append" => self.items().push(argument(0)?),
            "extend" => {
                let more: Vec<Value> = argument(0)?.try_iter()?.collect();
                self.items().extend(more);
            }
            "insert" => {
                let (at, value) = (argument(0)?.as_i64(), argument(1)?);
                let at = at.ok_or_else(|| invalid("insert: expected an integer"))?;
                let mut items = self.items();
                let len = items.len();
                let at = if at < 0 { place(at, len).unwrap_or(0) } else { at as usize };
                items.insert(at.min(len), value);
                places = 2;
            }
            "pop" => {
                let at = args.given(0).map_or(Some(-1), |at| at.as_i64());
                let mut items = self.items();
                let at = at.and_then(|at| place(at, items.len())).filter(|at| *at < items.len());
                result = items.remove(at.ok_or_else(|| invalid("pop: index out of range"))?);
            }
            "remove" => {
                let at = self.find(&argument(0)?)?;
                self.items().remove(at);
            }
            "reverse" => self.items().reverse(),
            "sort" => {
                let items = Value::from(self.items().clone());
                let reverse = args.get_or(1, "reverse", false)?;
                let order = [("reverse", reverse.into()), ("case_sensitive", true.into())];
                let sorted = minijinja::filters::sort(state, items, order.into_iter().collect())?;
                *self.items() = sorted.try_iter()?.collect();
                places = 0;
            }
            "clear" => self.items().clear(),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        args.finish(places)?;
        Ok(result)
    }
}

/// A dictionary, in the order in which its keys were set.
#[derive(Debug)]
struct Dict(Mutex<IndexMap<Value, Value>>);

impl Dict {
    fn members(&self) -> MutexGuard<'_, IndexMap<Value, Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.members().get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.members().keys().cloned().collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.members().len())
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        if !CHANGING.contains(&method) {
            return Err(Error::from(ErrorKind::UnknownMethod));
        }
        if method == "update" {
            return self.update(args);
        }
        let args = Arguments::of(args)?;
        let key = || args.given(0).ok_or_else(|| Error::from(ErrorKind::MissingArgument));
        let mut members = self.members();
        let result = match method {
            "pop" => match members.shift_remove(&key()?) {
                Some(value) => value,
                None => args.given(1).ok_or_else(|| invalid("pop: no such key"))?,
            },
            "popitem" => {
                let (key, value) =
                    members.pop().ok_or_else(|| invalid("popitem: the dictionary is empty"))?;
                Value::from(Tuple::from(vec![key, value]))
            }
            "setdefault" => {
                let default = args.given(1).unwrap_or_else(|| Value::from(()));
                members.entry(key()?).or_insert(default).clone()
            }
            "clear" => {
                members.clear();
                Value::from(())
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        };
        args.finish(2)?;
        Ok(result)
    }
}

impl Dict {
    /// Takes over the members of a mapping, of a list of pairs, and of named arguments.
    fn update(&self, args: &[Value]) -> Result<Value, Error> {
        let (other, named): (Option<Value>, Kwargs) = minijinja::value::from_args(args)?;
        let mut more = Vec::new();
        if let Some(other) = other {
            let is_map = other.kind() == ValueKind::Map;
            for item in other.try_iter()? {
                let pair = if is_map {
                    (item.clone(), other.get_item(&item)?)
                } else {
                    (item.get_item_by_index(0)?, item.get_item_by_index(1)?)
                };
                more.push(pair);
            }
        }
        for name in named.args() {
            more.push((Value::from(name), named.get(name)?));
        }
        self.members().extend(more);
        Ok(Value::from(()))
    }
}
