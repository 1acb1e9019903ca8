//! `[f(a="x", b=[1, True]), g()]`: the Pythonic tool-call format, arguments by keyword, values
//! literals. They stand in a list, or on lines of their own.

use super::{
    calls::ToolCalls,
    input::{Expect, Input, Progress},
    marker::is_code,
};

/// Bytes of a tool's or an argument's name.
const NAME_BYTES_MAX: usize = 256;
/// Deepest nesting of a literal, as for JSON.
const DEPTH_MAX: usize = 127;

#[derive(Debug)]
enum State {
    /// Before the list.
    Begin,
    /// Before a call.
    Name,
    /// After `(` or `,` in a call.
    Key,
    /// In a value: how it is read so far.
    Value(Extent),
    /// After a call.
    Next,
    /// After the last.
    Close,
}

/// Finds the end of a literal.
#[derive(Clone, Debug, Default)]
struct Extent {
    /// Bytes read.
    len: usize,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

impl Extent {
    /// Reads on from where it stopped; true at the `,` or `)` after the literal.
    fn advance(&mut self, text: &str) -> Option<bool> {
        for c in text[self.len..].chars() {
            match (self.quote, c) {
                (Some(_), _) if self.escaped => self.escaped = false,
                (Some(_), '\\') => self.escaped = true,
                (Some(quote), c) if c == quote => self.quote = None,
                (None, '"' | '\'') => self.quote = Some(c),
                (None, '[' | '{' | '(') => self.depth += 1,
                (None, ',' | ')') if self.depth == 0 => return Some(true),
                (None, ']' | '}') if self.depth == 0 => return None,
                (None, ']' | '}' | ')') => self.depth -= 1,
                _ => {}
            }
            if self.depth > DEPTH_MAX {
                return None;
            }
            self.len += c.len_utf8();
        }
        Some(false)
    }
}

/// One list of calls.
#[derive(Debug)]
pub(super) struct PythonicSection {
    state: State,
    count: usize,
    /// Whether each call has a line, without a list around them.
    is_lines: bool,
}

impl PythonicSection {
    /// Before the list's `[`.
    pub(super) const fn list() -> Self {
        Self { state: State::Begin, count: 0, is_lines: false }
    }

    /// Before the first line.
    pub(super) const fn lines() -> Self {
        Self { state: State::Name, count: 0, is_lines: true }
    }

    /// Whether what is at hand is a list of JSON objects instead; nothing as long as that is open.
    pub(super) fn is_json(&self, input: &Input) -> Option<bool> {
        let text = input.text().trim_start();
        let first = text.strip_prefix('[').map(|rest| rest.trim_start().chars().next());
        match first {
            _ if !matches!(self.state, State::Begin) => Some(false),
            Some(None) if !input.ended => None,
            Some(Some('{')) => Some(true),
            _ if text.is_empty() && !input.ended => None,
            _ => Some(false),
        }
    }

    /// Advances over what is at hand; `closers` may end it.
    pub(crate) fn step(
        &mut self,
        closers: &[String],
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match &self.state {
            State::Begin => {
                input.skip_space();
                match input.expect("[") {
                    Expect::Taken => self.state = State::Name,
                    Expect::Wait => return Progress::Wait,
                    Expect::Other => return Progress::NotACall,
                }
                Progress::Again
            }
            State::Name => self.name(input, calls),
            State::Key => self.key(input, calls),
            State::Value(_) => self.value(input, calls),
            State::Close => {
                // A model that forgets to close its list has made its calls all the same.
                input.skip_space();
                let closer = closers.first().map_or("", String::as_str);
                if input.expect(closer) == Expect::Wait { Progress::Wait } else { Progress::Leave }
            }
            State::Next if self.is_lines => self.next_line(closers, input),
            State::Next => self.next(input),
        }
    }

