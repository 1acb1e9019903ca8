//! `"text" % values`: minijinja's formatting, with the conversions that are Python's alone.

use minijinja::{
    Error, Value,
    formatting::{self, FormatStyle},
    value::{Rest, ValueKind, ValueOrKwargs},
};

use super::python;

/// The filter `format`, to which [`super::source`] turns `"text" % values`.
pub(super) fn format(text: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let mut args = args.into_values();
    let source = python::str(text);
    let mut out = String::new();
    let (mut rest, mut next) = (&*source, 0);
    while let Some(at) = rest.find('%') {
        let (before, conversion) = rest.split_at(at + 1);
        out.push_str(before);
        let flags = conversion.find(|c: char| !"#0- +.123456789*".contains(c));
        let Some(end) = flags else {
            rest = conversion;
            break;
        };
        // An argument for each star comes before the value's.
        next += conversion[..end].matches('*').count();
        out.push_str(&conversion[..end]);
        let kind = &conversion[end..];
        if kind.starts_with('(') {
            // Taken by name: only the form of what is printed differs.
            let Some(close) = kind.find(')') else {
                rest = kind;
                break;
            };
            out.push_str(&kind[..=close]);
            rest = &kind[close + 1..];
            continue;
        }
        let letter = kind.chars().next().unwrap_or('%');
        rest = &kind[letter.len_utf8()..];
        if letter == '%' {
            out.push('%');
            continue;
        }
        if let Some(value) = args.get_mut(next) {
            match letter {
                'r' | 'a' => *value = python::repr(value).into(),
                's' if value.kind() != ValueKind::String => *value = python::str(value).into(),
                'd' | 'i' | 'u' => {
                    if let Some(number) =
                        python::as_float(value).filter(|number| number.is_finite())
                    {
                        *value = (number.trunc() as i128).into();
                    }
                }
                _ => {}
            }
        }
        next += 1;
        out.push(if matches!(letter, 'r' | 'a') { 's' } else { letter });
    }
    out.push_str(rest);
    formatting::format(FormatStyle::Printf, &out, &args)
}
