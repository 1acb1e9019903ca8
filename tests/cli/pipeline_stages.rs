//! Pipeline stages through the commands: planned, resharded, pushed and served.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, files, path, succeed},
    running::{Running, ask, post},
};

fn reshard(from: &Path, to: PathBuf, options: &[&str]) -> PathBuf {
    succeed(&[&["reshard", path(from), "-o", path(&to)], options].concat());
    to
}

#[test]
fn resharding_to_and_from_stages_gives_the_bytes_of_conversions() {
    let ways: [&[&str]; 5] = [
        &["--nodes", "2", "--stages", "2"],
        &["--nodes", "3"],
        &["--nodes", "4", "--stages", "2"],
        &["--nodes", "1"],
        &["--nodes", "3", "--stages", "3"],
    ];
    for (model, bits) in [("kjv-4m", "4"), ("models/llama-tied", "6"), ("models/starcoder2", "16")]
    {
        let folder = tempdir().unwrap();
        let mut last = convert(model, &folder.path().join("first"), &["--bits", bits]);
        for (index, way) in ways.iter().enumerate() {
            let at = |name: &str| folder.path().join(format!("{name}-{index}"));
            let expected = convert(model, &at("converted"), &[&["--bits", bits], *way].concat());
            last = reshard(&last, at("resharded"), way);
            assert!(files(&last) == files(&expected), "{model}, {way:?}");
            succeed(&["verify", path(&last)]);
            if *way == ["--nodes", "4", "--stages", "2"] {
                let (mlx, one) = (at("mlx"), convert(model, &at("one"), &["--bits", bits]));
                succeed(&["export", path(&last), "--mlx", "-o", path(&mlx)]);
                assert!(files(&mlx) == files(&one.join("node-0")), "{model}");
            }
        }
    }
}

#[test]
fn plan_and_inspect_show_the_layers_of_each_stage() {
    let source = data("kjv-4m");
    let plan = |options: &[&str]| {
        let args = [&["plan", path(&source), "--json", "--context", "1024"], options].concat();
        serde_json::from_str::<Value>(&succeed(&args)).unwrap()
    };
    let (two, plain) = (plan(&["--nodes", "2", "--stages", "2"]), plan(&[]));
    let of = |plan: &Value, rank: usize, what: &str| plan["ranks"][rank][what].as_u64().unwrap();
    let both = |what| of(&two, 0, what) + of(&two, 1, what);
    // Each stage has the keys and values of its own layers, and the weights are all there.
    assert_eq!(both("cache_bytes"), of(&plain, 0, "cache_bytes"));
    assert_eq!(both("weight_bytes"), of(&plain, 0, "weight_bytes"));
    assert!(of(&two, 0, "cache_bytes") > 0 && of(&two, 1, "cache_bytes") > 0);
    let folder = tempdir().unwrap();
    let options = ["--nodes", "4", "--stages", "2"];
    let set = convert("kjv-4m", &folder.path().join("set"), &options);
    let shown = succeed(&["inspect", path(&set)]);
    let layers = two["layout"]["stages"][1]["layers"].as_array().unwrap();
    assert!(shown.contains("layers") && shown.contains(&format!("..{}", layers[1])), "{shown}");
    let staged = succeed(&[&["plan", path(&source)], &options[..]].concat());
    assert!(staged.contains(&format!("{}..{}", layers[0], layers[1])), "{staged}");
}

#[test]
fn memory_limits_move_layers_between_stages() {
    let source = data("kjv-4m");
    let layers = |nodes: &str| {
        let args = ["plan", path(&source), "--json", "--stages", "2", "--context", "256"];
        let text = succeed(&[&args[..], &["--bits", "16", "--nodes", nodes]].concat());
        let plan: Value = serde_json::from_str(&text).unwrap();
        let of = |stage: usize| {
            let layers = &plan["layout"]["stages"][stage]["layers"];
            layers[1].as_u64().unwrap() - layers[0].as_u64().unwrap()
        };
        let rank = |rank: usize| plan["ranks"][rank]["total_bytes"].as_u64().unwrap();
        ([of(0), of(1)], [rank(0), rank(1)])
    };
    let (even, bytes) = layers("2");
    // A little less than the first stage needs.
    let small = bytes[0] - 100_000;
    let (moved, _) = layers(&format!("a=1g:{small},b=1g:1g"));
    assert!(moved[0] < even[0] && moved[0] + moved[1] == even[0] + even[1], "{even:?} {moved:?}");
}

#[test]
fn impossible_stage_counts_are_refused_with_the_nearest_possible() {
    let (source, folder) = (data("kjv-4m"), tempdir().unwrap());
    let out = folder.path().join("out");
    let check = |nodes: &str, stages: &str, words: &[&str]| {
        let args = ["-o", path(&out), "--nodes", nodes, "--stages", stages];
        let said = fail(2, &[&["convert", path(&source)], &args[..]].concat());
        for word in words {
            assert!(said.contains(word), "expected {word:?} in: {said}");
        }
    };
    check("8", "8", &["the model has 4 layers", "--stages 4 is"]);
    check("6", "4", &["6 nodes are not 4 groups of the same size", "--stages 3 is"]);
    check("2", "3", &["2 nodes are not 3 groups", "--stages 2 is"]);
    check("2", "0", &["--stages 1 is"]);
    assert!(!out.exists());
}

#[test]
fn staged_sets_give_the_answers_of_unstaged_ones() {
    let folder = tempdir().unwrap();
    let set = |name: &str, options: &[&str]| {
        convert("kjv-4m", &folder.path().join(name), &[&["--bits", "16"], options].concat())
    };
    let request = serde_json::json!({
        "seed": 11, "temperature": 1.3, "top_p": 0.9, "max_tokens": 24,
        "logprobs": true, "top_logprobs": 3,
        "messages": [{"role": "user", "content": "Genesis 1:1"}],
    });
    let answers = |set: &Path| {
        let server = Running::serve(set, &["--threads", "1"]);
        let verse = ask(&server.url(), "Psalm 23:1");
        let (status, answer) = post(&format!("{}/chat/completions", server.url()), &request);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(server.terminate(), Some(0));
        (verse, answer["choices"].clone())
    };
    let expected = answers(&set("one", &[]));
    assert!(expected.0.contains("my shepherd"), "{expected:?}");
    assert_eq!(answers(&set("staged", &["--nodes", "2", "--stages", "2"])), expected);
    let two = answers(&set("two", &["--nodes", "2"]));
    assert_eq!(answers(&set("both", &["--nodes", "4", "--stages", "2"])), two);
}

#[test]
fn staged_packages_are_pushed_and_serve_from_nodes() {
    let folder = tempdir().unwrap();
    let options = ["--nodes", "2", "--stages", "2"];
    let set = convert("kjv-4m", &folder.path().join("set"), &options);
    let nodes: Vec<Running> = (0..2)
        .map(|rank| Running::node(&folder.path().join(format!("store-{rank}")), None))
        .collect();
    let addresses = nodes.iter().map(Running::address).collect::<Vec<_>>().join(",");
    succeed(&["push", path(&set), "--to", &addresses]);
    let server = Running::serve(&set, &["--nodes", &addresses]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(server.terminate(), Some(0));
}