    /// A name up to `end`, or why there is none yet.
    fn word(input: &mut Input, end: char) -> Result<String, Progress> {
        let text = input.text();
        match text.find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))) {
            Some(at) if at > 0 && at <= NAME_BYTES_MAX && text[at..].starts_with(end) => {
                let word = input.take(at);
                input.take(end.len_utf8());
                Ok(word)
            }
            None if !input.ended && text.len() <= NAME_BYTES_MAX => Err(Progress::Wait),
            _ => Err(Progress::NotACall),
        }
    }

    fn name(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        input.skip_space();
        match Self::word(input, '(') {
            Err(progress) => progress,
            Ok(name) if !calls.begin(&name, None) => Progress::NotACall,
            Ok(_) => {
                self.count = 0;
                self.state = State::Key;
                Progress::Again
            }
        }
    }

    fn key(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        input.skip_space();
        match input.expect(")") {
            Expect::Taken => return self.close(calls),
            Expect::Wait => return Progress::Wait,
            Expect::Other => {}
        }
        match Self::word(input, '=') {
            Err(progress) => progress,
            Ok(key) => {
                let separator = if self.count == 0 { "{" } else { ", " };
                calls.arguments(&format!("{separator}{}: ", serde_json::Value::from(key)));
                self.count += 1;
                self.state = State::Value(Extent::default());
                Progress::Again
            }
        }
    }

    fn value(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let State::Value(extent) = &mut self.state else { return Progress::NotACall };
        match extent.advance(input.text()) {
            None => return Progress::NotACall,
            Some(false) if input.ended => return Progress::NotACall,
            Some(false) => return Progress::Wait,
            Some(true) => {}
        }
        let len = extent.len;
        let text = input.take(len);
        let Some(json) = literal(&text) else { return Progress::NotACall };
        calls.arguments(&json);
        if input.take(1) == ")" {
            return self.close(calls);
        }
        self.state = State::Key;
        Progress::Again
    }

    fn close(&mut self, calls: &mut ToolCalls) -> Progress {
        if self.count > 0 {
            calls.arguments("}");
        }
        if !calls.end() {
            return Progress::NotACall;
        }
        self.state = State::Next;
        Progress::Again
    }

    fn next_line(&mut self, closers: &[String], input: &mut Input) -> Progress {
        input.skip_space();
        if input.text().is_empty() {
            return if input.ended { Progress::Leave } else { Progress::Wait };
        }
        // Commas between the lines are not the format's, but nothing else can be meant.
        input.expect(",");
        match closers.iter().map(|closer| input.sees(closer)).find(|seen| *seen != Expect::Other) {
            Some(Expect::Wait) => return Progress::Wait,
            Some(_) => self.state = State::Close,
            None => self.state = State::Name,
        }
        Progress::Again
    }

    fn next(&mut self, input: &mut Input) -> Progress {
        input.skip_space();
        match (input.expect(","), input.sees("]")) {
            (Expect::Taken, _) => {
                self.state = State::Name;
                Progress::Again
            }
            (_, Expect::Taken) => {
                input.take(1);
                self.state = State::Close;
                Progress::Again
            }
            (Expect::Wait, _) => Progress::Wait,
            _ => Progress::Leave,
        }
    }
}

/// The JSON of a Python literal: text, number, `True`, `False`, `None`, list, tuple, dictionary.
pub(super) fn literal(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text.trim() };
    let mut out = String::new();
    reader.value(&mut out, 0)?;
    reader.rest.trim().is_empty().then_some(out)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, text: &str) -> bool {
        self.rest.strip_prefix(text).map(|rest| self.rest = rest).is_some()
    }

    fn value(&mut self, out: &mut String, depth: usize) -> Option<()> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.skip_space();
        match self.rest.chars().next()? {
            '"' | '\'' => self.text(out),
            '[' => self.items(out, depth, ']'),
            '(' => self.items(out, depth, ')'),
            '{' => self.dictionary(out, depth),
            _ => self.word(out),
        }
    }

    fn word(&mut self, out: &mut String) -> Option<()> {
        let end = self
            .rest
            .find(|c: char| matches!(c, ',' | ']' | ')' | '}' | ':') || c.is_whitespace())
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        let json = match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number if serde_json::from_str::<serde_json::Number>(number).is_ok() => number,
            _ => return None,
        };
        out.push_str(json);
        Some(())
    }

    /// A text in quotes with Python's escapes.
    fn text(&mut self, out: &mut String) -> Option<()> {
        let mut chars = self.rest.chars();
        let quote = chars.next()?;
        let mut text = String::new();
        loop {
            match chars.next()? {
                c if c == quote => break,
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    '0' => text.push('\0'),
                    '\n' => {}
                    c @ ('x' | 'u' | 'U') => {
                        let digits = match c {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let digits: String = chars.by_ref().take(digits).collect();
                        text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                    }
                    c @ ('\\' | '"' | '\'') => text.push(c),
                    c => text.extend(['\\', c]),
                },
                c if is_code(c) => return None,
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        out.push_str(&serde_json::Value::from(text).to_string());
        Some(())
    }

    fn items(&mut self, out: &mut String, depth: usize, close: char) -> Option<()> {
        self.rest = &self.rest[1..];
        out.push('[');
        let mut first = true;
        loop {
            self.skip_space();
            if self.rest.starts_with(close) {
                self.rest = &self.rest[1..];
                break;
            }
            if !first {
                out.push_str(", ");
            }
            first = false;
            self.value(out, depth + 1)?;
            self.skip_space();
            if !self.eat(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
        out.push(']');
        Some(())
    }

    fn dictionary(&mut self, out: &mut String, depth: usize) -> Option<()> {
        self.rest = &self.rest[1..];
        out.push('{');
        let mut first = true;
        loop {
            self.skip_space();
            if self.eat("}") {
                break;
            }
            if !first {
                out.push_str(", ");
            }
            first = false;
            if !self.rest.starts_with(['"', '\'']) {
                return None;
            }
            self.text(out)?;
            self.skip_space();
            if !self.eat(":") {
                return None;
            }
            out.push_str(": ");
            self.value(out, depth + 1)?;
            self.skip_space();
            if !self.eat(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
        out.push('}');
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn literals_become_json() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(literal(text).as_deref(), expected, "{text}");
        };
        check("'a\"b'", Some(r#""a\"b""#));
        check(r#""it's\n""#, Some(r#""it's\n""#));
        check("-1.5e3", Some("-1.5e3"));
        check("[1, True, None, ('x',),]", Some(r#"[1, true, null, ["x"]]"#));
        check("{'a': {}, \"b\": [ ]}", Some(r#"{"a": {}, "b": []}"#));
        check(r"'\u00e9\x41'", Some(r#""éA""#));
        for text in ["f()", "1 2", "'a", "{1: 2}", "[1 2]", "", "x"] {
            check(text, None);
        }
    }
}
