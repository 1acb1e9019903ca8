//! Two controllers of one cluster, with nodes as real processes: a handover, and two at once.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use serde_json::{Value, json};
use shardpack_identity::Home;
use shardpack_manifests::Digest;
use shardpack_transfer::{
    protocol::{FailureCode, Timeouts},
    receive::{ClientError, NodeClient},
};

use crate::{
    cluster::{Scene, TLS},
    harness::{convert, fail, path, run, shardpack, succeed, text},
    running::Running,
};

const PASSPHRASE: &str = "two controllers, one acts";

/// The cluster of `scene`, with further controllers of it in folders of their own.
struct Controllers<'a> {
    scene: &'a Scene,
    passphrase: PathBuf,
    file: PathBuf,
}

impl<'a> Controllers<'a> {
    fn export(scene: &'a Scene) -> Self {
        let (passphrase, file) = (scene.store("passphrase"), scene.store("exported"));
        fs::write(&passphrase, format!("{PASSPHRASE}\n")).unwrap();
        let args = ["export-controller", path(&file), "--passphrase-file", path(&passphrase)];
        scene.cluster(&args);
        Self { scene, passphrase, file }
    }

    fn import(&self, name: &str) -> PathBuf {
        let folder = self.scene.store(name);
        let passphrase = ["--passphrase-file", path(&self.passphrase)];
        let file = ["cluster", "import-controller", path(&self.file)];
        succeed(&[&file[..], &passphrase, &["--cluster", path(&folder)]].concat());
        folder
    }
}

fn handover(folder: &Path, name: &str) -> Value {
    let args = ["cluster", "handover", "--json", "--name", name, "--cluster", path(folder)];
    serde_json::from_str(&succeed(&args)).unwrap()
}

/// Has a node change something, as the controller in `folder`; what it said if it refused.
fn change(folder: &Path, node: &str) -> Result<(), String> {
    let output: Output = run(&["cluster", "gc", node, "--cluster", path(folder)]);
    if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
}

#[test]
fn a_second_controller_takes_over_and_the_first_may_only_look() {
    let scene = Scene::new();
    let first = scene.store("cluster");
    let set = convert("models/llama", &scene.store("set"), &["--nodes", "2"]);
    let nodes = scene.pair(&TLS);
    scene.push(&set);
    let controllers = Controllers::export(&scene);
    let exported = text(&fs::read(&controllers.file).unwrap());
    let document: Value = serde_json::from_str(&exported).unwrap();
    assert_eq!((&document["kdf"], &document["memory_kib"]), (&"argon2id".into(), &65536.into()));
    assert!(!exported.contains(&nodes[0].address()), "members stand there encrypted");
    let second = controllers.import("second");
    // Before the handover the imported one does nothing, and the first one all.
    let refused = fail(2, &["cluster", "list", "--cluster", path(&second)]);
    assert!(refused.contains("was imported and does not act"), "{refused}");
    change(&first, "a").unwrap();

    // A conversation that the first one is in the middle of.
    let home = Home::open(&first).unwrap();
    let endpoint = home.endpoint(home.member("a").unwrap());
    let mut under_way = NodeClient::connect(endpoint, Timeouts::default()).unwrap();
    under_way.list().unwrap();

    let done = handover(&second, "mini-2");
    assert_eq!((&done["epoch"], &done["ok"]), (&1.into(), &true.into()), "{done}");
    nodes[0].wait_for("the controller on mini-2 acts from now on (epoch 1)");
    let commit = json!({ "model": "x", "record": Digest::of(b"") });
    let refused = under_way.operate("activation.commit", &commit).unwrap_err();
    let ClientError::Refused { failure, .. } = refused else { panic!("{refused}") };
    assert_eq!(failure.code, FailureCode::Replaced, "{failure}");
    change(&second, "b").unwrap();
    let refused = change(&first, "a").unwrap_err();
    assert!(refused.contains("this controller was replaced by a handover on 20"), "{refused}");
    assert!(refused.contains("(epoch 1, to mini-2)"), "{refused}");
    for line in [
        &["cluster", "renew", "a"][..],
        &["cluster", "remove", "a"],
        &["push", path(&set), "--to", "a,b", "--release", "9"],
    ] {
        let output = run(&[line, &["--cluster", path(&first)]].concat());
        let said = text(&output.stderr) + &text(&output.stdout);
        assert!(!output.status.success(), "{line:?}: {said}");
        assert!(said.contains("replaced by a handover"), "{line:?}: {said}");
    }
    let status = scene.cluster(&["status"]);
    assert_eq!(status["members"][0]["reachable"], true, "it may look: {status}");
    // The second one pushes; nothing of the first one's attempt is left.
    succeed(&["push", path(&set), "--to", "a,b", "--release", "9", "--cluster", path(&second)]);

    // Back again, with a node that was away meanwhile: it learns of it at the next contact.
    let [a, b] = nodes;
    let address = b.address();
    assert_eq!(b.terminate(), Some(0));
    let lost = fail(2, &["cluster", "handover", "--cluster", path(&first)]);
    assert!(lost.contains("more than half are needed"), "{lost}");
    change(&second, "a").unwrap();
    let forced = ["cluster", "handover", "--name", "first", "--force", "--cluster", path(&first)];
    succeed(&forced);
    assert!(change(&second, "a").unwrap_err().contains("to first)"));
    let b = scene.start("b", &["--listen", &address]);
    change(&second, "b").expect("b has not heard of the handover yet, and nobody else acts there");
    change(&first, "b").unwrap();
    assert!(change(&second, "b").unwrap_err().contains("to first)"), "now it has");
    drop((a, b));
}

