//! `reasoning_effort` in the words that a template knows.

use crate::json::{Json, Object};

/// The variable.
pub(super) const EFFORT: &str = "reasoning_effort";

/// Words for efforts, from none to the most, by what they stand for.
const SCALE: [&[&str]; 6] = [
    &["none", "no_think", "off", "disabled"],
    &["minimal"],
    &["low"],
    &["medium", "auto"],
    &["high"],
    &["xhigh", "max", "maximum"],
];

/// Efforts that a template compares the variable with, where they are more than one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Efforts(Vec<&'static str>);

impl Efforts {
    /// Those of a source: texts of the tags that name the variable.
    pub(super) fn of(source: &str) -> Self {
        let tags = source.split("{%").skip(1).chain(source.split("{{").skip(1));
        let tags = tags.filter_map(|tag| tag.split(['}']).next());
        let mut found = Vec::new();
        for tag in tags.filter(|tag| tag.contains(EFFORT)) {
            for word in SCALE.iter().copied().flatten() {
                let named =
                    ['"', '\''].iter().any(|quote| tag.contains(&format!("{quote}{word}{quote}")));
                if named && !found.contains(word) {
                    found.push(*word);
                }
            }
        }
        Self(if found.len() > 1 { found } else { Vec::new() })
    }

    /// The variables with an effort that the template names: the nearest, and of two as near the higher.
    pub(super) fn known(&self, kwargs: &Object) -> Object {
        let mut kwargs = kwargs.clone();
        let asked = kwargs.get(EFFORT).and_then(Json::as_str).map(str::to_owned);
        let Some(asked) = asked else { return kwargs };
        if self.0.is_empty() || self.0.contains(&asked.as_str()) {
            return kwargs;
        }
        let Some(wanted) = place(&asked) else { return kwargs };
        let distance = |word: &&&str| {
            let place = place(word).unwrap_or_default();
            (place.abs_diff(wanted), SCALE.len() - place)
        };
        if let Some(nearest) = self.0.iter().min_by_key(distance) {
            kwargs.set(EFFORT, (*nearest).into());
        }
        kwargs
    }
}

fn place(word: &str) -> Option<usize> {
    SCALE.iter().position(|words| words.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effort_that_the_template_does_not_name_is_the_nearest() {
        let check = |source: &str, asked: &str, expected: &str| {
            let mut kwargs = Object::default();
            kwargs.set(EFFORT, asked.into());
            let known = Efforts::of(source).known(&kwargs);
            assert_eq!(known.get(EFFORT).and_then(Json::as_str), Some(expected), "{asked}");
        };
        let three = "{% if reasoning_effort not in ['no_think', \"low\", 'high'] %}{{ raise_exception('reasoning_effort medium') }}{% endif %}";
        check(three, "none", "no_think");
        check(three, "minimal", "low");
        check(three, "medium", "high");
        check(three, "low", "low");
        check(three, "xhigh", "high");
        check(three, "own word", "own word");
        let apart =
            "{% if reasoning_effort == 'max' %}{% elif reasoning_effort == 'high' %}{% endif %}";
        check(apart, "medium", "high");
        check(apart, "xhigh", "max");
        check("{% set reasoning_effort = 'medium' %}", "xhigh", "xhigh");
    }
}
