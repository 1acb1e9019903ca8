//! Regular expressions that match what JSON writes for a text. The lexer goes back over no byte, so
//! what JSON escapes is a lexeme of its own: a backslash alone never tells which one begins.

use regex_syntax::{
    ParserBuilder,
    hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Repetition},
};

/// Characters that JSON escapes with a letter, and the letter.
const LETTERS: [(char, char); 7] = [
    ('"', '"'),
    ('\\', '\\'),
    ('\n', 'n'),
    ('\t', 't'),
    ('\r', 'r'),
    ('\u{8}', 'b'),
    ('\u{c}', 'f'),
];

/// A regular expression.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    source: String,
    hir: Hir,
}

/// What JSON writes for a text, without the quotes.
pub(super) fn escaped(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    json[1..json.len() - 1].to_owned()
}

impl Expression {
    pub(super) fn parse(source: &str, flags: &str) -> Result<Self, String> {
        let mut builder = ParserBuilder::new();
        for flag in flags.chars() {
            match flag {
                'i' => builder.case_insensitive(true),
                's' => builder.dot_matches_new_line(true),
                'x' => builder.ignore_whitespace(true),
                'm' | 'u' => &mut builder,
                _ => return Err(format!("the flag {flag:?}")),
            };
        }
        let hir = builder.build().parse(source).map_err(|error| error.to_string())?;
        Ok(Self { source: format!("/{source}/{flags}"), hir })
    }

    /// The characters from one to another.
    pub(super) fn range(first: &str, last: &str) -> Result<Self, String> {
        let one = |text: &str| match text.chars().collect::<Vec<_>>().as_slice() {
            [c] => Ok(*c),
            _ => Err(format!("a range from or to {text:?}")),
        };
        let class = ClassUnicode::new([ClassUnicodeRange::new(one(first)?, one(last)?)]);
        Ok(Self { source: String::new(), hir: Hir::class(Class::Unicode(class)) })
    }

    /// As it was written.
    pub(super) fn source(&self) -> String {
        self.source.clone()
    }

    /// Whether it matches nothing that JSON escapes.
    pub(super) fn is_plain(&self) -> bool {
        is_plain(&self.hir)
    }

    /// In Lark, matching what JSON writes.
    pub(super) fn within_json(&self) -> Result<String, String> {
        write(&self.hir, !is_simple(&self.hir))
    }

    /// As one lexeme, for what no other lexeme follows that begins with a backslash.
    pub(super) fn lexeme_within_json(&self) -> Result<String, String> {
        Ok(format!("/{}/", pattern(&self.hir)?))
    }

    /// One character, or other text, of those that it repeats, as one lexeme.
    pub(super) fn one_within_json(&self) -> Result<String, String> {
        let hir = match self.hir.kind() {
            HirKind::Repetition(repeated) => &repeated.sub,
            _ => &self.hir,
        };
        let HirKind::Class(Class::Unicode(class)) = hir.kind() else {
            return Err("%ignore of more than one character".to_owned());
        };
        let parts: Vec<String> = class_parts(class, "").into_iter().flatten().collect();
        Ok(format!("/{}/", parts.join("|")))
    }
}

/// What JSON escapes.
fn special() -> ClassUnicode {
    let range = ClassUnicodeRange::new;
    ClassUnicode::new([range('\0', '\u{1f}'), range('"', '"'), range('\\', '\\')])
}

fn is_plain(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Empty => true,
        HirKind::Literal(literal) => {
            std::str::from_utf8(&literal.0).is_ok_and(|text| escaped(text) == text)
        }
        HirKind::Class(Class::Unicode(class)) => {
            let mut escapes = class.clone();
            escapes.intersect(&special());
            escapes.ranges().is_empty()
        }
        HirKind::Class(Class::Bytes(_)) | HirKind::Look(_) => false,
        HirKind::Repetition(repeated) => is_plain(&repeated.sub),
        HirKind::Capture(capture) => is_plain(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().all(is_plain),
    }
}

/// Whether what is escaped is repeated at its end alone, so that a run of characters takes nothing
/// from what follows.
fn is_simple(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Capture(capture) => is_simple(&capture.sub),
        HirKind::Alternation(parts) => parts.iter().all(is_simple),
        HirKind::Concat(parts) => {
            let is_fixed = |part: &Hir| {
                is_plain(part) || matches!(part.kind(), HirKind::Literal(_) | HirKind::Class(_))
            };
            parts
                .split_last()
                .is_none_or(|(last, rest)| rest.iter().all(is_fixed) && is_simple(last))
        }
        HirKind::Repetition(repeated) => {
            is_plain(&repeated.sub) || matches!(own(&repeated.sub).kind(), HirKind::Class(_))
        }
        _ => true,
    }
}

/// Without the group about it.
fn own(hir: &Hir) -> &Hir {
    match hir.kind() {
        HirKind::Capture(capture) => own(&capture.sub),
        _ => hir,
    }
}

