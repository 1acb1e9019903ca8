//! MLX with one process per rank, with our all-reduce and with MLX's ring: the logits of the `cpu`
//! engine, and the same bits whatever the timing.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_collectives::{
    Deadline, Group, GroupCall, GroupObserver, GroupOp, LinkedGroup, ObservedGroup,
    join_on_loopback,
};
use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::{Collectives, Mlx},
    engine::LocalModel,
    loading::{OpenOptions, Package},
};
use shardpack_engine_api::TokenId;
use shardpack_formats::memory::KvType;
use shardpack_mlx::{Device, runtime};
use tempfile::{TempDir, tempdir};

use super::{TOLERANCE, families, in_steps, mlx, on_cpu, relative_errors, tokens};
use crate::{
    harness::{data, path},
    ports::free_port,
    reference_models::{open, open_with, write},
    skip::mlx_runtime,
};

/// Says to a process of this test program that it is a rank, and which: `1/3`.
const RANK_VARIABLE: &str = "SHARDPACK_TEST_MLX_RANK";

/// Our collectives, activations and sums in bfloat16.
const HALF: &str = "own, 16 bits";

/// Only a test that hangs waits that long.
const TIMEOUT: Duration = Duration::from_mins(10);

/// Whether this process is a rank of another process's test, in which case it has served as one:
/// it says where it listens, is told where all ranks do, and then computes what each line asks for.
fn was_rank() -> bool {
    let Ok(which) = env::var(RANK_VARIABLE) else { return false };
    let (rank, size) = which.split_once('/').unwrap();
    let (rank, size): (u32, u32) = (rank.parse().unwrap(), size.parse().unwrap());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    println!("\n{}", json!({ "address": listener.local_addr().unwrap() }));
    let mut lines = io::stdin().lock().lines().map_while(Result::ok);
    let addresses: Vec<SocketAddr> = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert_eq!(addresses.len() as u32, size);
    let deadline = Deadline::after(TIMEOUT);
    let group = Arc::new(join_on_loopback(rank, &listener, &addresses, deadline).unwrap());
    for line in lines {
        let job: Value = serde_json::from_str(&line).unwrap();
        let answer = match compute(&job, &group) {
            Ok(()) => json!({ "done": true }),
            Err(error) => json!({ "error": error }),
        };
        println!("{answer}");
    }
    true
}

fn compute(job: &Value, group: &Arc<LinkedGroup>) -> Result<(), String> {
    let text = |name: &str| job[name].as_str().unwrap_or_default().to_owned();
    let package = Package::open(Path::new(&text("package")), &OpenOptions::stored(1), &|_| ())
        .map_err(|error| error.to_string())?;
    let collectives = match text("collectives").as_str() {
        "ring" => Collectives::Ring,
        _ => Collectives::Own,
    };
    let place = [group.rank(), group.size()];
    let folder = mlx_runtime(runtime::FOLDER).ok_or("no runtime")?;
    let backend = Mlx::open(&folder, Some(Device::Cpu), collectives, place)
        .map_err(|error| error.to_string())?;
    let backend = if text("collectives") == HALF { backend.half() } else { backend };
    let group: Arc<dyn Group> = match job["delays"].as_u64() {
        None => Arc::clone(group) as Arc<dyn Group>,
        Some(seed) => {
            let state = AtomicU64::new(seed.wrapping_mul(31).wrapping_add(group.rank().into()));
            Arc::new(ObservedGroup::with_observer(Arc::clone(group), Delay(state)))
        }
    };
    let model = LocalModel::one_rank(&package, group, backend).map_err(|it| it.to_string())?;
    let tokens: Vec<TokenId> = serde_json::from_value(job["tokens"].clone()).unwrap();
    let logits = model.logits(&tokens).map_err(|error| format!("{error}: {error:?}"))?;
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
    fs::write(text("output"), bytes).map_err(|error| error.to_string())
}

/// Delays every all-reduce and all-gather of a rank by up to three milliseconds.
struct Delay(AtomicU64);

impl GroupObserver for Delay {
    fn observe<T>(&self, call: GroupCall, run: impl FnOnce() -> T) -> T {
        if matches!(call.op, GroupOp::AllReduce | GroupOp::AllGather) {
            let old = self.0.load(Ordering::Relaxed);
            let next =
                old.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            self.0.store(next, Ordering::Relaxed);
            thread::sleep(Duration::from_micros((next >> 33) % 3000));
        }
        run()
    }
}

/// A process for each rank; they serve any number of models, one after the other.
struct Ranks {
    ranks: Vec<RankChild>,
    folder: TempDir,
}

