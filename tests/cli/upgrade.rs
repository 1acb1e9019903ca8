//! `cluster upgrade` with real nodes: each runs a copy of the program in a folder of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use base64ct::{Base64, Encoding as _};
use serde_json::{Value, json};
use shardpack_identity::{Credentials, Home, Signature};
use shardpack_manifests::Digest;
use shardpack_transfer::{protocol::Timeouts, receive::NodeClient};

use crate::{
    cluster::{Scene, TLS},
    harness::{copy_program, path, run, text},
    running::{Running, ask, lives},
    sets::kjv_for_two,
};

/// A node with a program of its own.
struct Upgradable {
    node: Running,
    program: PathBuf,
}

impl Upgradable {
    fn start(scene: &Scene, name: &str, pause: Option<&str>) -> Self {
        let program = scene.store(&format!("program-{name}")).join("shardpack");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        copy_program(&program);
        let store = scene.store(name);
        let mut command = Command::new(&program);
        command.args(["node", "--json", "--threads", "1", "--store", path(&store)]).args(TLS);
        command.stdin(Stdio::null()).env_remove("SHARDPACK_PAUSE_AT");
        if let Some(point) = pause {
            command.env("SHARDPACK_PAUSE_AT", point);
        }
        let node = Running::spawn(command);
        scene.add(&node, name);
        Self { node, program }
    }

    fn files(&self) -> Vec<String> {
        let folder = fs::read_dir(self.program.parent().unwrap()).unwrap();
        let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<String> = folder.map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }
}

/// The program with bytes behind its end, which are another program by digest and the same otherwise.
fn variant(scene: &Scene, name: &str) -> PathBuf {
    let mut bytes = fs::read(env!("CARGO_BIN_EXE_shardpack")).unwrap();
    bytes.extend_from_slice(name.as_bytes());
    program(scene, name, &bytes)
}

fn program(scene: &Scene, name: &str, bytes: &[u8]) -> PathBuf {
    let file = scene.store(name);
    fs::write(&file, bytes).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// `cluster upgrade` with a binary: whether it succeeded, its JSON, and what it said.
fn upgrade(scene: &Scene, binary: &Path, options: &[&str]) -> (bool, Value, String) {
    let args = ["cluster", "upgrade", "--json", "--binary", path(binary)];
    let output = run(&[&args[..], options, &scene.choice()].concat());
    let json = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.success(), json, text(&output.stderr))
}

fn states(json: &Value) -> Vec<&str> {
    let nodes = json["nodes"].as_array().unwrap();
    nodes.iter().map(|node| node["state"].as_str().unwrap()).collect()
}

fn digest(file: &Path) -> Digest {
    Digest::of(&fs::read(file).unwrap())
}

fn client(scene: &Scene, node: &str) -> (NodeClient, Credentials) {
    let home = Home::open(&scene.store("cluster")).unwrap();
    let endpoint = home.endpoint(home.member(node).unwrap());
    let client = NodeClient::connect(endpoint, Timeouts::default()).unwrap();
    (client, home.credentials().clone())
}

/// What a node says of its program.
fn state(scene: &Scene, node: &str) -> Value {
    client(scene, node).0.operate("program.state", &Value::Null).unwrap()
}

