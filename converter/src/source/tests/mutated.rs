//! Small JSON files that say something else than their format allows: an error or a note, never a
//! panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::{ConvertOptions, Plan};

/// What stands in the place of a value.
fn others() -> [Value; 6] {
    [json!(null), json!(-1), json!(u64::MAX), json!("x"), json!([[0]]), json!({"x": {}})]
}

/// Pointers to all values of a document, but of long lists and maps only to the first ones.
fn pointers(value: &Value, here: &str, found: &mut Vec<String>) {
    const FIRST: usize = 24;
    found.push(here.to_owned());
    match value {
        Value::Object(members) => {
            for (key, value) in members.iter().take(FIRST) {
                let key = key.replace('~', "~0").replace('/', "~1");
                pointers(value, &format!("{here}/{key}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().take(2).enumerate() {
                pointers(value, &format!("{here}/{index}"), found);
            }
        }
        _ => {}
    }
}

/// Calls `open` with mutants of a file, so many for each value; a panic fails with the mutant's name.
fn check(file: &Path, each: usize, open: &dyn Fn() -> Result<(), String>) {
    let original = fs::read(file).unwrap();
    let document: Value = serde_json::from_slice(&original).unwrap();
    let mut places = Vec::new();
    pointers(&document, "", &mut places);
    let write = |text: &[u8]| fs::write(file, text).unwrap();
    let run = |mutant: &str| {
        catch_unwind(AssertUnwindSafe(open))
            .unwrap_or_else(|_| panic!("{}: {mutant}", file.display()))
    };
    for (index, place) in places.iter().enumerate() {
        for other in others().into_iter().cycle().skip(index).take(each) {
            let mut mutant = document.clone();
            *mutant.pointer_mut(place).unwrap() = other.clone();
            write(mutant.to_string().as_bytes());
            let _ = run(&format!("{place} = {other}"));
        }
    }
    for end in [0, 1, original.len() / 2] {
        write(&original[..end]);
        let _ = run(&format!("cut at {end}"));
    }
    write(&original);
    run("unchanged").unwrap();
}

/// A folder with copies of the small files of `from`, and links to its weights.
fn copied(from: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let place = folder.path().join(path.file_name().unwrap());
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            std::os::unix::fs::symlink(fs::canonicalize(&path).unwrap(), place).unwrap();
        } else if path.is_file() {
            fs::copy(&path, place).unwrap();
        }
    }
    folder
}

fn planned(source: Result<Source, SourceError>) -> Result<(), String> {
    let source = source.map_err(|error| error.to_string())?;
    let plan = Plan::new(&source, ConvertOptions::new(PathBuf::from("unused"), 2));
    plan.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn no_value_of_a_small_file_is_a_panic() {
    let folder = copied(&fixture("bf16_sharded"));
    let file = |name: &str| folder.path().join(name);
    // A short template: what is said of it is asked of every mutant.
    let template = "{% for turn in messages %}{{ turn.content }}<|im_end|>{% endfor %}";
    fs::write(file("chat_template.jinja"), template).unwrap();
    let end = json!({"id": 2, "content": "<|im_end|>", "special": true});
    let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "<|im_end|>": 2}, "merges": []});
    let tokenizer = json!({"version": "1.0", "added_tokens": [end], "model": model});
    fs::write(file("tokenizer.json"), tokenizer.to_string()).unwrap();
    let special = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"});
    fs::write(file("special_tokens_map.json"), special.to_string()).unwrap();
    let generation = json!({"eos_token_id": [2], "temperature": 0.5, "top_k": 3});
    fs::write(file("generation_config.json"), generation.to_string()).unwrap();
    fs::write(file("added_tokens.json"), json!({"<x>": 2047}).to_string()).unwrap();
    let open = || planned(Source::open(folder.path()));
    // A plan takes long: rules are parsed for each.
    check(&file("config.json"), 1, &open);
    let opened = || Source::open(folder.path()).map(drop).map_err(|error| error.to_string());
    for name in [
        "config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "added_tokens.json",
    ] {
        check(&file(name), others().len(), &opened);
    }
    for wrong in ["", "[]", "5", "{", "\"x\""] {
        fs::write(file("config.json"), wrong).unwrap();
        let error = open().unwrap_err();
        assert!(error.contains("config.json"), "{wrong:?}: {error}");
    }
}

#[test]
fn no_value_of_an_index_or_an_adapter_is_a_panic() {
    let folder = copied(&fixture("bf16_sharded"));
    let index = folder.path().join(INDEX);
    let opened = || Source::open(folder.path()).map(drop).map_err(|error| error.to_string());
    check(&index, others().len(), &opened);
    let adapter = copied(&fixture("lora/lora_rs_patterns"));
    let merged = || {
        let mut source = Source::open(folder.path()).map_err(|error| error.to_string())?;
        source.merge_adapters(&[adapter.path().to_owned()]).map_err(|error| error.to_string())
    };
    check(&adapter.path().join("adapter_config.json"), others().len(), &merged);
    for (file, name) in [(index, INDEX), (adapter.path().join("adapter_config.json"), "adapter")] {
        let original = fs::read(&file).unwrap();
        for wrong in ["", "[]", "5", "{"] {
            fs::write(&file, wrong).unwrap();
            let error = merged().unwrap_err();
            assert!(error.contains(name), "{wrong:?}: {error}");
        }
        fs::write(&file, original).unwrap();
    }
}
