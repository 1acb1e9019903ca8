//! Scaffolded rules as a rule file.

use std::fmt::Write as _;

use serde_json::{Map, Value};
use toml::Table;

use super::{Group, Scaffold, nearest::Nearest};
use crate::{expr, normalise::family::shown, rules::builtin_text};

/// Parts of keys that say something of training, tokens or pictures, and not of what a forward
/// pass computes.
const IGNORED: &[&str] = &[
    "_token",
    "token_id",
    "dropout",
    "drop_rate",
    "init",
    "loss",
    "cache",
    "dtype",
    "aux",
    "version",
    "vision",
    "audio",
    "image",
    "video",
    "train",
    "grad",
    "label",
    "generat",
    "fused",
    "flash",
    "kernel_impl",
];

/// Names whose values shapes are likely to be, the likeliest first.
const SIZES: &[&str] = &[
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "q_size",
    "kv_size",
    "head_size",
    "num_attention_heads",
    "kv_heads",
    "moe_size",
    "moe_intermediate_size",
    "experts",
];

/// Longest list of layers that a comment shows.
const MAX_LAYERS_SHOWN: usize = 12;

pub(super) fn write(
    model_type: &str,
    config: &Map<String, Value>,
    nearest: &Nearest<'_>,
) -> Scaffold {
    let (pack, family) = (nearest.family.pack.id(), nearest.family.name);
    let points = points(config, nearest);
    let mut text = format!(
        "# Rules for {model_type}, scaffolded from its config.json and the names and shapes of its tensors\n\
         # alone. Nobody has checked what the model computes. The file is refused while `todo` has\n\
         # points: take each out once it is decided, and compare logits before the packages are used.\n\
         # The form is described in formats/src/rules.rs; {pack} is formats/rules/{pack}.toml.\n\n\
         schema = 1\nid = {}\n\
         # {} of {} names of tensors and all but {} keys are those of its family {family}.\n\
         extends = {}\n\ntodo = [\n",
        quoted(&format!("{model_type}-rules")),
        nearest.known,
        nearest.known + nearest.unknown.len(),
        nearest.keys.len(),
        quoted(pack),
    );
    for point in &points {
        line(&mut text, &format!("    {},", quoted(point)));
    }
    text.push_str("]\n");
    if !nearest.missing.is_empty() {
        line(&mut text, &format!("\n# Tensors of {pack} that this model does not have."));
        line(&mut text, "without = [");
        for name in &nearest.missing {
            line(&mut text, &format!("    {},", quoted(name)));
        }
        text.push_str("]\n");
    }
    config_keys(&mut text, config, nearest);
    family_table(&mut text, model_type, config, nearest);
    tensors(&mut text, nearest);
    Scaffold { text, nearest: format!("{pack} ({family})"), points: points.len() }
}

