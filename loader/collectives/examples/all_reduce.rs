//! Median latency of an all-reduce: `cargo run --release --example all_reduce -- 2`.
//!
//! The limit: 16 KiB pass a core's cache in about 1 µs and loopback TCP in about 10 µs (two
//! system calls a side and one wake), so more than a few times that is our own waste. Inside TLS
//! each side seals and opens 16 KiB besides, at some GB/s a core about 10 µs.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    env,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use shardpack_collectives::{Deadline, Group, Link, LinkedGroup, TcpLink};
use shardpack_identity::{
    Channel, Credentials, EnrollmentState, ExpectedPeer, Guard, HandshakeDeadline, Home, Role,
    Service, credentials_of_node,
};

const SIZES_BYTES: [usize; 4] = [8 << 10, 16 << 10, 64 << 10, 1 << 20];
const TIMEOUT: Duration = Duration::from_mins(1);

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [name, size, rank, identity, addresses @ ..] = arguments.as_slice()
        && name == "rank"
    {
        let credentials = match identity.as_str() {
            "-" => None,
            folder => credentials_of_node(Path::new(folder)).map_err(io::Error::other)?,
        };
        let group = join(number(size), number(rank), addresses, credentials.as_ref())?;
        let name = if credentials.is_some() { "processes, tls" } else { "processes, tcp" };
        measure(name, &group);
        return Ok(());
    }
    let size = arguments.first().map_or(2, |size| number(size));
    let groups = LinkedGroup::in_memory(size, 0)?;
    thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || measure("threads, memory", group));
        }
    });
    processes(size, "-")?;
    let folder = tempfile::tempdir()?;
    let identity = folder.path().join("node");
    make_member(&folder.path().join("cluster"), &identity)?;
    processes(size, identity.to_str().expect("temporary folders have plain names"))
}

/// A node's identity, which all ranks here share.
fn make_member(cluster: &Path, identity: &Path) -> io::Result<()> {
    let mut home = Home::init(cluster).map_err(io::Error::other)?;
    let guard = Guard::open(identity, TIMEOUT).map_err(io::Error::other)?;
    let EnrollmentState::Inviting { token, .. } = guard.enrollment() else { return Ok(()) };
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?.to_string();
    thread::scope(|scope| {
        let receiving = scope
            .spawn(|| guard.receive(listener.accept()?.0, &|| false).map_err(io::Error::other));
        home.add(&address, &token, None).map_err(io::Error::other)?;
        receiving.join().expect("joining does not panic").map(drop)
    })
}

fn number(text: &str) -> u32 {
    text.parse().expect("arguments are numbers")
}

/// Starts one process per rank; each prints its address and is told those of the lower ranks.
fn processes(size: u32, identity: &str) -> io::Result<()> {
    let mut children: Vec<Child> = Vec::new();
    let mut addresses: Vec<String> = Vec::new();
    for rank in 0..size {
        let mut child = Command::new(env::current_exe()?)
            .args(["rank", &size.to_string(), &rank.to_string(), identity])
            .args(&addresses)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut address = String::new();
        output.read_line(&mut address)?;
        addresses.push(address.trim().to_owned());
        children.push(child);
        thread::spawn(move || {
            output.lines().map_while(Result::ok).for_each(|line| println!("{line}"));
        });
    }
    children.iter_mut().try_for_each(|child| child.wait().map(drop))?;
    thread::sleep(Duration::from_millis(50));
    Ok(())
}

/// Two connections to each lower rank, which begin with this one's number; two from each higher
/// one, which come in any order.
fn join(
    size: u32,
    rank: u32,
    addresses: &[String],
    credentials: Option<&Credentials>,
) -> io::Result<LinkedGroup> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    println!("{}", listener.local_addr()?);
    let mut streams: Vec<Vec<TcpStream>> = (0..size).map(|_| Vec::new()).collect();
    for (streams, address) in streams.iter_mut().zip(addresses) {
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(&rank.to_le_bytes())?;
            streams.push(stream);
        }
    }
    for _ in 0..2 * (size - 1 - rank) {
        let (mut stream, mut from) = (listener.accept()?.0, [0; 4]);
        stream.read_exact(&mut from)?;
        streams[u32::from_le_bytes(from) as usize].push(stream);
    }
    let links = (0..).zip(streams).map(|(peer, mut streams)| {
        let (Some(farewell), Some(data)) = (streams.pop(), streams.pop()) else {
            return Ok(None);
        };
        let [data, farewell] =
            [data, farewell].map(|socket| secure(socket, credentials, rank > peer));
        Ok(Some(Box::new(TcpLink::new(data?, farewell?)?) as Box<dyn Link>))
    });
    LinkedGroup::new(rank, 0, links.collect::<io::Result<_>>()?)
}

/// The connection inside TLS, if there are credentials; the higher rank calls.
fn secure(socket: TcpStream, with: Option<&Credentials>, calls: bool) -> io::Result<Channel> {
    let (service, deadline) = (Service::Rank, HandshakeDeadline::after(TIMEOUT));
    let Some(with) = with else { return Ok(socket.into()) };
    let channel = if calls {
        Channel::call(
            socket,
            with,
            service,
            ExpectedPeer { role: Role::Node, key: Some(with.key()) },
            deadline,
        )
    } else {
        Channel::answer(socket, with, &[service], &[Role::Node], deadline)
    };
    channel.map_err(io::Error::other)
}

fn measure(name: &str, group: &dyn Group) {
    for size_bytes in SIZES_BYTES {
        let mut values = vec![1e-9; size_bytes / 4];
        let rounds = if size_bytes > 100_000 { 500 } else { 5000 };
        let mut times: Vec<Duration> = (0..rounds)
            .map(|_| {
                let start = Instant::now();
                let sum = group.all_reduce_sum(&mut values, Deadline::after(TIMEOUT));
                sum.expect("nothing fails while measuring");
                start.elapsed()
            })
            .collect();
        times.sort_unstable();
        if group.rank() == 0 {
            let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
            println!(
                "{name}, {} ranks, {} KiB: median {:.1} µs, p10 {:.1}, p90 {:.1}, p99 {:.1}",
                group.size(),
                size_bytes >> 10,
                at(50),
                at(10),
                at(90),
                at(99)
            );
        }
    }
}
