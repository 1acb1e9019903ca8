//! Pipeline stages: the same bits as without them, only elsewhere.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Instant,
};

use serde_json::Value;
use shardpack_collectives::Group;
use shardpack_converter::{ConvertOptions, Plan, Source, convert as convert_source};
use shardpack_engine::{
    backend::Cpu,
    engine::{Engine, EngineOptions, RankEngine, logits, memory_group},
    loading::Package,
    model::Model,
};
use shardpack_engine_api::{Event, GenerateRequest, RequestId, TokenId};
use shardpack_manifests::Cut;
use tempfile::tempdir;

use crate::{
    experts::{join, open},
    harness::{convert, data, fail, files, path, succeed},
    running::{Running, ask, post},
};

/// Writes a reference model for so many nodes in so many stages.
fn write(model: &str, output: &Path, bits: u32, [nodes, stages]: [u32; 2]) {
    let source = Source::open(&data("models").join(model)).unwrap();
    let options = ConvertOptions {
        bits,
        stages,
        rounding: "mlx-cpu".to_owned(),
        ..ConvertOptions::new(output.to_owned(), nodes)
    };
    let plan = Plan::new(&source, options).unwrap_or_else(|error| panic!("{model}: {error}"));
    convert_source(&source, &plan, &|_| ()).unwrap();
}

/// Bits of the logits after each of some tokens.
fn compute(packages: &[Package]) -> Vec<u32> {
    let vocabulary = packages[0].manifest().architecture.vocab_size;
    let tokens: Vec<TokenId> = (0..23).map(|index| TokenId(index * 7919 % vocabulary)).collect();
    let groups = memory_group(packages.len() as u32).unwrap();
    let values = logits(packages, &groups, &tokens, 1).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Every rank holds its own layers and no others, and what stands at the ends where it belongs.
fn check_places(packages: &[Package]) {
    let first = packages[0].manifest();
    let (layout, tied) = (&first.layout, first.architecture.tied_embeddings);
    let last = layout.stage_count() - 1;
    for package in packages {
        let manifest = package.manifest();
        let features = first.architecture.features();
        assert_eq!(manifest.requires, [&["stages"], &features[..]].concat());
        let stage = layout.stage_of(manifest.rank);
        let [start, end] = layout.stages[stage].layers;
        assert!(start < end);
        for tensor in &manifest.tensors {
            let of_layer = tensor.name.strip_prefix("model.layers.");
            let layer = of_layer.map(|rest| rest.split_once('.').unwrap().0.parse().unwrap());
            let here = match layer {
                Some(layer) => (start..end).contains(&layer),
                None if tensor.name.contains("embed_tokens") => {
                    stage == 0 || (stage == last && tied)
                }
                None => stage == last,
            };
            assert!(here, "{} on rank {}", tensor.name, manifest.rank);
            let leads = layout.stage_ranks(stage).start == manifest.rank;
            assert!(tensor.cut != Cut::Once || leads, "{} is added once", tensor.name);
        }
    }
}

/// A staged set computes the bits of the set without stages whose rank group is a stage's, and
/// joined it is the one-node package.
fn check_model(model: &str, bits: u32, [nodes, stages]: [u32; 2]) {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write(model, &at("plain"), bits, [nodes / stages, 1]);
    write(model, &at("staged"), bits, [nodes, stages]);
    let staged = open(&at("staged"), nodes);
    let what = || format!("{model} at {bits} bits, {nodes} nodes in {stages} stages");
    check_places(&staged);
    assert!(compute(&staged) == compute(&open(&at("plain"), nodes / stages)), "{}", what());
    let one = if nodes == stages { at("plain") } else { at("one") };
    if nodes != stages {
        write(model, &one, bits, [1, 1]);
    }
    assert!(join(&at("staged"), nodes) == join(&one, 1), "{}", what());
    let ids = |set: &Path| {
        let set: Value = serde_json::from_slice(&fs::read(set.join("set.json")).unwrap()).unwrap();
        set["ids"].clone()
    };
    let (ids, plain) = (ids(&at("staged")), ids(&at("plain")));
    assert_eq!([&ids["weights"], &ids["model"]], [&plain["weights"], &plain["model"]]);
    assert_ne!(ids["layout"], plain["layout"], "{}", what());
}

#[test]
fn every_family_computes_the_same_bits_in_two_stages() {
    let mut models: Vec<String> = fs::read_dir(data("models"))
        .unwrap()
        .map(Result::unwrap)
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        // It has one layer.
        .filter(|model| model != "falcon_h1_norm")
        .collect();
    models.sort();
    assert!(models.len() >= 42);
    for model in models {
        check_model(&model, 16, [2, 2]);
    }
}

#[test]
fn stages_of_several_ranks_compute_what_as_many_ranks_do() {
    for model in ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next", "olmo2"] {
        check_model(model, 16, [4, 2]);
        check_model(model, 16, [3, 3]);
    }
    // Quantized weights and activations are rounded alike too.
    check_model("llama-tied", 4, [4, 2]);
    check_model("gpt_oss", 8, [6, 2]);
}

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
fn plan_and_inspect_show_who_runs_what() {
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
fn limits_move_layers_between_stages() {
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
fn stages_that_cannot_be_are_refused_with_the_nearest_that_can() {
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
fn staged_sets_say_what_others_say() {
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

/// A rank's engine over its package.
fn engine(package: &Package) -> Engine<Cpu> {
    let backend = Cpu::new(1).unwrap();
    Engine::new(Model::load(package, &backend).unwrap(), backend, EngineOptions::STANDARD)
}

#[test]
fn a_rank_lost_in_another_stage_ends_the_step_at_once() {
    let folder = tempdir().unwrap();
    for lost in [1, 2] {
        let set = folder.path().join(format!("set-{lost}"));
        write("llama", &set, 16, [3, 3]);
        let packages = open(&set, 3);
        let mut engines: Vec<Engine<Cpu>> = packages.iter().map(engine).collect();
        let mut groups: Vec<Option<Arc<dyn Group>>> =
            memory_group(3).unwrap().into_iter().map(Some).collect();
        thread::scope(|scope| {
            let mut leader = engines.remove(0);
            for (engine, rank) in engines.iter_mut().zip(1..) {
                let group = groups[rank].take().unwrap();
                // The one that is lost leaves after some steps, its links with it.
                let steps = if rank == lost { 4 } else { usize::MAX };
                scope.spawn(move || (0..steps).all(|_| engine.follow(group.as_ref()).is_ok()));
            }
            leader.submit(RequestId(1), GenerateRequest::greedy(vec![TokenId(5); 3], 100));
            let (mut tokens, mut begun) = (0, Instant::now());
            let error = loop {
                let group = groups[0].as_deref().unwrap();
                let led = leader.lead(group, &mut |event| {
                    tokens += u32::from(matches!(event, Event::Token { .. }));
                });
                match led {
                    Ok(_) => begun = Instant::now(),
                    Err(error) => break error,
                }
            };
            assert!(tokens >= 2, "{tokens} tokens before the loss");
            assert!(error.to_string().contains(&format!("rank {lost}")), "{error}");
            let timeout = EngineOptions::STANDARD.collective_timeout;
            assert!(begun.elapsed() < timeout, "{:?}", begun.elapsed());
        });
    }
}
