//! Models that are converted when they are needed, and package sets of the hub.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{data, files, path, succeed, text},
    hub::server::{COMMIT, Hub},
    running::{HANG, Running, ask, post},
};

#[test]
fn a_model_is_converted_when_it_is_served_and_kept_by_name() {
    let folder = tempdir().unwrap();
    let hub = Hub::start(&data("kjv-4m"));
    let store = folder.path().join("models");
    let command = |args: &[&str]| {
        let mut command = hub.command(folder.path(), args);
        command.env("SHARDPACK_MODELS", &store);
        command
    };
    let run = |args: &[&str]| {
        let output = command(args).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let listen = ["--listen", "127.0.0.1:0", "--json", "--threads", "1"];
    let local = data("kjv-4m");
    for (model, bits) in [("org/model", "8"), (path(&local), "4")] {
        let args = [&["serve", model, "--bits", bits][..], &listen].concat();
        let server = Running::spawn(command(&args));
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.", "{model}");
        assert_eq!(server.terminate(), Some(0));
    }
    // What is there is served again without the hub, also by its name.
    hub.requests();
    for args in [&["run", "org/model", "--bits", "8"][..], &["serve", "org--model-8bit"]] {
        let server = Running::spawn(command(&[args, &listen].concat()));
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
        assert_eq!(server.terminate(), Some(0));
    }
    assert_eq!(hub.requests(), 0);

    let (code, listed, _) = run(&["list", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let models = listed["models"].as_array().unwrap();
    assert_eq!((code, models.len()), (Some(0), 2), "{listed}");
    assert_eq!(models[1]["name"], "org--model-8bit", "{listed}");
    assert_eq!((&models[1]["bits"], &models[1]["nodes"]), (&8.into(), &1.into()));
    let used: Value = serde_json::from_str(&run(&["du", "--json"]).1).unwrap();
    let sum: u64 = models.iter().map(|model| model["bytes"].as_u64().unwrap()).sum();
    assert_eq!(used["bytes"], sum);

    // Nothing is removed unless every name is one of the store's.
    let (code, _, said) = run(&["rm", "org--model-8bit", "../home"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("no model of this name") && said.contains("shardpack list"), "{said}");
    assert!(store.join("org--model-8bit").exists() && folder.path().join("home").exists());
    assert_eq!(run(&["rm", "org--model-8bit"]).0, Some(0));
    assert!(!store.join("org--model-8bit").exists());

    let set = folder.path().join("set");
    succeed(&["convert", path(&local), "-o", path(&set)]);
    for (args, words) in [
        (["serve", path(&set), "--bits", "4"], "converted already"),
        (["serve", "nowhere", "--bits", "4"], "no such set, model or file"),
    ] {
        let (code, _, said) = run(&args);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_set_goes_to_the_hub_and_is_served_from_there() {
    let folder = tempdir().unwrap();
    let hub = Hub::of(BTreeMap::new());
    let set = folder.path().join("set");
    succeed(&["convert", path(&data("kjv-4m")), "-o", path(&set), "--nodes", "2"]);
    let push = ["push-hub", path(&set), "org/model", "--json"];
    let refused = hub.command(folder.path(), &push).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("HF_TOKEN"), "{}", text(&refused.stderr));
    let pushed = hub.command(folder.path(), &push).env("HF_TOKEN", "writer").output().unwrap();
    assert!(pushed.status.success(), "{}", text(&pushed.stderr));
    let pushed: Value = serde_json::from_slice(&pushed.stdout).unwrap();
    assert_eq!(pushed["commit"], COMMIT);
    // What the hub's store has is not sent again.
    let again = hub.command(folder.path(), &push).env("HF_TOKEN", "writer").output().unwrap();
    assert!(again.status.success(), "{}", text(&again.stderr));
    let store = folder.path().join("models");
    let command = |args: &[&str]| {
        let mut command = hub.command(folder.path(), args);
        command.env("SHARDPACK_MODELS", &store);
        command
    };
    // By its name on the hub, then by its name in the store.
    for name in ["org/model", "org--model"] {
        let serve = ["serve", name, "--listen", "127.0.0.1:0", "--json", "--threads", "1"];
        let server = Running::spawn(command(&serve));
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.", "{name}");
        assert_eq!(server.terminate(), Some(0));
    }
    let cached = folder.path().join("home/hub/models--org--model/snapshots").join(COMMIT);
    assert!(files(&cached) == files(&set), "every file of the set");
    for args in [&["inspect", "org/model"][..], &["verify", "org--model"]] {
        succeeds(command(args));
    }
    let bits = command(&["serve", "org/model", "--bits", "8"]).output().unwrap();
    let said = text(&bits.stderr);
    assert!(bits.status.code() == Some(2) && said.contains("leave --bits away"), "{said}");
    // The link goes, what the cache holds stays.
    succeeds(command(&["rm", "org--model"]));
    assert!(!store.join("org--model").exists() && cached.join("set.json").exists());
    // Something else is refused before anything is sent.
    let other = hub.command(folder.path(), &["push-hub", path(folder.path()), "org/model"]);
    let other = { other }.env("HF_TOKEN", "writer").output().unwrap();
    assert_eq!(other.status.code(), Some(2), "{}", text(&other.stderr));
}

#[test]
fn one_node_s_package_is_fetched_alone_and_verified() {
    let folder = tempdir().unwrap();
    let set = folder.path().join("set");
    succeed(&["convert", path(&data("kjv-4m")), "-o", path(&set), "--nodes", "2"]);
    let hub = Hub::start(&set);
    let pull = |home: &str, rank: &str| {
        let args = ["pull-hub", "org/model", "--rank", rank, "--json"];
        hub.command(&folder.path().join(home), &args).output().unwrap()
    };
    let pulled = pull("one", "1");
    assert!(pulled.status.success(), "{}", text(&pulled.stderr));
    let pulled: Value = serde_json::from_slice(&pulled.stdout).unwrap();
    let package = Path::new(pulled["folder"].as_str().unwrap());
    assert!(files(package) == files(&set.join("node-1")));
    let snapshot = package.parent().unwrap();
    assert!(snapshot.join("set.json").exists() && !snapshot.join("node-0").exists());
    let missing = pull("two", "2");
    let said = text(&missing.stderr);
    assert!(!missing.status.success() && said.contains("2 packages"), "{said}");

    // Of the hub's own checksum, and yet not what the set says.
    let mut wrong = files(&set);
    let weights =
        wrong.keys().find(|name| name.starts_with("node-1/") && name.ends_with("tensors"));
    let weights = weights.unwrap().clone();
    *wrong.get_mut(&weights).unwrap().last_mut().unwrap() ^= 1;
    let hub = Hub::of(wrong);
    let args = ["pull-hub", "org/model", "--rank", "1"];
    let damaged = hub.command(&folder.path().join("three"), &args).output().unwrap();
    let said = text(&damaged.stderr);
    assert_eq!(damaged.status.code(), Some(1), "{said}");
    assert!(said.contains("model-00001-of-00001.safetensors: chunk 0"), "{said}");

    let model = Hub::start(&data("kjv-4m"));
    let args = ["pull-hub", "org/model"];
    let other = model.command(&folder.path().join("four"), &args).output().unwrap();
    assert!(text(&other.stderr).contains("no set.json"), "{}", text(&other.stderr));
}

#[test]
fn models_are_named_wherever_one_is_asked_for() {
    let folder = tempdir().unwrap();
    let hub = Hub::start(&data("kjv-4m"));
    let command = |args: &[&str]| {
        let mut command = hub.command(folder.path(), args);
        command.env("SHARDPACK_MODELS", folder.path().join("models"));
        command
    };
    // What converts nothing says what it takes.
    let refused = command(&["inspect", "org/model"]).output().unwrap();
    let said = text(&refused.stderr);
    assert!(said.contains("no package set") && said.contains("shardpack convert"), "{said}");
    let bench = ["--contexts", "4", "--batches", "1", "--generate", "2", "--threads", "1"];
    succeeds(command(&[&["bench", "org/model"][..], &bench].concat()));
    let local = data("kjv-4m");
    succeeds(command(&[&["bench", path(&local)][..], &bench].concat()));
    let set = folder.path().join("models/org--model-4bit");
    let text_file = folder.path().join("text");
    fs::write(&text_file, "In the beginning God created the heaven and the earth.").unwrap();
    for name in ["org/model", "org--model-4bit", path(&set.join("node-0"))] {
        let eval = ["eval", name, "--text", path(&text_file), "--context", "8", "--threads", "1"];
        succeeds(command(&eval));
        succeeds(command(&["inspect", name]));
        succeeds(command(&["verify", name]));
    }
    let exported = folder.path().join("mlx");
    succeeds(command(&["export", "org/model", "--mlx", "-o", path(&exported)]));
    succeeds(command(&[
        "reshard",
        "org/model",
        "--nodes",
        "2",
        "-o",
        path(&folder.path().join("two")),
    ]));
    // One package of a one-node set is served by itself; one of two is not.
    let package = set.join("node-0");
    let listen = ["--listen", "127.0.0.1:0", "--json", "--threads", "1"];
    let server = Running::spawn(command(&[&["serve", path(&package)][..], &listen].concat()));
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(server.terminate(), Some(0));
    let half = folder.path().join("two/node-0");
    let refused = command(&["serve", path(&half)]).output().unwrap();
    assert!(text(&refused.stderr).contains("one package"), "{}", text(&refused.stderr));
}

fn succeeds(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}\n{}", text(&output.stderr));
}

#[test]
fn a_server_fetches_a_further_model_for_ollamas_clients_and_deletes_it() {
    let folder = tempdir().unwrap();
    let hub = Hub::start(&data("kjv-4m"));
    let (set, store) = (folder.path().join("set"), folder.path().join("models"));
    succeed(&["convert", path(&data("kjv-4m")), "-o", path(&set), "--name", "kjv"]);
    let mut command =
        hub.command(folder.path(), &["serve", path(&set), "--listen", "127.0.0.1:0", "--json"]);
    command.env("SHARDPACK_MODELS", &store);
    let server = Running::spawn(command);
    let pull = server.url().replace("/v1", "/api/pull");
    let delete = server.url().replace("/v1", "/api/delete");
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(HANG))
        .http_status_as_error(false)
        .build()
        .into();
    let mut reply = agent
        .post(&pull)
        .content_type("application/json")
        .send(json!({"model": "hf.co/org/model:8bit"}).to_string())
        .unwrap();
    let lines = reply.body_mut().read_to_string().unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.last(), Some(&json!({"status": "success"})), "{lines:?}");
    let last = |status: &str| lines.iter().rfind(|line| line["status"] == status).unwrap();
    for status in ["pulling files", "converting"] {
        let line = last(status);
        assert!(line["total"].is_u64() && line["total"] == line["completed"], "{line}");
    }
    assert!(store.join("org--model-8bit/set.json").exists());
    let (status, there) = post(&pull, &json!({"model": "org/model:8bit", "stream": false}));
    assert_eq!((status, there), (200, json!({"status": "success"})));
    let (status, other) = post(&pull, &json!({"model": "org/nothing", "stream": false}));
    assert!(status >= 400 && other["error"].is_string(), "{other}");
    let (status, other) = post(&pull, &json!({"model": path(&set), "stream": false}));
    assert_eq!(status, 404, "no path of this machine: {other}");
    // The served model goes on answering meanwhile.
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let remove = |name: &str| {
        let request = agent.delete(&delete).force_send_body();
        request
            .content_type("application/json")
            .send(json!({"model": name}).to_string())
            .unwrap()
            .status()
            .as_u16()
    };
    assert_eq!(remove("org/model:8bit"), 200);
    assert!(!store.join("org--model-8bit").exists());
    assert_eq!((remove("org/model:8bit"), remove("../set"), remove("kjv")), (404, 404, 400));
    assert!(set.join("set.json").exists());
    assert_eq!(server.terminate(), Some(0));
}
