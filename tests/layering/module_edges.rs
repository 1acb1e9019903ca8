//! Imports between the modules of one crate go down. A new edge means a reviewed change to a table
//! here.
//!
//! Knows sources as text: every path that begins with `crate`, `super` or `self`, in `use` trees
//! and in code. What stands under `#[cfg(test)]` is left out, and so are the crate's roots, which
//! list modules and hold no code.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::documents::root;

/// A crate's folder, and its modules in layers, the lowest first. A module refers to modules of
/// layers below its own, never to one of the same layer or above.
const LAYERS: &[(&str, &[&[&str]])] = &[
    (
        "formats/quantize",
        &[
            &["dtype", "simd", "small_floats"],
            &["affine", "lowrank"],
            &["float_groups"],
            &["dequantize"],
        ],
    ),
    (
        "formats/containers",
        &[&["container", "neutral", "tokenizer"], &["gguf", "pickle"], &["imatrix", "stored"]],
    ),
    (
        "formats",
        &[
            &[
                "calibration",
                "expr",
                "hex",
                "inert",
                "learned",
                "memory",
                "python_json",
                "sensitivity",
                "template",
                "tool_family",
            ],
            &["chat", "spec"],
            &["rope", "rules"],
            &["normalise"],
            &["config"],
        ],
    ),
    (
        "manifests",
        &[
            &["digest", "format1", "layout"],
            &["canonical", "partition"],
            &["ids"],
            &["manifest"],
            &["set"],
            &["verify"],
            &["signature"],
        ],
    ),
    (
        "identity",
        &[
            &["address", "connection_slots", "files", "key"],
            &["certificate", "token"],
            &["credentials"],
            &["handshake"],
            &["channel"],
            &["endpoint", "message"],
            &["signature"],
            &["mandate"],
            &["controller", "guard", "probe"],
            &["front"],
        ],
    ),
    (
        "converter",
        &[
            &["cancel", "checkpoint", "measured", "package", "recipe", "report", "shard"],
            &["adapter", "hub", "learned", "moments", "staging"],
            &["rounding", "source"],
            &["plan", "rules"],
            &["convert", "unsharded"],
            &["shard_writer", "store"],
            &["reshard"],
            &["export"],
        ],
    ),
    (
        "transfer",
        &[
            &["error_chain", "limit", "protocol"],
            &["release", "ticket"],
            &["receive"],
            &["push"],
            &["pull", "repair"],
        ],
    ),
    (
        "loader/engine-api",
        &[&["links", "tenant", "token"], &["constraint"], &["request"], &["handle"]],
    ),
    (
        "loader/engine",
        &[
            &["loading"],
            &["backend"],
            &["model"],
            &["engine"],
            &["bench", "calibration", "eval"],
            &["distillation", "rank_engine"],
        ],
    ),
    (
        "loader/kernels",
        &[
            &["exp", "float_groups", "floats", "lanes", "pool", "rope"],
            &[
                "attention",
                "avx2",
                "avx512",
                "memory",
                "neon",
                "platform",
                "quantized",
                "repack",
                "team",
                "tiles",
            ],
            &["elementwise", "matrix", "norm", "outer", "portable"],
            &["gather", "matmul", "moments"],
        ],
    ),
    (
        "loader/collectives",
        &[
            &["frame", "group", "sum"],
            &["link", "observed"],
            &["fate", "rdma"],
            &["linked"],
            &["loopback"],
        ],
    ),
    (
        "loader/cluster",
        &[
            &["identity", "token", "vitals", "wire"],
            &["announce"],
            &["message", "process"],
            &["acceptor", "probe"],
            &["links"],
            &["mesh"],
            &["rank"],
            &["supervisor"],
        ],
    ),
    (
        "loader/chat",
        &[
            &["json"],
            &["conversation"],
            &["template", "tools"],
            &["text"],
            &["prompt"],
            &["sandbox"],
            &["prompt_side"],
            &["model", "tokens"],
            &["output"],
        ],
    ),
    (
        "loader/server",
        &[
            &[
                "background",
                "dates",
                "error",
                "events",
                "fair",
                "limits",
                "model_info",
                "model_store",
                "response_store",
                "scripted",
                "tasks",
                "tenant",
                "usage",
            ],
            &["tls"],
            &["audit", "closing", "connections", "keys", "model_host"],
            &["http2", "ledger"],
            &["door", "metrics"],
            &["admission", "served_model"],
            &["registry"],
            &["generation"],
            &["batch", "dialect"],
            &["routes", "stream"],
            &["openapi"],
            &["app"],
            &["serve"],
        ],
    ),
    (
        "loader/mlx",
        &[
            &["distributed", "table"],
            &["runtime"],
            &["library"],
            &["array"],
            &["collective", "fused", "gradients", "linear_attention", "sampling"],
        ],
    ),
    ("loader/sensors", &[&["linux", "smc"], &["macos"]]),
    (
        ".",
        &[
            &[
                "args",
                "descriptors",
                "leftovers",
                "own_program",
                "progress",
                "sd_notify",
                "sleep_inhibitor",
                "text_file",
            ],
            &["discovery", "failure", "kill_points"],
            &["cluster", "engines", "source"],
            &["commands"],
        ],
    ),
];