struct RankChild {
    child: Child,
    input: ChildStdin,
    said: mpsc::Receiver<Value>,
}

impl Drop for RankChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RankChild {
    /// Starts this test program again, with one test that begins with [`was_rank`].
    fn start(rank: u32, size: u32, hosts: &Path) -> Self {
        let (_, module) = module_path!().split_once("::").unwrap();
        let test = format!("{module}::own_all_reduce_gives_the_same_bits_whatever_the_timing");
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", &test, "--nocapture"])
            .env(RANK_VARIABLE, format!("{rank}/{size}"))
            .env("MLX_HOSTFILE", hosts)
            .env("MLX_RANK", rank.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // What the test program says besides is no JSON.
            lines.filter_map(|line| serde_json::from_str(&line).ok()).for_each(|json: Value| {
                let _ = say.send(json);
            });
        });
        Self { child, input, said }
    }

    fn tell(&mut self, line: &Value) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn hear(&self) -> Value {
        self.said.recv_timeout(TIMEOUT).expect("a rank answers")
    }
}

impl Ranks {
    fn start(size: u32) -> Self {
        let folder = tempdir().unwrap();
        let hosts = folder.path().join("hosts.json");
        let addresses: Vec<_> = (0..size).map(|_| [format!("127.0.0.1:{}", free_port())]).collect();
        fs::write(&hosts, json!(addresses).to_string()).unwrap();
        let mut ranks: Vec<_> =
            (0..size).map(|rank| RankChild::start(rank, size, &hosts)).collect();
        let addresses: Vec<Value> =
            ranks.iter().map(|rank| rank.hear()["address"].clone()).collect();
        for rank in &mut ranks {
            rank.tell(&json!(addresses));
        }
        Self { ranks, folder }
    }

    /// The logits of a set, the same bits on every rank.
    fn logits(
        &mut self,
        set: &Path,
        tokens: &[TokenId],
        collectives: &str,
        delays: Option<u64>,
    ) -> Vec<f32> {
        let output = |rank: usize| self.folder.path().join(format!("logits-{rank}"));
        let outputs: Vec<PathBuf> = (0..self.ranks.len()).map(output).collect();
        for (rank, (child, output)) in self.ranks.iter_mut().zip(&outputs).enumerate() {
            child.tell(&json!({
                "package": path(&set.join(format!("node-{rank}"))),
                "tokens": tokens, "collectives": collectives, "delays": delays,
                "output": path(output),
            }));
        }
        for child in &self.ranks {
            let answer = child.hear();
            assert_eq!(answer["done"], true, "{answer}");
        }
        let mut all = outputs.iter().map(|output| fs::read(output).unwrap());
        let first = all.next().unwrap();
        assert!(all.all(|other| other == first), "every rank has the same bits");
        let value = |four: &[u8]| f32::from_le_bytes(four.try_into().unwrap());
        first.chunks_exact(4).map(value).collect()
    }
}

/// Converts a model, and compares MLX's logits with those of `cpu` on as many ranks.
fn check(model: &Path, bits: u32, ranks: &mut Ranks, collectives: &str) {
    let nodes = ranks.ranks.len() as u32;
    let folder = tempdir().unwrap();
    let set = folder.path().join("set");
    write(model, &set, bits, nodes, ExpertSharding::Inside);
    let tokens = tokens(model);
    let cpu = on_cpu(&open(&set, nodes), &tokens);
    let mlx = ranks.logits(&set, &tokens, collectives, None);
    let name = model.file_name().unwrap().display();
    assert_eq!(cpu.len(), mlx.len(), "{name}");
    let worst = cpu.iter().zip(&mlx).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{name}, {bits} bits, {nodes} processes, {collectives}: {worst:.2e}");
    assert!(worst < TOLERANCE, "{name}, {bits} bits, {nodes} processes, {collectives}: {worst}");
}

/// A few families of different kinds: dense, experts, MLA, linear attention.
const FEW: [&str; 4] = ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next"];

fn few() -> impl Iterator<Item = PathBuf> {
    let found = families();
    let of = move |name: &str| {
        let is = |model: &&PathBuf| model.file_name().is_some_and(|it| it == name);
        let found = found.iter().find(is).cloned();
        found.unwrap_or_else(|| panic!("no model {name}"))
    };
    FEW.into_iter().map(of)
}

