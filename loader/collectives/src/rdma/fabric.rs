//! Devices in memory that behave as Apple's note says, for tests: a SEND waits for a RECV, both must
//! cover the same frames, and queue pairs, regions and depths are limited. A fabric can lose, damage,
//! double or delay a message, and cut a device off.
//!
//! It does not stand in for something that could be run: Soft-RoCE forgives what Apple's devices
//! refuse, and real devices lose nothing on demand.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    buffer::Buffer,
    device::{Completion, Device, DeviceError, Path, RawDevice, RawQueuePair, RawRegion, Work},
    devices::Devices,
    port::Port,
    rules::{self, QueueShape, QueueState},
};

/// `IBV_WC_LOC_LEN_ERR`.
const LENGTH_ERROR: u32 = 1;

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOMEM: i32 = 12;

/// What happens to one message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Lose,
    /// Changes the byte at this place.
    Damage(usize),
    Double,
    Delay(Duration),
    /// Arrives with one frame more.
    Lengthen,
}

struct Receive {
    id: u64,
    buffer: Arc<Buffer>,
    offset: usize,
    bytes: usize,
}

struct Queue {
    device: String,
    shape: QueueShape,
    state: QueueState,
    path: Option<Path>,
    receives: VecDeque<Receive>,
    sends: VecDeque<(u64, Vec<u8>)>,
    completions: VecDeque<Completion>,
    held_until: Option<Instant>,
}

struct Node {
    address: Option<Ipv4Addr>,
    /// An address that it has from the second look at its port on.
    later: Option<Ipv4Addr>,
    is_active: bool,
    is_cut: bool,
    queues: usize,
    regions: usize,
}

#[derive(Default)]
struct State {
    nodes: HashMap<String, Node>,
    queues: HashMap<u32, Queue>,
    next_queue: u32,
    /// By the number of messages delivered before.
    faults: Vec<(usize, Fault)>,
    delivered: usize,
    /// SENDs that had to wait for a RECV.
    waited: usize,
}

/// A fabric that devices are connected to.
#[derive(Clone, Default)]
pub(super) struct Fabric(Arc<Mutex<State>>);

pub(super) fn gid(address: Ipv4Addr) -> [u8; 16] {
    address.to_ipv6_mapped().octets()
}

fn failed(device: &str, call: &'static str, code: i32) -> DeviceError {
    let source = io::Error::from_raw_os_error(code);
    DeviceError::Call { device: device.to_owned(), call, source }
}

impl Fabric {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Devices of one machine, by name and address.
    pub(super) fn devices(&self, devices: &[(&str, Option<Ipv4Addr>)]) -> Devices {
        let device = |(name, address): &(&str, Option<Ipv4Addr>)| {
            let node = Node {
                address: *address,
                later: None,
                is_active: true,
                is_cut: false,
                queues: 0,
                regions: 0,
            };
            self.lock().nodes.insert((*name).to_owned(), node);
            Device::new(Box::new(FabricDevice { fabric: self.clone(), name: (*name).to_owned() }))
        };
        Devices(devices.iter().map(device).collect())
    }

    /// Applies `fault` to a message: the next one, or `after` so many.
    pub(super) fn fault(&self, after: usize, fault: Fault) {
        let mut state = self.lock();
        let at = state.delivered + after;
        state.faults.push((at, fault));
    }

    pub(super) fn set_address(&self, device: &str, address: Option<Ipv4Addr>) {
        self.lock().nodes.get_mut(device).unwrap().address = address;
    }

    /// The device has no address when it is looked at, and this one when it is looked at again.
    pub(super) fn set_late_address(&self, device: &str, address: Ipv4Addr) {
        let mut state = self.lock();
        let node = state.nodes.get_mut(device).unwrap();
        (node.address, node.later) = (None, Some(address));
    }

    pub(super) fn set_active(&self, device: &str, is_active: bool) {
        self.lock().nodes.get_mut(device).unwrap().is_active = is_active;
    }

    /// Nothing comes from or to a device any more, without a word.
    pub(super) fn cut(&self, device: &str) {
        self.lock().nodes.get_mut(device).unwrap().is_cut = true;
    }

    /// Takes a device's queue pairs, as another process does.
    pub(super) fn occupy(&self, device: &str, queues: usize) {
        self.lock().nodes.get_mut(device).unwrap().queues += queues;
    }

