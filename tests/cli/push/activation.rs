//! Activation on all nodes or on none, and the way back: real nodes and controllers, killed at every
//! step.

use std::process::Output;

use shardpack_identity::Home;
use shardpack_transfer::release::{Release, ReleasePackage, SignedRelease};
use tempfile::{TempDir, tempdir};

use super::*;
use crate::{
    harness::{fail, kill, path, paused, run, succeed, text},
    running::Running,
};

/// Sets of one model, and stores of nodes that are processes of their own.
struct Cluster {
    folder: TempDir,
    sets: Vec<PathBuf>,
    keys: Vec<PackageSet>,
}

impl Cluster {
    /// Small sets for two nodes, which share one file.
    fn new(sets: u64) -> Self {
        let folder = tempdir().unwrap();
        let make = |seed| {
            let directory = folder.path().join(format!("set-{seed}"));
            let plan =
                SetPlan { seed, own_bytes: 70_000, shared_bytes: 50_000, ..SetPlan::default() };
            (directory.clone(), write_set(&directory, &plan))
        };
        let (sets, keys) = (1..=sets).map(make).unzip();
        Self { folder, sets, keys }
    }

    fn store(&self, rank: u32) -> PathBuf {
        self.folder.path().join(format!("store-{rank}"))
    }

    fn node(&self, rank: u32, pause: Option<&str>) -> Running {
        Running::node(&self.store(rank), pause)
    }

    fn push(&self, set: usize, nodes: &[&Running]) -> Vec<String> {
        ["push", path(&self.sets[set]), "--to", &addresses(nodes), "--json"]
            .map(str::to_owned)
            .to_vec()
    }

    /// A node that speaks TLS.
    fn member(&self, rank: u32, pause: Option<&str>) -> Running {
        let store = self.store(rank);
        let listen = ["node", "--tls", "--listen", "127.0.0.1:0", "--json"];
        Running::start(&[&listen[..], &["--store", path(&store)]].concat(), pause)
    }

    /// A cluster in the folder `home`, with two members.
    fn members(&self, home: &Path) -> [Running; 2] {
        succeed(&["cluster", "init", "--cluster", path(home)]);
        [0, 1].map(|rank| {
            let node = self.member(rank, None);
            let token = node.json["join"]["token"].as_str().unwrap();
            let name = ["a", "b"][rank as usize];
            let (address, home) = (node.address(), path(home));
            let add = ["cluster", "add", &address, "--token", token, "--name", name];
            succeed(&[&add[..], &["--cluster", home]].concat());
            node
        })
    }

    /// Which set and release is current on a node, by the record on its disk; and whether one is
    /// pending.
    fn current(&self, rank: u32) -> (Option<usize>, u64, Option<usize>) {
        let Ok(text) = fs::read(self.store(rank).join("active.json")) else {
            return (None, 0, None);
        };
        let json: Value = serde_json::from_slice(&text).unwrap();
        let model = &json["models"]["tiny"];
        let set = |release: &Value| {
            let package = release["package"].as_str()?;
            self.keys.iter().position(|set| key(set, rank).to_string() == package)
        };
        let current = &model["current"];
        (set(current), current["release"].as_u64().unwrap_or(0), set(&model["pending"]))
    }
}

fn addresses(nodes: &[&Running]) -> String {
    nodes.iter().map(|node| node.address()).collect::<Vec<_>>().join(",")
}

fn done(args: &[String]) -> Value {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    serde_json::from_str(&succeed(&args)).unwrap()
}

/// Runs a command while a node pauses at `point`, and kills the node there.
fn killed_at(point: &str, node: Running, args: Vec<String>) -> Output {
    let command = thread::spawn(move || {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run(&args)
    });
    node.wait_for(&format!("paused at {point}"));
    node.kill();
    command.join().unwrap()
}

