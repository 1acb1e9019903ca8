//! `eval`: several sets and texts, files of logits, and the forms of the result.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::tempdir;

use crate::harness::{convert, fail, path, run, succeed, text};

const GENESIS: &str = "In the beginning God created the heaven and the earth. And the earth was \
    without form, and void; and darkness was upon the face of the deep. And the Spirit of God moved \
    upon the face of the waters. And God said, Let there be light: and there was light.";
const JOHN: &str = "For God so loved the world, that he gave his only begotten Son, that whosoever \
    believeth in him should not perish, but have everlasting life.";

/// Sets of the bundled model and two texts.
fn prepare(folder: &Path, bits: &[&str]) -> (Vec<PathBuf>, [PathBuf; 2]) {
    let set = |bits: &&str| convert("kjv-4m", &folder.join(format!("b{bits}")), &["--bits", bits]);
    let texts = [("genesis", GENESIS), ("john", JOHN)].map(|(name, text)| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    });
    (bits.iter().map(set).collect(), texts)
}

fn json(args: &[&str]) -> Value {
    let output = run(&[args, &["--json", "--threads", "1"]].concat());
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_file_of_logits_gives_the_figures_of_the_reference_set() {
    let folder = tempdir().unwrap();
    let (sets, [genesis, john]) = prepare(folder.path(), &["4", "6", "16"]);
    let [four, six, sixteen] = [0, 1, 2].map(|index| path(&sets[index]));
    let texts = ["--text", path(&genesis), "--text", path(&john), "--context", "32"];
    let file = folder.path().join("kjv.logits");
    let save = ["--save-logits", path(&file), "--top", "100000"];
    let saved = json(&[&["eval", sixteen][..], &texts, &save].concat());
    let direct = json(&[&["eval", four, six][..], &texts, &["--against", sixteen]].concat());
    let stored = json(&["eval", four, six, "--logits", path(&file)]);
    assert_eq!(stored["texts"], direct["texts"]);
    for index in 0..2 {
        let [direct, stored] = [&direct, &stored].map(|it| &it["sets"][index]);
        for field in ["tokens", "windows", "perplexity", "bits_per_weight", "bytes"] {
            assert_eq!(direct[field], stored[field], "{field}");
        }
        let near = |pointer: &str| {
            let [a, b] = [direct, stored].map(|it| it.pointer(pointer).unwrap().as_f64().unwrap());
            // The file's logarithms have 24 bits.
            assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{pointer}: {a} {b}");
        };
        near("/against/kl_mean/value");
        near("/against/kl/median");
        near("/against/kl/p999");
        near("/against/perplexity/value");
        near("/against/same_top/value");
        near("/against/rms_probability_difference");
        near("/texts/1/against/kl_mean/value");
        assert_eq!(stored["against"]["rest"], 0.0);
    }
    assert_eq!(saved["sets"][0]["bits_per_weight"], 16.0);
    let bits = |index: usize| stored["sets"][index]["bits_per_weight"].as_f64().unwrap();
    assert!((4.5..4.7).contains(&bits(0)) && (6.5..6.7).contains(&bits(1)), "{stored}");

    // The default keeps fewer tokens than there are: the rest is one sum, and the figure a little less.
    let save = ["--save-logits", path(&file), "--top", "64"];
    succeed(&[&["eval", sixteen, "--threads", "1"][..], &texts, &save].concat());
    let less = json(&["eval", four, "--logits", path(&file)]);
    let kl =
        |document: &Value| document["sets"][0]["against"]["kl_mean"]["value"].as_f64().unwrap();
    assert!(kl(&less) <= kl(&direct) + 1e-6 && kl(&less) > 0.5 * kl(&direct));
    assert!(less["sets"][0]["against"]["rest"].as_f64().unwrap() > 0.0);
}

#[test]
fn sets_are_compared_in_a_table_a_document_and_a_drawing() {
    let folder = tempdir().unwrap();
    let (sets, [genesis, john]) = prepare(folder.path(), &["4", "8", "16"]);
    let [four, eight, sixteen] = [0, 1, 2].map(|index| path(&sets[index]));
    let (markdown, svg) = (folder.path().join("report.md"), folder.path().join("kl.svg"));
    let output = run(&[
        &["eval", four, eight, sixteen, "--against", sixteen, "--terms", "--threads", "1"][..],
        &["--text", path(&genesis), "--text", path(&john), "--context", "32"],
        &["--markdown", path(&markdown), "--svg", path(&svg)],
    ]
    .concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let head = said.lines().find(|line| line.starts_with("set ")).unwrap();
    for column in ["bits per weight", "size", "perplexity", "KL mean", "99.9 %", "KL of weights"] {
        assert!(head.contains(column), "{head}");
    }
    assert_eq!(said.lines().filter(|line| line.contains("/b")).count(), 3, "{said}");
    let document = fs::read_to_string(&markdown).unwrap();
    assert!(document.contains("genesis, john") && document.contains("## Each text"));
    let rows: Vec<_> = document.lines().filter(|line| line.starts_with('|')).collect();
    assert!(rows.len() == 5 + 2 + 6 && rows.iter().all(|row| row.ends_with('|')), "{document}");
    let drawing = fs::read_to_string(&svg).unwrap();
    assert_eq!(drawing.matches("<circle").count(), 2);
    assert!(drawing.contains(">b4<") && drawing.contains("no divergence: b16"), "{drawing}");
    // The set against itself: neither weights nor activations differ.
    let terms = json(
        &[
            &["eval", four, "--against", sixteen, "--terms"][..],
            &["--text", path(&genesis), "--context", "32"],
        ]
        .concat(),
    );
    let set = &terms["sets"][0];
    let value = |it: &Value| it["against"]["kl_mean"]["value"].as_f64().unwrap();
    assert!(value(set) > 0.0 && value(&set["exact_activations"]) > 0.0);
    assert_ne!(value(set), value(&set["exact_activations"]));
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = tempdir().unwrap();
    let (sets, [genesis, _]) = prepare(folder.path(), &["16"]);
    let (set, file) = (path(&sets[0]), folder.path().join("logits"));
    let text = ["--text", path(&genesis)];
    let refused = |code: i32, options: &[&str], expected: &str| {
        let error = fail(code, &[&["eval", set][..], options].concat());
        assert!(error.contains(expected), "{options:?}: {error}");
    };
    refused(2, &[], "required arguments");
    refused(2, &[&text[..], &["--logits", path(&file)]].concat(), "cannot be used with");
    refused(2, &[&text[..], &["--svg", "kl.svg"]].concat(), "--against or --logits");
    let two = [&[set][..], &text, &["--save-logits", path(&file)]].concat();
    refused(2, &two, "of one set, 2 were given");
    assert!(!file.exists());
    refused(1, &["--logits", path(&genesis)], "holds no logits");
}

#[test]
fn tasks_in_lm_evals_forms_are_scored() {
    let folder = tempdir().unwrap();
    let (sets, [genesis, _]) = prepare(folder.path(), &["4", "16"]);
    let file = |name: &str, lines: &[&str]| {
        let path = folder.path().join(name);
        fs::write(&path, lines.join("\n")).unwrap();
        path
    };
    let choices = file(
        "choices.jsonl",
        &[
            r#"{"query":"In the beginning God created the heaven and the","choices":["sword of Saul.","earth."],"gold":1}"#,
            r#"{"doc_id":1,"target":"0","arguments":{"gen_args_0":{"arg_0":"And God said, Let there be","arg_1":" light:"},"gen_args_1":{"arg_0":"And God said, Let there be","arg_1":" asses:"}}}"#,
            r#"{"query":"In the beginning God created the heaven and the","choices":["sword of Saul.","earth."],"gold":0}"#,
        ],
    );
    let words = file("words.jsonl", &[r#"{"text":"In the beginning God created the heaven and"}"#]);
    let tasks = ["--task", path(&choices), "--task", path(&words)];
    let found = json(&[&["eval", path(&sets[0]), path(&sets[1])][..], &tasks].concat());
    for set in found["sets"].as_array().unwrap() {
        let [choices, words] = [0, 1].map(|index| &set["tasks"][index]);
        assert_eq!((&choices["task"], &choices["items"]), (&"choices".into(), &3.into()));
        let accuracy = choices["accuracy"]["value"].as_f64().unwrap();
        assert!((accuracy - 2.0 / 3.0).abs() < 1e-9, "{found}");
        assert!(choices["normalised_accuracy"].is_object() && choices.get("perplexity").is_none());
        assert!(words["perplexity"]["value"].as_f64().unwrap() > 1.0);
        assert_eq!(words["accuracy"]["value"], 1.0, "{found}");
    }
    let shown = succeed(&[&["eval", path(&sets[0])][..], &tasks].concat());
    assert!(shown.contains("66.67") && shown.contains("words"), "{shown}");
    let refused = |file: &Path, expected: &str| {
        let error = fail(1, &["eval", path(&sets[0]), "--task", path(file)]);
        assert!(error.contains(expected), "{error}");
    };
    refused(&genesis, "line 1: not a JSON object");
    let mixed = file("mixed", &[r#"{"text":"a b"}"#, r#"{"query":"a","choices":["b"],"gold":0}"#]);
    refused(&mixed, "line 2: the items before are of another kind");
    refused(&file("none", &[""]), "no items");
}