#[test]
fn mlx_on_two_processes_matches_the_cpu_engine() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let mut ranks = Ranks::start(2);
    for model in families() {
        for bits in [4, 8, 16] {
            check(&model, bits, &mut ranks, "own");
        }
    }
    for model in few() {
        for bits in [4, 16] {
            check(&model, bits, &mut ranks, "ring");
        }
    }
}

/// The bound is that of one rank: sums of ranks are added in f32 and rounded once.
#[test]
fn mlx_in_16_bits_on_several_processes_is_as_near_as_its_rounding() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let check = |model: &Path, ranks: &mut Ranks| {
        let (folder, nodes) = (tempdir().unwrap(), ranks.ranks.len() as u32);
        let set = folder.path().join("set");
        write(model, &set, 4, nodes, ExpertSharding::Inside);
        let tokens = tokens(model);
        let cpu = on_cpu(&open(&set, nodes), &tokens);
        let half = ranks.logits(&set, &tokens, HALF, None);
        let errors = relative_errors(&cpu, &half, tokens.len());
        let quarter = errors[(errors.len() - 1) / 4];
        println!("{}, {nodes} processes: {quarter:.4}", model.display());
        assert!(quarter < 0.03, "{}, {nodes} processes: {errors:?}", model.display());
    };
    let mut two = Ranks::start(2);
    for model in &families() {
        check(model, &mut two);
    }
    let mut three = Ranks::start(3);
    for model in few() {
        check(&model, &mut three);
    }
}

/// A trained model, whose tokens are mostly clear: where the best logit leads by more than rounding
/// explains, a tenth of the row's root mean square, the same token comes on one rank, on two and on
/// `cpu`.
#[test]
fn mlx_in_16_bits_gives_the_same_greedy_tokens_on_one_and_two_processes() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let (model, folder) = (data("kjv-4m"), tempdir().unwrap());
    let sets = [1, 2].map(|nodes| {
        let set = folder.path().join(format!("set-{nodes}"));
        write(&model, &set, 4, nodes, ExpertSharding::Inside);
        set
    });
    let one = open(&sets[0], 1);
    let greedy = |logits: &[f32], rows: usize| -> Vec<usize> {
        let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        logits.chunks(logits.len() / rows).map(best).collect()
    };
    let mut tokens = vec![TokenId(10)];
    for _ in 0..48 {
        let next = *greedy(&on_cpu(&one, &tokens), tokens.len()).last().unwrap();
        tokens.push(TokenId(next as u32));
    }
    let half = mlx(&runtime, KvType::F32).half();
    let alone = in_steps(half, &open_with(&sets[0], 1, OpenOptions::stored(1)), &tokens, &[9, 1]);
    let together = Ranks::start(2).logits(&sets[1], &tokens, HALF, None);
    let exact = on_cpu(&one, &tokens);
    let clear: Vec<bool> = exact
        .chunks(exact.len() / tokens.len())
        .map(|row| {
            let mut sorted = row.to_vec();
            sorted.sort_by(f32::total_cmp);
            let rms = (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32).sqrt();
            sorted[row.len() - 1] - sorted[row.len() - 2] > 0.1 * rms
        })
        .collect();
    let [exact, alone, together] =
        [exact, alone, together].map(|logits| greedy(&logits, tokens.len()));
    for (position, _) in clear.iter().enumerate().filter(|(_, is_clear)| **is_clear) {
        assert_eq!(alone[position], exact[position], "position {position}, one rank");
        assert_eq!(together[position], exact[position], "position {position}, two ranks");
    }
    let count = clear.iter().filter(|is_clear| **is_clear).count();
    println!("{count} of {} positions are clear", clear.len());
    assert!(count > 40, "{count}");
}

#[test]
fn mlx_on_three_processes_matches_the_cpu_engine() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let mut ranks = Ranks::start(3);
    for model in few() {
        for (bits, collectives) in [(4, "own"), (16, "own"), (4, "ring")] {
            check(&model, bits, &mut ranks, collectives);
        }
    }
}

#[test]
fn own_all_reduce_gives_the_same_bits_whatever_the_timing() {
    if was_rank() {
        return;
    }
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let mut ranks = Ranks::start(3);
    let (model, folder) = (few().next().unwrap(), tempdir().unwrap());
    let (set, tokens) = (folder.path().join("set"), tokens(&model));
    write(&model, &set, 4, 3, ExpertSharding::Inside);
    let expected = ranks.logits(&set, &tokens, "own", None);
    for seed in 1..=3 {
        let delayed = ranks.logits(&set, &tokens, "own", Some(seed));
        let same = expected.iter().zip(&delayed).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "delays of seed {seed} change bits");
    }
}
