//! Grammars of custom tools (Lark) within JSON strings: every text and expression is rewritten so
//! that it matches what JSON writes for it. No grammar of tool calls.

mod expression;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use expression::{Expression, escaped};

use super::quoted;

/// Members of the schema of a text which hold its grammar: within a JSON string, and bare.
pub(crate) const WITHIN_JSON: &str = "x-shardpack-lark-json";
pub(crate) const BARE: &str = "x-shardpack-lark";

/// Terminals of Lark's library that may match what JSON escapes.
const LIBRARY: [(&str, &str); 9] = [
    ("WS", r"[ \t\f\r\n]+"),
    ("WS_INLINE", r"[ \t]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("ESCAPED_STRING", r#""([^"\\]|\\.)*""#),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
    ("SQL_COMMENT", r"--[^\n]*"),
];

/// A piece of a grammar's text.
#[derive(Clone, Debug)]
enum Piece {
    /// A name in capitals.
    Terminal(String),
    /// Another name.
    Rule(String),
    /// A text, and whether its case does not count.
    Text(String, bool),
    /// An expression with its flags.
    Expression(Expression),
    /// Anything else.
    Mark(String),
}

/// A definition or a directive.
struct Statement {
    /// What it defines; absent: a directive.
    name: Option<Piece>,
    /// Between the name and its colon.
    head: String,
    body: Vec<Piece>,
}

/// The grammar of the JSON escapes of what a grammar in Lark allows, without the quotes.
pub(crate) fn within_json(text: &str) -> Result<String, String> {
    let statements = statements(pieces(text)?)?;
    // What is ignored may stand between lexemes: then a terminal must stay one.
    let whole = statements.iter().any(ignores);
    let plain = plain_terminals(&statements);
    let form = Form { plain: &plain, whole };
    let mut out = String::new();
    for statement in &statements {
        let Some(name) = &statement.name else {
            directive(statement, &statements, form, &mut out)?;
            continue;
        };
        let body = &statement.body;
        match name {
            Piece::Terminal(name) if plain.contains(name) => {
                let body: Vec<String> = body.iter().map(as_it_is).collect();
                let _ = writeln!(out, "{name}{}: {}", statement.head, body.join(" "));
            }
            Piece::Terminal(name) if whole => {
                let _ = writeln!(out, "{name}{}: {}", statement.head, rewritten(body, form)?);
            }
            Piece::Terminal(name) if statement.head.is_empty() => {
                let _ = writeln!(out, "{}: {}", as_rule(name), rewritten(body, form)?);
            }
            Piece::Rule(name) => {
                let _ = writeln!(out, "{name}{}: {}", statement.head, rewritten(body, form)?);
            }
            _ => return Err("a terminal with options".to_owned()),
        }
    }
    Ok(out)
}

/// How terminals are rewritten.
#[derive(Clone, Copy)]
struct Form<'a> {
    /// Those that stay as they are.
    plain: &'a BTreeSet<String>,
    /// Whether the others stay one lexeme each; else they become rules.
    whole: bool,
}

impl Form<'_> {
    fn expression(self, expression: &Expression) -> Result<String, String> {
        if self.whole { expression.lexeme_within_json() } else { expression.within_json() }
    }
}

fn ignores(statement: &Statement) -> bool {
    matches!(statement.body.first(), Some(Piece::Mark(mark)) if mark == "%ignore")
}

fn as_rule(terminal: &str) -> String {
    format!("terminal_{}", terminal.to_ascii_lowercase())
}

fn as_it_is(piece: &Piece) -> String {
    match piece {
        Piece::Terminal(name) | Piece::Rule(name) | Piece::Mark(name) => name.clone(),
        Piece::Text(text, any_case) => quoted(text) + if *any_case { "i" } else { "" },
        Piece::Expression(expression) => expression.source(),
    }
}

/// The body of a rule whose pieces match what JSON writes.
fn rewritten(body: &[Piece], form: Form<'_>) -> Result<String, String> {
    let mut out = Vec::new();
    let mut rest = body.iter().peekable();
    while let Some(piece) = rest.next() {
        out.push(match piece {
            Piece::Terminal(name) if !form.whole && !form.plain.contains(name) => as_rule(name),
            Piece::Text(text, any_case) => {
                let is_range = matches!(rest.peek(), Some(Piece::Mark(mark)) if mark == "..");
                if is_range {
                    rest.next();
                    let Some(Piece::Text(last, _)) = rest.next() else {
                        return Err("a range without an end".to_owned());
                    };
                    form.expression(&Expression::range(text, last)?)?
                } else if *any_case && escaped(text) != *text {
                    return Err(format!("{text:?} in any case"));
                } else {
                    quoted(&escaped(text)) + if *any_case { "i" } else { "" }
                }
            }
            Piece::Expression(expression) => form.expression(expression)?,
            piece => as_it_is(piece),
        });
    }
    Ok(out.join(" "))
}

