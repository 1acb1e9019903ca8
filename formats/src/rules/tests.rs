//! Rule packs that parse, and those that do not.

use super::*;

const MINIMAL: &str = r#"
schema = 1
id = "tiny"
[config]
used = ["hidden_size", "layers", "heads"]
[let]
half = "hidden_size / 2"
even = "L % 2 == 0"
[families.tiny]
architectures = ["TinyForCausalLM"]
[spec]
layers = "layers"
hidden_size = "hidden_size"
vocab_size = 32
max_positions = 64
tied_embeddings = false
norm = { kind = "rms", eps = "1e-6" }
attention = { heads = "heads", kv_heads = "heads", head_dim = "half", qkv_bias = false, o_bias = false, qk_norm = "'none'" }
rope = { style = "'half'", width = "half", default_theta = "1e4" }
ffn = { size = "half", activation = "'silu_glu'", bias = false }
layer = { window = "even ? 16 : null", rope = "!even" }
[axes]
q = { len = "heads", unit = "half" }
kv = { len = "heads", unit = "half", follow = "q" }
[[tensors]]
name = "layers.{L}.weight"
shape = ["heads * half", "hidden_size"]
shard = "column(q)"
role = "linear"
"#;

/// The message and its causes.
fn chain(error: &RuleError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn check(from: &str, to: &str, expected: &str) {
    assert!(MINIMAL.contains(from), "{from}");
    let error = RulePack::parse(&MINIMAL.replace(from, to)).expect_err(to);
    let text = chain(&error);
    assert!(text.contains(expected), "{to}: {text}");
}

#[test]
fn every_compiled_in_pack_parses_and_no_two_claim_a_model_type() {
    let mut types: Vec<String> = Vec::new();
    for (name, text) in BUILTIN {
        let pack =
            RulePack::parse(text).unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
        assert_eq!(format!("{}.toml", pack.id()), *name);
        types.extend(pack.model_types().map(str::to_owned));
    }
    assert_eq!(RulePack::builtin().len(), BUILTIN.len());
    types.sort();
    assert!(types.windows(2).all(|pair| pair[0] != pair[1]), "{types:?}");
}

#[test]
fn a_small_pack_parses() {
    let pack = RulePack::parse(MINIMAL).unwrap();
    assert_eq!(pack.model_types().collect::<Vec<_>>(), ["tiny"]);
    let per_layer: Vec<_> =
        pack.lets["tiny"].iter().map(|entry| (entry.name.as_str(), entry.per_layer)).collect();
    assert_eq!(per_layer, [("even", true), ("half", false)]);
}

#[test]
fn slips_are_found_without_a_model() {
    check("schema = 1", "schema = 2", "rule file of schema 2, this program reads 1");
    check("id = \"tiny\"", "id = \"tiny\"\nname = 1", "unknown field `name`");
    check(
        "hidden_size / 2",
        "hiden_size / 2",
        "let.half (in families.tiny): in `hiden_size / 2`: unknown name `hiden_size`",
    );
    check("hidden_size / 2", "hidden_size /", "at byte 13: expected a value");
    check("hidden_size / 2", "half * 2", "`let` in a circle: half");
    check("half = ", "heads = ", "\"heads\" is defined by `let` and has a meaning already");
    check("half = ", "L = ", "\"L\" is defined by `let` and has a meaning already");
    check("\"layers\",", "\"heads\",", "config key \"heads\" is listed twice");
    check(
        "shape = [\"heads * half\"",
        "shape = [\"heds\"",
        "tensor layers.{L}.weight (in families.tiny): in `heds`: unknown name `heds`",
    );
    check(
        "layers = \"layers\"",
        "layers = \"even ? 1 : 2\"",
        "`even ? 1 : 2` depends on the layer by `even`",
    );
    check("column(q)", "column(ffn)", "is sharded along \"ffn\", which is not an axis");
    check("column(q)", "vocab", "is sharded along \"vocab\", which is not an axis");
    check("column(q)", "vector(q)", "its sharding rule needs 1 dimensions");
    check("column(q)", "diagonal(q)", "unknown sharding rule \"diagonal(q)\"");
    check("follow = \"q\"", "follow = \"x\"", "axes.kv: follows \"x\", which is not an axis");
    check("follow = \"q\"", "follow = \"kv\"", "axes.kv: follows \"kv\", which follows another");
    check("layers.{L}.weight", "layers.{L}.{L}.weight", "is not a name with at most one {L}");
    check("layers.{L}.weight", "layers.{L}.{Odd}", "is not a name with at most one {L}");
    check("layers.{L}.weight", "layers.{E}.weight", "only a source's name has {E}");
    check("layers.{L}.weight", "layers.{L}.{block}", "{block} is not the name of anything");
    check("layers.{L}.weight", "layers.{L}.{even}", "{even} is not the name of anything");
    check("role = \"linear\"", "role = \"cook\"", "unknown variant `cook`");
    check(
        "role = \"linear\"",
        "role = \"linear\"\nrows = \"heads\"",
        "`rows` needs a tensor that exists once",
    );
    check(
        "shape = [\"heads * half\", \"hidden_size\"]\nshard = \"column(q)\"",
        "shape = [\"half\"]\nshard = \"once\"\nquantize = true",
        "only matrices are quantized",
    );
    check("[families.tiny]\narchitectures = [\"TinyForCausalLM\"]", "[families]", "families: none");
    assert!(matches!(
        RulePack::parse(&" ".repeat(MAX_RULES_BYTES + 1)),
        Err(RuleError::TooLarge(_))
    ));
}

#[test]
fn sources_of_tensors_are_checked() {
    let from = |rest: &str| format!("role = \"linear\"\n[[tensors.from]]\n{rest}");
    for (rest, expected) in [
        ("name = \"w\"", "w is of another number of layers"),
        ("name = \"{L}.{E}\"\nshape = [\"heads\"]", "without the first dimension"),
        ("name = \"{L}.w\"\nblocks = \"hads\"", "unknown name `hads`"),
        ("name = \"{L}.w\"\ntranspose = \"both\"", "transpose \"both\"; known: source, result"),
        ("name = \"{L}.w\"\nrows = { first = \"0\" }", "missing field `count`"),
    ] {
        check("role = \"linear\"", &from(rest), expected);
    }
    check("schema = 1", "schema = 1\nbase = \"dense\"", "\"dense\" is not a compiled-in pack");
}

#[test]
fn a_tensor_listed_twice_is_refused() {
    let tensor = &MINIMAL[MINIMAL.find("[[tensors]]").unwrap()..];
    let error = RulePack::parse(&format!("{MINIMAL}{tensor}")).unwrap_err();
    assert_eq!(chain(&error), "tensor layers.{L}.weight: listed twice");
}

#[test]
fn stars_stand_for_any_characters() {
    for (pattern, name, expected) in [
        ("*.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", true),
        ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq", false),
        ("*.rotary_emb.inv_freq", "a.rotary_emb.inv_freq.b", false),
        ("a", "a", true),
        ("a", "ab", false),
        ("", "", true),
        ("*", "", true),
        ("a*b*c", "aXbYbZc", true),
        ("a*b*c", "ac", false),
        ("a*a", "a", false),
        ("**", "x", true),
    ] {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }
}

#[test]
fn the_older_key_of_the_sharding_rule_is_read() {
    let pack = RulePack::parse(&MINIMAL.replace("shard = ", "cut = ")).unwrap();
    assert_eq!(pack.file.tensors[0].shard, ShardingRule::Column("q".to_owned()));
}