#[test]
fn node_killed_while_a_release_is_prepared_leaves_the_one_before_everywhere() {
    for point in ["node:release-preparing", "node:release-pending"] {
        let cluster = Cluster::new(2);
        let node = cluster.node(0, None);
        let other = cluster.node(1, None);
        done(&cluster.push(0, &[&node, &other]));
        drop(other);
        let other = cluster.node(1, Some(point));
        let args = cluster.push(1, &[&node, &other]);
        let output = killed_at(point, other, args);
        assert_eq!(output.status.code(), Some(2), "{point}: {}", text(&output.stderr));
        let said = text(&output.stderr);
        assert!(said.contains("because rank 1 did not take the release"), "{point}: {said}");
        assert_eq!(
            cluster.current(0),
            (Some(0), 1, None),
            "{point}: the old one, and none pending"
        );
        assert_eq!(cluster.current(1).0, Some(0), "{point}");
        // The node comes back; what it may hold as pending was decided by nobody.
        let other = cluster.node(1, None);
        assert_eq!(cluster.current(1).0, Some(0), "{point}");
        done(&cluster.push(1, &[&node, &other]));
        let (set, release, pending) = cluster.current(0);
        assert_eq!((set, pending), (Some(1), None), "{point}");
        assert_eq!(cluster.current(1), (Some(1), release, None), "{point}: the same release");
    }
}

#[test]
fn node_killed_while_it_activates_finishes_when_a_controller_comes_again() {
    for point in ["node:activating", "node:activated"] {
        for contact in ["push", "rollback", "other set"] {
            let cluster = Cluster::new(3);
            let node = cluster.node(0, None);
            let other = cluster.node(1, None);
            done(&cluster.push(0, &[&node, &other]));
            drop(other);
            let other = cluster.node(1, Some(point));
            let args = cluster.push(1, &[&node, &other]);
            let output = killed_at(point, other, args);
            assert_eq!(output.status.code(), Some(2), "{point}");
            let said = text(&output.stderr);
            assert!(said.contains("push again to finish it"), "{point}: {said}");
            assert_eq!(cluster.current(0), (Some(1), 2, None), "{point}: it was decided");
            let is_pending = point == "node:activating";
            let expected = if is_pending { (Some(0), 1, Some(1)) } else { (Some(1), 2, None) };
            assert_eq!(cluster.current(1), expected, "{point}");
            for (rank, set) in [(0, 1), (1, 0), (1, 1)] {
                let package = key(&cluster.keys[set], rank).to_string();
                assert_clean(&cluster.store(rank).join("packages").join(package));
            }
            let other = cluster.node(1, None);
            match contact {
                "push" => {
                    let report = done(&cluster.push(1, &[&node, &other]));
                    assert_eq!(report["nodes"][1]["sent_chunks"], 0, "{report}");
                    assert_eq!(cluster.current(1), (Some(1), 2, None), "the same release");
                }
                "rollback" if is_pending => {
                    let args = ["cluster", "rollback", "--json", "--nodes"];
                    let nodes = addresses(&[&node, &other]);
                    let report: Value =
                        serde_json::from_str(&succeed(&[&args[..], &[&nodes]].concat())).unwrap();
                    assert_eq!(
                        (&report["release"], &report["restored"]),
                        (&json!(2), &Value::Null)
                    );
                    assert_eq!(cluster.current(1), (Some(1), 2, None));
                }
                "rollback" => {
                    let nodes = addresses(&[&node, &other]);
                    succeed(&["cluster", "rollback", "--nodes", &nodes]);
                    assert_eq!(cluster.current(1), (Some(0), 3, None));
                }
                _ => {
                    done(&cluster.push(2, &[&node, &other]));
                    assert_eq!(cluster.current(1), (Some(2), 3, None));
                }
            }
            assert_eq!(cluster.current(0), cluster.current(1), "{point}, {contact}");
        }
    }
}