#[test]
fn of_handovers_at_the_same_time_never_two_win() {
    let scene = Scene::new();
    let nodes: Vec<Running> = ["a", "b", "c"]
        .map(|name| {
            let node = scene.start(name, &TLS);
            scene.add(&node, name);
            node
        })
        .into();
    let controllers = Controllers::export(&scene);
    let mut folders = vec![scene.store("cluster")];
    folders.extend(["second", "third"].map(|name| controllers.import(name)));
    for round in 0..4 {
        let racing: Vec<_> = folders
            .iter()
            .map(|folder| {
                let mut command = shardpack();
                command.args(["cluster", "handover", "--cluster", path(folder)]);
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        let ended: Vec<Output> =
            racing.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        // Who acts on each node; one that never took over is refused before it asks.
        let acting: Vec<Vec<usize>> = ["a", "b", "c"]
            .map(|node| {
                let may = |index: &usize| change(&folders[*index], node).is_ok();
                (0..folders.len()).filter(may).collect::<Vec<usize>>()
            })
            .into();
        for on_node in &acting {
            assert!(on_node.len() <= 1, "round {round}: two act on one node: {acting:?}");
        }
        let wins = |index: usize| acting.iter().all(|on_node| *on_node == [index]);
        let winners: Vec<usize> = (0..folders.len()).filter(|index| wins(*index)).collect();
        let claims = ended.iter().filter(|output| output.status.success()).count();
        assert!(
            claims == 0 || winners.len() == 1,
            "round {round}: who claims to have won last has all nodes: {acting:?}, {:?}",
            ended.iter().map(|output| text(&output.stderr)).collect::<Vec<_>>()
        );
    }
    // And whatever the race left, one more handover settles it.
    let done = handover(&folders[1], "second");
    assert!(done["nodes"].as_array().unwrap().iter().all(|node| node["accepted"] == true));
    for (index, folder) in folders.iter().enumerate() {
        for node in ["a", "b", "c"] {
            assert_eq!(change(folder, node).is_ok(), index == 1, "controller {index} on {node}");
        }
    }
    drop(nodes);
}
