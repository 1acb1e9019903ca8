//! The verbs library, opened at run time: `libibverbs` of Linux, `librdma` of macOS. Knows structs
//! and symbols; nothing is linked, so the program starts without the library.
//!
//! The structs are those of rdma-core's `infiniband/verbs.h`, which Apple's header repeats. Only
//! what UC SEND and RECV need is described. Contexts, queues and queue pairs are the library's own
//! and larger than what stands here: they are never allocated, sized or copied. Numbers that the
//! library may extend (transports, states, statuses) are integers, not enums.
#![expect(unsafe_code, reason = "calls into a foreign library")]
#![expect(clippy::struct_field_names, reason = "the header's names")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::{offset_of, size_of},
};

use libloading::Library;

/// A slot of the table of operations that is not called.
type Unused = *mut c_void;

pub(super) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(super) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub(super) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// `struct ibv_context_ops`: the calls that are inline functions in the header.
#[repr(C)]
pub(super) struct ContextOps {
    head: [Unused; 11],
    pub(super) poll_cq: Option<PollCq>,
    req_notify_cq: Unused,
    middle: [Unused; 12],
    pub(super) post_send: Option<PostSend>,
    pub(super) post_recv: Option<PostRecv>,
    tail: [Unused; 5],
}

/// `struct ibv_context`, its first fields.
#[repr(C)]
pub(super) struct Context {
    device: *mut c_void,
    pub(super) ops: ContextOps,
    cmd_fd: c_int,
    async_fd: c_int,
    num_comp_vectors: c_int,
}

/// `struct ibv_pd`; only its address is used.
#[repr(C)]
pub(super) struct Pd {
    context: *mut Context,
    handle: u32,
}

/// `struct ibv_cq`, its first fields.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// `struct ibv_qp`, its first fields.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub(super) qp_num: u32,
    state: u32,
    qp_type: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(super) lkey: u32,
    rkey: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

/// `struct ibv_send_wr`; what SEND does not use is zero.
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: u32,
    pub(super) send_flags: u32,
    pub(super) imm_data: u32,
    pub(super) wr: [u64; 4],
    pub(super) rest: [u64; 7],
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: u32,
    opcode: u32,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: u32,
    pub(super) sq_sig_all: c_int,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct RawGid(pub(super) [u8; 16]);

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct GlobalRoute {
    pub(super) dgid: RawGid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: u32,
    pub(super) cur_qp_state: u32,
    pub(super) path_mtu: u32,
    pub(super) path_mig_state: u32,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortAttr {
    pub(super) state: u32,
    pub(super) max_mtu: u32,
    pub(super) active_mtu: u32,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

/// `IBV_QPT_UC`, the only transport that Apple's devices have.
pub(super) const QPT_UC: u32 = 3;
pub(super) const QPS_INIT: u32 = 1;
pub(super) const QPS_RTR: u32 = 2;
pub(super) const QPS_RTS: u32 = 3;
/// `IBV_WR_SEND`.
pub(super) const WR_SEND: u32 = 2;
/// `IBV_SEND_SIGNALED`.
pub(super) const SEND_SIGNALED: u32 = 2;
pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(super) const ACCESS_REMOTE_READ: c_int = 4;
/// Bits of `enum ibv_qp_attr_mask`.
pub(super) mod mask {
    use std::ffi::c_int;

    pub(in super::super) const STATE: c_int = 1;
    pub(in super::super) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(in super::super) const PKEY_INDEX: c_int = 1 << 4;
    pub(in super::super) const PORT: c_int = 1 << 5;
    pub(in super::super) const AV: c_int = 1 << 7;
    pub(in super::super) const PATH_MTU: c_int = 1 << 8;
    pub(in super::super) const RQ_PSN: c_int = 1 << 12;
    pub(in super::super) const SQ_PSN: c_int = 1 << 16;
    pub(in super::super) const CAP: c_int = 1 << 19;
    pub(in super::super) const DEST_QPN: c_int = 1 << 20;
}

/// Names of the library, the first that opens counts. Apple's lies in the cache of the dynamic
/// linker and not in the file system, so only opening tells whether it exists.
const NAMES: &[&str] = if cfg!(target_os = "macos") {
    &["librdma.dylib", "/usr/lib/librdma.dylib"]
} else {
    &["libibverbs.so.1"]
};

macro_rules! api {
    ($($name:ident = $symbol:literal : fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the opened library.
        pub(super) struct Verbs {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            // Last: the functions lie in it.
            _library: Library,
        }

        impl Verbs {
            fn of(library: Library) -> Result<Self, String> {
                $(
                    // SAFETY: the symbol is the function of that name of the verbs API, whose
                    // declaration is repeated here. The library is kept as long as the pointer.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            concat!($symbol, "\0").as_bytes(),
                        )
                    };
                    let $name = *found.map_err(|error| format!("{}: {error}", $symbol))?;
                )*
                Ok(Self { $($name,)* _library: library })
            }
        }
    };
}

api! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut c_void;
    free_device_list = "ibv_free_device_list": fn(*mut *mut c_void);
    get_device_name = "ibv_get_device_name": fn(*mut c_void) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut c_void) -> *mut Context;
    close_device = "ibv_close_device": fn(*mut Context) -> c_int;
    alloc_pd = "ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    create_cq = "ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut Cq) -> c_int;
    create_qp = "ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = "ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    query_qp = "ibv_query_qp": fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut Qp) -> c_int;
    reg_mr = "ibv_reg_mr": fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut Mr) -> c_int;
    query_port = "ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid = "ibv_query_gid": fn(*mut Context, u8, c_int, *mut RawGid) -> c_int;
}