#[test]
fn nodes_go_over_to_another_program_one_by_one_and_keep_process_and_port() {
    let scene = Scene::new();
    let nodes = ["a", "b"].map(|name| Upgradable::start(&scene, name, None));
    let new = variant(&scene, "new");
    let (ok, json, said) = upgrade(&scene, &new, &["--dry-run"]);
    assert!(ok, "{said}");
    assert_eq!(states(&json), ["would be upgraded"; 2]);
    assert_eq!(nodes[0].files(), ["shardpack"]);
    let pid = |node: &str| {
        let status = scene.cluster(&["status", node]);
        status["members"][0]["facts"]["pid"].as_u64().unwrap()
    };
    let before = ["a", "b"].map(pid);
    let (ok, json, said) = upgrade(&scene, &new, &[]);
    assert!(ok, "{said}");
    assert_eq!(states(&json), ["upgraded"; 2]);
    assert_eq!(json["digest"], json!(digest(&new)));
    for (name, node) in ["a", "b"].into_iter().zip(&nodes) {
        assert_eq!(state(&scene, name)["digest"], json!(digest(&new)));
        assert_eq!(digest(&node.program), digest(&new), "it is started at the next boot too");
        assert_eq!(node.files(), ["shardpack", "shardpack.previous"]);
        let previous = node.program.with_extension("previous");
        assert_eq!(digest(&previous), digest(Path::new(env!("CARGO_BIN_EXE_shardpack"))));
    }
    assert_eq!(["a", "b"].map(pid), before, "a service manager sees the same process");
    let (ok, json, _) = upgrade(&scene, &new, &[]);
    assert_eq!((ok, states(&json)), (true, vec!["current"; 2]), "once more changes nothing");
    let (ok, _, said) = upgrade(&scene, &variant(&scene, "newer"), &["b"]);
    assert!(ok, "{said}");
    assert_eq!(state(&scene, "a")["digest"], json!(digest(&new)));
    let events = scene.cluster(&["events", "--kind", "upgraded"]);
    assert_eq!(events["events"].as_array().unwrap().len(), 3, "{events}");
    for Upgradable { node, .. } in nodes {
        assert_eq!(node.terminate(), Some(0), "it ends as every node");
    }
}

#[test]
fn ranks_that_serve_hold_up_an_upgrade_and_a_forced_one_is_survived() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let nodes = ["a", "b"].map(|name| Upgradable::start(&scene, name, None));
    scene.push(&set);
    let server = Running::serve(&set, &[&["--nodes", "a,b"], &scene.choice()[..]].concat());
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let new = variant(&scene, "new");
    let (ok, json, said) = upgrade(&scene, &new, &[]);
    assert!(!ok && said.contains("rank 0 runs here for"), "{said}");
    assert_eq!(states(&json), ["failed", "not tried"]);
    assert_eq!(nodes[0].files(), ["shardpack"], "nothing is left of it");
    let (ok, _, said) = upgrade(&scene, &new, &["--force"]);
    assert!(ok, "{said}");
    // The server starts the ranks again; what was appended makes no other build.
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(state(&scene, "b")["digest"], json!(digest(&new)));
}

/// Sends bytes to a node as the program of this digest; what the node says to its installation.
fn sent(scene: &Scene, node: &str, bytes: &[u8], digest: Digest) -> Result<Value, String> {
    let (mut client, signer) = client(scene, node);
    let offer = json!({ "format": 1, "digest": digest, "size_bytes": bytes.len(), "time": 0 });
    let offer = offer.to_string();
    let signature = Signature::sign(&signer, "node program", offer.as_bytes()).unwrap();
    let mut steps = vec![("program.begin", json!({ "offer": offer, "signature": signature }))];
    for (index, piece) in bytes.chunks(512 << 10).enumerate() {
        let (offset, data) = (index * (512 << 10), Base64::encode_string(piece));
        let piece = json!({ "digest": digest, "offset": offset, "data": data });
        steps.push(("program.piece", piece));
    }
    let install =
        json!({ "digest": digest, "force": false, "wait_seconds": 0, "confirm_seconds": 5 });
    steps.push(("program.install", install));
    let mut last = Ok(Value::Null);
    for (name, parameters) in steps {
        last = client.operate(name, &parameters).map_err(|error| error.to_string());
        if last.is_err() {
            break;
        }
    }
    last
}

#[test]
fn what_is_no_program_for_the_node_is_refused_and_the_node_goes_on() {
    let scene = Scene::new();
    let node = Upgradable::start(&scene, "a", None);
    let before = state(&scene, "a");
    let real = fs::read(env!("CARGO_BIN_EXE_shardpack")).unwrap();
    let mut foreign = real.clone();
    // `e_machine`: another machine than this one.
    foreign[18] = if foreign[18] == 62 { 183 } else { 62 };
    let script = b"#!/bin/sh\necho shardpack 9.9.9\n";
    let other = fs::read("/bin/false").unwrap();
    // The command refuses what it can see; the node does not rely on that.
    for (name, bytes, expected) in [
        ("script", &script[..], "neither an ELF nor a Mach-O program"),
        ("foreign", &foreign[..], "this node needs"),
    ] {
        let (ok, _, said) = upgrade(&scene, &program(&scene, name, bytes), &[]);
        assert!(!ok && said.contains(expected), "{name}: {said}");
        let said = sent(&scene, "a", bytes, Digest::of(bytes)).unwrap_err();
        assert!(said.contains(expected), "{name}: {said}");
    }
    let (ok, _, said) = upgrade(&scene, &program(&scene, "false", &other), &[]);
    assert!(!ok && said.contains("asked for its version"), "{said}");
    let torn = &real[..4096];
    assert!(sent(&scene, "a", torn, Digest::of(torn)).is_err(), "it cannot be started");
    let said = sent(&scene, "a", &real[..9999], Digest::of(b"another")).unwrap_err();
    assert!(said.contains("the program's BLAKE3 is"), "{said}");
    assert_eq!(state(&scene, "a"), before, "the node goes on");
    assert_eq!(node.files(), ["shardpack"], "nothing is left of them");
}

