//! A model by its name, from a hub on this machine.

pub(crate) mod server;

use std::{fs, path::Path, sync::atomic::Ordering};

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use shardpack_formats::hex;
use tempfile::tempdir;

use self::server::{COMMIT, Hub};
use crate::harness::{copy_folder, data, fail, files, kill, path, paused_command, succeed, text};

#[test]
fn a_name_converts_as_its_folder_does_kept_or_not() {
    let folder = tempdir().unwrap();
    let model = data("sources/bf16_sharded");
    let hub = Hub::start(&model);
    let output = |name: &str| folder.path().join(name);
    let (local, kept, passing) = (output("local"), output("kept"), output("passing"));
    succeed(&["convert", path(&model), "-o", path(&local), "--nodes", "2"]);

    // A plan reads headers.
    hub.run(folder.path(), &["plan", "org/model", "--nodes", "2"]);
    let total: u64 = files(&model)
        .iter()
        .filter(|(name, _)| name.ends_with(".safetensors"))
        .map(|(_, bytes)| bytes.len() as u64)
        .sum();
    let cache = folder.path().join("home/hub/models--org--model");
    let cached = || {
        let blobs = fs::read_dir(cache.join("blobs")).unwrap();
        blobs.map(|blob| blob.unwrap().metadata().unwrap().len()).sum::<u64>()
    };
    assert!(cached() < total / 2, "no weights are in the cache");

    let args = ["convert", "org/model", "--nodes", "2", "-o"];
    hub.run(folder.path(), &[&args[..], &[path(&passing), "--no-keep-source"]].concat());
    assert!(cached() < total / 2, "no weights are in the cache");
    assert!(!output("passing.source").exists(), "and none beside the result");
    hub.run(folder.path(), &[&args[..], &[path(&kept)]].concat());
    assert!(cached() > total, "all files are in the cache");
    assert!(files(&kept) == files(&passing), "the same bytes on either way");

    let manifest = |set: &Path| -> Value {
        serde_json::from_slice(&fs::read(set.join("node-0/manifest.json")).unwrap()).unwrap()
    };
    let (local, kept) = (manifest(&local), manifest(&kept));
    assert_eq!(local["ids"], kept["ids"]);
    assert_eq!(local["tensors"], kept["tensors"]);
    assert_eq!(kept["source"]["repo"], "org/model");
    assert_eq!(kept["source"]["commit"], COMMIT);
    let sources = kept["source"]["files"].as_array().unwrap();
    for file in sources.iter().filter(|file| file["name"].as_str().unwrap().ends_with("tensors")) {
        let bytes = fs::read(model.join(file["name"].as_str().unwrap())).unwrap();
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        assert_eq!(file["sha256"], hex::encode(&sha256).as_str());
    }
    assert!(hub.weight_bytes.load(Ordering::Relaxed) >= 2 * total);
}

#[test]
fn a_killed_conversion_that_keeps_no_source_goes_on_to_identical_bytes() {
    let model = data("sources/bf16_sharded");
    let hub = Hub::start(&model);
    let folder = tempdir().unwrap();
    let convert = |output: &Path| -> Vec<String> {
        let args = ["convert", "org/model", "--no-keep-source", "--nodes", "2", "--threads", "1"];
        args.iter().map(|arg| (*arg).to_owned()).chain(["-o".into(), path(output).into()]).collect()
    };
    let undisturbed = folder.path().join("undisturbed");
    let args = convert(&undisturbed);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    hub.run(folder.path(), &args);
    let expected = files(&undisturbed);
    // One request for each file's header, and one for each file's only piece.
    assert_eq!(hub.requests(), 6);
    // The last tensor of all is in the third file: what is made of the others is done by then.
    for (point, taken_up, requests) in [
        ("convert:planned", false, 6),
        ("convert:tensor:0", false, 6),
        ("convert:tensor:24", true, 4),
        ("convert:hashing", true, 3),
        ("convert:publishing", false, 6),
    ] {
        let output = folder.path().join(point.replace(':', "-"));
        let args = convert(&output);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        kill(paused_command(point, hub.command(folder.path(), &args)));
        assert!(!output.exists(), "{point}: half a result has the final name");
        hub.requests();
        let said = text(&hub.run(folder.path(), &args).stderr);
        assert_eq!(said.contains("resuming after"), taken_up, "{point}: {said}");
        assert_eq!(hub.requests(), requests, "{point}: files that were verified stay away");
        assert!(files(&output) == expected, "{point}");
        let spool = folder.path().join(point.replace(':', "-") + ".source");
        assert!(!spool.exists(), "{point}: nothing is left of either run");
    }
}

#[test]
fn a_second_conversion_of_one_output_leaves_the_first_ones_pieces_alone() {
    let hub = Hub::start(&data("sources/bf16_sharded"));
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let args = ["convert", "org/model", "--no-keep-source", "-o", path(&output), "--threads", "1"];
    let first = paused_command("convert:finished:3", hub.command(folder.path(), &args));
    let pieces = || files(&folder.path().join("set.source"));
    let held = pieces();
    assert!(!held.is_empty());
    let second = hub.command(folder.path(), &args).output().unwrap();
    assert!(text(&second.stderr).contains("another conversion"), "{}", text(&second.stderr));
    assert!(pieces() == held);
    kill(first);
    hub.run(folder.path(), &args);
    assert!(!folder.path().join("set.source").exists());
}

