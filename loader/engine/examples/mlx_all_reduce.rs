//! Time that one all-reduce between two processes adds to MLX's graph: ours and MLX's ring in the same
//! processes, in turns. `cargo run --release -p shardpack-engine --example mlx_all_reduce --
//! FOLDER`, where FOLDER is where engines are installed, or the runtime itself.
//!
//! The limit: the exchange itself takes about 15 µs over loopback TCP, and a node of MLX's graph
//! about 5 µs.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    env,
    error::Error,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use shardpack_collectives::{Deadline, join_on_loopback};
use shardpack_engine::{
    backend::{Collectives, Mlx},
    bench::all_reduce_in_graph,
};
use shardpack_mlx::runtime::FOLDER;

const RANKS: u32 = 2;
const ROUNDS: usize = 30;
const TURNS: usize = 3;
const TIMEOUT: Duration = Duration::from_mins(1);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.as_slice() {
        [folder] => {
            let folder = Path::new(folder);
            let within = folder.join(FOLDER);
            parent(if within.is_dir() { &within } else { folder })
        }
        [runtime, rank] => child(Path::new(runtime), rank.parse()?),
        _ => Err("give the folder of an installed MLX runtime".into()),
    }
}

/// Ends with the parent, whatever happens to it.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn parent(runtime: &Path) -> Result<()> {
    let folder = env::temp_dir().join(format!("shardpack-ring-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let hosts = folder.join("hosts.json");
    let free: Vec<_> =
        (0..RANKS).map(|_| TcpListener::bind(("127.0.0.1", 0))).collect::<io::Result<_>>()?;
    let ports: Vec<_> =
        free.iter().map(|it| Ok(vec![it.local_addr()?])).collect::<io::Result<_>>()?;
    fs::write(&hosts, serde_json::to_string(&ports)?)?;
    drop(free);
    let mut children = Vec::new();
    let mut outputs = Vec::new();
    let mut addresses = Vec::new();
    for rank in 0..RANKS {
        let child = Command::new(env::current_exe()?)
            .arg(runtime)
            .arg(rank.to_string())
            .env("MLX_HOSTFILE", &hosts)
            .env("MLX_RANK", rank.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut child = Killed(child);
        let mut output = BufReader::new(child.0.stdout.take().ok_or("no output")?);
        let mut address = String::new();
        output.read_line(&mut address)?;
        addresses.push(address.trim().parse::<SocketAddr>()?);
        children.push(child);
        outputs.push(output);
    }
    for child in &mut children {
        let input = child.0.stdin.as_mut().ok_or("no input")?;
        writeln!(input, "{}", serde_json::to_string(&addresses)?)?;
    }
    for line in outputs.swap_remove(0).lines() {
        println!("{}", line?);
    }
    drop(children);
    fs::remove_dir_all(folder)?;
    Ok(())
}

fn child(runtime: &Path, rank: u32) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{}", listener.local_addr()?);
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let addresses: Vec<SocketAddr> = serde_json::from_str(&line)?;
    let group = join_on_loopback(rank, &listener, &addresses, Deadline::after(TIMEOUT))?;
    let open = |collectives| Mlx::open(runtime, None, collectives, [rank, RANKS]);
    let backends = [("own", open(Collectives::Own)?), ("ring", open(Collectives::Ring)?)];
    for size_bytes in [16 << 10, 64 << 10] {
        for _ in 0..TURNS {
            for (name, backend) in &backends {
                let times = all_reduce_in_graph(backend, &group, size_bytes, ROUNDS)?;
                println!(
                    "{name:4} {:3} KiB: median {:7.1} µs, p10 {:7.1}, p90 {:7.1}",
                    size_bytes >> 10,
                    times.median_us,
                    times.p10_us,
                    times.p90_us
                );
            }
        }
    }
    Ok(())
}
