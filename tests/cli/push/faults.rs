//! A hundred faults of a push to two nodes that relay shared files: either side killed, links cut, closed
//! and bent at any byte, a disk that fills up. Real processes, a list from a seed.
//!
//! After each: every package that is listed is whole, nothing else is current, and the same push ends well
//! and sends no chunk again but those that were in flight.

use std::{
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicUsize},
    time::Instant,
};

use super::{
    tap::{CHUNK, CHUNK_STORED, Fate, HEADER_BYTES, Place, Tap, Way},
    *,
};
use crate::{
    harness::{kill, path, run, shardpack, text},
    running::{HANG, Running},
};

const FAULTS: usize = 100;
const SEED: u64 = 0x05ee_df0d;
const NODES: usize = 2;

/// Runs at a time: most of a run is waiting for processes.
const WORKERS: usize = 4;

/// Small files of each kind, two of weights, three of text.
const SMALL_FILES: u64 = 14;
const CHUNKS: u64 = 2 * SMALL_FILES + 5;

/// Chunks that a push has in flight at most.
const IN_FLIGHT: u64 = 16;

/// Chunks that a node has stored and not yet listed at most.
const UNLISTED: u64 = 16;

/// Bytes of a disk that can be filled: the reserve of a store, and room for a package.
const DISK_BYTES: u64 = (256 << 20) + (24 << 20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cut,
    Closed(Way),
    Bent(Way),
    ControllerKilled,
    NodeKilled(Way),
    DiskFull,
}

const KINDS: [Kind; 10] = [
    Kind::Cut,
    Kind::Closed(Way::In),
    Kind::Closed(Way::Out),
    Kind::Bent(Way::In),
    Kind::Bent(Way::Out),
    Kind::ControllerKilled,
    Kind::ControllerKilled,
    Kind::NodeKilled(Way::In),
    Kind::NodeKilled(Way::Out),
    Kind::DiskFull,
];

impl Kind {
    /// The way whose bytes are counted.
    const fn way(self) -> Way {
        match self {
            Self::Closed(way) | Self::Bent(way) | Self::NodeKilled(way) => way,
            Self::Cut | Self::ControllerKilled | Self::DiskFull => Way::In,
        }
    }

    /// Whether chunks may be lost that the node had written and not yet listed.
    const fn loses_unlisted(self) -> bool {
        matches!(self, Self::NodeKilled(_) | Self::DiskFull)
    }
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    number: usize,
    kind: Kind,
    /// At whose wire.
    node: usize,
    /// After which share of the bytes of an undisturbed push.
    share: f64,
    bit: u8,
}

/// The list; the same each time.
fn faults() -> Vec<Fault> {
    let mut state = SEED;
    // Multiplier and increment of Knuth's MMIX.
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let fault = |number: usize| {
        let kind = KINDS[number % KINDS.len()];
        let node = usize::from(random() < 0.5);
        Fault { number, kind, node, share: random(), bit: (random() * 8.0) as u8 }
    };
    (0..FAULTS).map(fault).collect()
}

/// Stores in memory where that is possible: kills of processes lose nothing there either, and syncing costs
/// nothing.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A disk of its own for a store, where the system lets the test mount one.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let size = format!("size={DISK_BYTES}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs", path(at)]).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| Self(at.to_owned()))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    fn fill(&self) {
        let mut file = fs::File::create(self.filler()).unwrap();
        let zeros = vec![0; 1 << 20];
        while file.write_all(&zeros).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", path(&self.0)]).status();
    }
}

/// A node whose files cannot become longer than a share of the weights', where no disk can be mounted.
fn limited_node(store: &Path, share: f64) -> Running {
    // In blocks of 512 bytes.
    let limit = (share * 300.0) as u64 + 20;
    let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
    let program = env!("CARGO_BIN_EXE_shardpack");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", program, "node", "--listen", "127.0.0.1:0", "--json"]);
    command.args(["--threads", "1", "--store", path(store)]).stdin(Stdio::null());
    Running::spawn(command)
}

/// The moment of a fault that the test itself carries out, while the wire waits.
#[derive(Default)]
struct Moment {
    reached: AtomicBool,
    acted: AtomicBool,
}

impl Moment {
    fn wait(&self) {
        while !self.acted.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_micros(200));
        }
    }
}

