//! The guide's reference pages against the program. `UPDATE_DOCS=1` writes the page of the command
//! line anew. `tests/layering/reference_docs.rs` compares the pages with the sources.

use std::{
    collections::BTreeSet,
    env,
    fmt::Write as _,
    fs,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::documents::{REFERENCE, demand, reference_page, root};

/// The program without what the machine's owner has set.
fn shardpack() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardpack"));
    command.stdin(Stdio::null());
    let set = ["SHARDPACK_CLUSTER", "SHARDPACK_ENGINES", "SHARDPACK_SERVER", "SHARDPACK_PAUSE_AT"];
    for name in set.into_iter().chain(["COLUMNS"]) {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str]) -> String {
    let output = shardpack().args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "shardpack {}: {said}", arguments.join(" "));
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that a help text lists.
fn commands_in(help: &str) -> Vec<&str> {
    let Some((_, list)) = help.split_once("\nCommands:\n") else { return Vec::new() };
    let lines = list.lines().take_while(|line| !line.is_empty() && !line.ends_with(':'));
    lines
        .filter_map(|line| line.strip_prefix("  ").filter(|it| !it.starts_with(' ')))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect()
}

fn render_command(command: &[&str], text: &mut String) {
    let help = run(&[command, &["--help"]].concat());
    let level = "#".repeat(2 + command.len().saturating_sub(1));
    let name = [&["shardpack"], command].concat().join(" ");
    write!(text, "\n{level} {name}\n\n```text\n").unwrap();
    for line in help.trim_end().lines() {
        writeln!(text, "{}", line.trim_end()).unwrap();
    }
    text.push_str("```\n");
    for inner in commands_in(&help) {
        render_command(&[command, &[inner]].concat(), text);
    }
}

#[test]
fn the_command_line_page_is_what_the_program_says() {
    let mut text = "# Command line\n\n\
        This page is generated from `shardpack --help` and the help of every command. A test compares \
        it with the\nprogram; `UPDATE_DOCS=1 cargo test command_line_page` writes it anew.\n"
        .to_owned();
    render_command(&[], &mut text);
    let path = root().join(REFERENCE).join("cli.md");
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = reference_page("cli.md");
    let differing = committed.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line = 1 + differing.unwrap_or(committed.lines().count().min(text.lines().count()));
    assert!(
        committed == text,
        "{} differs from the program's help from line {line} on; write it anew with UPDATE_DOCS=1",
        path.display()
    );
}

#[test]
fn every_field_of_a_package_set_is_on_the_package_page() {
    let folder = tempfile::tempdir().unwrap();
    let set = folder.path().join("set");
    let source = root().join("tests/data/kjv-4m");
    run(&["convert", source.to_str().unwrap(), "-o", set.to_str().unwrap(), "--nodes", "2"]);
    let mut keys = BTreeSet::new();
    for file in ["set.json", "node-1/manifest.json"] {
        collect_keys(
            &serde_json::from_slice(&fs::read(set.join(file)).unwrap()).unwrap(),
            &mut keys,
        );
    }
    demand(
        "package-format.md",
        "fields of set.json and manifest.json",
        keys.iter().map(String::as_str),
    );
}

/// Names of fields; what `architecture` has stands in its types.
fn collect_keys(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                keys.insert(key.clone());
                if key != "architecture" {
                    collect_keys(value, keys);
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                collect_keys(item, keys);
            }
        }
        _ => {}
    }
}

#[test]
fn the_rule_files_of_the_page_describe_a_model() {
    let page = reference_page("rule-files.md");
    let blocks: Vec<&str> = page
        .split("```toml\nschema = 1\n")
        .skip(1)
        .map(|rest| rest.split_once("\n```").expect("a block ends").0)
        .collect();
    assert_eq!(blocks.len(), 2, "a short rule file and a whole one");
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    let published = root().join("tests/data/models/llama");
    for entry in fs::read_dir(published).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let file = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["model_type"] = "driftwood".into();
    config["architectures"] = json!(["DriftwoodForCausalLM"]);
    fs::write(file, config.to_string()).unwrap();
    let rules = folder.path().join("driftwood.toml");
    let mut plans = Vec::new();
    for block in blocks {
        fs::write(&rules, format!("schema = 1\n{block}\n")).unwrap();
        let arguments = ["plan", model.to_str().unwrap(), "--nodes", "2", "--json", "--rules"];
        let plan = run(&[&arguments[..], &[rules.to_str().unwrap()]].concat());
        plans.push(serde_json::from_str::<Value>(&plan).unwrap());
    }
    assert_eq!(plans[0], plans[1], "both describe the same model");
}