impl Verbs {
    /// Opens the library; the error says which name failed and why.
    pub(super) fn open() -> Result<Self, String> {
        let mut failures = Vec::new();
        for name in NAMES {
            // SAFETY: the verbs library has initialisers that need nothing of this program.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Self::of(library),
                Err(error) => failures.push(format!("{name}: {error}")),
            }
        }
        Err(failures.join("; "))
    }

    /// A device's name.
    ///
    /// # Safety
    /// `device` is of a device list that was not freed.
    pub(super) unsafe fn name(&self, device: *mut c_void) -> String {
        // SAFETY: the caller says so; the library's string lives as long as the device.
        let name = unsafe { CStr::from_ptr((self.get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }
}

macro_rules! layout {
    (
        sizes { $($sized:ident as $c_type:literal = $size:literal,)* }
        offsets { $($of:ident as $c_of:literal . $($field:ident).+ = $offset:literal,)* }
    ) => {
        // A layout that differs from the header's does not compile.
        $(const _: () = assert!(size_of::<$sized>() == $size);)*
        $(const _: () = assert!(offset_of!($of, $($field).+) == $offset);)*

        /// The same as C expressions and their values, for the check against the header.
        #[cfg(test)]
        const LAYOUT: &[(&str, usize)] = &[
            $((concat!("sizeof(", $c_type, ")"), $size),)*
            $((concat!("offsetof(struct ", $c_of, ", ", layout!(@path $($field).+), ")"), $offset),)*
        ];
    };
    (@path $first:ident) => { stringify!($first) };
    (@path $first:ident . $second:ident) => {
        concat!(stringify!($first), ".", stringify!($second))
    };
}

layout! {
    sizes {
        ContextOps as "struct ibv_context_ops" = 256,
        Sge as "struct ibv_sge" = 16,
        RecvWr as "struct ibv_recv_wr" = 32,
        SendWr as "struct ibv_send_wr" = 128,
        Wc as "struct ibv_wc" = 48,
        QpCap as "struct ibv_qp_cap" = 20,
        QpInitAttr as "struct ibv_qp_init_attr" = 64,
        RawGid as "union ibv_gid" = 16,
        GlobalRoute as "struct ibv_global_route" = 24,
        AhAttr as "struct ibv_ah_attr" = 32,
        QpAttr as "struct ibv_qp_attr" = 144,
        PortAttr as "struct ibv_port_attr" = 52,
        Mr as "struct ibv_mr" = 48,
    }
    offsets {
        Context as "ibv_context".ops = 8,
        Context as "ibv_context".ops.poll_cq = 96,
        Context as "ibv_context".ops.req_notify_cq = 104,
        Context as "ibv_context".ops.post_send = 208,
        Context as "ibv_context".ops.post_recv = 216,
        Context as "ibv_context".cmd_fd = 264,
        Context as "ibv_context".num_comp_vectors = 272,
        Cq as "ibv_cq".context = 0,
        Qp as "ibv_qp".context = 0,
        Qp as "ibv_qp".qp_num = 52,
        Qp as "ibv_qp".state = 56,
        Qp as "ibv_qp".qp_type = 60,
        Mr as "ibv_mr".lkey = 36,
        Mr as "ibv_mr".rkey = 40,
        Mr as "ibv_mr".length = 24,
        SendWr as "ibv_send_wr".next = 8,
        SendWr as "ibv_send_wr".sg_list = 16,
        SendWr as "ibv_send_wr".num_sge = 24,
        SendWr as "ibv_send_wr".opcode = 28,
        SendWr as "ibv_send_wr".send_flags = 32,
        SendWr as "ibv_send_wr".imm_data = 36,
        SendWr as "ibv_send_wr".wr = 40,
        RecvWr as "ibv_recv_wr".sg_list = 16,
        RecvWr as "ibv_recv_wr".num_sge = 24,
        Wc as "ibv_wc".status = 8,
        Wc as "ibv_wc".opcode = 12,
        Wc as "ibv_wc".vendor_err = 16,
        Wc as "ibv_wc".byte_len = 20,
        Wc as "ibv_wc".qp_num = 28,
        Wc as "ibv_wc".src_qp = 32,
        Wc as "ibv_wc".wc_flags = 36,
        QpInitAttr as "ibv_qp_init_attr".cap = 32,
        QpInitAttr as "ibv_qp_init_attr".qp_type = 52,
        QpInitAttr as "ibv_qp_init_attr".sq_sig_all = 56,
        QpAttr as "ibv_qp_attr".path_mtu = 8,
        QpAttr as "ibv_qp_attr".rq_psn = 20,
        QpAttr as "ibv_qp_attr".sq_psn = 24,
        QpAttr as "ibv_qp_attr".dest_qp_num = 28,
        QpAttr as "ibv_qp_attr".qp_access_flags = 32,
        QpAttr as "ibv_qp_attr".ah_attr = 56,
        QpAttr as "ibv_qp_attr".alt_ah_attr = 88,
        QpAttr as "ibv_qp_attr".pkey_index = 120,
        QpAttr as "ibv_qp_attr".max_rd_atomic = 126,
        QpAttr as "ibv_qp_attr".port_num = 129,
        QpAttr as "ibv_qp_attr".timeout = 130,
        QpAttr as "ibv_qp_attr".rate_limit = 136,
        AhAttr as "ibv_ah_attr".dlid = 24,
        AhAttr as "ibv_ah_attr".is_global = 29,
        AhAttr as "ibv_ah_attr".port_num = 30,
        GlobalRoute as "ibv_global_route".sgid_index = 20,
        GlobalRoute as "ibv_global_route".hop_limit = 21,
        PortAttr as "ibv_port_attr".gid_tbl_len = 12,
        PortAttr as "ibv_port_attr".max_msg_sz = 20,
        PortAttr as "ibv_port_attr".lid = 34,
        PortAttr as "ibv_port_attr".link_layer = 46,
    }
}

#[cfg(test)]
mod tests;
