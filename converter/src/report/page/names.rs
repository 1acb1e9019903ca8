//! Splits a matrix's name into its layer and the rest; renders names as Markdown.

/// A matrix's layer and its name within the layer.
#[derive(Clone, Copy)]
pub(super) struct ModuleName<'a> {
    /// Its layer, if it is in one.
    pub(super) layer: Option<u32>,
    /// Its name within the layer (`mlp.down_proj`), or all of it.
    pub(super) kind: &'a str,
}

impl<'a> ModuleName<'a> {
    /// Splits the name of a tensor or module.
    pub(super) fn of(name: &'a str) -> Self {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let in_layer = module.split_once(".layers.").and_then(|(_, rest)| {
            let (layer, kind) = rest.split_once('.')?;
            Some(Self { layer: Some(layer.parse().ok()?), kind })
        });
        in_layer.unwrap_or(Self { layer: None, kind: module })
    }
}

/// ` of layers 0–3, 7`; nothing without layers.
pub(super) fn layers(mut found: Vec<u32>) -> String {
    found.sort_unstable();
    found.dedup();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for layer in found {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == layer => *end = layer,
            _ => ranges.push((layer, layer)),
        }
    }
    let spell = |(start, end): &(u32, u32)| {
        if start == end { start.to_string() } else { format!("{start}–{end}") }
    };
    match ranges.as_slice() {
        [] => String::new(),
        [(start, end)] if start == end => format!(" of layer {start}"),
        ranges => {
            let ranges: Vec<String> = ranges.iter().map(spell).collect();
            format!(" of layers {}", ranges.join(", "))
        }
    }
}

/// A name as code, also within a table.
pub(super) fn code(name: &str) -> String {
    let safe = |c: char| match c {
        '`' => '\'',
        '|' => '/',
        c if c.is_control() => ' ',
        c => c,
    };
    format!("`{}`", name.chars().map(safe).collect::<String>())
}

/// Foreign text as text: what Markdown or HTML would read as a command is escaped.
pub(super) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '[' | ']' | '<' | '>' | '|' | '#' | '!' | '&' => {
                out.extend(['\\', c]);
            }
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