/// What the wire in front of the faulty node does.
fn fate(fault: Fault, at: u64, moment: Arc<Moment>) -> impl Fn(Place) -> Fate + Send + Sync {
    move |place| {
        if place.way != fault.kind.way() || place.offset < at {
            return Fate::Passes;
        }
        // A length that was bent makes a side wait for bytes until its deadline, which other tests measure.
        let is_length = (HEADER_BYTES - 4..HEADER_BYTES).contains(&place.at);
        if matches!(fault.kind, Kind::Bent(_)) && is_length {
            return Fate::Passes;
        }
        if moment.reached.swap(true, Ordering::SeqCst) {
            return Fate::Passes;
        }
        match fault.kind {
            Kind::Cut => Fate::Cut,
            Kind::Closed(_) => Fate::Closed,
            Kind::Bent(_) => Fate::Bent(fault.bit),
            Kind::ControllerKilled | Kind::NodeKilled(_) | Kind::DiskFull => {
                moment.wait();
                Fate::Passes
            }
        }
    }
}

fn push_args(set: &Path, to: &str) -> Vec<String> {
    ["push", path(set), "--to", to, "--retries", "0", "--json"].map(str::to_owned).to_vec()
}

fn start_push(set: &Path, taps: &[Tap]) -> Child {
    let to: Vec<String> = taps.iter().map(|tap| tap.address.to_string()).collect();
    let mut command = shardpack();
    command.args(push_args(set, &to.join(",")));
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits for the push, and carries out what is to happen at the moment of the fault.
fn attend(mut push: Child, moment: &Moment, mut act: impl FnMut(&mut Child)) -> bool {
    let deadline = Instant::now() + HANG;
    loop {
        if moment.reached.load(Ordering::SeqCst) && !moment.acted.load(Ordering::SeqCst) {
            act(&mut push);
            moment.acted.store(true, Ordering::SeqCst);
        }
        if let Some(status) = push.try_wait().unwrap() {
            moment.acted.store(true, Ordering::SeqCst);
            return status.success();
        }
        if Instant::now() > deadline {
            kill(push);
            panic!("the push does not end");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Every package that a store lists is whole and of the set, and so is what is current.
fn check_store(scene: &Scene, store: &Path, rank: u32) {
    let expected = key(&scene.set, rank);
    for entry in fs::read_dir(store.join("packages")).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.file_name().to_string_lossy(), expected.to_string());
        let manifest = Some(scene.set.packages[rank as usize].manifest);
        let options = VerifyOptions { tensors: TensorCheck::Hash };
        let report = verify_package(&entry.path(), manifest, options, &|_| {});
        let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        assert_eq!(findings, [""; 0]);
    }
    let Ok(active) = fs::read(store.join("active.json")) else { return };
    let active: Value = serde_json::from_slice(&active).unwrap();
    for (name, model) in active["models"].as_object().unwrap() {
        if let Some(package) = model["current"]["package"].as_str() {
            assert_eq!((name.as_str(), package), ("tiny", &expected.to_string()[..]));
            assert!(store.join("packages").join(package).is_dir(), "{package} is current");
        }
    }
}

/// What a fault came to.
#[derive(Clone, Copy, Debug, Default)]
struct Outcome {
    /// Whether it happened before the push was over.
    happened: bool,
    /// Whether the push failed by it.
    failed: bool,
    /// Chunks that were sent once more.
    again: u64,
}

/// Bytes of an undisturbed push at each node, to it and from it.
type Usual = [[u64; 2]; NODES];

fn undisturbed(scene: &Scene) -> Usual {
    let folder = folder();
    let nodes = [0, 1].map(|rank: u32| Running::node(&folder.path().join(rank.to_string()), None));
    let taps = nodes.each_ref().map(|node| Tap::new(&node.address()));
    assert!(attend(start_push(&scene.set_dir(), &taps), &Moment::default(), |_| {}));
    taps.each_ref().map(|tap| [tap.counts.bytes(Way::In), tap.counts.bytes(Way::Out)])
}

fn suffer(scene: &Scene, fault: Fault, usual: &Usual) -> Outcome {
    let folder = folder();
    let stores = [0, 1].map(|rank: u32| folder.path().join(rank.to_string()));
    let is_full = fault.kind == Kind::DiskFull;
    let disk = if is_full { Disk::mount(&stores[fault.node]) } else { None };
    let is_limited = is_full && disk.is_none();
    let node = |rank: usize| Some(Running::node(&stores[rank], None));
    let mut nodes = [0, 1].map(|rank| {
        let limits = is_limited && rank == fault.node;
        if limits { Some(limited_node(&stores[rank], fault.share)) } else { node(rank) }
    });
    let at = (fault.share * usual[fault.node][fault.kind.way() as usize] as f64) as u64;
    let moment = Arc::new(Moment::default());
    let addresses = nodes.each_ref().map(|node| node.as_ref().unwrap().address());
    let taps = [0, 1].map(|rank| {
        if rank == fault.node {
            Tap::with(&addresses[rank], fate(fault, at, Arc::clone(&moment)))
        } else {
            Tap::new(&addresses[rank])
        }
    });
    let push = start_push(&scene.set_dir(), &taps);
    let succeeded = attend(push, &moment, |push| match fault.kind {
        Kind::ControllerKilled => push.kill().unwrap(),
        Kind::NodeKilled(_) => nodes[fault.node].take().unwrap().kill(),
        Kind::DiskFull => disk.iter().for_each(Disk::fill),
        Kind::Cut | Kind::Closed(_) | Kind::Bent(_) => {}
    });
    if let Some(disk) = &disk {
        let _ = fs::remove_file(disk.filler());
    }
    if is_limited {
        nodes[fault.node] = None;
    }
    for (rank, store) in (0..).zip(&stores) {
        check_store(scene, store, rank);
    }

    let nodes = [0, 1].map(|rank| nodes[rank].take().or_else(|| node(rank)).unwrap());
    let to = nodes.each_ref().map(Running::address).join(",");
    let args = push_args(&scene.set_dir(), &to);
    let output = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut again = 0;
    for rank in 0..NODES {
        check_store(scene, &stores[rank], rank as u32);
        let state = &report["nodes"][rank];
        assert_eq!(state["state"], "active");
        assert_eq!(fs::read_dir(stores[rank].join("staging")).unwrap().count(), 0);
        let second =
            state["sent_chunks"].as_u64().unwrap() + state["relayed_chunks"].as_u64().unwrap();
        let counts = &taps[rank].counts;
        let (sent, answered) =
            (counts.frames(Way::In, CHUNK), counts.frames(Way::Out, CHUNK_STORED));
        let lost = if fault.kind.loses_unlisted() && rank == fault.node { UNLISTED } else { 0 };
        assert!(
            second + answered <= CHUNKS + lost,
            "rank {rank}: {answered} answered, {second} sent"
        );
        assert!(
            sent + second <= CHUNKS + IN_FLIGHT + lost,
            "rank {rank}: {sent} and {second} sent"
        );
        again += (sent + second).saturating_sub(CHUNKS);
    }
    let happened = moment.reached.load(Ordering::SeqCst) || is_limited;
    Outcome { happened, failed: !succeeded, again }
}

#[test]
#[expect(clippy::print_stdout, reason = "says how many of the faults meant something")]
fn a_hundred_faults_leave_nothing_wrong_active_and_a_push_that_ends() {
    let plan = SetPlan {
        own_bytes: 150_000,
        shared_bytes: 90_000,
        small_files: SMALL_FILES,
        ..SetPlan::default()
    };
    let scene = Scene::new(&plan);
    let usual = undisturbed(&scene);
    let (list, next) = (faults(), AtomicUsize::new(0));
    let (outcomes, begun) = (Mutex::new(Vec::new()), Instant::now());
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(fault) = list.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let suffered = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        suffer(&scene, *fault, &usual)
                    }));
                    let outcome = suffered.unwrap_or_else(|panic| {
                        println!("fault {}: {fault:?}", fault.number);
                        std::panic::resume_unwind(panic)
                    });
                    outcomes.lock().unwrap().push(outcome);
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    let count = |what: fn(&Outcome) -> bool| outcomes.iter().filter(|it| what(it)).count();
    let (happened, failed) = (count(|it| it.happened), count(|it| it.failed));
    let again: u64 = outcomes.iter().map(|it| it.again).sum();
    let seconds = begun.elapsed().as_secs_f32();
    println!(
        "{FAULTS} faults in {seconds:.1} s: {happened} came before the push was over, {failed} ended it, \
         {again} chunks were sent twice"
    );
    assert!(happened >= FAULTS * 6 / 10, "{happened} faults came in time");
    assert!(failed >= FAULTS / 2, "{failed} faults ended a push");
}
