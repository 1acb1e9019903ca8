//! A tree and a scope to a value.

use std::{borrow::Cow, collections::BTreeMap};

use super::{Binary, Function, Node, Unary, Value};

/// What names stand for; a name that is not here is looked up in the parent.
#[derive(Clone, Debug, Default)]
pub struct Scope<'a> {
    parent: Option<&'a Scope<'a>>,
    values: BTreeMap<String, Value>,
}

impl<'a> Scope<'a> {
    /// An empty scope.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty scope within `parent`.
    #[must_use]
    pub fn within(parent: &'a Scope<'a>) -> Self {
        Self { parent: Some(parent), values: BTreeMap::new() }
    }

    /// Gives `name` a value, in place of an earlier one.
    pub fn set(&mut self, name: &str, value: Value) {
        self.values.insert(name.to_owned(), value);
    }

    /// The value of `name`, if it has one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name).or_else(|| self.parent.and_then(|parent| parent.get(name)))
    }
}

pub(super) enum Failure {
    UnknownName(String),
    Operands(String),
}

type Evaluated<'a> = Result<Cow<'a, Value>, Failure>;

pub(super) fn evaluate<'a>(node: &'a Node, scope: &'a Scope<'a>) -> Evaluated<'a> {
    match node {
        Node::Literal(value) => Ok(Cow::Borrowed(value)),
        Node::Name(name) => match scope.get(name) {
            Some(value) => Ok(Cow::Borrowed(value)),
            None => Err(Failure::UnknownName(name.clone())),
        },
        Node::List(items) => {
            let items = items.iter().map(|item| Ok(evaluate(item, scope)?.into_owned()));
            Ok(Cow::Owned(Value::List(items.collect::<Result<_, _>>()?)))
        }
        Node::Field(inner, field) => field_of(evaluate(inner, scope)?, field, inner),
        Node::Index(list, index) => {
            element_of(evaluate(list, scope)?, &*evaluate(index, scope)?, list)
        }
        Node::Unary(operator, operand) => {
            unary(*operator, &*evaluate(operand, scope)?, operand).map(Cow::Owned)
        }
        Node::Call(function, operand) => {
            call(*function, &*evaluate(operand, scope)?, operand).map(Cow::Owned)
        }
        Node::Binary(operator, left, right) => match operator {
            Binary::Coalesce => match evaluate(left, scope)? {
                value if *value == Value::Null => evaluate(right, scope),
                value => Ok(value),
            },
            Binary::Or => Ok(flag(truth(left, scope)? || truth(right, scope)?)),
            Binary::And => Ok(flag(truth(left, scope)? && truth(right, scope)?)),
            _ => {
                let (left_value, right_value) = (evaluate(left, scope)?, evaluate(right, scope)?);
                binary(*operator, (left, &left_value), (right, &right_value)).map(Cow::Owned)
            }
        },
        Node::Choose(parts) => {
            let [condition, yes, no] = parts.as_ref();
            evaluate(if truth(condition, scope)? { yes } else { no }, scope)
        }
    }
}

fn flag<'a>(flag: bool) -> Cow<'a, Value> {
    Cow::Owned(Value::Bool(flag))
}

fn fail<T>(problem: String) -> Result<T, Failure> {
    Err(Failure::Operands(problem))
}

/// How a message names an operand: `hidden_size` is null, or just null.
fn describe(node: &Node, value: &Value) -> String {
    match node.path() {
        Some(path) => format!("`{path}` ({value})"),
        None => value.to_string(),
    }
}

impl Node {
    fn path(&self) -> Option<String> {
        match self {
            Self::Name(name) => Some(name.clone()),
            Self::Field(inner, field) => Some(format!("{}.{field}", inner.path()?)),
            _ => None,
        }
    }
}

fn truth(node: &Node, scope: &Scope<'_>) -> Result<bool, Failure> {
    match &*evaluate(node, scope)? {
        Value::Bool(flag) => Ok(*flag),
        value => fail(format!("{} is not a bool", describe(node, value))),
    }
}

fn field_of<'a>(object: Cow<'a, Value>, field: &str, node: &Node) -> Evaluated<'a> {
    match object {
        Cow::Borrowed(Value::Map(map)) => {
            Ok(map.get(field).map_or(Cow::Owned(Value::Null), Cow::Borrowed))
        }
        Cow::Owned(Value::Map(mut map)) => Ok(Cow::Owned(map.remove(field).unwrap_or(Value::Null))),
        value if *value == Value::Null => Ok(value),
        value => fail(format!("{} has no field `{field}`", describe(node, &value))),
    }
}

fn element_of<'a>(list: Cow<'a, Value>, index: &Value, node: &Node) -> Evaluated<'a> {
    let Value::Int(index) = index else {
        return fail(format!("the index {index} is not an integer"));
    };
    let position = usize::try_from(*index).unwrap_or(usize::MAX);
    if let Value::Text(text) = &*list {
        // A pattern of layers, a letter for each.
        let letter = text.chars().nth(position);
        return match letter {
            Some(letter) => Ok(Cow::Owned(Value::Text(letter.to_string()))),
            None => fail(format!("index {index} is outside {}", describe(node, &list))),
        };
    }
    let length = match &*list {
        Value::List(items) => items.len(),
        value => return fail(format!("{} is not a list", describe(node, value))),
    };
    if position >= length {
        return fail(format!("index {index} is outside a list of {length}"));
    }
    Ok(match list {
        Cow::Borrowed(Value::List(items)) => Cow::Borrowed(&items[position]),
        Cow::Owned(Value::List(mut items)) => Cow::Owned(items.swap_remove(position)),
        other => other,
    })
}