fn line(text: &mut String, line: &str) {
    let _ = writeln!(text, "{line}");
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// What a person has to decide.
fn points(config: &Map<String, Value>, nearest: &Nearest<'_>) -> Vec<String> {
    let family = nearest.family.name;
    let mut points = vec![format!(
        "is what it computes that of {family} in every part: norms and where they stand, position embedding, \
         attention, activation, experts? Read its code; compare logits"
    )];
    if config.get("auto_map").is_some_and(|value| !value.is_null()) {
        points.push(
            "its code comes with the repository (auto_map): state native = \"true\" under let if these rules are \
             what that code does"
                .to_owned(),
        );
    }
    for key in &nearest.keys {
        let value = shown(&config[key.as_str()]);
        points.push(if is_ignored(key) {
            format!("config key {key} = {value} was guessed to be without effect")
        } else {
            format!(
                "config key {key} = {value} is read by nothing: name it in an expression (let, require, spec), \
                 or move it to ignored"
            )
        });
    }
    for (pattern, found, expected) in &nearest.reshaped {
        points.push(format!("tensor {pattern} has shape {found:?}, {family} has {expected}"));
    }
    for name in &nearest.missing {
        points.push(format!("tensor {name} of {family} is not there: is nothing in its place?"));
    }
    for pattern in nearest.unknown.keys() {
        points.push(format!(
            "tensor {pattern}: state its shape, sharding rule and role below, or under `ignore` why it is not needed; no \
             engine uses a tensor that {family} does not have"
        ));
    }
    points
}

fn is_ignored(key: &str) -> bool {
    IGNORED.iter().any(|part| key.contains(part))
}

fn config_keys(text: &mut String, config: &Map<String, Value>, nearest: &Nearest<'_>) {
    let (ignored, used): (Vec<_>, Vec<_>) = nearest.keys.iter().partition(|key| is_ignored(key));
    line(
        text,
        "\n# Keys that the other rules do not know; where each stands is a guess.\n[config]",
    );
    for (name, keys) in [("used", used), ("ignored", ignored)] {
        line(text, &format!("{name} = ["));
        for key in keys {
            line(text, &format!("    {}, # {}", quoted(key), shown(&config[key.as_str()])));
        }
        line(text, "]");
    }
}

/// The nearest family's own table, for this model.
fn family_table(
    text: &mut String,
    model_type: &str,
    config: &Map<String, Value>,
    nearest: &Nearest<'_>,
) {
    let pack = builtin_text(nearest.family.pack.id()).expect("only such packs are compared");
    let pack: Table = toml::from_str(pack).expect("a test parses every compiled-in pack");
    let mut family = pack["families"][nearest.family.name].as_table().cloned().unwrap_or_default();
    let classes = config.get("architectures").and_then(Value::as_array);
    let classes = classes.into_iter().flatten().filter_map(Value::as_str);
    let classes = classes.map(|class| toml::Value::String(class.to_owned())).collect();
    family.insert("architectures".to_owned(), toml::Value::Array(classes));
    let mut own = Table::new();
    own.insert(model_type.to_owned(), toml::Value::Table(family));
    let mut outer = Table::new();
    outer.insert("families".to_owned(), toml::Value::Table(own));
    line(text, &format!("\n# As for {}.", nearest.family.name));
    text.push_str(&outer.to_string());
}

fn tensors(text: &mut String, nearest: &Nearest<'_>) {
    let reshaped = nearest.reshaped.iter();
    for (pattern, found, expected) in reshaped {
        let shape = expressions(nearest, found);
        line(
            text,
            &format!("\n# {found:?} here, {expected} there. Its sharding may have changed too."),
        );
        line(text, &format!("[[tensors]]\nname = {}\nshape = {shape}", quoted(pattern)));
    }
    for (pattern, group) in &nearest.unknown {
        line(text, &format!("\n# {}; a guess.", where_it_is(group)));
        // A source's experts are stacked by a rule that names where they come from.
        let hash = if pattern.contains("{E}") { "# " } else { "" };
        let shape = group.shapes.first().map_or(&[][..], Vec::as_slice);
        let (shard, role) = guess(pattern, shape);
        for (key, value) in [
            ("name", quoted(pattern)),
            ("shape", expressions(nearest, shape)),
            ("shard", quoted(shard)),
            ("role", quoted(role)),
        ] {
            if key == "name" {
                line(text, &format!("{hash}[[tensors]]"));
            }
            line(text, &format!("{hash}{key} = {value}"));
        }
    }
}

fn where_it_is(group: &Group) -> String {
    let shapes: Vec<String> =
        group.shapes.iter().take(3).map(|shape| format!("{shape:?}")).collect();
    let shapes = shapes.join(" or ");
    let is_run = group.layers.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    match group.layers.as_slice() {
        [] => format!("once, {shapes}"),
        [only] => format!("layer {only}, {shapes}"),
        [first, .., last] if is_run => format!("layers {first} to {last}, {shapes}"),
        some => {
            let shown: Vec<String> =
                some.iter().take(MAX_LAYERS_SHOWN).map(ToString::to_string).collect();
            let more = if some.len() > MAX_LAYERS_SHOWN { ", …" } else { "" };
            format!("layers {}{more}, {shapes}", shown.join(", "))
        }
    }
}

/// A shape by the names that have these values, else by the numbers.
fn expressions(nearest: &Nearest<'_>, shape: &[u64]) -> String {
    let word = |size: &u64| {
        let is_it = |name: &&&str| nearest.scope.get(name) == Some(&expr::Value::Int(*size as i64));
        SIZES.iter().find(is_it).map_or_else(|| size.to_string(), |name| (*name).to_owned())
    };
    let words: Vec<String> = shape.iter().map(|size| quoted(&word(size))).collect();
    format!("[{}]", words.join(", "))
}

/// How a tensor of this name is usually sharded, and what it is usually for.
fn guess(pattern: &str, shape: &[u64]) -> (&'static str, &'static str) {
    let module = pattern.rsplit('.').nth(1).unwrap_or(pattern);
    let is = |names: &[&str]| names.contains(&module);
    if shape.len() == 1 {
        let role = if pattern.contains("norm") { "norm" } else { "bias" };
        return ("replicate", role);
    }
    if is(&["q_proj", "wq", "query"]) {
        ("column(q)", "linear")
    } else if is(&["k_proj", "v_proj", "wk", "wv", "key", "value"]) {
        ("column(kv)", "linear")
    } else if is(&["o_proj", "out_proj", "wo", "dense"]) {
        ("row(q)", "linear")
    } else if is(&["gate_proj", "up_proj", "w1", "w3", "c_fc", "fc1"]) {
        ("column(ffn)", "linear")
    } else if is(&["down_proj", "w2", "c_proj", "fc2"]) {
        ("row(ffn)", "linear")
    } else if is(&["gate", "router"]) {
        ("replicate", "router")
    } else {
        ("replicate", "linear")
    }
}
