//! Numbers of a schema that the grammar compiler would round: it reads them as 64-bit floats and holds
//! integers in 64 bits. Bounds become the nearest ones that it holds exactly and that allow nothing
//! else; where there is none, and for constants, the schema is refused.

use serde_json::{Map, Number, Value};

use super::SchemaError;

/// From here on not every integer is a 64-bit float, and adding 1 to one may change nothing.
const FLOAT_EXACT: i128 = 1 << 53;
/// Floats from here on come of integers beyond 64 bits, which were rounded when they were read.
const ROUNDED: f64 = 18_446_744_073_709_551_616.0;
/// The largest `multipleOf` that the compiler holds.
const MULTIPLE_MAX: f64 = 4_294_967_295.0;

/// Keywords of lower bounds and of upper bounds, the inclusive one first.
const LOWER: [&str; 2] = ["minimum", "exclusiveMinimum"];
const UPPER: [&str; 2] = ["maximum", "exclusiveMaximum"];

/// Refuses a constant that would become another number.
pub(super) fn check_values(keyword: &str, value: &Value) -> Result<(), SchemaError> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_values(keyword, item)),
        Value::Object(members) => {
            members.values().try_for_each(|member| check_values(keyword, member))
        }
        Value::Number(number) if !is_held(number) => {
            let reason = format!(
                "{number} has no exact 64-bit float, which grammars are compiled with; write it as a string"
            );
            Err(SchemaError::new(keyword, reason))
        }
        _ => Ok(()),
    }
}

fn is_held(number: &Number) -> bool {
    match number.as_i128() {
        Some(integer) => i64::try_from(integer).is_ok() && (integer as f64) as i128 == integer,
        None => number.as_f64().is_some_and(|float| float.abs() < ROUNDED),
    }
}

/// The bounds of a schema that the compiler would round, as it holds them; the members that this
/// replaces.
pub(super) fn bounds(object: &Map<String, Value>) -> Result<Map<String, Value>, SchemaError> {
    let mut out = Map::new();
    if let Some(multiple) = object.get("multipleOf").and_then(Value::as_f64)
        && multiple.abs() > MULTIPLE_MAX
    {
        let reason =
            format!("{multiple} is above {MULTIPLE_MAX}, the most that a grammar can hold");
        return Err(SchemaError::new("multipleOf", reason));
    }
    let lower = bound(object, LOWER, true)?;
    let upper = bound(object, UPPER, false)?;
    let float = |bound: Option<&Bound>, key: &str| {
        bound.map_or_else(|| object.get(key).and_then(Value::as_f64), |bound| Some(bound.float))
    };
    if (lower.is_some() || upper.is_some())
        && let (Some(low), Some(high)) =
            (float(lower.as_ref(), LOWER[0]), float(upper.as_ref(), UPPER[0]))
        && low > high
    {
        let key = lower.as_ref().or(upper.as_ref()).map_or(LOWER[0], |bound| bound.keyword);
        let reason = "no 64-bit float, which grammars are compiled with, lies between the bounds; write the number as a string";
        return Err(SchemaError::new(key, reason));
    }
    for (bound, [inclusive, exclusive]) in [(lower, LOWER), (upper, UPPER)] {
        if let Some(bound) = bound {
            out.insert(inclusive.to_owned(), bound.float.into());
            out.insert(exclusive.to_owned(), Value::Bool(false));
        }
    }
    Ok(out)
}

/// An inclusive bound.
struct Bound {
    float: f64,
    keyword: &'static str,
}

