//! Nodes that speak mutual TLS: joining, pushing, serving and losing ranks, with real processes;
//! and everybody who must not get in.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use serde_json::Value;
use shardpack_identity::{
    Channel, Endpoint, ExpectedPeer, HandshakeDeadline, Home, Role, Service, credentials_of_node,
};
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::receive::NodeClient;
use tempfile::{TempDir, tempdir};

use crate::{
    harness::{fail, path, run, shardpack, succeed, text},
    ports::free_port,
    recovery::lose,
    running::{HANG, Running, ask},
    sets::kjv_for_two,
    skip::skip,
};

/// Only a test that hangs waits that long.
const LONG: Duration = HANG;

/// A cluster's folder and room for its nodes.
pub(crate) struct Scene {
    folder: TempDir,
    cluster: PathBuf,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = tempdir().unwrap();
        let cluster = folder.path().join("cluster");
        succeed(&["cluster", "init", "--cluster", path(&cluster)]);
        Self { folder, cluster }
    }

    pub(crate) fn store(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A node that speaks TLS, joined or not. Its port on the loopback stays its own when it has ended, so that it or
    /// another one may listen there again.
    pub(crate) fn start(&self, name: &str, options: &[&str]) -> Running {
        let store = self.store(name);
        let own = format!("127.0.0.1:{}", free_port());
        let mut args = vec!["node", "--json", "--threads", "1", "--store", path(&store)];
        args.extend(options.iter().map(|it| if *it == "127.0.0.1:0" { own.as_str() } else { *it }));
        Running::start(&args, None)
    }

    pub(crate) fn cluster(&self, args: &[&str]) -> Value {
        let all = [&["cluster"], args, &["--json", "--cluster", path(&self.cluster)]].concat();
        serde_json::from_str(&succeed(&all)).unwrap()
    }

    /// Says what the node printed, gives its token when asked, and calls it `name`.
    pub(crate) fn add(&self, node: &Running, name: &str) {
        let line = node.json["join"]["command"].as_str().unwrap();
        let line: Vec<&str> = line.split(' ').collect();
        assert_eq!(line[..2], ["shardpack", "cluster"]);
        let args = [&line[1..], &["--name", name, "--json"], &self.choice()[..]].concat();
        let mut command = shardpack();
        let output = piped(command.args(args), &format!("{}\n", token(node)));
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    /// Two nodes that have joined as `a` and `b`.
    pub(crate) fn pair(&self, options: &[&str]) -> [Running; 2] {
        ["a", "b"].map(|name| {
            let node = self.start(name, options);
            self.add(&node, name);
            node
        })
    }

    /// What is added to a command that is to use the cluster.
    pub(crate) fn choice(&self) -> [&str; 2] {
        ["--cluster", path(&self.cluster)]
    }

    pub(crate) fn push(&self, set: &Path) {
        succeed(
            &[&["push", path(set), "--to", "a,b", "--streams", "3"], &self.choice()[..]].concat(),
        );
    }
}

/// Runs a command that reads `input`.
fn piped(command: &mut Command, input: &str) -> Output {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn token(node: &Running) -> String {
    node.json["join"]["token"].as_str().unwrap().to_owned()
}

fn set(scene: &Scene) -> PathBuf {
    kjv_for_two(&scene.store("set"))
}

pub(crate) const TLS: [&str; 3] = ["--listen", "127.0.0.1:0", "--tls"];

/// Join, push, ask, serve.
fn check_whole_way(scene: &Scene, options: &[&str]) -> ([Running; 2], Running) {
    let set = set(scene);
    let nodes = scene.pair(options);
    scene.push(&set);
    let status = scene.cluster(&["status"]);
    for (rank, member) in status["members"].as_array().unwrap().iter().enumerate() {
        assert_eq!(member["reachable"], true, "{status}");
        let active = member["active"].as_object().unwrap().values().next().unwrap();
        assert_eq!(active["current"]["rank"], rank, "{status}");
    }
    let server = Running::serve(&set, &[&["--nodes", "a,b"], &scene.choice()[..]].concat());
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    (nodes, server)
}

#[test]
fn cluster_status_asks_every_member() {
    let scene = Scene::new();
    let set = set(&scene);
    let [a, b] = scene.pair(&TLS);
    scene.push(&set);
    let choice = scene.choice();
    let doctor = [&["doctor", path(&set), "--nodes", "a,b", "--json"], &choice[..]].concat();
    let found: Value = serde_json::from_str(&succeed(&doctor)).unwrap();
    let of = |index: usize| found["reports"][index]["of"].as_str().unwrap().to_owned();
    assert_eq!(of(0), format!("node a ({})", a.address()));
    assert_eq!(of(1), format!("node b ({})", b.address()));
    // A certificate that has less than half of its time left is renewed when its node is named.
    let file = scene.cluster.join("cluster.json");
    let mut document: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    document["members"][0]["expires"] = 1_800_000_000.into();
    fs::write(&file, document.to_string()).unwrap();
    succeed(&doctor);
    a.wait_for("renewed, member until");
    let expires = |index: usize| scene.cluster(&["list"])["members"][index]["expires"].as_u64();
    assert!(expires(0) >= expires(1));
    b.kill();
    let output = run(&[&["cluster", "status", "--json"], &choice[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["members"][0]["reachable"], true);
    let problem = status["members"][1]["problem"].as_str().unwrap();
    assert!(problem.contains("could not connect"), "{problem}");
}

#[test]
fn nodes_join_serve_and_lose_ranks_inside_tls() {
    let scene = Scene::new();
    let (nodes, server) = check_whole_way(&scene, &TLS);
    // Each rank once, as a power cut would end it; the group forms again, inside TLS.
    for node in nodes.iter().rev() {
        let ranks = node.children();
        assert_eq!(ranks.len(), 1, "one rank on each node");
        lose(&server, ranks[0]);
    }
    assert_eq!(server.terminate(), Some(0));
    // A node that is started again is a member still, elsewhere too.
    let [a, b] = nodes;
    assert_eq!(a.terminate(), Some(0));
    let a = scene.start("a", &["--listen", "127.0.0.1:0"]);
    scene.cluster(&["move", "a", &a.address()]);
    assert!(a.json["tls"] == true && a.json["name"] == "a" && a.json["join"].is_null());
    let choice = scene.choice();
    let server = Running::serve(&scene.store("set"), &[&["--nodes", "a,b"], &choice[..]].concat());
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    drop(server);
    // Put out, it ends its rank, has no cluster and invites again.
    scene.cluster(&["remove", "b"]);
    b.wait_for("left its cluster");
    assert!(b.children().is_empty(), "the rank ends with the membership");
    assert_eq!(scene.cluster(&["list"])["members"].as_array().unwrap().len(), 1);
}

/// An address of this machine that is not its loopback.
fn own_address() -> Option<IpAddr> {
    // Nothing is sent: the system only says from where it would.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

#[test]
fn a_non_loopback_address_serves_end_to_end() {
    let Some(ip) = own_address() else {
        return skip("network", "this machine has no address but its loopback's");
    };
    let scene = Scene::new();
    let listen = SocketAddr::new(ip, 0).to_string();
    // Before it has joined, such a node accepts only a request to join.
    let alone = scene.start("alone", &["--listen", &listen]);
    assert!(alone.json["tls"] == true && alone.json["join"].is_object(), "{}", alone.json);
    let error = fail(2, &["push", path(&set(&scene)), "--to", &alone.address()]);
    assert!(error.contains("no cluster on this machine"), "{error}");
    // One whose ranks would be at that address neither, though it listens on loopback.
    let advertised = ip.to_string();
    let options = ["--listen", "127.0.0.1:0", "--advertise", &advertised];
    let forwarded = scene.start("forwarded", &options);
    assert!(forwarded.json["tls"] == true, "{}", forwarded.json);
    let scene = Scene::new();
    // All addresses of the machine, and the ranks on one of them.
    let everywhere = ["--listen", "0.0.0.0:0", "--advertise", &advertised];
    let options: &[&str] = if ip.is_ipv4() { &everywhere } else { &["--listen", &listen] };
    let (_nodes, server) = check_whole_way(&scene, options);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn nodes_in_network_namespaces_recover_from_a_pulled_cable() {
    let scene = Scene::new();
    let Some(said) = in_namespaces(&scene, "netns.sh", &set(&scene), &[], 600) else { return };
    assert!(said.contains("found on the network"), "{said}");
    assert!(said.contains("silent as a member"), "{said}");
    assert!(said.contains("answered over the network"), "{said}");
    assert!(said.contains("rank 1 (node studio-2 (10.9.0.2:7420))"), "{said}");
    assert!(said.contains("the answer went on"), "{said}");
    assert!(said.contains("answered after the cable was back"), "{said}");
}

/// Ranks and nodes are lost in every way while eight streams are open. `SHARDPACK_FAULTS` is how often.
#[test]
#[cfg(target_os = "linux")]
#[expect(clippy::print_stdout, reason = "the pauses are worth their lines")]
fn streams_survive_whatever_happens_to_ranks_and_nodes() {
    let scene = Scene::new();
    let set = crate::harness::convert("kjv-4m", &scene.store("set"), &["--nodes", "3"]);
    let rounds = std::env::var("SHARDPACK_FAULTS").unwrap_or_else(|_| "10".to_owned());
    let seed = if rounds == "10" { "7".to_owned() } else { std::process::id().to_string() };
    let seconds = 60 + 20 * rounds.parse::<u32>().expect("SHARDPACK_FAULTS is a number");
    let Some(said) = in_namespaces(&scene, "faults.sh", &set, &[&rounds, &seed], seconds) else {
        return;
    };
    println!("{said}");
    let (_, summary) = said.rsplit_once("streams whole, the longest pause ").expect(&said);
    let pause: u32 = summary.split(' ').next().unwrap().parse().unwrap();
    // No hang. Other tests share the processors; what a pause is without them stands in the log.
    assert!(pause < 20_000, "{said}");
}

/// Runs a script with network namespaces of its own over a set; what it said, if there are such here.
#[cfg(target_os = "linux")]
fn in_namespaces(
    scene: &Scene,
    script: &str,
    set: &Path,
    args: &[&str],
    seconds: u32,
) -> Option<String> {
    const NAMESPACES: [&str; 7] =
        ["--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let unshare = |command: &[&str]| {
        std::process::Command::new("unshare").args(NAMESPACES).args(command).output()
    };
    let try_out = "ip link add near0 type veth peer name far0 && curl --version && pgrep --version";
    if !unshare(&["sh", "-c", try_out]).is_ok_and(|output| output.status.success()) {
        skip("netns", "no network namespaces for users, or no ip, curl or pgrep, on this machine");
        return None;
    }
    let room = scene.store("net");
    fs::create_dir(&room).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let (seconds, program) = (seconds.to_string(), env!("CARGO_BIN_EXE_shardpack"));
    let command = ["timeout", &seconds, path(&script), program, path(set), path(&room)];
    let output = unshare(&[&command[..], args].concat()).unwrap();
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    Some(said)
}

#[test]
fn tokens_that_are_wrong_used_or_late_join_nobody() {
    let scene = Scene::new();
    let [a, b] = ["a", "b"].map(|name| scene.start(name, &TLS));
    let choice = scene.choice();
    let add = |address: &str, token: &str| {
        let error =
            fail(2, &[&["cluster", "add", address, "--token", token], &choice[..]].concat());
        assert!(!error.contains(token), "tokens stay out of errors: {error}");
        error
    };
    let (address, token_of_a, token_of_b) = (a.address(), token(&a), token(&b));
    let error = add(&address, &token_of_b);
    assert!(error.contains("another node answers there"), "{error}");
    // The key is a's, the secret b's.
    let mixed = format!("{}{}", &token_of_b[..26], &token_of_a[26..]);
    let error = add(&address, &mixed);
    assert!(error.contains("token is wrong") || error.contains("another node"), "{error}");
    scene.add(&a, "a");
    let again = ["cluster", "add", &address, "--token", &token_of_a, "--name", "other"];
    let error = fail(2, &[&again, &choice[..]].concat());
    assert!(error.contains("in the cluster already, as a"), "{error}");
    assert_eq!(scene.cluster(&["list"])["members"][0]["name"], "a");
    // Used up; and this cluster's own node may be named again, as another's may not.
    let foreign = Scene::new();
    let foreign_choice = foreign.choice();
    let args = ["cluster", "add", &address, "--token", &token_of_a];
    let error = fail(2, &[&args, &foreign_choice[..]].concat());
    assert!(error.contains("in a cluster already"), "{error}");
    let late = scene.start("late", &[&TLS[..], &["--token-ttl", "0"]].concat());
    let error = add(&late.address(), &token(&late));
    assert!(error.contains("expired"), "{error}");
    // A node that speaks in the clear waits for no cluster.
    let plain = Running::node(&scene.store("plain"), None);
    let error = add(&plain.address(), &token_of_a);
    assert!(error.contains("started with --tls"), "{error}");
    let error = add(&address, "spj1_nonsense");
    assert!(error.contains("--token: not a token"), "{error}");
}

#[test]
fn a_token_comes_by_pipe_file_variable_or_argument() {
    let scene = Scene::new();
    let file = scene.store("token.txt");
    let choice = scene.choice();
    let ways = ["pipe", "dash", "file", "variable", "argument"];
    for way in ways {
        let node = scene.start(way, &TLS);
        let (address, token) = (node.address(), token(&node));
        fs::write(&file, format!("{token}\n")).unwrap();
        let mut command = shardpack();
        command.args(["cluster", "add", &address, "--name", way]).args(choice);
        let output = match way {
            "pipe" => piped(&mut command, &token),
            "dash" => piped(command.args(["--token", "-"]), &token),
            "file" => command.args(["--token-file", path(&file)]).output().unwrap(),
            "variable" => command.env("SHARDPACK_JOIN_TOKEN", &token).output().unwrap(),
            _ => command.args(["--token", &token]).output().unwrap(),
        };
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{way}: {errors}");
        assert!(said.contains(&format!("{way} ({address}) is in the cluster")), "{said}");
        assert!(!said.contains(&token) && !errors.contains(&token), "{way}: {said}{errors}");
    }
    assert_eq!(scene.cluster(&["list"])["members"].as_array().unwrap().len(), ways.len());
    let add = ["cluster", "add", "127.0.0.1:9"];
    let error = fail(2, &[&add, &choice[..]].concat());
    assert!(error.contains("standard input: there is no token"), "{error}");
    fs::write(&file, "spj1_nonsense").unwrap();
    let error = fail(2, &[&add[..], &["--token-file", path(&file)], &choice[..]].concat());
    assert!(error.contains("token.txt: not a token") && !error.contains("nonsense"), "{error}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_terminal_does_not_show_the_token() {
    let scene = Scene::new();
    let node = scene.start("a", &TLS);
    let token = token(&node);
    let line = format!(
        "{} cluster add {} --name a --cluster {}; stty -a",
        env!("CARGO_BIN_EXE_shardpack"),
        node.address(),
        path(&scene.cluster)
    );
    let log = scene.store("typescript");
    if Command::new("script").arg("--version").output().is_err() {
        return skip("script", "there is no `script` on this machine, which gives a terminal");
    }
    // A prompt that never comes ends the program, and with it the test.
    let mut command = Command::new("timeout");
    command.args(["--foreground", "60", "script", "--quiet", "--flush", "--return"]);
    command.args(["--command", &line, path(&log)]).env_remove("SHARDPACK_JOIN_TOKEN");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut shown, mut output) = (Vec::new(), child.stdout.take().unwrap());
    let mut byte = [0];
    while !shown.ends_with(b"(not echoed): ") {
        assert_eq!(output.read(&mut byte).unwrap(), 1, "{}", text(&shown));
        shown.extend(byte);
    }
    let mut keyboard = child.stdin.take().unwrap();
    keyboard.write_all(format!("{token}\n").as_bytes()).unwrap();
    output.read_to_end(&mut shown).unwrap();
    drop(keyboard);
    assert!(child.wait().unwrap().success(), "{}", text(&shown));
    let shown = text(&shown);
    assert!(shown.contains("is in the cluster") && !shown.contains(&token), "{shown}");
    assert!(shown.contains(" echo ") && !shown.contains("-echo "), "it shows again: {shown}");
}

#[test]
fn idle_connections_in_every_slot_keep_nobody_from_joining() {
    let scene = Scene::new();
    let node = scene.start("a", &TLS);
    let silent = || -> Vec<TcpStream> {
        (0..100).map(|_| TcpStream::connect(node.address()).unwrap()).collect()
    };
    let before = silent();
    scene.add(&node, "a");
    let after = silent();
    assert_eq!(scene.cluster(&["status"])["members"][0]["reachable"], true);
    // Those who came first have made room.
    before[0].set_read_timeout(Some(LONG)).unwrap();
    match (&before[0]).read(&mut [0]) {
        Ok(count) => assert_eq!(count, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    drop(after);
}

#[test]
fn only_a_controller_of_the_cluster_is_served() {
    let scene = Scene::new();
    let node = scene.start("a", &TLS);
    scene.add(&node, "a");
    let (address, choice) = (node.address(), scene.choice());
    let socket = || TcpStream::connect(&address).unwrap();

    // Noise and silence, and a controller all the same.
    let silent: Vec<TcpStream> = (0..5).map(|_| socket()).collect();
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 3000], b"\x16\x03\x01\x40\x00"] {
        let mut socket = socket();
        socket.write_all(noise).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        // It hangs up, with a word of TLS or without.
        let mut answer = Vec::new();
        match socket.read_to_end(&mut answer) {
            Ok(_) => assert!(answer.len() < 100, "{answer:?}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
    scene.cluster(&["status"]);
    drop(silent);

    // In the clear.
    let error = NodeClient::connect(Endpoint::plain(&address), Timeouts::default()).map(drop);
    let error = format!("{:?}", error.unwrap_err());
    assert!(error.contains("Tls"), "{error}");

    // A node of the cluster in a controller's place.
    let of_node = credentials_of_node(&scene.store("a").join("identity")).unwrap().unwrap();
    for service in [Service::Transfer, Service::Member] {
        let expected = ExpectedPeer { role: Role::Node, key: Some(of_node.key()) };
        let error =
            Channel::call(socket(), &of_node, service, expected, HandshakeDeadline::after(LONG));
        let error = error.map(drop).unwrap_err().to_string();
        assert!(error.contains("refused this machine's role"), "{error}");
    }

    // The controller of another cluster that has got hold of this one's list of members.
    let foreign = Scene::new();
    let list = |scene: &Scene| -> Value {
        serde_json::from_slice(&fs::read(scene.cluster.join("cluster.json")).unwrap()).unwrap()
    };
    let mut forged = list(&foreign);
    forged["members"] = list(&scene)["members"].clone();
    fs::write(foreign.cluster.join("cluster.json"), forged.to_string()).unwrap();
    let error = fail(2, &[&["cluster", "remove", "a"], &foreign.choice()[..]].concat());
    assert!(error.contains("another cluster"), "{error}");
    // It is told apart from both sides: this node does not take the foreign controller either.
    let home = Home::open(&foreign.cluster).unwrap();
    let member = home.member("a").unwrap().key;
    let called = Channel::call(
        socket(),
        home.credentials(),
        Service::Member,
        ExpectedPeer { role: Role::Node, key: Some(member) },
        HandshakeDeadline::after(LONG),
    );
    let error = called.map(drop).unwrap_err().to_string();
    assert!(error.contains("refused this machine's certificate"), "{error}");

    // Another node at a member's address.
    drop(node);
    let other = scene.start("other", &["--listen", &address, "--tls"]);
    scene.cluster(&["remove", "a", "--force"]);
    scene.add(&other, "other");
    let mut document = list(&scene);
    document["members"][0]["key"] = serde_json::json!(of_node.key());
    fs::write(scene.cluster.join("cluster.json"), document.to_string()).unwrap();
    let output = run(&[&["cluster", "status"], &choice[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("another node answers there"));
}

#[test]
fn errors_name_what_is_missing_and_what_to_do() {
    let scene = Scene::new();
    let set = set(&scene);
    let missing = scene.store("no-cluster");
    let error = fail(2, &["cluster", "list", "--cluster", path(&missing)]);
    assert!(error.contains("there is no cluster here"), "{error}");
    let error = fail(2, &["cluster", "init", "--cluster", path(&scene.cluster)]);
    assert!(error.contains("there is a cluster here already"), "{error}");
    let choice = scene.choice();
    let push = |to: &str| fail(2, &[&["push", path(&set), "--to", to], &choice[..]].concat());
    assert!(push("studio-1,studio-2").contains("studio-1 is no node of cluster"));
    assert!(push("192.0.2.1:7420,192.0.2.2:7420").contains("192.0.2.1:7420 is no node"));
    let store = scene.store("x");
    let listen = ["node", "--listen", "0.0.0.0:0", "--store", path(&store)];
    let error = fail(2, &listen);
    assert!(error.contains("every address of this machine"), "{error}");
    // A key that others can read.
    let key = scene.cluster.join("controller.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let error = fail(2, &[&["cluster", "list"], &choice[..]].concat());
    assert!(error.contains("controller.key") && error.contains("chmod 600"), "{error}");
}

#[test]
fn a_reset_node_belongs_to_no_cluster() {
    let scene = Scene::new();
    let node = scene.start("a", &TLS);
    scene.add(&node, "a");
    let address = node.address();
    drop(node);
    // Its store is in nobody's use: it leaves, and has another key.
    let node = scene.start("a", &["--listen", &address, "--tls", "--reset"]);
    assert!(node.json["join"].is_object(), "{}", node.json);
    let error = fail(2, &[&["cluster", "renew", "a"], &scene.choice()[..]].concat());
    assert!(error.contains("has not joined a cluster"), "{error}");
    scene.cluster(&["remove", "a", "--force"]);
    scene.add(&node, "a");
    let renewed = scene.cluster(&["renew"]);
    assert_eq!(renewed["renewed"][0]["name"], "a");
}