/// Modules of one layer that refer to one another, with the reason.
const CIRCLES: &[(&str, &[&str], &str)] = &[(
    "loader/kernels",
    &[
        "attention",
        "avx2",
        "avx512",
        "memory",
        "neon",
        "platform",
        "quantized",
        "repack",
        "team",
        "tiles",
    ],
    "portable kernels choose an instruction set's, which are written over the same packed weights",
)];

#[test]
fn modules_refer_downwards_only() {
    let mut wrong = Vec::new();
    for (folder, layers) in LAYERS {
        let layer_of = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        for Edge { from, to, file } in Crate::read(folder).edges() {
            let (Some(upper), Some(lower)) = (layer_of(&from), layer_of(&to)) else { continue };
            let circular = CIRCLES.iter().any(|(crate_folder, modules, _)| {
                crate_folder == folder
                    && modules.contains(&from.as_str())
                    && modules.contains(&to.as_str())
            });
            if lower >= upper && !circular {
                wrong.push(format!("{}: {from} refers to {to}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "references that do not go down:\n{}", wrong.join("\n"));
}

#[test]
fn every_module_has_one_layer() {
    for (folder, layers) in LAYERS {
        let listed: Vec<&str> = layers.iter().flat_map(|layer| layer.iter().copied()).collect();
        let once: BTreeSet<&str> = listed.iter().copied().collect();
        assert_eq!(listed.len(), once.len(), "{folder}: a module is listed twice");
        let read = Crate::read(folder);
        let found: BTreeSet<&str> = read.modules.iter().map(String::as_str).collect();
        assert_eq!(once, found, "{folder}: the table and the crate's modules");
    }
}

#[test]
fn circles_are_needed() {
    for (folder, circle, reason) in CIRCLES {
        let edges = Crate::read(folder).edges();
        for module in *circle {
            let mut reached = BTreeSet::new();
            let mut waiting = vec![*module];
            while let Some(from) = waiting.pop() {
                for edge in edges.iter().filter(|edge| edge.from == from) {
                    if reached.insert(edge.to.as_str()) {
                        waiting.push(&edge.to);
                    }
                }
            }
            assert!(
                circle.iter().all(|other| reached.contains(other)),
                "{folder}: {module} is in no circle ({reason}) any more; give it a layer"
            );
        }
    }
}

#[test]
fn references_are_found_wherever_they_stand() {
    let check = |text: &str, expected: &[&str]| {
        let tokens = without_tests(&tokens(text));
        let found: Vec<String> =
            references(&tokens, &["own".to_owned()]).iter().map(|path| path.join("::")).collect();
        assert_eq!(found, expected, "{text}");
    };
    check("use crate::one;", &["one"]);
    check(
        "use crate::{one::{A, b::{self, C}}, two as other};",
        &["one::A", "one::b::self", "one::b::C", "two"],
    );
    check("use super::{one, two::*};", &["one", "two::*"]);
    check("use self::inner::A; use super::two;", &["own::inner::A", "two"]);
    check("mod inner { use super::A; use super::super::one; }", &["own::A", "one"]);
    check("mod inner { fn f() {} } use super::one;", &["one"]);
    check("fn f() -> crate::one::A { crate :: two :: f::<u8>(1) }", &["one::A", "two::f"]);
    check("pub(crate) fn f(x: &'static str, y: Self) { self.x(super::one::G) }", &["one::G"]);
    check("macro_rules! m { () => { $crate::one::f() } }", &["one::f"]);
    // Comments, texts and characters name nothing.
    check("// use crate::one;\n/* crate::one /* */ crate::two */", &[]);
    check(
        r##"const A: &str = "crate::one \" crate::two"; const B: &[u8] = br#"" crate::one"#;"##,
        &[],
    );
    check("const A: [char; 3] = ['\"', '\\'', '\\u{1F600}']; use crate::one;", &["one"]);
    // Tests may look anywhere.
    check("#[cfg(test)] mod tests { use crate::one; } use crate::two;", &["two"]);
    check("#[cfg(test)]\n#[path = \"x.rs\"]\npub(crate) mod tests; use crate::two;", &["two"]);
    check("#[cfg(all(test, unix))] use crate::{one, three}; use crate::two;", &["two"]);
    check("#[cfg(test)] fn f(a: [u8; 2]) -> A { crate::one::f() } use crate::two;", &["two"]);
    check("#[cfg(not(test))] use crate::one;", &["one"]);
    check("#[cfg(feature = \"hub\")] use crate::one;", &["one"]);
}

/// A reference from one top-level module to another.
struct Edge {
    from: String,
    to: String,
    file: PathBuf,
}

/// A crate's sources without its tests.
struct Crate {
    /// Its top-level modules.
    modules: BTreeSet<String>,
    /// The module that each name in the root stands for.
    exports: BTreeMap<String, String>,
    /// Each file with the path of the module that it is and its tokens.
    files: Vec<(PathBuf, Vec<String>, Vec<Token>)>,
}

impl Crate {
    fn read(folder: &str) -> Self {
        let source = root().join(folder).join("src");
        let root = ["lib.rs", "main.rs"].map(|name| source.join(name));
        let root = root.iter().find(|path| path.is_file()).expect("a crate has a root");
        let root = read(root);
        let modules: BTreeSet<String> = children(&root).into_iter().collect();
        let mut exports = BTreeMap::new();
        for (index, token) in root.iter().enumerate() {
            if token.is("use") {
                for mut path in tree(&root, index + 1).0 {
                    path.retain(|name| name != "crate" && name != "self");
                    if let (Some(first), Some(last)) = (path.first(), path.last())
                        && modules.contains(first)
                    {
                        exports.insert(last.clone(), first.clone());
                    }
                }
            }
        }
        let mut files = Vec::new();
        let mut waiting: Vec<Vec<String>> = modules.iter().map(|name| vec![name.clone()]).collect();
        while let Some(module) = waiting.pop() {
            let file = source.join(module.join("/")).with_extension("rs");
            let tokens = read(&file);
            waiting.extend(children(&tokens).into_iter().map(|name| {
                let mut child = module.clone();
                child.push(name);
                child
            }));
            files.push((file, module, tokens));
        }
        Self { modules, exports, files }
    }

    /// References between its top-level modules.
    fn edges(&self) -> Vec<Edge> {
        let mut edges = Vec::new();
        for (file, module, tokens) in &self.files {
            for path in references(tokens, module) {
                let first = path.first().map_or("*", String::as_str);
                assert_ne!(first, "*", "{}: all of the root hides what is used", file.display());
                let to = if self.modules.contains(first) {
                    first
                } else if let Some(to) = self.exports.get(first) {
                    to
                } else {
                    // Something of the root itself.
                    continue;
                };
                if module[0] != to {
                    let (from, to) = (module[0].clone(), to.to_owned());
                    edges.push(Edge { from, to, file: file.clone() });
                }
            }
        }
        edges
    }
}

fn read(file: &Path) -> Vec<Token> {
    let text =
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    without_tests(&tokens(&text))
}

/// The modules that a file declares and that stand in files of their own.
fn children(tokens: &[Token]) -> Vec<String> {
    let declared = tokens.windows(3).filter(|found| found[0].is("mod") && found[2].is(";"));
    declared.map(|found| found[1].0.clone()).collect()
}

/// A word, `::`, or one other character; a literal is `"`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token(String);

impl Token {
    fn is(&self, text: &str) -> bool {
        self.0 == text
    }

    fn is_word(&self) -> bool {
        self.0.chars().all(is_word)
    }
}

fn is_word(character: char) -> bool {
    character == '_' || character.is_alphanumeric()
}

/// The tokens of a source.
fn tokens(text: &str) -> Vec<Token> {
    let mut rest = text;
    let mut found: Vec<Token> = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (length, token) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), None)
        } else if rest.starts_with("/*") {
            (block_comment(rest), None)
        } else if let Some(length) = literal(rest) {
            (length, Some("\""))
        } else if is_word(first) {
            let length = rest.find(|character| !is_word(character)).unwrap_or(rest.len());
            (length, Some(&rest[..length]))
        } else if rest.starts_with("::") {
            (2, Some("::"))
        } else {
            let length = first.len_utf8();
            (length, Some(&rest[..length]).filter(|_| !first.is_whitespace()))
        };
        found.extend(token.map(|token| Token(token.to_owned())));
        rest = &rest[length..];
    }
    found
}

/// The length of a comment that begins here, with those inside it.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        match rest {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// The length of the text or character that begins here, if one does.
fn literal(text: &str) -> Option<usize> {
    let start = ["br", "cr", "b", "c", "r"].into_iter().find(|prefix| text.starts_with(prefix));
    let prefix = start.unwrap_or("");
    let body = &text[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = body.bytes().take_while(|byte| *byte == b'#').count();
        if body[hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let length = body[hashes + 1..].find(&end).expect("a raw text ends");
            return Some(prefix.len() + hashes + 1 + length + end.len());
        }
        return None;
    }
    if body.starts_with('"') {
        return Some(prefix.len() + quoted(body, '"'));
    }
    let mut characters = body.strip_prefix('\'')?.chars();
    // A lifetime has no second quote after its first character.
    let (first, second) = (characters.next()?, characters.next());
    (first == '\\' || second == Some('\'')).then(|| prefix.len() + quoted(body, '\''))
}

/// The length of a literal with both its quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + 1,
            _ => {}
        }
    }
    panic!("a literal ends: {}", &text[..text.len().min(60)]);
}