/// Terminals that match nothing that JSON escapes.
fn plain_terminals(statements: &[Statement]) -> BTreeSet<String> {
    let mut bodies: BTreeMap<&str, &[Piece]> = BTreeMap::new();
    let mut plain: BTreeSet<String> = BTreeSet::new();
    for statement in statements {
        match &statement.name {
            Some(Piece::Terminal(name)) => {
                bodies.insert(name, &statement.body);
                plain.insert(name.clone());
            }
            Some(_) => {}
            None => plain.extend(
                imports(&statement.body)
                    .into_iter()
                    .filter(|(library, _)| LIBRARY.iter().all(|(name, _)| name != library))
                    .map(|(_, own)| own),
            ),
        }
    }
    loop {
        let is_plain = |piece: &Piece| match piece {
            Piece::Terminal(name) => plain.contains(name),
            Piece::Text(text, _) => escaped(text) == *text,
            Piece::Expression(expression) => expression.is_plain(),
            // Ranges may hold what is escaped.
            Piece::Mark(mark) => mark != "..",
            Piece::Rule(_) => false,
        };
        let escaping: Vec<String> = plain
            .iter()
            .filter(|name| bodies.get(name.as_str()).is_some_and(|body| !body.iter().all(is_plain)))
            .cloned()
            .collect();
        if escaping.is_empty() {
            return plain;
        }
        plain.retain(|name| !escaping.contains(name));
    }
}

/// `%import common.LF -> NL` as the library's name and the grammar's own.
fn imports(body: &[Piece]) -> Vec<(String, String)> {
    let is_mark = |piece: &Piece, own: &str| matches!(piece, Piece::Mark(mark) if mark == own);
    if !body.first().is_some_and(|first| is_mark(first, "%import")) {
        return Vec::new();
    }
    let names: Vec<String> = body
        .iter()
        .filter_map(|piece| match piece {
            Piece::Terminal(name) => Some(name.clone()),
            _ => None,
        })
        .collect();
    if body.iter().any(|piece| is_mark(piece, "->")) {
        return match names.as_slice() {
            [library, own] => vec![(library.clone(), own.clone())],
            _ => Vec::new(),
        };
    }
    names.into_iter().map(|name| (name.clone(), name)).collect()
}

fn directive(
    statement: &Statement,
    all: &[Statement],
    form: Form<'_>,
    out: &mut String,
) -> Result<(), String> {
    let imported = imports(&statement.body);
    for (library, own) in &imported {
        let known = LIBRARY.iter().find(|(name, _)| name == library);
        let _ = match known {
            Some((_, source)) => {
                let expression = form.expression(&Expression::parse(source, "")?)?;
                let own = if form.whole { own.clone() } else { as_rule(own) };
                writeln!(out, "{own}: {expression}")
            }
            None => writeln!(out, "%import common.{library} -> {own}"),
        };
    }
    if !imported.is_empty() {
        return Ok(());
    }
    let [Piece::Mark(kind), ignored] = statement.body.as_slice() else {
        return Err(format!("the directive {:?}", statement.body.first()));
    };
    if kind != "%ignore" {
        return Err(format!("the directive {kind}"));
    }
    let one = match ignored {
        Piece::Terminal(name) if form.plain.contains(name) => name.clone(),
        Piece::Terminal(name) => defined(name, all)?.one_within_json()?,
        Piece::Expression(expression) => expression.one_within_json()?,
        Piece::Text(text, _) => quoted(&escaped(text)),
        _ => return Err("%ignore of a rule".to_owned()),
    };
    let _ = writeln!(out, "%ignore {one}");
    Ok(())
}

/// The expression that a terminal stands for.
fn defined(name: &str, all: &[Statement]) -> Result<Expression, String> {
    for statement in all {
        match &statement.name {
            Some(Piece::Terminal(own)) if own == name => {
                if let [Piece::Expression(expression)] = statement.body.as_slice() {
                    return Ok(expression.clone());
                }
            }
            None => {
                let imported = imports(&statement.body);
                let library = imported.iter().find(|(_, own)| own == name);
                let known =
                    library.and_then(|(library, _)| LIBRARY.iter().find(|(own, _)| own == library));
                if let Some((_, source)) = known {
                    return Expression::parse(source, "");
                }
            }
            Some(_) => {}
        }
    }
    Err(format!("%ignore {name}"))
}