#[test]
fn a_model_in_a_part_of_a_repository_converts_as_it_does_by_itself() {
    let folder = tempdir().unwrap();
    let alone = data("sources/bf16_sharded");
    let whole = folder.path().join("whole");
    copy_folder(&alone, &whole.join("parts/text_model"));
    // The tokenizer stands beside the whole, with what is not the text model's.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::rename(whole.join("parts/text_model").join(name), whole.join(name)).unwrap();
    }
    fs::write(whole.join("model.safetensors"), "vision tower").unwrap();
    fs::write(whole.join("generation_config.json"), "{}").unwrap();
    let set = |name: &str| folder.path().join(name);
    succeed(&["convert", path(&alone), "-o", path(&set("alone"))]);
    let part = ["--subfolder", "parts/text_model"];
    let convert = |source: &str, name: &str, more: &[&str]| -> Vec<String> {
        let set = set(name);
        let args = ["convert", source, "-o", path(&set)];
        args.iter().chain(&part).chain(more).map(|arg| (*arg).to_owned()).collect()
    };
    let run = |args: Vec<String>, hub: Option<&Hub>| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        match hub {
            None => _ = succeed(&args),
            Some(hub) => _ = hub.run(folder.path(), &args),
        }
    };
    run(convert(path(&whole), "local", &[]), None);
    let expected = files(&set("alone"));
    assert!(files(&set("local")) == expected, "a folder's part");

    let hub = Hub::start(&whole);
    let without = hub.command(folder.path(), &["plan", "org/model"]).output().unwrap();
    let hint = "parts/text_model/ has one; name it with --subfolder parts/text_model";
    assert!(text(&without.stderr).contains(hint), "{}", text(&without.stderr));
    run(vec!["plan".into(), "org/model".into(), part[0].into(), part[1].into()], Some(&hub));
    run(convert("org/model", "kept", &[]), Some(&hub));
    run(convert("org/model", "passing", &["--no-keep-source"]), Some(&hub));
    let kept = files(&set("kept"));
    assert!(files(&set("passing")) == kept, "the same bytes on either way");
    let manifest: Value = serde_json::from_slice(&kept["node-0/manifest.json"]).unwrap();
    assert_eq!(manifest["source"]["subfolder"], part[1]);
    let alone: Value = serde_json::from_slice(&expected["node-0/manifest.json"]).unwrap();
    assert_eq!(manifest["ids"], alone["ids"], "tokenizer and weights are those of the part");
    // From the cache alone.
    let args = convert("org/model", "offline", &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let offline = hub.command(folder.path(), &args).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(offline.status.success(), "{}", text(&offline.stderr));
    assert!(files(&set("offline")) == kept);

    let nowhere = set("nowhere");
    let args = ["convert", path(&whole), "-o", path(&nowhere), "--subfolder", "none"];
    assert!(fail(2, &args).contains("no such folder"));
}

#[test]
fn gguf_files_and_pickles_of_the_hub_convert_as_they_do_here() {
    let folder = tempdir().unwrap();
    let whole = folder.path().join("whole");
    let set = |name: &str| folder.path().join(name);
    fs::create_dir_all(whole.join("Q4")).unwrap();
    let gguf = data("sources/gguf_q8_0/model.gguf");
    for file in ["model-Q8_0.gguf", "Q4/other.gguf", "mmproj-F16.gguf"] {
        fs::copy(&gguf, whole.join(file)).unwrap();
    }
    // What such repositories have for the hub's own pages.
    fs::write(whole.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    succeed(&["convert", path(&gguf), "-o", path(&set("here")), "--bits", "8"]);
    let hub = Hub::start(&whole);
    let ids = |name: &str| -> Value {
        let text = fs::read(set(name).join("set.json")).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["ids"].clone()
    };
    for (name, file) in [("root", "model-Q8_0.gguf"), ("below", "Q4/other.gguf")] {
        let source = format!("org/model@main/{file}");
        hub.run(folder.path(), &["plan", &source]);
        hub.run(folder.path(), &["convert", &source, "-o", path(&set(name)), "--bits", "8"]);
        assert_eq!(ids(name), ids("here"), "{file}");
    }
    let refused = |args: &[&str], words: &[&str]| {
        let output = hub.command(folder.path(), args).output().unwrap();
        let said = text(&output.stderr);
        assert!(!output.status.success() && words.iter().all(|word| said.contains(word)), "{said}");
    };
    let none = set("none");
    let convert = ["convert", "org/model/missing.gguf", "-o", path(&none)];
    refused(&convert, &["no missing.gguf", "Q4/other.gguf, mmproj-F16.gguf, model-Q8_0.gguf"]);
    refused(&["plan", "org/model"], &["name one of them", "org", "model-Q8_0.gguf"]);
    let args = ["convert", "org/model/model-Q8_0.gguf", "-o", path(&none), "--no-keep-source"];
    refused(&args, &["--no-keep-source supports .safetensors only"]);

    let pickles = data("sources/pickle_bin");
    let hub = Hub::start(&pickles);
    let refused = hub.command(folder.path(), &["plan", "org/model"]).output().unwrap();
    assert!(text(&refused.stderr).contains("--allow-pickle"), "{}", text(&refused.stderr));
    succeed(&["convert", path(&pickles), "-o", path(&set("pickle")), "--allow-pickle"]);
    let allowed = set("allowed");
    hub.run(folder.path(), &["convert", "org/model", "-o", path(&allowed), "--allow-pickle"]);
    assert_eq!(ids("allowed"), ids("pickle"));
}
