//! Texts cut into lines as Python's `textwrap` cuts them, and indented as jinja2 indents them.

use minijinja::Error;

use super::arguments::{Arguments, invalid};

/// Widths that templates may ask for.
const WIDTH_MAX: usize = 1 << 20;

/// `truncate(text, length=255, killwords=False, end="...", leeway=5)`.
pub(super) fn truncate(text: &str, args: &Arguments) -> Result<String, Error> {
    let length = args.get_or(0, "length", 255_usize)?;
    let cuts_words = args.get_or(1, "killwords", false)?;
    let end = args.text(2, "end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = args.get_or(3, "leeway", 5_usize)?;
    args.finish(4)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept = length.checked_sub(end.chars().count());
    let kept = kept.ok_or_else(|| invalid(format!("truncate: {length} is less than {end:?}")))?;
    let kept: String = text.chars().take(kept).collect();
    let whole =
        if cuts_words { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(whole, _)| whole) };
    Ok(format!("{whole}{end}"))
}

/// `indent(text, width=4, first=False, blank=False)`; the width is a number of spaces or a text.
pub(super) fn indent(text: &str, args: &Arguments) -> Result<String, Error> {
    let width = args.get(0, "width")?;
    let space = match width.as_ref().map(|width| (width.as_str(), width.as_usize())) {
        None => " ".repeat(4),
        Some((Some(text), _)) => text.to_owned(),
        Some((_, Some(spaces))) if spaces <= WIDTH_MAX => " ".repeat(spaces),
        Some(_) => return Err(invalid("indent: expected a text or a small number of spaces")),
    };
    let (first, blank) = (args.get_or(1, "first", false)?, args.get_or(2, "blank", false)?);
    args.finish(3)?;
    let mut out = String::new();
    for (index, line) in lines(&format!("{text}\n")).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        if is_indented {
            out.push_str(&space);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `str.splitlines`.
pub(super) fn lines(text: &str) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        lines.push(&rest[..at]);
        let end = &rest[at..];
        let len = end.chars().next().map_or(1, char::len_utf8);
        rest = end.strip_prefix("\r\n").unwrap_or(&end[len..]);
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// `wordwrap(text, width=79, break_long_words=True, wrapstring="\n", break_on_hyphens=True)`.
pub(super) fn wordwrap(text: &str, args: &Arguments) -> Result<String, Error> {
    let width = args.get_or(0, "width", 79_usize)?;
    let breaks_words = args.get_or(1, "break_long_words", true)?;
    let end = args.text(2, "wrapstring")?.unwrap_or_else(|| "\n".to_owned());
    let at_hyphens = args.get_or(3, "break_on_hyphens", true)?;
    args.finish(4)?;
    if width == 0 {
        return Err(invalid("wordwrap: expected a width of at least 1"));
    }
    let wrapped = lines(text).into_iter();
    let wrapped = wrapped.map(|line| wrap(line, width, breaks_words, at_hyphens).join(&end));
    Ok(wrapped.collect::<Vec<_>>().join(&end))
}

/// `textwrap.wrap` with tabs and other white space left as they are.
fn wrap(text: &str, width: usize, breaks_words: bool, at_hyphens: bool) -> Vec<String> {
    let mut chunks = chunks(text, at_hyphens);
    chunks.reverse();
    let mut lines = Vec::new();
    while !chunks.is_empty() {
        let (mut line, mut len): (Vec<Vec<char>>, usize) = (Vec::new(), 0);
        let is_space = |chunk: &Vec<char>| chunk.iter().all(|c| c.is_whitespace());
        if !lines.is_empty() && chunks.last().is_some_and(is_space) {
            chunks.pop();
        }
        while let Some(chunk) = chunks.pop_if(|chunk| len + chunk.len() <= width) {
            len += chunk.len();
            line.push(chunk);
        }
        if let Some(chunk) = chunks.last_mut().filter(|chunk| chunk.len() > width) {
            if breaks_words {
                line.push(chunk.drain(..width - len).collect());
            } else if line.is_empty() {
                line.extend(chunks.pop());
            }
        }
        line.pop_if(|chunk| is_space(chunk));
        if !line.is_empty() {
            lines.push(line.concat().into_iter().collect());
        }
    }
    lines
}

/// Words, parts of words that end with a hyphen, and white space.
fn chunks(text: &str, at_hyphens: bool) -> Vec<Vec<char>> {
    let letters: Vec<char> = text.chars().collect();
    let mut chunks: Vec<Vec<char>> = Vec::new();
    let mut starts = true;
    for (at, letter) in letters.iter().enumerate() {
        let changes = at > 0 && letters[at - 1].is_whitespace() != letter.is_whitespace();
        match chunks.last_mut() {
            Some(chunk) if !starts && !changes => chunk.push(*letter),
            _ => chunks.push(vec![*letter]),
        }
        starts = at_hyphens && is_hyphen(&letters, at);
    }
    chunks
}

/// Whether a hyphen stands there between letters, two on each side.
fn is_hyphen(letters: &[char], at: usize) -> bool {
    let is_letter = |at: usize| letters.get(at).is_some_and(|letter| letter.is_alphabetic());
    letters[at] == '-'
        && at >= 2
        && is_letter(at - 1)
        && is_letter(at - 2)
        && is_letter(at + 1)
        && (is_letter(at + 2) || letters.get(at + 2) == Some(&'-') && is_letter(at + 3))
}