/// Cuts a grammar into pieces; a line that goes on with no piece of its own is part of the last.
fn pieces(text: &str) -> Result<Vec<Vec<Piece>>, String> {
    let mut lines: Vec<Vec<Piece>> = Vec::new();
    for line in text.lines() {
        let mut pieces = Vec::new();
        let mut rest = line.trim_start();
        while !rest.is_empty() && !rest.starts_with("//") && !rest.starts_with('#') {
            let (piece, len) = piece(rest)?;
            pieces.push(piece);
            rest = rest[len..].trim_start();
        }
        let goes_on = line.starts_with([' ', '\t'])
            || matches!(pieces.first(), Some(Piece::Mark(mark)) if mark == "|");
        match lines.last_mut().filter(|_| goes_on) {
            Some(last) => last.extend(pieces),
            None if pieces.is_empty() => {}
            None => lines.push(pieces),
        }
    }
    Ok(lines)
}

/// The piece at the beginning of a text, and its length.
fn piece(text: &str) -> Result<(Piece, usize), String> {
    let first = text.chars().next().unwrap_or_default();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if first == '"' || first == '/' {
        let end = closing(&text[1..], first).ok_or_else(|| format!("no end of {text:?}"))? + 2;
        let flags: String = text[end..].chars().take_while(char::is_ascii_lowercase).collect();
        let len = end + flags.len();
        if first == '/' {
            return Ok((Piece::Expression(Expression::parse(&text[1..end - 1], &flags)?), len));
        }
        let value = serde_json::from_str(&text[..end]).map_err(|error| error.to_string())?;
        return match flags.as_str() {
            "" => Ok((Piece::Text(value, false), len)),
            "i" => Ok((Piece::Text(value, true), len)),
            _ => Err(format!("the flags {flags:?}")),
        };
    }
    if is_name(first) && !first.is_ascii_digit() {
        let len = text.find(|c: char| !is_name(c)).unwrap_or(text.len());
        let name = text[..len].to_owned();
        let is_terminal = name.chars().any(char::is_alphabetic) && name == name.to_uppercase();
        let piece = if is_terminal { Piece::Terminal(name) } else { Piece::Rule(name) };
        return Ok((piece, len));
    }
    if first == '%' || first.is_ascii_digit() {
        let len = text[1..].find(|c: char| !is_name(c)).map_or(text.len(), |len| len + 1);
        return Ok((Piece::Mark(text[..len].to_owned()), len));
    }
    if let Some(mark) = ["->", ".."].into_iter().find(|mark| text.starts_with(mark)) {
        return Ok((Piece::Mark(mark.to_owned()), mark.len()));
    }
    if "|()[]{}?*+:.,!~-=".contains(first) {
        return Ok((Piece::Mark(first.to_string()), 1));
    }
    Err(format!("{first:?}"))
}

/// Where a text ends that a backslash may protect from its end.
fn closing(text: &str, end: char) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().find_map(|(at, c)| {
        let ends = c == end && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends.then_some(at)
    })
}

fn statements(lines: Vec<Vec<Piece>>) -> Result<Vec<Statement>, String> {
    lines.into_iter().map(statement).collect()
}

fn statement(mut pieces: Vec<Piece>) -> Result<Statement, String> {
    if matches!(pieces.first(), Some(Piece::Mark(mark)) if mark.starts_with('%')) {
        return Ok(Statement { name: None, head: String::new(), body: pieces });
    }
    let is_colon = |piece: &Piece| matches!(piece, Piece::Mark(mark) if mark == ":");
    let colon = pieces.iter().position(is_colon).ok_or("a line without a colon")?;
    let body = pieces.split_off(colon + 1);
    let is_directive = |piece: &&Piece| matches!(piece, Piece::Mark(mark) if mark.starts_with('%'));
    if let Some(Piece::Mark(mark)) = body.iter().find(is_directive) {
        return Err(format!("{mark} within a rule"));
    }
    pieces.pop();
    // `?rule` and `!rule` say how a tree is made.
    pieces.retain(|piece| !matches!(piece, Piece::Mark(mark) if mark == "?" || mark == "!"));
    let mut head = pieces.into_iter();
    let name = head.next().ok_or("a rule without a name")?;
    let head: Vec<String> = head.map(|piece| as_it_is(&piece)).collect();
    Ok(Statement { name: Some(name), head: head.concat(), body })
}

#[cfg(test)]
mod tests;
