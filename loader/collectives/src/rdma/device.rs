//! Devices, their registered memory and their queue pairs, with [`rules`](super::rules) checked
//! before every call. What is below is the verbs library, or in tests a fabric that behaves as
//! Apple's devices do.
//!
//! Registering memory is slow, limited, and not always undone by the system, so a device keeps its
//! regions and lends pieces of them to links: forming a group again registers nothing.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    buffer::{Buffer, PAGE_BYTES},
    port::Port,
    rules::{self, QueueBook, QueueShape, QueueState, RuleError},
};

/// Least size of a region: what the links of two peers take.
const REGION_BYTES: usize = 16 << 20;

/// Why a device cannot do what it is asked for.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The verbs library cannot be opened.
    #[error(
        "the verbs library cannot be opened ({0}); RDMA needs rdma-core on Linux, or macOS 26.2"
    )]
    Library(String),
    /// A call of the library failed.
    #[error("{device}: {call} failed")]
    Call {
        /// The device.
        device: String,
        /// The function.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The call would have broken one of Apple's rules.
    #[error("{device}: a rule of RDMA over Thunderbolt would be broken")]
    Rule {
        /// The device.
        device: String,
        /// The rule.
        source: RuleError,
    },
    /// There is no memory for a region.
    #[error("{device}: no memory for a region of {bytes} bytes")]
    Memory {
        /// The device.
        device: String,
        /// What was asked for.
        bytes: usize,
    },
    /// The queue pair was destroyed, since the process ends.
    #[error("{device}: the queue pair was destroyed, since the process ends")]
    Released {
        /// The device.
        device: String,
    },
}

/// The address that a queue pair is reached at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    pub(super) number: u32,
    /// First packet sequence number that it sends.
    pub(super) psn: u32,
}

/// How a queue pair reaches its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) to: Address,
    /// Index of the own port's GID.
    pub(super) gid_index: u8,
    /// `enum ibv_mtu`.
    pub(super) mtu: u32,
    /// First packet sequence number that this side sends.
    pub(super) own_psn: u32,
}

/// A message that is posted.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) id: u64,
    pub(super) buffer: &'a Arc<Buffer>,
    pub(super) key: u32,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// A message that is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) id: u64,
    /// `enum ibv_wc_status`; 0 is success.
    pub(super) status: u32,
    /// The device maker's own number of an error.
    pub(super) vendor_error: u32,
    /// Of a RECV.
    pub(super) bytes: usize,
}

/// What a device does: the verbs library's, or the test fabric's.
pub(super) trait RawDevice: Send + Sync {
    fn name(&self) -> &str;
    fn port(&self) -> Result<Port, DeviceError>;
    fn register(&self, buffer: &Arc<Buffer>) -> Result<Box<dyn RawRegion>, DeviceError>;
    /// A queue pair in state INIT, and the frames granted to each of its queues.
    fn queue_pair(&self, shape: QueueShape) -> Result<(Box<dyn RawQueuePair>, usize), DeviceError>;
}

/// Registered memory, until it is dropped.
pub(super) trait RawRegion: Send + Sync {
    fn key(&self) -> u32;
}

/// A queue pair of UC with a completion queue of its own, destroyed when it is dropped.
pub(super) trait RawQueuePair: Send {
    fn number(&self) -> u32;
    fn ready_to_receive(&mut self, path: &Path) -> Result<(), DeviceError>;
    fn ready_to_send(&mut self, path: &Path) -> Result<(), DeviceError>;
    fn post_recv(&mut self, work: Work<'_>) -> Result<(), DeviceError>;
    fn post_send(&mut self, work: Work<'_>) -> Result<(), DeviceError>;
    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, DeviceError>;
}

/// A registered region.
pub(super) struct Region {
    // Before the memory: it is registered no longer than it exists.
    raw: Box<dyn RawRegion>,
    pub(super) buffer: Arc<Buffer>,
}

struct Lent {
    region: Arc<Region>,
    /// Free ranges by offset, none next to another one.
    free: Vec<(usize, usize)>,
}

impl Lent {
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let index = self.free.iter().position(|(_, size)| *size >= bytes)?;
        let (offset, size) = &mut self.free[index];
        let taken = *offset;
        (*offset, *size) = (*offset + bytes, *size - bytes);
        if *size == 0 {
            self.free.remove(index);
        }
        Some(taken)
    }

    fn give_back(&mut self, offset: usize, bytes: usize) {
        self.free.push((offset, bytes));
        self.free.sort_unstable();
        self.free.dedup_by(|next, before| {
            let touches = before.0 + before.1 == next.0;
            if touches {
                before.1 += next.1;
            }
            touches
        });
    }
}

/// An opened device.
pub(super) struct Device {
    // Before the device: regions are released first.
    regions: Mutex<Vec<Lent>>,
    queue_pairs: AtomicUsize,
    raw: Box<dyn RawDevice>,
}

/// A piece of a registered region, given back when it is dropped.
pub(super) struct Piece {
    pub(super) region: Arc<Region>,
    pub(super) offset: usize,
    bytes: usize,
    device: Arc<Device>,
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut regions = lock(&self.device.regions);
        let lent = regions.iter_mut().find(|lent| Arc::ptr_eq(&lent.region, &self.region));
        lent.expect("a device keeps its regions").give_back(self.offset, self.bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind the locks is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    pub(super) fn new(raw: Box<dyn RawDevice>) -> Arc<Self> {
        let (regions, queue_pairs) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { regions, queue_pairs, raw })
    }

