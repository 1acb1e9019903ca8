//! Values of expressions, and text that is none.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn scope() -> Scope<'static> {
    let config = json!({
        "heads": 6, "hidden": 192, "theta": 1e4, "absent": null, "act": "silu", "tied": false,
        "rope": {"factor": 8.0, "nested": {"type": "yarn"}}, "kinds": ["full", "sliding"]
    });
    let mut scope = Scope::new();
    for (name, value) in config.as_object().unwrap() {
        scope.set(name, Value::from_json(value).unwrap());
    }
    scope
}

#[expect(clippy::needless_pass_by_value, reason = "every case is written in place")]
fn check(text: &str, expected: serde_json::Value) {
    let value = Expr::parse(text).unwrap().evaluate(&scope()).unwrap();
    assert_eq!(value, Value::from_json(&expected).unwrap(), "{text}");
}

fn check_error(text: &str, expected: &str) {
    let error = Expr::parse(text)
        .and_then(|expression| expression.evaluate(&scope()))
        .expect_err(text)
        .to_string();
    assert_eq!(error, expected);
}

#[test]
fn operators_bind_as_documented() {
    check("1 + 2 * 3 - 4", json!(3));
    check("(1 + 2) * 3", json!(9));
    check("absent ?? hidden / heads", json!(32));
    check("heads ?? 1 / 0", json!(6));
    check("1 < 2 == true", json!(true));
    check("true || false && false", json!(true));
    check("false || tied == false", json!(true));
    check("tied ? 1 : heads > 5 ? 2 : 3", json!(2));
    check("- heads + 7", json!(1));
    check("!tied && !!true", json!(true));
    check("heads % 4 == 2", json!(true));
}

#[test]
fn only_what_decides_is_evaluated() {
    check("tied && 1 / 0 == 1", json!(false));
    check("true || nobody", json!(true));
    check("tied ? nobody : 'no'", json!("no"));
}

#[test]
fn values_of_every_kind() {
    check("[1, 2.5, 'x', null, [true]]", json!([1, 2.5, "x", null, [true]]));
    check("[]", json!([]));
    check("1e-6", json!(1e-6));
    check("2.5e2 / 2", json!(125.0));
    check("\"it's\"", json!("it's"));
    check("1 == 1.0 && 0.0 == -0.0 && null == absent && 'a' != 1", json!(true));
    check("[1, 2] == [1.0, 2]", json!(true));
    check("'full' in kinds && !(3 in [1, 2])", json!(true));
    check("kinds[1]", json!("sliding"));
    check("rope.factor * 2", json!(16.0));
    check("rope.nested.type", json!("yarn"));
    check("rope.missing.deeper ?? 7", json!(7));
}

#[test]
fn functions_take_one_number() {
    check("sqrt(16)", json!(4.0));
    check("1.0 / sqrt(hidden + 64)", json!(0.0625));
    check("floor(heads * 0.75)", json!(4));
    check("floor(-0.5) + floor(7)", json!(6));
    check_error("sqrt(-1)", "in `sqrt(-1)`: -1 has no square root");
    check_error("floor(act)", "in `floor(act)`: `act` (\"silu\") has no floor");
    check_error("floor(1e300)", "in `floor(1e300)`: 1e300 has no floor");
    check_error("heads(1)", "in `heads(1)` at byte 0: expected the function sqrt, floor or length");
}

#[test]
fn errors_name_expression_and_operand() {
    check_error("hidden / (heads + 1)", "in `hidden / (heads + 1)`: 192 / 7 is not an integer");
    check_error("head_dim * 2", "in `head_dim * 2`: unknown name `head_dim`");
    check_error("absent * 2", "in `absent * 2`: `absent` (null) is not a number");
    check_error("rope.act + 1", "in `rope.act + 1`: `rope.act` (null) is not a number");
    check_error("!heads", "in `!heads`: `heads` (6) is not a bool");
    check_error("act.kind", "in `act.kind`: `act` (\"silu\") has no field `kind`");
    check_error("kinds[2]", "in `kinds[2]`: index 2 is outside a list of 2");
    check_error("kinds[-1]", "in `kinds[-1]`: index -1 is outside a list of 2");
    check_error("1 / 0", "in `1 / 0`: 1 is divided by zero");
    check_error("1.0 / 0", "in `1.0 / 0`: arithmetic on 1 and 0 has no finite result");
    check_error(
        "9223372036854775807 + 1",
        "in `9223372036854775807 + 1`: arithmetic on 9223372036854775807 and 1 overflows",
    );
    check_error("1 in 2", "in `1 in 2`: 2 is not a list");
    check_error("1 +", "in `1 +` at byte 3: expected a value");
    check_error("1 2", "in `1 2` at byte 2: expected an operator or the end");
    check_error("(1", "in `(1` at byte 2: expected `)`");
    check_error("'open", "in `'open` at byte 0: a string without end");
    check_error("a @ b", "in `a @ b` at byte 2: unexpected character '@'");
    check_error(
        "99999999999999999999",
        "in `99999999999999999999` at byte 0: 99999999999999999999 is out of range",
    );
    check_error("", "in `` at byte 0: expected a value");
}

#[test]
fn size_and_depth_are_bounded() {
    for deep in ["(", "[", "!", "-", "1?", "1?1:", "a["] {
        assert!(Expr::parse(&deep.repeat(200)).is_err(), "{deep}");
    }
    assert!(Expr::parse(&format!("{}1{}", "(".repeat(31), ")".repeat(31))).is_ok());
    assert!(Expr::parse(&format!("{}1{}", "(".repeat(32), ")".repeat(32))).is_err());
    let long = "1+".repeat(MAX_LENGTH / 2);
    assert!(Expr::parse(&format!("{}1", &long[2..])).is_ok());
    assert_eq!(Expr::parse(&format!("{long}1")), Err(ExprError::TooLong { length: 1025 }));
}

#[test]
fn names_are_listed_without_fields() {
    let expression = Expr::parse("a.b ? [c, d[e]] : !f in g.h && true").unwrap();
    assert_eq!(expression.names().into_iter().collect::<Vec<_>>(), ["a", "c", "d", "e", "f", "g"]);
}

#[test]
fn inner_scopes_hide_outer_ones() {
    let outer = scope();
    let mut inner = Scope::within(&outer);
    inner.set("heads", Value::Int(7));
    let expression = Expr::parse("heads + hidden").unwrap();
    assert_eq!(expression.evaluate(&inner), Ok(Value::Int(199)));
    assert_eq!(expression.evaluate(&outer), Ok(Value::Int(198)));
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,200}") {
        if let Ok(expression) = Expr::parse(&text) {
            let _ = expression.evaluate(&scope());
        }
    }

    #[test]
    fn no_row_of_tokens_panics(tokens in prop::collection::vec(prop::sample::select(&[
        "heads", "absent", "act", "rope", "kinds", "theta", "nobody", "1", "0", "2.5", "1e300",
        "9223372036854775807", "'x'", "[", "]", "(", ")", ".", "factor", ",", "?", ":", "??",
        "||", "&&", "==", "!=", "<", "<=", "in", "+", "-", "*", "/", "%", "!", "true", "null",
    ][..]), 0..40)) {
        if let Ok(expression) = Expr::parse(&tokens.join(" ")) {
            let _ = expression.evaluate(&scope());
        }
    }
}
