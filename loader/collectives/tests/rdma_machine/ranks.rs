//! Forms groups over the machine's devices: of threads, or with ranks in processes of their own, which
//! are told on their input what to do.

use std::{
    env,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use shardpack_collectives::{
    Deadline, Link, LinkedGroup, TcpLink,
    rdma::{Cables, Connected, Devices, Pair, Shape, connect},
};

use super::{LONG, PROCESS_STEP, sum};

/// A decode step's vector in these tests.
const VECTOR_BYTES: usize = 4 << 10;

/// Groups of threads, and how many of their links' ends are over RDMA.
pub(super) struct Formed {
    pub(super) groups: Vec<LinkedGroup>,
    pub(super) over_rdma: u32,
}

fn devices_of(rank: u32) -> Devices {
    Devices::open_only(&[["rxe_a", "rxe_b"][rank as usize % 2]]).unwrap()
}

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Data and control connections to every other rank. The higher rank of two connects.
fn streams(
    rank: u32,
    epoch: u64,
    listener: &TcpListener,
    addresses: &[SocketAddr],
) -> Vec<[Option<TcpStream>; 2]> {
    let mut streams: Vec<[Option<TcpStream>; 2]> = addresses.iter().map(|_| [None, None]).collect();
    for (streams, address) in streams.iter_mut().zip(&addresses[..rank as usize]) {
        for (way, place) in (0_u8..).zip(streams) {
            let mut stream = TcpStream::connect_timeout(address, LONG).unwrap();
            stream.write_all(&[rank as u8, epoch as u8, way]).unwrap();
            *place = Some(stream);
        }
    }
    while streams.iter().filter(|ways| ways.iter().all(Option::is_some)).count() + 1
        < addresses.len()
    {
        let (mut stream, mut hello) = (listener.accept().unwrap().0, [0; 3]);
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.read_exact(&mut hello).unwrap();
        // A process that was stopped may have connected for a group that is over.
        if u64::from(hello[1]) == epoch {
            streams[hello[0] as usize][hello[2] as usize] = Some(stream);
        }
    }
    streams
}

/// The links of one rank, and how many are over RDMA.
fn links(
    rank: u32,
    epoch: u64,
    listener: &TcpListener,
    addresses: &[SocketAddr],
) -> (Vec<Option<Box<dyn Link>>>, u32) {
    let (devices, shape) = (devices_of(rank), Shape::for_vectors(VECTOR_BYTES));
    let mut over_rdma = 0;
    let links = (0..).zip(streams(rank, epoch, listener, addresses)).map(|(peer, streams)| {
        let [Some(data), Some(control)] = streams else { return None };
        let (pair, cables) = (Pair { rank, peer, epoch }, Cables::Found(&devices));
        let streams = (data.into(), control.into());
        Some(match connect(pair, &shape, &cables, streams, Deadline::after(LONG)).unwrap() {
            Connected::Rdma(link) => {
                over_rdma += 1;
                Box::new(link) as Box<dyn Link>
            }
            Connected::Declined { reason, data, control } => {
                println!("rank {rank} to {peer}: {reason}");
                Box::new(TcpLink::new(data, control).unwrap())
            }
        })
    });
    (links.collect(), over_rdma)
}

fn form(
    rank: u32,
    epoch: u64,
    listener: &TcpListener,
    addresses: &[SocketAddr],
) -> (LinkedGroup, u32) {
    let (links, over_rdma) = links(rank, epoch, listener, addresses);
    (LinkedGroup::new(rank, epoch, links).unwrap(), over_rdma)
}

/// A group of threads.
pub(super) fn form_all(size: u32, epoch: u64) -> Formed {
    let (listeners, addresses): (Vec<_>, Vec<_>) = (0..size).map(|_| listen()).unzip();
    let addresses = addresses.as_slice();
    let formed: Vec<_> = thread::scope(|scope| {
        let ranks = (0..)
            .zip(&listeners)
            .map(|(rank, listener)| scope.spawn(move || form(rank, epoch, listener, addresses)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let over_rdma = formed.iter().map(|(_, links)| links).sum();
    Formed { groups: formed.into_iter().map(|(group, _)| group).collect(), over_rdma }
}

/// Runs `work` on every rank at the same time; results in rank order.
pub(super) fn on_all<T: Send>(
    groups: &[LinkedGroup],
    work: impl Fn(&LinkedGroup) -> T + Sync,
) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || work(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Round trips of one frame with `bytes` bytes of payload over a bare link.
pub(super) fn ping_pong(bytes: usize, rounds: usize) -> Vec<Duration> {
    use shardpack_collectives::frame::{Header, Op, Scope};
    let (listeners, addresses): (Vec<_>, Vec<_>) = (0..2).map(|_| listen()).unzip();
    let header = Header {
        op: Op::Pass,
        scope: Scope::Subgroup,
        from: 0,
        payload_bytes: bytes as u32,
        epoch: 1,
        sequence: 0,
    };
    let mut sent = header.encode().to_vec();
    sent.resize(sent.len() + bytes, 7);
    let (sent, addresses) = (sent.as_slice(), addresses.as_slice());
    let end = |rank: u32, listener: &TcpListener| {
        let (mut links, over_rdma) = links(rank, 1, listener, addresses);
        assert_eq!(over_rdma, 1);
        let link = links[1 - rank as usize].take().expect("a link to the other rank");
        let deadline = Deadline::after(LONG);
        let send = || {
            let count = link.send_now(sent).unwrap();
            link.send_rest(&sent[count..], deadline).unwrap();
        };
        let mut frame = Vec::new();
        let mut receive = || {
            let header = link.receive_header(&mut frame, deadline).unwrap();
            link.receive_payload(&header, &mut frame, deadline).unwrap();
            assert!(frame == sent);
        };
        let mut times = Vec::new();
        for _ in 0..rounds {
            let start = Instant::now();
            if rank == 0 {
                send();
                receive();
            } else {
                receive();
                send();
            }
            times.push(start.elapsed());
        }
        times
    };
    thread::scope(|scope| {
        let high = scope.spawn(|| end(1, &listeners[1]));
        let times = end(0, &listeners[0]);
        high.join().unwrap();
        times
    })
}

/// A rank in a process of its own.
pub(super) struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
}

/// What a line for the test begins with, among those of the test program's own.
const MARK: &str = "rank: ";

impl Process {
    pub(super) fn start(rank: u32, size: u32) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "rank_in_a_process", "--ignored", "--nocapture"])
            .env("TEST_RANK", format!("{rank} {size}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self { child, output, address: ([127, 0, 0, 1], 0).into() };
        process.address = process.read_line().parse().unwrap();
        process
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub(super) fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line for the test.
    pub(super) fn read_line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "a rank ended");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; a stopped one ends by this too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Rank 0 here, of a group with the processes.
pub(super) fn form_with(processes: &mut [Process], epoch: u64) -> LinkedGroup {
    let (listener, address) = listen();
    let addresses: Vec<_> =
        std::iter::once(address).chain(processes.iter().map(|process| process.address)).collect();
    let list: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    for process in &mut *processes {
        process.tell(&format!("form {epoch} {}", list.join(" ")));
    }
    let (group, over_rdma) = form(0, epoch, &listener, &addresses);
    assert_eq!(over_rdma as usize, processes.len());
    for process in processes {
        assert_eq!(process.read_line(), "formed");
    }
    group
}

/// Does what the lines of the input say, until it ends.
pub(super) fn obey() {
    let Ok(numbers) = env::var("TEST_RANK") else { return };
    let (rank, _) = numbers.split_once(' ').unwrap();
    let rank: u32 = rank.parse().unwrap();
    let (listener, address) = listen();
    println!("{MARK}{address}");
    let mut group = None;
    for line in io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "form" => {
                drop(group.take());
                let addresses: Vec<SocketAddr> =
                    words[2..].iter().map(|it| it.parse().unwrap()).collect();
                group = Some(form(rank, words[1].parse().unwrap(), &listener, &addresses).0);
                println!("{MARK}formed");
            }
            "steps" => {
                let group = group.as_ref().expect("steps of a group that was formed");
                // The first steps wait for the test.
                let mut timeout = LONG;
                let error = loop {
                    match sum(group, 4096, timeout) {
                        Ok(_) => timeout = 2 * PROCESS_STEP,
                        Err(error) => break error,
                    }
                };
                println!("{MARK}{error}");
            }
            other => panic!("expected form or steps, found {other:?}"),
        }
    }
}