/// The tightest bound of one side, where one of its keywords would be rounded.
fn bound(
    object: &Map<String, Value>,
    keys: [&'static str; 2],
    is_lower: bool,
) -> Result<Option<Bound>, SchemaError> {
    let tighter = |a: f64, b: f64| if is_lower { a > b } else { a < b };
    // Draft 4 has a boolean beside the bound that it makes exclusive.
    let is_exclusive = object.get(keys[1]) == Some(&Value::Bool(true));
    // The compiler negates integers, which the smallest of 64 bits does not survive.
    let most = (-(i64::MIN as f64)).next_down();
    let mut tightest: Option<Bound> = None;
    let mut is_rounded = false;
    for (place, keyword) in keys.into_iter().enumerate() {
        let Some(Value::Number(number)) = object.get(keyword) else { continue };
        let excludes = place == 1 || is_exclusive;
        let large = number.as_f64().is_some_and(|float| float.abs() >= FLOAT_EXACT as f64);
        is_rounded |= large;
        let mut float = if large {
            inward(number, excludes, is_lower)
        } else if excludes {
            // Only compared with: the float next to it is the bound.
            let float = number.as_f64().unwrap_or_default();
            if is_lower { float.next_up() } else { float.next_down() }
        } else {
            number.as_f64().unwrap_or_default()
        };
        // What lies outside 64 bits would become the nearest within.
        let is_outside =
            if is_lower { float >= -(i64::MIN as f64) } else { float <= i64::MIN as f64 };
        if large && is_outside {
            let reason =
                format!("{number} lies beyond 64-bit integers, which grammars are compiled with");
            return Err(SchemaError::new(keyword, reason));
        }
        float = if is_lower { float.max(-most) } else { float.min(most) };
        if tightest.as_ref().is_none_or(|bound| tighter(float, bound.float)) {
            tightest = Some(Bound { float, keyword });
        }
    }
    Ok(tightest.filter(|_| is_rounded))
}

/// The nearest float that is no looser than a large bound.
fn inward(number: &Number, excludes: bool, is_lower: bool) -> f64 {
    let Some(integer) = number.as_i128() else {
        // It may stand for an integer that was rounded, which the float next to it does not pass.
        let float = number.as_f64().unwrap_or_default();
        let is_open = excludes || float.abs() >= ROUNDED;
        return match (is_open, is_lower) {
            (false, _) => float,
            (true, true) => float.next_up(),
            (true, false) => float.next_down(),
        };
    };
    let step = i128::from(excludes);
    let integer = if is_lower { integer + step } else { integer - step };
    let float = integer as f64;
    let is_loose = if is_lower { (float as i128) < integer } else { (float as i128) > integer };
    match (is_loose, is_lower) {
        (false, _) => float,
        (true, true) => float.next_up(),
        (true, false) => float.next_down(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tools::schema::enforceable;

    const BEYOND: i64 = (1 << 53) + 1;

    #[test]
    fn constants_are_exact_or_refused() {
        let held = |schema: Value| assert_eq!(enforceable(&schema).unwrap(), schema);
        held(json!({"const": 1_i64 << 53}));
        held(json!({"enum": [-(1_i64 << 62), i64::MIN, 0.5, 1e16]}));
        let refused = |schema: Value, keyword: &str| {
            assert_eq!(enforceable(&schema).unwrap_err().keyword, keyword, "{schema}");
        };
        refused(json!({"const": BEYOND}), "const");
        refused(json!({"const": {"a": [-BEYOND]}}), "const");
        refused(json!({"properties": {"x": {"enum": [1, BEYOND]}}}), "enum");
        refused(json!({"const": u64::MAX}), "const");
        refused(
            serde_json::from_str(r#"{"const": 123456789012345678901234567890}"#).unwrap(),
            "const",
        );
    }

    #[test]
    fn bounds_allow_nothing_that_they_forbid() {
        let bound = |schema: Value, key: &str| enforceable(&schema).unwrap()[key].as_f64().unwrap();
        let float = BEYOND as f64;
        assert_eq!(float, (BEYOND - 1) as f64, "it is rounded down");
        assert_eq!(bound(json!({"minimum": BEYOND}), "minimum"), float + 2.0);
        assert_eq!(bound(json!({"maximum": BEYOND}), "maximum"), float);
        assert_eq!(bound(json!({"exclusiveMinimum": BEYOND - 1}), "minimum"), float + 2.0);
        assert_eq!(bound(json!({"exclusiveMaximum": BEYOND + 2}), "maximum"), float + 2.0);
        assert_eq!(bound(json!({"minimum": -BEYOND}), "minimum"), -float);
        assert_eq!(
            bound(json!({"minimum": BEYOND + 1, "exclusiveMinimum": true}), "minimum"),
            float + 4.0
        );
        assert_eq!(
            bound(json!({"minimum": 3, "exclusiveMinimum": BEYOND}), "minimum"),
            float + 2.0
        );
        assert!(bound(json!({"maximum": i64::MAX}), "maximum") < i64::MAX as f64);
        assert!(bound(json!({"maximum": u64::MAX}), "maximum") < u64::MAX as f64);
        assert!(bound(json!({"minimum": i64::MIN}), "minimum") > i64::MIN as f64);
        assert!(bound(json!({"type": "number", "maximum": f64::MAX}), "maximum") < i64::MAX as f64);
        let small = json!({"type": "integer", "minimum": -3, "exclusiveMaximum": 1_i64 << 52});
        assert_eq!(enforceable(&small).unwrap(), small);
        let refused = |schema: Value, keyword: &str| {
            assert_eq!(enforceable(&schema).unwrap_err().keyword, keyword, "{schema}");
        };
        refused(json!({"minimum": BEYOND, "maximum": BEYOND}), "minimum");
        refused(json!({"minimum": i64::MAX}), "minimum");
        refused(json!({"maximum": -1e20}), "maximum");
        refused(json!({"multipleOf": 1_i64 << 33}), "multipleOf");
    }
}
