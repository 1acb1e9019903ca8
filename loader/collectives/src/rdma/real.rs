//! Devices of the verbs library. Owns what the library hands out and destroys it in the order that
//! the library wants: queue pair, completion queue, region, protection domain, context.
#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::{
    ffi::c_int,
    io,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    buffer::Buffer,
    device::{Completion, DeviceError, Path, RawDevice, RawQueuePair, RawRegion, Work},
    port::{MAX_GIDS, Port},
    rules::QueueShape,
    verbs::{
        ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, AhAttr, Context, Cq,
        GlobalRoute, Mr, Pd, PortAttr, QPS_INIT, QPS_RTR, QPS_RTS, QPT_UC, Qp, QpAttr, QpCap,
        QpInitAttr, RawGid, RecvWr, SEND_SIGNALED, SendWr, Sge, Verbs, WR_SEND, Wc, mask,
    },
};

/// Every device has one port.
const PORT_NUMBER: u8 = 1;

/// A direct cable has no router on it.
const HOP_LIMIT: u8 = 1;

/// An opened device and its protection domain.
struct Opened {
    name: String,
    verbs: Arc<Verbs>,
    context: NonNull<Context>,
    pd: NonNull<Pd>,
}

// SAFETY: the library's calls may be made from any thread; its own objects are locked by it.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs keep this alive, so none is left in the domain.
        unsafe { (self.verbs.dealloc_pd)(self.pd.as_ptr()) };
        // SAFETY: the domain was the last object of the context.
        unsafe { (self.verbs.close_device)(self.context.as_ptr()) };
    }
}

impl Opened {
    fn failed(&self, call: &'static str, source: io::Error) -> DeviceError {
        DeviceError::Call { device: self.name.clone(), call, source }
    }

    /// The library's calls return an error's number, or a negative one and set `errno`.
    fn check(&self, call: &'static str, result: c_int) -> Result<(), DeviceError> {
        match result {
            0 => Ok(()),
            code if code > 0 => Err(self.failed(call, io::Error::from_raw_os_error(code))),
            _ => Err(self.failed(call, io::Error::last_os_error())),
        }
    }

    fn some<T>(&self, call: &'static str, found: *mut T) -> Result<NonNull<T>, DeviceError> {
        NonNull::new(found).ok_or_else(|| self.failed(call, io::Error::last_os_error()))
    }
}

/// A device of the library.
pub(super) struct RealDevice(Arc<Opened>);