fn unary(operator: Unary, value: &Value, node: &Node) -> Result<Value, Failure> {
    match (operator, value) {
        (Unary::Not, Value::Bool(flag)) => Ok(Value::Bool(!flag)),
        (Unary::Negate, Value::Float(float)) => Ok(Value::Float(-float)),
        (Unary::Negate, Value::Int(integer)) => match integer.checked_neg() {
            Some(negated) => Ok(Value::Int(negated)),
            None => fail(format!("-({integer}) overflows")),
        },
        (Unary::Not, _) => fail(format!("{} is not a bool", describe(node, value))),
        (Unary::Negate, _) => fail(format!("{} is not a number", describe(node, value))),
    }
}

fn call(function: Function, value: &Value, node: &Node) -> Result<Value, Failure> {
    /// Integers beyond this are not exact as floats.
    const EXACT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;
    match (function, value, value.as_float()) {
        (Function::Length, Value::List(items), _) => Ok(Value::Int(items.len() as i64)),
        (Function::Length, Value::Text(text), _) => Ok(Value::Int(text.chars().count() as i64)),
        (Function::Length, ..) => fail(format!("{} has no length", describe(node, value))),
        (Function::Floor, Value::Int(integer), _) => Ok(Value::Int(*integer)),
        (Function::Floor, _, Some(float)) if float.abs() < EXACT => {
            Ok(Value::Int(libm::floor(float) as i64))
        }
        (Function::Sqrt, _, Some(float)) if float >= 0.0 => Ok(Value::Float(libm::sqrt(float))),
        (Function::Floor, ..) => fail(format!("{} has no floor", describe(node, value))),
        (Function::Sqrt, ..) => fail(format!("{} has no square root", describe(node, value))),
    }
}

fn binary(
    operator: Binary,
    (left_node, left): (&Node, &Value),
    (right_node, right): (&Node, &Value),
) -> Result<Value, Failure> {
    match operator {
        Binary::Equal => return Ok(Value::Bool(left.equals(right))),
        Binary::Unequal => return Ok(Value::Bool(!left.equals(right))),
        Binary::In => {
            return match right {
                Value::List(items) => Ok(Value::Bool(items.iter().any(|item| item.equals(left)))),
                Value::Text(text) => {
                    let is_left = |item: &str| {
                        item.trim().parse().is_ok_and(|item| Value::Int(item).equals(left))
                    };
                    Ok(Value::Bool(text.split(',').any(is_left)))
                }
                _ => fail(format!("{} is not a list", describe(right_node, right))),
            };
        }
        _ => {}
    }
    for (node, value) in [(left_node, left), (right_node, right)] {
        if value.as_float().is_none() {
            return fail(format!("{} is not a number", describe(node, value)));
        }
    }
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => integers(operator, *left, *right),
        _ => floats(
            operator,
            left.as_float().unwrap_or_default(),
            right.as_float().unwrap_or_default(),
        ),
    }
}

fn integers(operator: Binary, left: i64, right: i64) -> Result<Value, Failure> {
    let result = match operator {
        Binary::Less => return Ok(Value::Bool(left < right)),
        Binary::LessEqual => return Ok(Value::Bool(left <= right)),
        Binary::Greater => return Ok(Value::Bool(left > right)),
        Binary::GreaterEqual => return Ok(Value::Bool(left >= right)),
        Binary::Divide | Binary::Remainder if right == 0 => {
            return fail(format!("{left} is divided by zero"));
        }
        Binary::Divide if left.checked_rem(right).is_some_and(|rest| rest != 0) => {
            return fail(format!("{left} / {right} is not an integer"));
        }
        Binary::Add => left.checked_add(right),
        Binary::Subtract => left.checked_sub(right),
        Binary::Multiply => left.checked_mul(right),
        Binary::Divide => left.checked_div(right),
        _ => left.checked_rem_euclid(right),
    };
    match result {
        Some(integer) => Ok(Value::Int(integer)),
        None => fail(format!("arithmetic on {left} and {right} overflows")),
    }
}

fn floats(operator: Binary, left: f64, right: f64) -> Result<Value, Failure> {
    let result = match operator {
        Binary::Less => return Ok(Value::Bool(left < right)),
        Binary::LessEqual => return Ok(Value::Bool(left <= right)),
        Binary::Greater => return Ok(Value::Bool(left > right)),
        Binary::GreaterEqual => return Ok(Value::Bool(left >= right)),
        Binary::Add => left + right,
        Binary::Subtract => left - right,
        Binary::Multiply => left * right,
        Binary::Divide => left / right,
        _ => left.rem_euclid(right),
    };
    if result.is_finite() {
        Ok(Value::Float(result))
    } else {
        fail(format!("arithmetic on {left} and {right} has no finite result"))
    }
}
