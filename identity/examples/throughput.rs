//! Bytes per second of one direction of a connection: `cargo run --release --example throughput`.
//!
//! The limit: each side runs AES-GCM over every byte, at some GB/s a core, and copies them twice.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    error::Error,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use shardpack_identity::{
    Authority, Channel, ExpectedPeer, HandshakeDeadline, Role, Service, Validity,
};

const TOTAL_BYTES: usize = 2 << 30;
const STEP_BYTES: usize = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let authority = Authority::generate("measured")?;
    let node = authority.issue(Role::Node, Validity::from_now())?;
    for secured in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let calling = TcpStream::connect(listener.local_addr()?)?;
        let answering = listener.accept()?.0;
        let deadline = || HandshakeDeadline::after(Duration::from_secs(10));
        let (near, far) = if secured {
            let answerer = node.clone();
            let far = thread::spawn(move || {
                let (services, roles) = ([Service::Rank], [Role::Node]);
                Channel::answer(answering, &answerer, &services, &roles, deadline())
            });
            let expected = ExpectedPeer { role: Role::Node, key: Some(node.key()) };
            let near = Channel::call(calling, &node, Service::Rank, expected, deadline())?;
            (near, far.join().expect("handshakes do not panic")?)
        } else {
            (calling.into(), answering.into())
        };
        let begun = Instant::now();
        let writing = thread::spawn(move || {
            let bytes = vec![7; STEP_BYTES];
            (0..TOTAL_BYTES / STEP_BYTES).try_for_each(|_| (&mut &near).write_all(&bytes))
        });
        let mut bytes = vec![0; STEP_BYTES];
        for _ in 0..TOTAL_BYTES / STEP_BYTES {
            (&mut &far).read_exact(&mut bytes)?;
        }
        writing.join().expect("writing does not panic")?;
        let rate = TOTAL_BYTES as f64 / begun.elapsed().as_secs_f64() / 1e9;
        println!("{}: {rate:.2} GB/s", if secured { "tls" } else { "tcp" });
    }
    Ok(())
}