/// Opens the devices whose names are `wanted`.
pub(super) fn open(wanted: impl Fn(&str) -> bool) -> Result<Vec<RealDevice>, DeviceError> {
    let verbs = Arc::new(Verbs::open().map_err(DeviceError::Library)?);
    let mut count = 0;
    // SAFETY: the count is written before the call returns.
    let list = unsafe { (verbs.get_device_list)(&raw mut count) };
    if list.is_null() {
        // A kernel without RDMA.
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` devices.
        let device = unsafe { *list.add(index) };
        // SAFETY: the list is freed below.
        let name = unsafe { verbs.name(device) };
        if wanted(&name) {
            // SAFETY: as above.
            let context = unsafe { (verbs.open_device)(device) };
            found.push((name, context, io::Error::last_os_error()));
        }
    }
    // SAFETY: opened devices stay valid without the list.
    unsafe { (verbs.free_device_list)(list) };
    found
        .into_iter()
        .map(|(name, context, error)| RealDevice::of(&verbs, name, context, error))
        .collect()
}

impl RealDevice {
    fn of(
        verbs: &Arc<Verbs>,
        name: String,
        context: *mut Context,
        error: io::Error,
    ) -> Result<Self, DeviceError> {
        let failed = |call, source| DeviceError::Call { device: name.clone(), call, source };
        let context = NonNull::new(context).ok_or_else(|| failed("ibv_open_device", error))?;
        // SAFETY: the context was just opened.
        let Some(pd) = NonNull::new(unsafe { (verbs.alloc_pd)(context.as_ptr()) }) else {
            let error = failed("ibv_alloc_pd", io::Error::last_os_error());
            // SAFETY: nothing was made in the context.
            unsafe { (verbs.close_device)(context.as_ptr()) };
            return Err(error);
        };
        Ok(Self(Arc::new(Opened { name, verbs: Arc::clone(verbs), context, pd })))
    }
}

impl RawDevice for RealDevice {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn port(&self) -> Result<Port, DeviceError> {
        let opened = &*self.0;
        // Zeroed: the symbol's oldest version writes only the first fields.
        let mut port = PortAttr::default();
        // SAFETY: the struct is as large as the header's.
        let result = unsafe {
            (opened.verbs.query_port)(opened.context.as_ptr(), PORT_NUMBER, &raw mut port)
        };
        opened.check("ibv_query_port", result)?;
        let count = usize::try_from(port.gid_tbl_len).unwrap_or(0).min(MAX_GIDS);
        let gids = (0..count).map(|index| {
            let mut gid = RawGid::default();
            let context = opened.context.as_ptr();
            // SAFETY: the index is within the port's table, and the GID has its 16 bytes.
            let result = unsafe {
                (opened.verbs.query_gid)(context, PORT_NUMBER, index as c_int, &raw mut gid)
            };
            // An empty entry is an error with some drivers.
            if result == 0 { gid.0 } else { [0; 16] }
        });
        let gids = gids.collect();
        let PortAttr { state, active_mtu: mtu, active_width, active_speed, lid, .. } = port;
        Ok(Port { state, mtu, width: active_width, speed: active_speed, lid, gids })
    }

    fn register(&self, buffer: &Arc<Buffer>) -> Result<Box<dyn RawRegion>, DeviceError> {
        let opened = &self.0;
        // Apple's note asks for local writes alone, and its driver refuses just that.
        let all = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE;
        let register = |access| {
            let (address, bytes) = (buffer.address().cast(), buffer.len());
            // SAFETY: the memory is kept by the region for as long as it is registered.
            let region =
                unsafe { (opened.verbs.reg_mr)(opened.pd.as_ptr(), address, bytes, access) };
            opened.some("ibv_reg_mr", region)
        };
        let region = register(all).or_else(|_| register(ACCESS_LOCAL_WRITE))?;
        let (opened, buffer) = (Arc::clone(opened), Arc::clone(buffer));
        Ok(Box::new(RealRegion { region, opened, _buffer: buffer }))
    }

    fn queue_pair(&self, shape: QueueShape) -> Result<(Box<dyn RawQueuePair>, usize), DeviceError> {
        let opened = Arc::clone(&self.0);
        let depth = (shape.slots * shape.frames()) as u32;
        // Both queues' messages, which number less than their frames.
        let entries = 2 * shape.slots as c_int + 2;
        let (context, none) = (opened.context.as_ptr(), ptr::null_mut());
        // SAFETY: the context is open; there is no channel.
        let cq = unsafe { (opened.verbs.create_cq)(context, entries, none, none, 0) };
        let cq = opened.some("ibv_create_cq", cq)?;
        let cq = Completions { cq, opened };
        let cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: shape.sges as u32,
            max_recv_sge: shape.sges as u32,
            max_inline_data: 0,
        };
        let mut init = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cq.cq.as_ptr(),
            recv_cq: cq.cq.as_ptr(),
            srq: ptr::null_mut(),
            cap,
            qp_type: QPT_UC,
            sq_sig_all: 1,
        };
        let opened = &cq.opened;
        // SAFETY: domain and completion queue are of this device, and outlive the queue pair.
        let qp = unsafe { (opened.verbs.create_qp)(opened.pd.as_ptr(), &raw mut init) };
        let qp = opened.some("ibv_create_qp", qp)?;
        let queue = RealQueuePair { qp, cq };
        let attributes = QpAttr { qp_state: QPS_INIT, port_num: PORT_NUMBER, ..QpAttr::default() };
        let bits = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
        queue.modify("ibv_modify_qp (INIT)", attributes, bits)?;
        let granted = queue.granted()?;
        Ok((Box::new(queue), granted))
    }
}

struct RealRegion {
    region: NonNull<Mr>,
    opened: Arc<Opened>,
    _buffer: Arc<Buffer>,
}

// SAFETY: only its keys are read, and it is released once.
unsafe impl Send for RealRegion {}
// SAFETY: as above.
unsafe impl Sync for RealRegion {}

impl RawRegion for RealRegion {
    fn key(&self) -> u32 {
        // SAFETY: the region is registered until this is dropped.
        unsafe { (*self.region.as_ptr()).lkey }
    }
}

impl Drop for RealRegion {
    fn drop(&mut self) {
        // SAFETY: queue pairs whose messages lie in the region keep it, so none is left.
        unsafe { (self.opened.verbs.dereg_mr)(self.region.as_ptr()) };
    }
}

struct Completions {
    cq: NonNull<Cq>,
    opened: Arc<Opened>,
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: its queue pair is destroyed before it.
        unsafe { (self.opened.verbs.destroy_cq)(self.cq.as_ptr()) };
    }
}

struct RealQueuePair {
    qp: NonNull<Qp>,
    cq: Completions,
}

// SAFETY: its owner calls from one thread at a time, which need not be the same one.
unsafe impl Send for RealQueuePair {}

impl Drop for RealQueuePair {
    fn drop(&mut self) {
        // Directly, without the state ERR, after which Apple's driver does not unmap its memory.
        // SAFETY: it was created and not destroyed.
        unsafe { (self.cq.opened.verbs.destroy_qp)(self.qp.as_ptr()) };
    }
}

impl RealQueuePair {
    fn modify(
        &self,
        call: &'static str,
        mut attributes: QpAttr,
        bits: c_int,
    ) -> Result<(), DeviceError> {
        let opened = &self.cq.opened;
        // SAFETY: the struct is as large as the header's, and the bits name what is set.
        let result =
            unsafe { (opened.verbs.modify_qp)(self.qp.as_ptr(), &raw mut attributes, bits) };
        opened.check(call, result)
    }

    /// Frames of the smaller of both queues.
    fn granted(&self) -> Result<usize, DeviceError> {
        let opened = &self.cq.opened;
        let mut attributes = QpAttr::default();
        let mut init = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: ptr::null_mut(),
            recv_cq: ptr::null_mut(),
            srq: ptr::null_mut(),
            cap: QpCap::default(),
            qp_type: 0,
            sq_sig_all: 0,
        };
        let (attributes, init) = (&raw mut attributes, &raw mut init);
        // SAFETY: both structs are as large as the header's.
        let result =
            unsafe { (opened.verbs.query_qp)(self.qp.as_ptr(), attributes, mask::CAP, init) };
        opened.check("ibv_query_qp", result)?;
        // SAFETY: it points to the local above.
        let cap = unsafe { (*init).cap };
        Ok(cap.max_send_wr.min(cap.max_recv_wr) as usize)
    }

    /// Where the library keeps its inline calls' functions.
    fn operations(&self) -> *const super::verbs::ContextOps {
        // SAFETY: the queue pair exists, and its context outlives it.
        unsafe { &raw const (*(*self.qp.as_ptr()).context).ops }
    }

    fn missing(&self, call: &'static str) -> DeviceError {
        self.cq.opened.failed(call, io::ErrorKind::Unsupported.into())
    }
}

fn entry(work: Work<'_>) -> Sge {
    let address = work.buffer.address().wrapping_add(work.offset);
    Sge { addr: address.expose_provenance() as u64, length: work.bytes as u32, lkey: work.key }
}

impl RawQueuePair for RealQueuePair {
    fn number(&self) -> u32 {
        // SAFETY: the queue pair exists until this is dropped.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    fn ready_to_receive(&mut self, path: &Path) -> Result<(), DeviceError> {
        let grh = GlobalRoute {
            dgid: RawGid(path.to.gid),
            sgid_index: path.gid_index,
            hop_limit: HOP_LIMIT,
            ..GlobalRoute::default()
        };
        let address = AhAttr {
            grh,
            dlid: path.to.lid,
            is_global: 1,
            port_num: PORT_NUMBER,
            ..AhAttr::default()
        };
        let attributes = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: path.mtu,
            rq_psn: path.to.psn,
            dest_qp_num: path.to.number,
            ah_attr: address,
            ..QpAttr::default()
        };
        let bits = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        self.modify("ibv_modify_qp (RTR)", attributes, bits)
    }

    fn ready_to_send(&mut self, path: &Path) -> Result<(), DeviceError> {
        let attributes = QpAttr { qp_state: QPS_RTS, sq_psn: path.own_psn, ..QpAttr::default() };
        self.modify("ibv_modify_qp (RTS)", attributes, mask::STATE | mask::SQ_PSN)
    }

    fn post_recv(&mut self, work: Work<'_>) -> Result<(), DeviceError> {
        // SAFETY: the table belongs to the context.
        let post = unsafe { (*self.operations()).post_recv };
        let post = post.ok_or_else(|| self.missing("ibv_post_recv"))?;
        let mut entry = entry(work);
        let mut request =
            RecvWr { wr_id: work.id, next: ptr::null_mut(), sg_list: &raw mut entry, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: request and entry live through the call, which copies them. The memory lies in a
        // region that the queue pair's owner keeps, and nothing else uses it until it is done.
        let result = unsafe { post(self.qp.as_ptr(), &raw mut request, &raw mut bad) };
        self.cq.opened.check("ibv_post_recv", result)
    }

    fn post_send(&mut self, work: Work<'_>) -> Result<(), DeviceError> {
        // SAFETY: the table belongs to the context.
        let post = unsafe { (*self.operations()).post_send };
        let post = post.ok_or_else(|| self.missing("ibv_post_send"))?;
        let mut entry = entry(work);
        let mut request = SendWr {
            wr_id: work.id,
            next: ptr::null_mut(),
            sg_list: &raw mut entry,
            num_sge: 1,
            opcode: WR_SEND,
            send_flags: SEND_SIGNALED,
            imm_data: 0,
            wr: [0; 4],
            rest: [0; 7],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: as for a RECV.
        let result = unsafe { post(self.qp.as_ptr(), &raw mut request, &raw mut bad) };
        self.cq.opened.check("ibv_post_send", result)
    }

    fn poll(&mut self, into: &mut [Completion]) -> Result<usize, DeviceError> {
        // SAFETY: the table belongs to the context.
        let poll = unsafe { (*self.operations()).poll_cq };
        let poll = poll.ok_or_else(|| self.missing("ibv_poll_cq"))?;
        let mut found = [Wc::default(); 16];
        let most = into.len().min(found.len());
        // SAFETY: there is room for `most` completions.
        let count = unsafe { poll(self.cq.cq.as_ptr(), most as c_int, found.as_mut_ptr()) };
        let count = usize::try_from(count)
            .map_err(|_| self.cq.opened.failed("ibv_poll_cq", io::ErrorKind::Other.into()))?;
        for (into, wc) in into.iter_mut().zip(&found[..count.min(most)]) {
            *into = Completion {
                id: wc.wr_id,
                status: wc.status,
                vendor_error: wc.vendor_err,
                bytes: wc.byte_len as usize,
            };
        }
        Ok(count.min(most))
    }
}