#[test]
fn controller_killed_between_and_within_the_phases_finishes_by_pushing_again() {
    for point in ["push:release-pending:0", "push:release-pending:1", "push:activating:1"] {
        let cluster = Cluster::new(2);
        let (node, other) = (cluster.node(0, None), cluster.node(1, None));
        done(&cluster.push(0, &[&node, &other]));
        let args = cluster.push(1, &[&node, &other]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        kill(paused(point, &args));
        for rank in 0..2 {
            assert!(cluster.current(rank).0.is_some(), "{point}");
        }
        succeed(&args);
        assert_eq!(cluster.current(0), (Some(1), 2, None), "{point}: one release, one number");
        assert_eq!(cluster.current(1), (Some(1), 2, None), "{point}");
    }
}

#[test]
fn rollback_goes_to_the_release_before_and_back_on_all_nodes_or_on_none() {
    let cluster = Cluster::new(3);
    let (node, other) = (cluster.node(0, None), cluster.node(1, None));
    let nodes = addresses(&[&node, &other]);
    let rollback = ["cluster", "rollback", "--nodes", &nodes];
    done(&cluster.push(0, &[&node, &other]));
    let said = fail(2, &rollback);
    assert!(said.contains("before release 1"), "{said}");
    done(&cluster.push(1, &[&node, &other]));
    done(&cluster.push(2, &[&node, &other]));
    succeed(&rollback);
    assert_eq!(cluster.current(0), (Some(1), 4, None));
    succeed(&rollback);
    assert_eq!(cluster.current(0), (Some(2), 5, None), "once more goes forward");
    let to = [&rollback[..], &["--to", "1", "--json"]].concat();
    let report: Value = serde_json::from_str(&succeed(&to)).unwrap();
    assert_eq!((&report["release"], &report["restored"]), (&json!(6), &json!(1)), "{report}");
    for rank in 0..2 {
        assert_eq!(cluster.current(rank), (Some(0), 6, None));
    }
    let said = fail(2, &[&rollback[..], &["--to", "77"]].concat());
    assert!(said.contains("does not have release 77"), "{said}");
    let said = fail(2, &[&rollback[..2], &["--nodes", &node.address()]].concat());
    assert!(said.contains("no node has rank 1"), "{said}");
    let said = fail(2, &[&rollback[..], &["nobody"]].concat());
    assert!(said.contains("no node has an active release of nobody"), "{said}");
    // A node that cannot be reached, and one that dies meanwhile, leave all as they were.
    drop(other);
    fail(2, &rollback);
    assert_eq!(cluster.current(0), (Some(0), 6, None));
    let other = cluster.node(1, Some("node:release-pending"));
    let args = ["cluster", "rollback", "--nodes", &addresses(&[&node, &other])].map(str::to_owned);
    let output = killed_at("node:release-pending", other, args.to_vec());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(cluster.current(0), (Some(0), 6, None));
    assert_eq!(cluster.current(1).0, Some(0));
}

#[test]
fn number_that_is_not_newer_is_refused_without_allow_rollback() {
    let cluster = Cluster::new(2);
    let (node, other) = (cluster.node(0, None), cluster.node(1, None));
    let push = |set: usize, options: &[&str]| {
        let args = cluster.push(set, &[&node, &other]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        run(&[&args[..], options].concat())
    };
    assert!(push(0, &["--release", "7"]).status.success());
    assert_eq!(cluster.current(1), (Some(0), 7, None));
    let refused = push(1, &["--release", "6"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(said.contains("release 6 of tiny is not newer than release 7"), "{said}");
    assert_eq!(cluster.current(0), (Some(0), 7, None));
    assert!(push(1, &["--release", "6", "--allow-rollback"]).status.success());
    assert_eq!(cluster.current(0), (Some(1), 6, None));
    assert!(push(0, &[]).status.success());
    assert_eq!(cluster.current(1), (Some(0), 8, None), "above all that were");
}

#[test]
fn members_take_records_that_their_controller_signed_and_no_others() {
    let cluster = Cluster::new(2);
    let home = cluster.folder.path().join("cluster");
    let choice = ["--cluster", path(&home)];
    let nodes = cluster.members(&home);
    for set in [0, 1] {
        let push = ["push", path(&cluster.sets[set]), "--to", "a,b"];
        succeed(&[&push[..], &choice].concat());
    }
    let stored = fs::read_to_string(cluster.store(1).join("active.json")).unwrap();
    let json: Value = serde_json::from_str(&stored).unwrap();
    let current = &json["models"]["tiny"]["current"];
    let signed: SignedRelease = serde_json::from_value(current["record"].clone()).unwrap();
    let opened = Home::open(&home).unwrap();
    signed.verify(opened.credentials(), signed.release().time).unwrap();
    assert_eq!(signed.release().release, 2);

    let member = opened.member("b").unwrap().clone();
    let offer = |release: &SignedRelease| {
        let mut client = NodeClient::connect(opened.endpoint(&member), TIMEOUTS).unwrap();
        let request = json!({ "rank": 1, "release": release });
        client.operate("activation.prepare", &request).map_err(|error| error.to_string())
    };
    let release = |set: &PackageSet| {
        let package = |rank: u32| ReleasePackage {
            package: key(set, rank),
            manifest: set.packages[rank as usize].manifest,
        };
        let packages = vec![package(0), package(1)];
        Release::new("tiny".to_owned(), 9, None, set.ids.layout, packages)
    };
    let unsigned = SignedRelease::sign(release(&cluster.keys[0]), None).unwrap();
    assert!(offer(&unsigned).unwrap_err().contains("not signed"));
    let foreign = cluster.folder.path().join("foreign");
    succeed(&["cluster", "init", "--cluster", path(&foreign)]);
    let stranger = Home::open(&foreign).unwrap();
    let forged =
        SignedRelease::sign(release(&cluster.keys[0]), Some(stranger.credentials())).unwrap();
    assert!(offer(&forged).unwrap_err().contains("signature is refused"));
    let mut bent = serde_json::to_value(&signed).unwrap();
    bent["record"] =
        bent["record"].as_str().unwrap().replace(r#""release":2"#, r#""release":9"#).into();
    let bent: SignedRelease = serde_json::from_value(bent).unwrap();
    assert!(offer(&bent).unwrap_err().contains("signature is refused"));
    assert_eq!(fs::read_to_string(cluster.store(1).join("active.json")).unwrap(), stored);

    succeed(&[&["cluster", "rollback"], &choice[..]].concat());
    assert_eq!(cluster.current(0), (Some(0), 3, None));
    let said = succeed(&[&["cluster", "status"], &choice[..]].concat());
    assert!(said.contains("(release 3)"), "{said}");
    succeed(&[&["cluster", "fsck"], &choice[..]].concat());
    drop(nodes);
}

#[test]
fn status_of_a_cluster_finishes_what_was_half_activated_and_tells_a_damaged_record() {
    let cluster = Cluster::new(2);
    let home = cluster.folder.path().join("cluster");
    let choice = ["--cluster", path(&home)];
    let [node, other] = cluster.members(&home);
    let push =
        |set: usize| [&["push", path(&cluster.sets[set]), "--to", "a,b"], &choice[..]].concat();
    succeed(&push(0));
    let again = |other: Running, pause: Option<&str>| {
        drop(other);
        let other = cluster.member(1, pause);
        succeed(&[&["cluster", "move", "b", &other.address()], &choice[..]].concat());
        other
    };
    let other = again(other, Some("node:activating"));
    let args = push(1).into_iter().map(str::to_owned).collect();
    let output = killed_at("node:activating", other, args);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(cluster.current(1), (Some(0), 1, Some(1)));
    drop(node);
    // Nobody who has the release as current can be asked.
    let other = cluster.member(1, None);
    succeed(&[&["cluster", "move", "b", &other.address()], &choice[..]].concat());
    let status = [&["cluster", "status"], &choice[..]].concat();
    let output = run(&status);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("b: release 2 of \"tiny\" is pending"), "{said}");
    let node = cluster.member(0, None);
    succeed(&[&["cluster", "move", "a", &node.address()], &choice[..]].concat());
    let output = run(&status);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(said.contains("release 2 of tiny, current on other nodes, is so here now"), "{said}");
    assert_eq!(cluster.current(1), (Some(1), 2, None));
    fs::write(cluster.store(1).join("active.json"), "{}").unwrap();
    let output = run(&status);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("active.json cannot be used") && said.contains("--rebuild"), "{said}");
    assert!(text(&output.stdout).contains("(release 2)"), "the other member is told as ever");
}