    pub(super) fn waited(&self) -> usize {
        self.lock().waited
    }

    pub(super) fn queue_pairs(&self) -> usize {
        self.lock().queues.len()
    }
}

impl State {
    /// Delivers what a queue has sent as far as the other one has receives.
    fn deliver(&mut self, from: u32) {
        loop {
            let Some(queue) = self.queues.get(&from) else { return };
            let Some(Path { to, mtu, own_psn, .. }) = queue.path else { return };
            let is_held = queue.held_until.is_some_and(|until| Instant::now() < until);
            if queue.sends.is_empty() || is_held {
                return;
            }
            let source = gid(self.nodes[&queue.device].address.unwrap());
            let is_cut = self.nodes[&queue.device].is_cut;
            let was_held = queue.held_until.is_some();
            let Some(peer) = self.queues.get(&to.number) else { return };
            let fits = peer.path.is_some_and(|path| {
                path.to.number == from
                    && (path.to.gid, path.to.psn, path.mtu) == (source, own_psn, mtu)
            });
            let node = &self.nodes[&peer.device];
            let is_reached = node.address.map(gid) == Some(to.gid) && !node.is_cut && !is_cut;
            if !fits || !is_reached {
                // UC: it has left, and that is all that the sender learns.
                self.complete(from);
                continue;
            }
            if peer.receives.is_empty() {
                return;
            }
            let at = self.delivered;
            let fault = self.faults.iter().position(|(when, _)| *when == at);
            let fault = fault.map(|index| self.faults.swap_remove(index).1);
            if let Some(Fault::Delay(time)) = fault
                && !was_held
            {
                self.queues.get_mut(&from).unwrap().held_until = Some(Instant::now() + time);
                return;
            }
            self.queues.get_mut(&from).unwrap().held_until = None;
            self.delivered += 1;
            let mut message = self.complete(from);
            match fault {
                Some(Fault::Lose) => continue,
                Some(Fault::Damage(place)) => message[place] ^= 0x10,
                Some(Fault::Lengthen) => message.extend([0; rules::FRAME_BYTES]),
                Some(Fault::Double) => self.arrive(to.number, &message),
                Some(Fault::Delay(_)) | None => {}
            }
            self.arrive(to.number, &message);
        }
    }

    fn complete(&mut self, from: u32) -> Vec<u8> {
        let queue = self.queues.get_mut(&from).unwrap();
        let (id, message) = queue.sends.pop_front().unwrap();
        queue.completions.push_back(Completion { id, ..Completion::default() });
        message
    }

    fn arrive(&mut self, to: u32, message: &[u8]) {
        let queue = self.queues.get_mut(&to).unwrap();
        let Some(Receive { id, buffer, offset, bytes }) = queue.receives.pop_front() else {
            return;
        };
        let status = if rules::frames(message.len()) == rules::frames(bytes) {
            buffer.write(offset, message);
            0
        } else {
            LENGTH_ERROR
        };
        queue.completions.push_back(Completion {
            id,
            status,
            vendor_error: 0,
            bytes: message.len(),
        });
    }
}

struct FabricDevice {
    fabric: Fabric,
    name: String,
}

impl RawDevice for FabricDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, DeviceError> {
        let mut state = self.fabric.lock();
        let node = state.nodes.get_mut(&self.name).unwrap();
        let mut gids = vec![[0xfe; 16]];
        gids.extend(node.address.map(gid));
        node.address = node.address.or(node.later.take());
        let state = if node.is_active { 4 } else { 1 };
        Ok(Port { state, mtu: 5, width: 4, speed: 4, lid: 0, gids })
    }

    fn register(&self, _: &Arc<Buffer>) -> Result<Box<dyn RawRegion>, DeviceError> {
        let mut state = self.fabric.lock();
        let node = state.nodes.get_mut(&self.name).unwrap();
        if node.regions >= rules::MAX_REGIONS {
            return Err(failed(&self.name, "ibv_reg_mr", ENOMEM));
        }
        node.regions += 1;
        Ok(Box::new(FabricRegion { fabric: self.fabric.clone(), name: self.name.clone() }))
    }

    fn queue_pair(&self, shape: QueueShape) -> Result<(Box<dyn RawQueuePair>, usize), DeviceError> {
        let mut state = self.fabric.lock();
        let node = state.nodes.get_mut(&self.name).unwrap();
        if node.queues >= rules::MAX_QUEUE_PAIRS {
            return Err(failed(&self.name, "ibv_create_qp", EBUSY));
        }
        node.queues += 1;
        let number = state.next_queue + 100;
        state.next_queue += 1;
        let queue = Queue {
            device: self.name.clone(),
            shape,
            state: QueueState::Init,
            path: None,
            receives: VecDeque::new(),
            sends: VecDeque::new(),
            completions: VecDeque::new(),
            held_until: None,
        };
        state.queues.insert(number, queue);
        Ok((Box::new(FabricQueue { fabric: self.fabric.clone(), number }), rules::MAX_QUEUE_FRAMES))
    }
}

