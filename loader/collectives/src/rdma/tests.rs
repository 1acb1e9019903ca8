//! Groups over the fabric have the bits of groups in memory, and whatever goes wrong is an error
//! that names the peer; over the machine's own devices, where it has some.

mod formed;
mod real;
mod refused;
mod wrong;

use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use shardpack_identity::{
    Authority, Channel, ExpectedPeer, HandshakeDeadline, Role, Service, Validity,
};

use super::{fabric::Fabric, *};
use crate::{Deadline, Group as _, GroupError, Link, LinkedGroup};

/// Longer than any test may take. Who gives up then says so in its error, so any other error has another cause.
const LONG: Duration = Duration::from_mins(10);

/// The hidden vector of the tests' model: small slots of two frames.
const VECTOR_BYTES: usize = 6000;

fn sockets() -> (Channel, Channel) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let high = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0.into(), high.into())
}

/// Both ends of a data and of a control connection inside TLS.
fn channels() -> [(Channel, Channel); 2] {
    let authority = Authority::generate("c").unwrap();
    let [low, high] = [0, 1].map(|_| authority.issue(Role::Node, Validity::from_now()).unwrap());
    [0, 1].map(|_| {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (answering, deadline) =
            (listener.accept().unwrap().0, || HandshakeDeadline::after(LONG));
        thread::scope(|scope| {
            let low_end = scope.spawn(|| {
                Channel::answer(answering, &low, &[Service::Rank], &[Role::Node], deadline())
            });
            let expected = ExpectedPeer { role: Role::Node, key: Some(low.key()) };
            let high_end = Channel::call(socket, &high, Service::Rank, expected, deadline());
            (low_end.join().unwrap().unwrap(), high_end.unwrap())
        })
    })
}

/// Both ends of a rendezvous, the lower rank's first.
fn rendezvous(
    (low, high): (u32, u32),
    epoch: u64,
    cables: [Cables<'_>; 2],
) -> [Result<Connected, RdmaError>; 2] {
    rendezvous_over([sockets(), sockets()], (low, high), epoch, cables)
}

/// The same over data and control channels.
fn rendezvous_over(
    channels: [(Channel, Channel); 2],
    (low, high): (u32, u32),
    epoch: u64,
    cables: [Cables<'_>; 2],
) -> [Result<Connected, RdmaError>; 2] {
    let [(low_data, high_data), (low_control, high_control)] = channels;
    let shape = Shape::for_vectors(VECTOR_BYTES);
    let [of_low, of_high] = cables;
    thread::scope(|scope| {
        let deadline = Deadline::after(LONG);
        let shape = &shape;
        let low_end = scope.spawn(move || {
            let pair = Pair { rank: low, peer: high, epoch };
            connect(pair, shape, &of_low, (low_data, low_control), deadline)
        });
        let pair = Pair { rank: high, peer: low, epoch };
        let high_end = connect(pair, shape, &of_high, (high_data, high_control), deadline);
        [low_end.join().unwrap(), high_end]
    })
}

fn linked(connected: Result<Connected, RdmaError>) -> RdmaLink {
    match connected.unwrap() {
        Connected::Rdma(link) => link,
        Connected::Declined { reason, .. } => panic!("declined: {reason}"),
    }
}

/// The machines of a group, with `cables` cables between each two; the devices of rank `a` to rank
/// `b` are called `r<a>to<b>n<cable>`.
fn machines(fabric: &Fabric, size: u32, cables: u8) -> Vec<Devices> {
    let devices = |rank: u32| {
        let mut devices = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            for cable in 0..cables {
                let (low, high) = (rank.min(other) as u8, rank.max(other) as u8);
                let end = if rank < other { 1 } else { 2 };
                let address = Ipv4Addr::new(10, low, high * 16 + cable, end);
                devices.push((format!("r{rank}to{other}n{cable}"), Some(address)));
            }
        }
        let devices: Vec<_> = devices.iter().map(|(name, it)| (name.as_str(), *it)).collect();
        fabric.devices(&devices)
    };
    (0..size).map(devices).collect()
}

/// The two groups of two links.
fn two([low, high]: [Box<dyn Link>; 2]) -> Vec<LinkedGroup> {
    let links = [vec![None, Some(low)], vec![Some(high), None]];
    (0..).zip(links).map(|(rank, links)| LinkedGroup::new(rank, 7, links).unwrap()).collect()
}

/// A group over the machines' devices.
fn form(machines: &[Devices], epoch: u64) -> Vec<LinkedGroup> {
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> = Vec::new();
    for (high, devices) in machines.iter().enumerate() {
        let mut to_lower: Vec<Option<Box<dyn Link>>> = Vec::new();
        for (low, row) in links.iter_mut().enumerate() {
            let cables = [Cables::Found(&machines[low]), Cables::Found(devices)];
            let [low_end, high_end] = rendezvous((low as u32, high as u32), epoch, cables);
            row.push(Some(Box::new(linked(low_end))));
            to_lower.push(Some(Box::new(linked(high_end))));
        }
        to_lower.push(None);
        links.push(to_lower);
    }
    (0..).zip(links).map(|(rank, links)| LinkedGroup::new(rank, epoch, links).unwrap()).collect()
}

/// Runs `work` on every rank at the same time; results in rank order.
fn on_all<T: Send>(groups: &[LinkedGroup], work: impl Fn(&LinkedGroup) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || work(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A value whose sums depend on their order.
fn value(rank: u32, index: usize) -> f32 {
    let mixed = (u64::from(rank) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let scale = [1.0, 1e-4, 1e4, 3e7][(mixed >> 13) as usize % 4];
    ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
}

/// Everything that a group does, with vectors of `lens` elements; what each rank has at the end.
fn everything(groups: &[LinkedGroup], lens: &[usize]) -> Vec<Vec<Vec<u8>>> {
    on_all(groups, |group| {
        let (rank, size, deadline) = (group.rank(), group.size(), Deadline::after(LONG));
        let mut found = Vec::new();
        for &len in lens {
            let mut values: Vec<f32> = (0..len).map(|index| value(rank, index)).collect();
            group.all_reduce_sum(&mut values, deadline).unwrap();
            found.push(values.iter().flat_map(|value| value.to_le_bytes()).collect());
            let mut halves: Vec<half::bf16> =
                (0..len).map(|index| half::bf16::from_f32(value(rank, index))).collect();
            group.sum_bf16_among(0..size, &mut halves, deadline).unwrap();
            found.push(halves.iter().flat_map(|value| value.to_le_bytes()).collect());
            let mine: Vec<u8> = (0..len).map(|index| (index as u32 * 7 + rank) as u8).collect();
            found.extend(group.all_gather(&mine, deadline).unwrap());
            for root in 0..size {
                let mut bytes = if rank == root { mine.clone() } else { Vec::new() };
                group.broadcast(root, &mut bytes, deadline).unwrap();
                found.push(bytes);
            }
            if rank == 0 {
                group.send(size - 1, &mine, deadline).unwrap();
            } else if rank == size - 1 {
                let mut bytes = Vec::new();
                group.receive(0, &mut bytes, deadline).unwrap();
                found.push(bytes);
            }
            group.keep_alive().unwrap();
            group.barrier(deadline).unwrap();
        }
        found
    })
}

fn check_everything(groups: &[LinkedGroup], lens: &[usize]) {
    let expected = everything(&LinkedGroup::in_memory(groups.len() as u32, 0).unwrap(), lens);
    let found = everything(groups, lens);
    assert!(found == expected, "{} ranks have other bytes than in memory", groups.len());
}
