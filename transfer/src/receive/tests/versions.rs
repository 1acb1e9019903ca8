//! Programs of neighbouring versions, over real sockets: the previous one is spoken here, by its frames,
//! against the node and the client of this one.

use shardpack_identity::Endpoint;

use super::*;
use crate::protocol::{FailureCode, Feature, Message, NoCommonVersion, SPOKEN, Wire, WireError};

/// How the first version greets: the number, and a name without a range.
const PREVIOUS: &str = "shardpack 0.1.0";

type Socket = Wire<TcpStream, fn(&TcpStream, Duration) -> std::io::Result<()>>;

fn wire(stream: TcpStream) -> Socket {
    Wire::new(stream, |stream, timeout| stream.set_read_timeout(Some(timeout)), Timeouts::default())
}

/// What a real node answers to a caller's greeting and its messages after that.
fn answers(greeting: (u16, &str), messages: &[Message]) -> Vec<Message> {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(root.path()).unwrap());
    let options = NodeOptions {
        timeouts: Timeouts::default(),
        observer: Box::new(|_| {}),
        start_rank: Box::new(|_, _| Err("no ranks here".to_owned())),
    };
    let (node, shutdown) = (Node::new(store, options), Shutdown::new());
    let listener = bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| node.serve(&listener, &shutdown).unwrap());
        let mut wire = wire(TcpStream::connect(address).unwrap());
        let (protocol, program) = (greeting.0, greeting.1.to_owned());
        let mut answers = Vec::new();
        for message in [Message::Hello { protocol, program }].iter().chain(messages) {
            wire.send(message).unwrap();
            answers.push(wire.receive().unwrap());
        }
        drop(wire);
        shutdown.stop();
        answers
    })
}

#[test]
fn a_controller_of_the_first_version_is_answered_in_it() {
    let found = answers((1, PREVIOUS), &[Message::List]);
    // It compares this number and refuses every other.
    assert!(matches!(found[0], Message::Hello { protocol: 1, .. }), "{found:?}");
    assert!(matches!(found[1], Message::Listing(_)), "{found:?}");
}

#[test]
fn a_later_controller_is_answered_in_the_highest_common_version() {
    let found = answers((1, "shardpack 9.0.0 (transfer 1-9)"), &[Message::List]);
    let Message::Hello { protocol, .. } = found[0] else { panic!("{found:?}") };
    assert_eq!(protocol, SPOKEN.highest);
    assert!(matches!(found[1], Message::Listing(_)), "{found:?}");
    let Message::Failed(refused) = answers((8, "shardpack 9.0.0 (transfer 8-9)"), &[]).remove(0)
    else {
        panic!("there is no common version");
    };
    assert_eq!(refused.code, FailureCode::Version);
    assert!(
        refused
            .message
            .ends_with("speaks transfer protocol 8 to 9, this node 1 to 2: upgrade this node"),
        "{refused}"
    );
}

/// A node of another version: it answers `List`, and greets as it is told if the caller's greeting is
/// one that the first version takes.
fn other_node(greeting: u16) -> (Endpoint, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = move || {
        let mut wire = wire(listener.accept().unwrap().0);
        loop {
            let message = match wire.receive() {
                Ok(message) => message,
                Err(WireError::Frame(_)) => return,
                Err(error) => panic!("{error}"),
            };
            let answer = match message {
                Message::Hello { protocol: 1, .. } => {
                    Message::Hello { protocol: greeting, program: PREVIOUS.to_owned() }
                }
                Message::List => Message::Listing("{}".to_owned()),
                other => panic!("the first version does not take {other:?}"),
            };
            wire.send(&answer).unwrap();
        }
    };
    (address.into(), thread::spawn(answer))
}

#[test]
fn a_node_of_the_first_version_is_spoken_to_in_it_and_not_asked_for_more() {
    let (node, answering) = other_node(1);
    let mut client = NodeClient::connect(node, Timeouts::default()).unwrap();
    assert_eq!((client.protocol(), client.program()), (1, PREVIOUS));
    client.list().unwrap();
    let refused = client.require(Feature::Handover).unwrap_err().to_string();
    assert!(
        refused.ends_with(
            "speaks transfer protocol 1; `cluster handover` needs 2: install this release there"
        ),
        "{refused}"
    );
    drop(client);
    answering.join().unwrap();
}

#[test]
fn a_node_that_answers_in_an_unknown_version_is_left() {
    let (node, answering) = other_node(7);
    let refused = NodeClient::connect(node, Timeouts::default()).err().unwrap();
    let expected = NoCommonVersion { program: PREVIOUS.to_owned(), found: 7 };
    assert!(matches!(&refused, ClientError::Version { source, .. } if *source == expected));
    answering.join().unwrap();
}