    pub(super) fn name(&self) -> &str {
        self.raw.name()
    }

    pub(super) fn port(&self) -> Result<Port, DeviceError> {
        self.raw.port()
    }

    fn broken(&self, source: RuleError) -> DeviceError {
        DeviceError::Rule { device: self.name().to_owned(), source }
    }

    /// Registered memory of at least `bytes` bytes.
    pub(super) fn lend(self: &Arc<Self>, bytes: usize) -> Result<Piece, DeviceError> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let mut regions = lock(&self.regions);
        let found =
            regions.iter_mut().find_map(|lent| Some((Arc::clone(&lent.region), lent.take(bytes)?)));
        let (region, offset) = if let Some(found) = found {
            found
        } else {
            let mut lent = self.register(regions.len(), bytes.max(REGION_BYTES))?;
            let offset = lent.take(bytes).expect("the region is as large as the piece");
            let region = Arc::clone(&lent.region);
            regions.push(lent);
            (region, offset)
        };
        Ok(Piece { region, offset, bytes, device: Arc::clone(self) })
    }

    fn register(&self, existing: usize, bytes: usize) -> Result<Lent, DeviceError> {
        let none = || DeviceError::Memory { device: self.name().to_owned(), bytes };
        let buffer = Arc::new(Buffer::new(bytes).ok_or_else(none)?);
        rules::region(existing, buffer.address().addr(), buffer.len())
            .map_err(|source| self.broken(source))?;
        let raw = self.raw.register(&buffer)?;
        let free = vec![(0, buffer.len())];
        Ok(Lent { region: Arc::new(Region { raw, buffer }), free })
    }

    /// A queue pair whose messages lie in `piece`.
    pub(super) fn queue_pair(
        self: &Arc<Self>,
        shape: QueueShape,
        piece: Piece,
    ) -> Result<QueuePair, DeviceError> {
        shape.check().map_err(|source| self.broken(source))?;
        let counted = Counted::new(self).map_err(|source| self.broken(source))?;
        let (raw, granted) = self.raw.queue_pair(shape)?;
        let number = raw.number();
        // From here on it is destroyed with its owner.
        let raw = Arc::new(Mutex::new(Some(raw)));
        let book = QueueBook::new(shape, granted).map_err(|source| self.broken(source))?;
        let mut live = lock(&LIVE);
        live.retain(|queue| queue.strong_count() > 0);
        live.push(Arc::downgrade(&raw));
        Ok(QueuePair { raw, _counted: counted, number, book, piece })
    }

    /// Regions and queue pairs that exist, and bytes lent.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> (usize, usize, usize) {
        let regions = lock(&self.regions);
        let lent = |lent: &Lent| {
            lent.region.buffer.len() - lent.free.iter().map(|(_, size)| size).sum::<usize>()
        };
        let bytes = regions.iter().map(lent).sum();
        (regions.len(), self.queue_pairs.load(Ordering::SeqCst), bytes)
    }
}

/// One of a device's queue pairs, as counted.
struct Counted(Arc<Device>);

