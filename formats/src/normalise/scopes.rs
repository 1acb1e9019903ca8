//! What names stand for, and expressions of the expected kind.

use serde_json::{Map, Value as Json};

use super::{MAX_LAYERS, MAX_SIZE, ResolveError, accounting::Inventory, family::FamilyRules};
use crate::expr::{Expr, Scope, Value};

/// The layer's index in expressions.
const LAYER: &str = "L";

/// Every key that expressions may name, null where the configuration has none.
pub(super) fn config_scope(
    family: &FamilyRules<'_>,
    config: &Map<String, Json>,
) -> Result<Scope<'static>, ResolveError> {
    let mut scope = Scope::new();
    for key in family.used_keys() {
        let value = Value::from_json(config.get(key).unwrap_or(&Json::Null)).ok_or_else(|| {
            ResolveError::Value {
                place: "config".to_owned(),
                expression: key.to_owned(),
                expected: "fewer levels".to_owned(),
                found: "nested too deep".to_owned(),
            }
        })?;
        scope.set(key, value);
    }
    for (key, value) in &family.family.absent {
        if !config.contains_key(key) {
            let value = evaluate(value, &scope, &format!("absent {key}"))?;
            scope.set(key, value);
        }
    }
    Ok(scope)
}

/// Lets the rows of tensors stand for the keys that rules say they decide: fine-tunes add tokens
/// and forget the configuration. Returns warnings.
pub(super) fn replace_rows(
    family: &FamilyRules<'_>,
    inventory: &Inventory<'_>,
    scope: &mut Scope<'_>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    for rule in &family.pack.file.tensors {
        let Some(key) = &rule.rows else { continue };
        // Before names have meanings: such a name is plain text.
        let Ok(name) = rule.name.expand(scope, 0, 0) else { continue };
        let Some(rows) = inventory.rows(&name) else { continue };
        let rows = Value::Int(rows);
        match scope.get(key) {
            Some(stated) if *stated == rows => continue,
            Some(Value::Null) | None => {}
            Some(stated) => warnings.push(format!(
                "config says {key} = {stated}, but {name} has {rows} rows; the tensor is believed"
            )),
        }
        scope.set(key, rows);
    }
    warnings
}

/// Adds the rules' own names that are the same in every layer.
pub(super) fn add_lets(
    family: &FamilyRules<'_>,
    scope: &mut Scope<'_>,
) -> Result<(), ResolveError> {
    for entry in family.lets.iter().filter(|entry| !entry.per_layer) {
        let value = evaluate(&entry.value, scope, &format!("let {}", entry.name))?;
        scope.set(&entry.name, value);
    }
    Ok(())
}

/// One scope per layer.
pub(super) fn layer_scopes<'a>(
    family: &FamilyRules<'_>,
    scope: &'a Scope<'a>,
) -> Result<Vec<Scope<'a>>, ResolveError> {
    let layers = &family.pack.file.spec.layers;
    let count = size(layers, scope, "layers")?;
    if count > MAX_LAYERS {
        return Err(wrong(layers, "layers", &format!("at most {MAX_LAYERS}"), &count.to_string()));
    }
    (0..count)
        .map(|layer| {
            let mut inner = Scope::within(scope);
            inner.set(LAYER, Value::Int(i64::from(layer)));
            for entry in family.lets.iter().filter(|entry| entry.per_layer) {
                let place = at_layer(&format!("let {}", entry.name), layer as usize);
                let value = evaluate(&entry.value, &inner, &place)?;
                inner.set(&entry.name, value);
            }
            Ok(inner)
        })
        .collect()
}

pub(super) fn at_layer(place: &str, layer: usize) -> String {
    format!("{place} (layer {layer})")
}

pub(super) fn evaluate(
    expression: &Expr,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Value, ResolveError> {
    expression
        .evaluate(scope)
        .map_err(|source| ResolveError::Expression { place: place.to_owned(), source })
}

/// A size, length or count from 1 to [`MAX_SIZE`].
pub(super) fn size(expression: &Expr, scope: &Scope<'_>, place: &str) -> Result<u32, ResolveError> {
    let value = evaluate(expression, scope, place)?;
    // A share of a width is a float with a whole value.
    let whole = value.as_float().filter(|number| number.fract() == 0.0);
    match whole.map_or(value, |number| Value::Int(number as i64)) {
        Value::Int(integer) if (1..=i64::from(MAX_SIZE)).contains(&integer) => Ok(integer as u32),
        other => {
            let expected = format!("an integer from 1 to {MAX_SIZE}");
            Err(wrong(expression, place, &expected, &other.to_string()))
        }
    }
}

pub(super) fn flag(
    expression: &Expr,
    scope: &Scope<'_>,
    place: &str,
) -> Result<bool, ResolveError> {
    match evaluate(expression, scope, place)? {
        Value::Bool(flag) => Ok(flag),
        other => Err(wrong(expression, place, "true or false", &other.to_string())),
    }
}

/// A number in `(0, most]`.
pub(super) fn positive(
    expression: &Expr,
    scope: &Scope<'_>,
    place: &str,
    most: f64,
) -> Result<f64, ResolveError> {
    let value = evaluate(expression, scope, place)?;
    let number = value.as_float().filter(|number| *number > 0.0 && *number <= most);
    number.ok_or_else(|| {
        let expected = format!("a number above 0, at most {most}");
        wrong(expression, place, &expected, &value.to_string())
    })
}

pub(super) fn wrong(expression: &Expr, place: &str, expected: &str, found: &str) -> ResolveError {
    ResolveError::Value {
        place: place.to_owned(),
        expression: expression.text().to_owned(),
        expected: expected.to_owned(),
        found: found.to_owned(),
    }
}