/// The tokens outside items that exist in tests alone.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_attribute = tokens[at].is("#") && tokens.get(at + 1).is_some_and(|t| t.is("["));
        if !is_attribute {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let end = at + 1 + closing(&tokens[at + 1..]);
        let attribute = &tokens[at..end];
        let names = |name: &str| attribute.iter().any(|token| token.is(name));
        at = if names("cfg") && names("test") && !names("not") && !names("any") {
            end + item(&tokens[end..])
        } else {
            end
        };
    }
    kept
}

/// The number of tokens up to the bracket that closes the first one.
fn closing(tokens: &[Token]) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        match token.0.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// The number of tokens of the item that begins here, with its further attributes.
fn item(tokens: &[Token]) -> usize {
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token.0.as_str() {
            ";" => return at + 1,
            "{" => return at + closing(&tokens[at..]),
            "(" | "[" => at += closing(&tokens[at..]),
            // The last thing in a block.
            "}" => return at,
            _ => at += 1,
        }
    }
    at
}

/// Every path from the crate's root that a file of `module` refers to.
fn references(tokens: &[Token], module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    // Modules within the file, each with the depth of braces that it ends at.
    let mut inner: Vec<(String, usize)> = Vec::new();
    let mut depth = 0;
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let after = |offset: usize, text: &str| tokens.get(at + offset).is_some_and(|t| t.is(text));
        match token.0.as_str() {
            "mod" if after(2, "{") => inner.push((tokens[at + 1].0.clone(), depth)),
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                inner.pop_if(|(_, end)| *end == depth);
            }
            "crate" | "super" | "self"
                if after(1, "::") && !(at > 0 && tokens[at - 1].is("::")) =>
            {
                let (paths, end) = tree(tokens, at);
                let here: Vec<&String> =
                    module.iter().chain(inner.iter().map(|(name, _)| name)).collect();
                found.extend(paths.into_iter().map(|path| absolute(&here, path)));
                // A brace that a tree ends with is balanced.
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// A path from the crate's root, of one that stands in the module `here`.
fn absolute(here: &[&String], path: Vec<String>) -> Vec<String> {
    let relative = path.iter().take_while(|name| *name == "self" || *name == "super");
    let ups = relative.clone().filter(|name| *name == "super").count();
    let (skipped, base) = match path[0].as_str() {
        "crate" => (1, &here[..0]),
        _ => (relative.count(), &here[..here.len() - ups]),
    };
    base.iter().copied().cloned().chain(path.into_iter().skip(skipped)).collect()
}

/// The paths of a `use` tree, or the one path, that begins at a token; and where it ends.
fn tree(tokens: &[Token], mut at: usize) -> (Vec<Vec<String>>, usize) {
    let mut path: Vec<String> = Vec::new();
    while let Some(token) = tokens.get(at) {
        if token.is("{") {
            let mut paths = Vec::new();
            at += 1;
            while !tokens[at].is("}") {
                if tokens[at].is(",") {
                    at += 1;
                    continue;
                }
                let (below, end) = tree(tokens, at);
                assert!(end > at, "a list of names goes on after {path:?}");
                at = end;
                paths.extend(below.into_iter().map(|rest| [path.clone(), rest].concat()));
            }
            return (paths, at + 1);
        }
        // Generic arguments end a path: those inside are seen by themselves.
        if !token.is_word() && !token.is("*") {
            break;
        }
        path.push(token.0.clone());
        at += 1;
        if !tokens.get(at).is_some_and(|token| token.is("::")) {
            break;
        }
        at += 1;
    }
    if tokens.get(at).is_some_and(|token| token.is("as")) {
        at += 2;
    }
    (vec![path], at)
}