/// An expression that matches what JSON writes.
fn pattern(hir: &Hir) -> Result<String, String> {
    let all = |parts: &[Hir], between: &str| {
        let parts: Result<Vec<String>, String> = parts.iter().map(pattern).collect();
        parts.map(|parts| format!("(?:{})", parts.join(between)))
    };
    match hir.kind() {
        HirKind::Empty => Ok(String::new()),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|error| error.to_string())?;
            Ok(regex_syntax::escape(&escaped(text)).replace('/', r"\/"))
        }
        HirKind::Class(Class::Unicode(class)) => {
            let parts: Vec<String> = class_parts(class, "").into_iter().flatten().collect();
            if parts.is_empty() {
                return Err("control characters".to_owned());
            }
            Ok(format!("(?:{})", parts.join("|")))
        }
        HirKind::Class(Class::Bytes(_)) => Err("bytes that are no text".to_owned()),
        HirKind::Look(_) => Err("an anchor within an expression".to_owned()),
        HirKind::Capture(capture) => pattern(&capture.sub),
        HirKind::Concat(parts) => all(parts, ""),
        HirKind::Alternation(parts) => all(parts, "|"),
        HirKind::Repetition(repeated) => {
            let max = repeated.max.map_or_else(String::new, |max| max.to_string());
            Ok(format!("(?:{}){{{},{max}}}", pattern(&repeated.sub)?, repeated.min))
        }
    }
}

/// `singly`: every character is a lexeme.
fn write(hir: &Hir, singly: bool) -> Result<String, String> {
    let all = |parts: &[Hir], between: &str| {
        let parts: Result<Vec<String>, String> =
            parts.iter().map(|part| write(part, singly)).collect();
        parts.map(|parts| format!("({})", parts.join(between)))
    };
    if !singly && is_plain(hir) && !matches!(hir.kind(), HirKind::Empty) {
        return Ok(lexeme(hir));
    }
    match hir.kind() {
        HirKind::Empty => Ok("\"\"".to_owned()),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|error| error.to_string())?;
            let quoted = |text: &str| super::quoted(&escaped(text));
            let single: Vec<String> = text.chars().map(|c| quoted(&c.to_string())).collect();
            Ok(if singly { single.join(" ") } else { quoted(text) })
        }
        HirKind::Class(Class::Unicode(class)) => class_rule(class, ""),
        HirKind::Class(Class::Bytes(_)) => Err("bytes that are no text".to_owned()),
        HirKind::Look(_) => Err("an anchor within an expression".to_owned()),
        HirKind::Capture(capture) => write(&capture.sub, singly),
        HirKind::Concat(parts) => all(parts, " "),
        HirKind::Alternation(parts) => all(parts, " | "),
        HirKind::Repetition(repeated) => {
            let sub = match own(&repeated.sub).kind() {
                HirKind::Class(Class::Unicode(class)) if !singly && repeated.max.is_none() => {
                    // At least so many characters are not so many runs.
                    if repeated.min <= 1 {
                        return Ok(class_rule(class, "+")? + times(repeated));
                    }
                    let one = class_rule(class, "")?;
                    let more = class_rule(class, "+")?;
                    return Ok(format!("{one}{{{0},{0}}} {more}*", repeated.min));
                }
                _ => write(&repeated.sub, singly)?,
            };
            Ok(match (repeated.min, repeated.max) {
                (0 | 1, None) | (0, Some(1)) => format!("({sub}){}", times(repeated)),
                (min, Some(max)) => format!("({sub}){{{min},{max}}}"),
                (min, None) => format!("({sub}){{{min},}}"),
            })
        }
    }
}

const fn times(repeated: &Repetition) -> &'static str {
    match (repeated.min, repeated.max) {
        (0, None) => "*",
        (_, None) => "+",
        _ => "?",
    }
}

/// A lexeme of an expression that matches nothing that JSON escapes.
fn lexeme(hir: &Hir) -> String {
    format!("/{}/", hir.to_string().replace('/', r"\/"))
}

/// Characters of a class as they are, and as JSON escapes them.
fn class_parts(class: &ClassUnicode, times: &str) -> [Option<String>; 2] {
    let mut plain = class.clone();
    plain.difference(&special());
    let plain = (!plain.ranges().is_empty()).then(|| {
        let text = Hir::class(Class::Unicode(plain)).to_string().replace('/', r"\/");
        format!("(?:{text}){times}")
    });
    let has = |c: char| class.ranges().iter().any(|own| own.start() <= c && c <= own.end());
    let letters = LETTERS.iter().filter(|(c, _)| has(*c));
    let letters: String =
        letters.map(|(_, letter)| regex_syntax::escape(&letter.to_string())).collect();
    let escapes = (!letters.is_empty()).then(|| format!(r"\\[{letters}]"));
    [plain, escapes]
}

fn class_rule(class: &ClassUnicode, times: &str) -> Result<String, String> {
    let parts = class_parts(class, times);
    let parts: Vec<String> = parts.into_iter().flatten().map(|part| format!("/{part}/")).collect();
    if parts.is_empty() {
        return Err("control characters".to_owned());
    }
    Ok(format!("({})", parts.join(" | ")))
}