struct FabricRegion {
    fabric: Fabric,
    name: String,
}

impl RawRegion for FabricRegion {
    fn key(&self) -> u32 {
        1
    }
}

impl Drop for FabricRegion {
    fn drop(&mut self) {
        self.fabric.lock().nodes.get_mut(&self.name).unwrap().regions -= 1;
    }
}

struct FabricQueue {
    fabric: Fabric,
    number: u32,
}

impl Drop for FabricQueue {
    fn drop(&mut self) {
        let mut state = self.fabric.lock();
        let queue = state.queues.remove(&self.number).unwrap();
        state.nodes.get_mut(&queue.device).unwrap().queues -= 1;
    }
}

impl RawQueuePair for FabricQueue {
    fn number(&self) -> u32 {
        self.number
    }

    fn ready_to_receive(&mut self, path: &Path) -> Result<(), DeviceError> {
        let mut state = self.fabric.lock();
        let queue = state.queues.get_mut(&self.number).unwrap();
        queue.path = Some(*path);
        queue.state = QueueState::ReadyToReceive;
        Ok(())
    }

    fn ready_to_send(&mut self, _: &Path) -> Result<(), DeviceError> {
        let mut state = self.fabric.lock();
        state.queues.get_mut(&self.number).unwrap().state = QueueState::ReadyToSend;
        Ok(())
    }

    fn post_recv(&mut self, work: Work<'_>) -> Result<(), DeviceError> {
        let mut state = self.fabric.lock();
        let queue = state.queues.get_mut(&self.number).unwrap();
        if queue.state != QueueState::ReadyToSend {
            return Err(failed(&queue.device, "ibv_post_recv", EINVAL));
        }
        if queue.receives.len() == queue.shape.slots {
            return Err(failed(&queue.device, "ibv_post_recv", ENOMEM));
        }
        let Work { id, buffer, offset, bytes, .. } = work;
        queue.receives.push_back(Receive { id, buffer: Arc::clone(buffer), offset, bytes });
        let from = queue.path.unwrap().to.number;
        state.deliver(from);
        Ok(())
    }

    fn post_send(&mut self, work: Work<'_>) -> Result<(), DeviceError> {
        let mut state = self.fabric.lock();
        let queue = state.queues.get_mut(&self.number).unwrap();
        if queue.state != QueueState::ReadyToSend {
            return Err(failed(&queue.device, "ibv_post_send", EINVAL));
        }
        if queue.sends.len() == queue.shape.slots {
            return Err(failed(&queue.device, "ibv_post_send", ENOMEM));
        }
        let mut message = vec![0; work.bytes];
        work.buffer.read(work.offset, &mut message);
        queue.sends.push_back((work.id, message));
        let to = queue.path.unwrap().to.number;
        if state.queues.get(&to).is_some_and(|peer| peer.receives.is_empty()) {
            state.waited += 1;
        }
        state.deliver(self.number);
        Ok(())
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, DeviceError> {
        let mut state = self.fabric.lock();
        // A held message goes on when somebody looks.
        let from = state.queues[&self.number].path.map(|path| path.to.number);
        if let Some(from) = from {
            state.deliver(from);
        }
        let completions = &mut state.queues.get_mut(&self.number).unwrap().completions;
        let count = completions.len().min(into.len());
        into.iter_mut().zip(completions.drain(..count)).for_each(|(into, it)| *into = it);
        Ok(count)
    }
}
