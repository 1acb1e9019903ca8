//! Which values of a configuration switch nothing on. Knows no key and no family.

use serde_json::Value;

/// Whether a configuration key that nobody knows may have this value: it then switches nothing
/// on.
///
/// Every key that a family's reference implementation reads is listed in its rules, so a key
/// that is not listed comes from a later version or from someone's own code, whose behaviour
/// without the key is the one that the rules describe. Null, false and empty values ask for that
/// behaviour. So does the number 0 (a count of none, a probability or a coefficient of nothing)
/// and the float 1.0 (a factor). The integer 1 does not: it is a count of one (`"num_mtp_layers":
/// 1`). An index that starts at 0 (`"first_dense_layer": 0`) would be missed, but comes with a
/// count that is refused.
#[must_use]
pub fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => {
            let is =
                |wanted: f64| number.as_f64().is_some_and(|found| found.total_cmp(&wanted).is_eq());
            is(0.0) || is(-0.0) || number.is_f64() && is(1.0)
        }
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_values_that_switch_nothing_on_are_neutral() {
        for value in [json!(null), json!(false), json!(0), json!(0.0), json!(-0.0), json!(1.0)] {
            assert!(is_neutral(&value), "{value}");
        }
        for value in [json!(""), json!([]), json!({})] {
            assert!(is_neutral(&value), "{value}");
        }
        for value in [json!(true), json!(1), json!(-1), json!(0.5), json!("0"), json!([0])] {
            assert!(!is_neutral(&value), "{value}");
        }
    }
}