#[test]
fn an_offer_that_no_controller_signed_is_refused() {
    let scene = Scene::new();
    let _node = Upgradable::start(&scene, "a", None);
    let bytes = b"program";
    let offer = json!({ "format": 1, "digest": Digest::of(bytes), "size_bytes": 7, "time": 0 });
    let offer = offer.to_string();
    let own = shardpack_identity::credentials_of_node(&scene.store("a").join("identity"));
    let of_node = own.unwrap().unwrap();
    let signature = Signature::sign(&of_node, "node program", offer.as_bytes()).unwrap();
    let by_node = json!({ "offer": offer, "signature": signature });
    let (mut client_, signer) = client(&scene, "a");
    let said = client_.operate("program.begin", &by_node).unwrap_err().to_string();
    assert!(said.contains("the offer of a program is refused"), "{said}");
    let signature = Signature::sign(&signer, "node program", offer.as_bytes()).unwrap();
    let bent = json!({ "offer": offer.replace(":7", ":8"), "signature": signature });
    let said = client(&scene, "a").0.operate("program.begin", &bent).unwrap_err().to_string();
    assert!(said.contains("the offer of a program is refused"), "{said}");
}

/// A real program that says that it is shardpack, and ends when it is to be a node.
const IMPOSTOR: &str = r#"fn main() {
    if std::env::args().nth(1).as_deref() == Some("--version") {
        println!("shardpack 9.9.9");
    } else {
        std::process::exit(3);
    }
}"#;

#[test]
fn a_program_that_ends_at_once_is_rolled_back() {
    let scene = Scene::new();
    let node = Upgradable::start(&scene, "a", None);
    let before = state(&scene, "a");
    let (source, impostor) = (scene.store("impostor.rs"), scene.store("impostor"));
    fs::write(&source, IMPOSTOR).unwrap();
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let built = Command::new(rustc).args([path(&source), "-o", path(&impostor)]).output().unwrap();
    assert!(built.status.success(), "{}", text(&built.stderr));
    let (ok, json, said) = upgrade(&scene, &impostor, &[]);
    assert!(!ok, "{json}");
    assert!(said.contains("it went back to the program before: the new program ended"), "{said}");
    assert!(said.contains("exit status: 3"), "{said}");
    let after = state(&scene, "a");
    assert_eq!(after["digest"], before["digest"]);
    assert_eq!(node.files(), ["shardpack"]);
    let events = scene.cluster(&["events", "--kind", "upgrade_failed"]);
    assert_eq!(events["events"].as_array().unwrap().len(), 1, "{events}");
    // The node takes a good one after that.
    let (ok, _, said) = upgrade(&scene, &variant(&scene, "new"), &[]);
    assert!(ok, "{said}");
}

#[test]
fn a_program_that_is_not_confirmed_is_rolled_back_and_leaves_no_process() {
    let scene = Scene::new();
    // It hangs before it answers.
    let node = Upgradable::start(&scene, "a", Some("node:trial"));
    let before = state(&scene, "a");
    let (ok, _, said) = upgrade(&scene, &variant(&scene, "new"), &["--timeout", "2"]);
    assert!(!ok && said.contains("did not confirm the new program within 2 s"), "{said}");
    assert_eq!(state(&scene, "a")["digest"], before["digest"]);
    assert!(node.node.children().into_iter().all(|child| !lives(child)), "the trial is over");
    assert_eq!(node.files(), ["shardpack"]);
}
