//! A user's own rule file. It may build on a compiled-in pack; what goes into packages is the whole,
//! so that they do not depend on the program's packs. Errors say in which line.

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{MAX_RULES_BYTES, RuleError, RulePack, builtin_text, extend};

/// A user's rules.
#[derive(Clone, Debug)]
pub struct OwnRules {
    /// The rules.
    pub pack: RulePack,
    text: String,
}

/// A user's rule file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{problem}", line.map_or_else(String::new, |line| format!("line {line}: ")))]
pub struct OwnRulesError {
    /// Where the slip stands, from 1; unknown when something is missing.
    pub line: Option<usize>,
    /// What is wrong.
    pub problem: String,
}

impl OwnRules {
    /// Parses and checks a rule file.
    pub fn parse(text: &str) -> Result<Self, OwnRulesError> {
        let own = Self::read(text)
            .map_err(|error| OwnRulesError { line: line_of(text, &error), problem: chain(&error) });
        let own = own?;
        let id = own.pack.id();
        if builtin_text(id).is_some() {
            return Err(OwnRulesError {
                line: find(text, &["id"]),
                problem: format!("id: {id:?} is the name of a compiled-in pack; take another one"),
            });
        }
        Ok(own)
    }

    fn read(text: &str) -> Result<Self, RuleError> {
        if text.len() > MAX_RULES_BYTES {
            return Err(RuleError::TooLarge(text.len()));
        }
        let table = extend::extended(toml::from_str(text)?, 0)?;
        let text = table.to_string();
        if text.len() > MAX_RULES_BYTES {
            return Err(RuleError::TooLarge(text.len()));
        }
        Ok(Self { pack: RulePack::from_table(table)?, text })
    }

    /// The rules with all that they build on; the same for the same file.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// An error with its causes.
fn chain(error: &RuleError) -> String {
    match error {
        RuleError::Toml(error) => error.message().to_owned(),
        RuleError::Expression { place, source } => format!("{place}: {source}"),
        other => other.to_string(),
    }
}

/// The line that an error is about, from 1.
fn line_of(text: &str, error: &RuleError) -> Option<usize> {
    match error {
        RuleError::Toml(error) => match error.span() {
            Some(span) => Some(line_at(text, span.start)),
            // What a table is read from has no places: the message ends with the key.
            None => find_key_of(text, &error.to_string()),
        },
        RuleError::Schema { .. } => find(text, &["schema"]),
        RuleError::Open { .. } => find(text, &["todo"]),
        RuleError::Expression { place, source } => {
            let expression = source.expression();
            find_place(text, place, expression).or_else(|| find_place(text, place, None))
        }
        RuleError::Invalid { place, problem } => {
            find_place(text, place, None).or_else(|| find_key_of(text, problem))
        }
        RuleError::TooLarge(_) => None,
    }
}

fn line_at(text: &str, byte: usize) -> usize {
    text.as_bytes()[..byte.min(text.len())].split(|byte| *byte == b'\n').count()
}

/// The line of the key that a message is about, which names an unknown field, or ends with where it
/// is, each in backticks.
fn find_key_of(text: &str, message: &str) -> Option<usize> {
    let message = message.trim_end();
    let path = message.strip_suffix('`').and_then(|message| message.rsplit_once("in `"));
    let mut keys: Vec<&str> = path.iter().flat_map(|(_, path)| path.split('.')).collect();
    let unknown = message.split_once("unknown field `").and_then(|(_, rest)| rest.split_once('`'));
    keys.extend(unknown.map(|(key, _)| key));
    // The innermost that stands in this file.
    (1..=keys.len()).rev().find_map(|count| find(text, &keys[..count]))
}

/// The line of a place of the checks: `tensor NAME …`, `let.NAME (in families.NAME)`, or keys; and
/// within it that of an expression.
fn find_place(text: &str, place: &str, expression: Option<&str>) -> Option<usize> {
    let table = DeTable::parse(text).ok()?;
    let table = table.get_ref();
    let (what, family) = match place.split_once(" (in ") {
        Some((what, family)) => (what, family.strip_suffix(')')),
        None => (place, None),
    };
    if let Some(name) = what.strip_prefix("tensor ") {
        let name = name.split(" from ").next().unwrap_or(name);
        let DeValue::Array(tensors) = table.get("tensors")?.get_ref() else { return None };
        let is_named = |tensor: &&Spanned<DeValue<'_>>| {
            tensor.get_ref().get("name").and_then(|found| found.get_ref().as_str()) == Some(name)
        };
        let tensor = tensors.iter().find(is_named)?;
        let at = match expression {
            Some(expression) => text_in(tensor, expression)?,
            None => tensor.get_ref().get("name")?.span().start,
        };
        return Some(line_at(text, at));
    }
    if let Some(expression) = expression {
        let found = table.values().find_map(|value| text_in(value, expression))?;
        return Some(line_at(text, found));
    }
    let family = family.map(|family| family.split('.').chain(what.split('.')).collect::<Vec<_>>());
    let own = what.split('.').collect::<Vec<_>>();
    let outer = place.split_once(" (in families.").map(|(_, name)| name.trim_end_matches(')'));
    family
        .and_then(|keys| find_in(table, text, &keys))
        .or_else(|| find_in(table, text, &own))
        .or_else(|| find_in(table, text, &["families", outer?]))
}