impl Counted {
    fn new(device: &Arc<Device>) -> Result<Self, RuleError> {
        let existing = device.queue_pairs.fetch_add(1, Ordering::SeqCst);
        let counted = Self(Arc::clone(device));
        rules::queue_pair(existing)?;
        Ok(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.queue_pairs.fetch_sub(1, Ordering::SeqCst);
    }
}

type Shared = Mutex<Option<Box<dyn RawQueuePair>>>;

/// Every queue pair of this process, for [`release_all`].
static LIVE: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Destroys every queue pair: the process ends. Those whose call hangs in the system are left.
pub(super) fn release_all(patience: std::time::Duration) {
    let end = std::time::Instant::now() + patience;
    let live: Vec<_> = lock(&LIVE).iter().filter_map(Weak::upgrade).collect();
    for queue in live {
        loop {
            if let Ok(mut raw) = queue.try_lock() {
                *raw = None;
                break;
            }
            if std::time::Instant::now() > end {
                break;
            }
            std::thread::yield_now();
        }
    }
}

/// A queue pair, and the memory that its messages lie in.
pub(super) struct QueuePair {
    // In this order: the queue pair is destroyed before it is no longer counted, and before its
    // memory is lent to another one.
    raw: Arc<Shared>,
    _counted: Counted,
    number: u32,
    book: QueueBook,
    piece: Piece,
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        *lock(&self.raw) = None;
    }
}

/// Marks the id of a RECV.
const RECV: u64 = 1 << 63;

/// A message that is done: the slot given when it was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Sent {
        slot: usize,
    },
    Received {
        slot: usize,
        bytes: usize,
    },
    /// A completion with an error, after which the queue pair carries nothing.
    Failed {
        status: u32,
        vendor_error: u32,
    },
}

impl QueuePair {
    pub(super) const fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn device(&self) -> &str {
        self.piece.device.name()
    }

    fn call<T>(
        &self,
        call: impl FnOnce(&mut dyn RawQueuePair) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        match lock(&self.raw).as_deref_mut() {
            Some(raw) => call(raw),
            None => Err(DeviceError::Released { device: self.device().to_owned() }),
        }
    }

    /// Connects it: it receives from then on, and sends once the peer has come as far.
    pub(super) fn connect(&mut self, path: &Path) -> Result<(), DeviceError> {
        self.call(|raw| raw.ready_to_receive(path))?;
        self.enter(QueueState::ReadyToReceive)?;
        self.call(|raw| raw.ready_to_send(path))?;
        self.enter(QueueState::ReadyToSend)
    }

    fn enter(&mut self, state: QueueState) -> Result<(), DeviceError> {
        let entered = self.book.enter(state);
        entered.map_err(|source| self.piece.device.broken(source))
    }

    /// Posts a RECV of `bytes` bytes at `offset` of the piece.
    pub(super) fn post_recv(
        &mut self,
        slot: usize,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let checked = self.book.receive(offset, bytes, self.piece.bytes);
        checked.map_err(|source| self.piece.device.broken(source))?;
        let work = self.work(slot as u64 | RECV, offset, bytes);
        self.call(|raw| raw.post_recv(work))
    }

    /// Posts a SEND.
    pub(super) fn post_send(
        &mut self,
        slot: usize,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let checked = self.book.send(offset, bytes, self.piece.bytes);
        checked.map_err(|source| self.piece.device.broken(source))?;
        let work = self.work(slot as u64, offset, bytes);
        self.call(|raw| raw.post_send(work))
    }

    fn work(&self, id: u64, offset: usize, bytes: usize) -> Work<'_> {
        let Region { raw, buffer } = &*self.piece.region;
        Work { id, buffer, key: raw.key(), offset: self.piece.offset + offset, bytes }
    }

    /// Adds what is done to `done`.
    pub(super) fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), DeviceError> {
        let mut completions = [Completion::default(); 16];
        let count = self.call(|raw| raw.poll(&mut completions))?;
        for completion in &completions[..count] {
            let Completion { id, status, vendor_error, bytes } = *completion;
            let slot = (id & !RECV) as usize;
            let is_recv = id & RECV != 0;
            if is_recv {
                self.book.received();
            } else {
                self.book.sent();
            }
            done.push(match (status, is_recv) {
                (0, true) => Done::Received { slot, bytes },
                (0, false) => Done::Sent { slot },
                _ => Done::Failed { status, vendor_error },
            });
        }
        Ok(())
    }

    /// The memory of the piece, and where in it `offset` lies.
    pub(super) fn memory(&self, offset: usize) -> (&Buffer, usize) {
        (&self.piece.region.buffer, self.piece.offset + offset)
    }
}
