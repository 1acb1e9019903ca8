//! macOS: the management controller through `IOKit`, and the footprint of this process. Both are
//! loaded when they are asked for, so that nothing of Apple's is needed to link.

#![expect(unsafe_code, reason = "calls into the system's libraries")]

use std::ffi::{CStr, c_char, c_int, c_void};

use libloading::Library;

use crate::{
    Reading,
    smc::{Controller, PACKET, Port},
};

const IOKIT: &str = "/System/Library/Frameworks/IOKit.framework/IOKit";
const SYSTEM: &str = "/usr/lib/libSystem.B.dylib";
/// The controller's endpoint on Apple silicon, and its class everywhere.
const SERVICES: [&CStr; 2] = [c"AppleSMCKeysEndpoint", c"AppleSMC"];
/// The one call of the controller's user client (`kSMCHandleYPCEvent`).
const SELECTOR: u32 = 2;
/// `RUSAGE_INFO_V2` of <libproc.h>, and its size in words.
const RUSAGE_FLAVOUR: c_int = 2;
const RUSAGE_WORDS: usize = 20;
/// `ri_phys_footprint` in words: after the 16 bytes of the UUID, user and system time, idle and
/// interrupt wake-ups, page-ins, wired and resident size.
const FOOTPRINT: usize = 9;
/// `ri_diskio_bytesread` in words: after start and exit time and the six figures of children.
const DISK_READ: usize = 18;

type Matching = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type Find = unsafe extern "C" fn(u32, *mut c_void) -> u32;
type Open = unsafe extern "C" fn(u32, u32, u32, *mut u32) -> c_int;
type Release = unsafe extern "C" fn(u32) -> c_int;
type Call = unsafe extern "C" fn(u32, u32, *const c_void, usize, *mut c_void, *mut usize) -> c_int;
type Rusage = unsafe extern "C" fn(c_int, c_int, *mut c_void) -> c_int;

/// The sensors of a Mac.
pub(crate) struct Machine {
    system: Option<Library>,
    controller: Option<Controller<Connection>>,
}

impl Machine {
    pub(crate) fn open() -> Self {
        // SAFETY: the system's own libraries have no initialisers that ask anything of us.
        let (system, iokit) = unsafe { (Library::new(SYSTEM).ok(), Library::new(IOKIT).ok()) };
        let connection = match (&system, iokit) {
            (Some(system), Some(iokit)) => Connection::open(system, iokit),
            _ => None,
        };
        Self { system, controller: connection.map(Controller::new) }
    }

    pub(crate) fn read(&mut self) -> Reading {
        Reading {
            memory_bytes: self.system.as_ref().and_then(footprint),
            power_watts: self.controller.as_mut().and_then(Controller::power),
            temperature_celsius: self.controller.as_mut().and_then(Controller::temperature),
        }
    }
}

/// What the kernel counts as this process's memory, GPU memory included.
fn footprint(system: &Library) -> Option<u64> {
    rusage(system).map(|words| words[FOOTPRINT])
}

/// What the kernel fetched from disks for this process.
pub(crate) fn disk_read_bytes() -> Option<u64> {
    // SAFETY: the system's own library has no initialisers that ask anything of us.
    let system = unsafe { Library::new(SYSTEM) }.ok()?;
    rusage(&system).map(|words| words[DISK_READ])
}

fn rusage(system: &Library) -> Option<[u64; RUSAGE_WORDS]> {
    let mut words = [0_u64; RUSAGE_WORDS];
    let process = c_int::try_from(std::process::id()).ok()?;
    // SAFETY: the function has this signature in <libproc.h>, and writes a structure of the
    // flavour's size, which is that of `words`.
    let result = unsafe {
        let rusage = system.get::<Rusage>(b"proc_pid_rusage\0").ok()?;
        rusage(process, RUSAGE_FLAVOUR, words.as_mut_ptr().cast())
    };
    (result == 0).then_some(words)
}

/// An open connection to the controller.
struct Connection {
    port: u32,
    iokit: Library,
}

impl Connection {
    fn open(system: &Library, iokit: Library) -> Option<Self> {
        // SAFETY: the functions have these signatures in <IOKit/IOKitLib.h>; the task's own port
        // is a variable of libSystem; `find` takes over the dictionary, and a service of 0 is none.
        unsafe {
            let task = **system.get::<*const u32>(b"mach_task_self_\0").ok()?;
            let matching = iokit.get::<Matching>(b"IOServiceMatching\0").ok()?;
            let find = iokit.get::<Find>(b"IOServiceGetMatchingService\0").ok()?;
            let open = iokit.get::<Open>(b"IOServiceOpen\0").ok()?;
            let release = iokit.get::<Release>(b"IOObjectRelease\0").ok()?;
            for name in SERVICES {
                let class = matching(name.as_ptr());
                let service = if class.is_null() { 0 } else { find(0, class) };
                if service == 0 {
                    continue;
                }
                let mut port = 0;
                let result = open(service, task, 0, &raw mut port);
                release(service);
                if result == 0 {
                    return Some(Self { port, iokit });
                }
            }
        }
        None
    }
}

impl Port for Connection {
    fn call(&mut self, packet: &[u8; PACKET]) -> Option<[u8; PACKET]> {
        let (mut answer, mut size) = ([0; PACKET], PACKET);
        // SAFETY: the signature is that of <IOKit/IOKitLib.h>; both structures have the sizes that
        // are given, and live through the call.
        let result = unsafe {
            let call = self.iokit.get::<Call>(b"IOConnectCallStructMethod\0").ok()?;
            let (input, output) = (packet.as_ptr().cast(), answer.as_mut_ptr().cast());
            call(self.port, SELECTOR, input, PACKET, output, &raw mut size)
        };
        (result == 0 && size == PACKET).then_some(answer)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the port was opened by us and is closed once.
        unsafe {
            if let Ok(close) = self.iokit.get::<Release>(b"IOServiceClose\0") {
                close(self.port);
            }
        }
    }
}
