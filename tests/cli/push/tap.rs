//! A wire of the test's own between a controller, or another node, and a node: counts frames by their
//! type in both directions, holds connections back, and lets a test change or end what goes through.

use std::sync::atomic::AtomicBool;

use super::*;

/// Types of frames that tests look at.
pub(super) const CHUNK: u8 = 4;
pub(super) const CHUNK_STORED: u8 = 5;
pub(super) const COMMIT: u8 = 7;
pub(super) const FETCHED: u8 = 22;

/// Bytes of a frame's header.
pub(super) const HEADER_BYTES: u64 = 12;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To the node.
    In,
    /// From the node.
    Out,
}

/// Where a byte stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Which way it goes.
    pub(super) way: Way,
    /// Bytes that went this way before it, over all connections.
    pub(super) offset: u64,
    /// Type of its frame; 0 within the first bytes of a header.
    pub(super) kind: u8,
    /// Its place in the frame, header included.
    pub(super) at: u64,
}

/// What becomes of a byte and all after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Passes,
    /// With this bit turned.
    Bent(u8),
    /// The connection ends before it, in both directions.
    Cut,
    /// No more goes this way; the other way stays open.
    Closed,
}

/// Frames and bytes that went through.
#[derive(Debug, Default)]
pub(super) struct Counts {
    bytes: [AtomicU64; 2],
    frames: [[AtomicU64; 32]; 2],
    payload_bytes: [[AtomicU64; 32]; 2],
}

impl Counts {
    /// Bytes of all connections.
    pub(super) fn bytes(&self, way: Way) -> u64 {
        self.bytes[way as usize].load(Ordering::SeqCst)
    }

    /// Whole frames of a type.
    pub(super) fn frames(&self, way: Way, kind: u8) -> u64 {
        self.frames[way as usize][usize::from(kind) % 32].load(Ordering::SeqCst)
    }

    /// Bytes of their payloads, those of frames that were cut off too.
    pub(super) fn payload_bytes(&self, way: Way, kind: u8) -> u64 {
        self.payload_bytes[way as usize][usize::from(kind) % 32].load(Ordering::SeqCst)
    }
}

/// Decides what becomes of each byte.
type Fault = dyn Fn(Place) -> Fate + Send + Sync;

/// The wire.
pub(super) struct Tap {
    pub(super) address: SocketAddr,
    pub(super) counts: Arc<Counts>,
    is_open: Arc<AtomicBool>,
}

impl Tap {
    /// In front of a node; nothing happens to what goes through.
    pub(super) fn new(node: &str) -> Self {
        Self::with(node, |_| Fate::Passes)
    }

    /// The same with a fault.
    pub(super) fn with(node: &str, fault: impl Fn(Place) -> Fate + Send + Sync + 'static) -> Self {
        let node: SocketAddr = node.parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (counts, is_open) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(true)));
        let (shared, gate): (_, Arc<AtomicBool>) = (Arc::clone(&counts), Arc::clone(&is_open));
        let fault: Arc<Fault> = Arc::new(fault);
        thread::spawn(move || {
            for near in listener.incoming() {
                let (counts, gate) = (Arc::clone(&shared), Arc::clone(&gate));
                let (near, fault) = (near.unwrap(), Arc::clone(&fault));
                thread::spawn(move || {
                    while !gate.load(Ordering::SeqCst) {
                        thread::sleep(Duration::from_millis(2));
                    }
                    // A node that is gone hangs up.
                    let Ok(far) = TcpStream::connect(node) else { return };
                    for socket in [&near, &far] {
                        socket.set_nodelay(true).unwrap();
                    }
                    let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                    let (shared, bending) = (Arc::clone(&counts), Arc::clone(&fault));
                    thread::spawn(move || carry(back.0, back.1, Way::Out, &shared, &*bending));
                    carry(near, far, Way::In, &counts, &*fault);
                });
            }
        });
        Self { address, counts, is_open }
    }

    /// Connections wait from now on until [`Self::open`].
    pub(super) fn hold(self) -> Self {
        self.is_open.store(false, Ordering::SeqCst);
        self
    }

    /// Lets connections through.
    pub(super) fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }
}

/// Passes bytes on, one way.
fn carry(mut from: TcpStream, mut to: TcpStream, way: Way, counts: &Counts, fault: &Fault) {
    use std::net::Shutdown;
    let mut frames = Frames::default();
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let mut fate = Fate::Passes;
        let mut passed = 0;
        let offset = counts.bytes[way as usize].fetch_add(len as u64, Ordering::SeqCst);
        for (offset, byte) in (offset..).zip(&mut buffer[..len]) {
            fate = fault(Place { way, offset, kind: frames.kind(), at: frames.at });
            match fate {
                Fate::Passes => frames.pass(*byte),
                Fate::Bent(bit) => {
                    frames.pass(*byte);
                    *byte ^= 1 << bit;
                }
                Fate::Cut | Fate::Closed => break,
            }
            passed += 1;
        }
        frames.tell(way, counts);
        if to.write_all(&buffer[..passed]).is_err() {
            break;
        }
        match fate {
            Fate::Passes | Fate::Bent(_) => {}
            Fate::Cut => break,
            Fate::Closed => {
                let _ = to.shutdown(Shutdown::Write);
                // What still comes is taken and lost.
                while matches!(from.read(&mut buffer), Ok(1..)) {}
                return;
            }
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Follows frames through a stream of bytes.
#[derive(Default)]
struct Frames {
    header: [u8; HEADER_BYTES as usize],
    /// Bytes of the frame so far.
    at: u64,
    /// Whole frames, and bytes of payloads, that were not told.
    whole: [u64; 32],
    payload_bytes: [u64; 32],
}

impl Frames {
    /// Type of the frame, once it is known.
    fn kind(&self) -> u8 {
        if self.at > 5 { self.header[5] } else { 0 }
    }

    fn pass(&mut self, byte: u8) {
        if self.at < HEADER_BYTES {
            self.header[self.at as usize] = byte;
        } else {
            self.payload_bytes[usize::from(self.header[5]) % 32] += 1;
        }
        self.at += 1;
        let [.., a, b, c, d] = self.header;
        if self.at >= HEADER_BYTES
            && self.at == HEADER_BYTES + u64::from(u32::from_le_bytes([a, b, c, d]))
        {
            self.whole[usize::from(self.header[5]) % 32] += 1;
            self.at = 0;
        }
    }

    fn tell(&mut self, way: Way, counts: &Counts) {
        let told = [
            (&mut self.whole, &counts.frames[way as usize]),
            (&mut self.payload_bytes, &counts.payload_bytes[way as usize]),
        ];
        for (mine, all) in told {
            for (mine, all) in mine.iter_mut().zip(all).filter(|(mine, _)| **mine > 0) {
                all.fetch_add(std::mem::take(mine), Ordering::SeqCst);
            }
        }
    }
}
