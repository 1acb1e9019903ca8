//! Text to tokens.

/// A token and the byte where it starts.
pub(super) type Spanned = (usize, Token);

/// What went wrong and where.
pub(super) type SyntaxError = (usize, String);

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Int(i64),
    Float(f64),
    Text(String),
    Name(String),
    Symbol(&'static str),
    End,
}

/// Longer symbols first, so that `<=` is not read as `<`.
const SYMBOLS: [&str; 25] = [
    "??", "||", "&&", "==", "!=", "<=", ">=", "?", ":", "<", ">", "+", "-", "*", "/", "%", "!",
    "(", ")", "[", "]", ".", ",", "{", "}",
];

pub(super) fn lex(text: &str) -> Result<Vec<Spanned>, SyntaxError> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        if first.is_ascii_whitespace() {
            at += 1;
            continue;
        }
        let (token, length) = if first.is_ascii_digit() {
            number(rest).map_err(|problem| (at, problem))?
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = prefix(rest, |byte| byte.is_ascii_alphanumeric() || byte == b'_');
            (Token::Name(rest[..length].to_owned()), length)
        } else if first == '\'' || first == '"' {
            let inner = &rest[1..];
            let end = inner.find(first).ok_or_else(|| (at, "a string without end".to_owned()))?;
            (Token::Text(inner[..end].to_owned()), end + 2)
        } else {
            let symbol = SYMBOLS
                .into_iter()
                .find(|symbol| rest.starts_with(symbol))
                .ok_or_else(|| (at, format!("unexpected character {first:?}")))?;
            (Token::Symbol(symbol), symbol.len())
        };
        tokens.push((at, token));
        at += length;
    }
    tokens.push((text.len(), Token::End));
    Ok(tokens)
}

fn prefix(text: &str, belongs: impl Fn(u8) -> bool) -> usize {
    text.bytes().take_while(|byte| belongs(*byte)).count()
}

fn number(text: &str) -> Result<(Token, usize), String> {
    let digits = |from: usize| prefix(&text[from..], |byte| byte.is_ascii_digit());
    let mut length = digits(0);
    let mut float = false;
    if text[length..].starts_with('.') && digits(length + 1) > 0 {
        length += 1 + digits(length + 1);
        float = true;
    }
    if text[length..].starts_with(['e', 'E']) {
        let sign = usize::from(text[length + 1..].starts_with(['-', '+']));
        let exponent = digits(length + 1 + sign);
        if exponent > 0 {
            length += 1 + sign + exponent;
            float = true;
        }
    }
    let digits = &text[..length];
    let token = if float {
        let value = digits.parse::<f64>().ok().filter(|value| value.is_finite());
        value.map(Token::Float)
    } else {
        digits.parse().ok().map(Token::Int)
    };
    token.map(|token| (token, length)).ok_or_else(|| format!("{digits} is out of range"))
}