/// Where a text stands as a value.
fn text_in(value: &Spanned<DeValue<'_>>, wanted: &str) -> Option<usize> {
    match value.get_ref() {
        DeValue::String(text) if text.trim() == wanted.trim() => Some(value.span().start),
        DeValue::Array(items) => items.iter().find_map(|item| text_in(item, wanted)),
        DeValue::Table(table) => table.values().find_map(|item| text_in(item, wanted)),
        _ => None,
    }
}

/// The line of a key.
fn find(text: &str, keys: &[&str]) -> Option<usize> {
    find_in(DeTable::parse(text).ok()?.get_ref(), text, keys)
}

fn find_in(table: &DeTable<'_>, text: &str, keys: &[&str]) -> Option<usize> {
    let (first, rest) = keys.split_first()?;
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == first)?;
    match (rest, value.get_ref()) {
        ([], _) => Some(line_at(text, key.span().start)),
        (_, DeValue::Table(inner)) => find_in(inner, text, rest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "schema = 1\nid = 'mine'\nextends = 'dense-gqa'\n\n[config]\nused = ['gate']\n\n\
                       [families.mine]\narchitectures = ['Mine']\n\n[families.mine.let]\n\
                       head_size = 'gate'\n\n[[tensors]]\nname = 'model.norm.weight'\n\
                       shape = ['hidden_size']\n";

    fn check(from: &str, to: &str, line: Option<usize>, problem: &str) {
        assert!(OWN.contains(from), "{from}");
        let error = OwnRules::parse(&OWN.replace(from, to)).expect_err(to);
        assert!(error.problem.contains(problem), "{error}");
        assert_eq!(error.line, line, "{error}");
    }

    #[test]
    fn slips_are_told_with_their_lines() {
        check("schema = 1", "schema = 7", Some(1), "rule file of schema 7");
        check("schema = 1", "schema = ", Some(1), "");
        check("'mine'\nextends", "'decoder'\nextends", Some(2), "name of a compiled-in pack");
        check("'mine'\nextends", "'mine'\ntodo = ['a', 'b']\nextends", Some(3), "2 points");
        check("'dense-gqa'", "'nobody'", Some(3), "\"nobody\" is not the name");
        check("'gate'\n", "'gait'\n", Some(12), "let.head_size (in families.mine)");
        check("'gate'\n", "'gate +'\n", Some(12), "expected a value");
        check("['hidden_size']", "['hiden_size']", Some(16), "unknown name `hiden_size`");
        check("shape = ['hidden_size']", "shard = 'up'", Some(15), "unknown sharding rule \"up\"");
        check("shape = ['hidden_size']", "form = 1", Some(15), "unknown field `form`");
        check("architectures = ['Mine']", "classes = ['Mine']", Some(9), "unknown field `classes`");
    }

    #[test]
    fn the_text_for_packages_stands_by_itself() {
        let own = OwnRules::parse(OWN).unwrap();
        assert!(!own.text().contains("extends"));
        let again = OwnRules::parse(own.text()).unwrap();
        assert_eq!(again.text(), own.text());
        assert_eq!(format!("{:?}", again.pack), format!("{:?}", own.pack));
    }
}
