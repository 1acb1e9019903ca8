//! `convert --distill`. Figures of what it is worth are in docs/log.md; here it is killed, and refused.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::Value;
use shardpack_mlx::runtime;
use tempfile::tempdir;

use crate::{
    harness::{data, files, kill, path, paused, run, shardpack, succeed, text},
    skip::mlx_runtime,
};

/// Few tokens: a processor's build of MLX multiplies slowly.
const OPTIONS: [&str; 6] =
    ["--calibration-tokens", "256", "--calibration-context", "16", "--distill", "4"];

/// Verses that kjv-4m was not trained on.
fn words(folder: &Path) -> PathBuf {
    let verses = fs::read(data("kjv-4m").join("heldout.json")).unwrap();
    let verses: Value = serde_json::from_slice(&verses).unwrap();
    let verses = verses.as_array().unwrap().iter().take(40);
    let all: Vec<&str> = verses.map(|verse| verse["text"].as_str().unwrap()).collect();
    let words = folder.join("words.txt");
    fs::write(&words, all.join("\n")).unwrap();
    words
}

#[test]
fn mlx_distillation_that_is_killed_goes_on_to_the_same_packages() {
    if mlx_runtime(runtime::FOLDER).is_none() {
        return;
    }
    let folder = tempdir().unwrap();
    let (source, words) = (data("kjv-4m"), words(folder.path()));
    let convert = |output: &Path, more: &[&str]| {
        let args = ["convert", path(&source), "-o", path(output), "--calibrate", path(&words)];
        [&args[..], &OPTIONS, more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let [whole, killed] = ["whole", "killed"].map(|name| folder.path().join(name));
    let args = convert(&whole, &["--nodes", "2"]);
    let said = text(&succeeded(&args).stderr);
    assert!(said.contains("distilled in 4 steps over 240 tokens"), "{said}");
    let args = convert(&killed, &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for point in ["distill:teach:2", "distill:step:2"] {
        kill(paused(point, &args));
        assert!(!killed.exists(), "half a result has the final name");
    }
    let again = run(&args);
    let said = text(&again.stderr);
    assert!(again.status.success(), "{said}");
    assert!(said.contains("resuming after 2 steps"), "{said}");
    let manifest = |set: &Path| -> Value {
        serde_json::from_slice(&fs::read(set.join("node-0/manifest.json")).unwrap()).unwrap()
    };
    let [whole, killed] = [&whole, &killed].map(|set| {
        succeed(&["verify", path(set)]);
        manifest(set)
    });
    assert_eq!(whole["ids"]["weights"], killed["ids"]["weights"], "other weights");
    let mut left: Vec<String> = files(folder.path()).into_keys().collect();
    left.retain(|name| name.contains("calibration-") || name.contains("distillation-"));
    assert!(left.is_empty(), "its work is left over: {left:?}");
}

fn succeeded(args: &[String]) -> Output {
    let output = shardpack().args(args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    output
}

#[test]
fn distillation_without_a_runtime_says_how_to_install_it_before_anything_is_measured() {
    let folder = tempdir().unwrap();
    let (source, words, output) = (data("kjv-4m"), words(folder.path()), folder.path().join("set"));
    let args = ["convert", path(&source), "-o", path(&output), "--calibrate", path(&words)];
    let output = shardpack()
        .args([&args[..], &OPTIONS].concat())
        .env("SHARDPACK_ENGINES", folder.path().join("engines"))
        .output()
        .unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("--distill runs on MLX") && error.contains("engine install mlx"),
        "{error}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "it has begun");
}
