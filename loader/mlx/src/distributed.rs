//! Configuration of MLX's own distributed layers (ring over TCP, JACCL over RDMA): hosts, ports and
//! RDMA devices of the ranks. Checked here, since MLX waits for ever where a host or a cable is
//! missing, and written as the environment variables and files that it reads when a process joins.

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// Most ranks of JACCL's mesh (`MESH_MAX_PEERS`), which connects every two of them.
const MAX_MESH_RANKS: usize = 8;

/// Most cables from one rank to the next in JACCL's ring (`RING_MAX_CONNS`).
const MAX_RING_CABLES: usize = 4;

/// Most ranks of any group here.
const MAX_RANKS: usize = 64;

/// Largest host file: a hundred bytes for each of 64 × 64 devices are less.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Longest name of a device; Linux allows 63 bytes and macOS's are shorter.
const MAX_DEVICE_BYTES: usize = 63;

/// The port of rank 0 where none is said, as `mlx.launch` has it. Rank `r` of a ring listens `r`
/// ports above it.
pub const FIRST_PORT: u16 = 32323;

/// One of MLX's own distributed layers, with its configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Distributed {
    /// Ring all-reduce over TCP.
    Ring {
        /// Where each rank listens, by rank; several addresses are several connections.
        hosts: Vec<Vec<SocketAddr>>,
    },
    /// JACCL: all-reduce over RDMA.
    Jaccl {
        /// For each rank its devices to each other rank: one for each cable, none to itself.
        devices: Vec<Vec<Vec<String>>>,
        /// Where rank 0 listens until all are connected; IPv4.
        coordinator: SocketAddr,
        /// Whether a ring is wanted where the devices would also be a mesh. A mesh takes one cable
        /// of each pair, a ring all of them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        prefer_ring: bool,
    },
}

/// How JACCL connects its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Every two ranks have a cable.
    Mesh,
    /// Each rank has cables to the one before and the one after.
    Ring,
}

/// Why MLX's own layers cannot be used so.
#[derive(Debug, thiserror::Error)]
pub enum DistributedError {
    /// The file cannot be read.
    #[error("{}: cannot be read", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no host file.
    #[error("{}: not a host file as mlx.distributed_config writes it: {problem}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Another number of ranks.
    #[error("the host file has {found} hosts, and the set has {expected} ranks")]
    Ranks {
        /// Ranks of the set.
        expected: usize,
        /// Hosts.
        found: usize,
    },
    /// A rank has no address, or one that another has.
    #[error("rank {rank}: {problem}")]
    Address {
        /// The rank.
        rank: usize,
        /// What is wrong.
        problem: String,
    },
    /// The devices connect the ranks neither as a mesh nor as a ring.
    #[error(
        "rank {from} has no RDMA device to rank {to}: JACCL needs one between every two of at most \
         {MAX_MESH_RANKS} ranks, or as many to the rank before as to the rank after, at most \
         {MAX_RING_CABLES}; connect them, or use --collectives auto"
    )]
    Devices {
        /// The rank.
        from: usize,
        /// The other.
        to: usize,
    },
    /// The file is one for another layer.
    #[error(
        "the host file is for the backend {found:?}, and the collectives are {asked}: let \
         mlx.distributed_config write one with --backend {asked}, or use --collectives {fits}"
    )]
    Backend {
        /// What the file says.
        found: String,
        /// What was asked for.
        asked: &'static str,
        /// What would fit.
        fits: &'static str,
    },
    /// A ring was asked for, and the devices are none.
    #[error(
        "the host file is for jaccl-ring, and rank {from} has {found} cables to rank {to} where rank 0 \
         has {expected} to rank 1: a ring needs as many to the rank before as to the rank after, 1 to \
         {MAX_RING_CABLES}"
    )]
    Ring {
        /// The rank.
        from: usize,
        /// Its neighbour.
        to: usize,
        /// Cables of rank 0.
        expected: usize,
        /// Cables between them.
        found: usize,
    },
    /// A name that no device can have.
    #[error("rank {rank}: {name:?} is not the name of an RDMA device")]
    Device {
        /// The rank.
        rank: usize,
        /// The name.
        name: String,
    },
}

/// `mlx.launch`'s description of its hosts:
/// `{"backend": "jaccl", "hosts": [{"ssh": …, "ips": […], "rdma": […]}]}`, or the list alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFile {
    hosts: Vec<Host>,
    backend: Backend,
}

/// The layer that a host file was written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    /// The file does not say.
    Any,
    Ring,
    Jaccl,
    /// JACCL as a ring, even if every two ranks have a cable.
    JacclRing,
}

impl Backend {
    fn parse(name: &str) -> Result<Self, String> {
        match name {
            "" | "any" => Ok(Self::Any),
            "ring" => Ok(Self::Ring),
            "jaccl" => Ok(Self::Jaccl),
            "jaccl-ring" => Ok(Self::JacclRing),
            other => Err(format!("its backend {other:?} is none of ring, jaccl, jaccl-ring")),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Host {
    #[serde(default)]
    ips: Vec<IpAddr>,
    #[serde(default)]
    rdma: Vec<Option<Cables>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Cables {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    Whole {
        hosts: Vec<Host>,
        #[serde(default)]
        backend: String,
    },
    List(Vec<Host>),
}

impl HostFile {
    /// Reads and parses a host file.
    pub fn read(path: &Path) -> Result<Self, DistributedError> {
        let read = |source| DistributedError::Read { path: path.to_owned(), source };
        let problem = |problem: String| DistributedError::File { path: path.to_owned(), problem };
        let size = fs::metadata(path).map_err(read)?.len();
        if size > MAX_FILE_BYTES {
            return Err(problem(format!("{size} bytes")));
        }
        Self::parse(&fs::read(path).map_err(read)?).map_err(problem)
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (hosts, backend) =
            match serde_json::from_slice(bytes).map_err(|error| error.to_string())? {
                File::Whole { hosts, backend } => (hosts, Backend::parse(&backend)?),
                File::List(hosts) => (hosts, Backend::Any),
            };
        if hosts.is_empty() || hosts.len() > MAX_RANKS {
            return Err(format!("{} hosts", hosts.len()));
        }
        Ok(Self { hosts, backend })
    }

    /// A ring over the hosts' addresses, with ports from `first_port` on.
    pub fn ring(&self, first_port: u16) -> Result<Distributed, DistributedError> {
        if matches!(self.backend, Backend::Jaccl | Backend::JacclRing) && self.has_no_addresses() {
            return Err(self.other("ring", "jaccl"));
        }
        let hosts = self.hosts.iter().enumerate().map(|(rank, host)| {
            let port = port_of(first_port, rank)?;
            Ok(host.ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect())
        });
        Ok(Distributed::Ring { hosts: hosts.collect::<Result<_, DistributedError>>()? })
    }

    /// JACCL over the hosts' devices, with its coordinator on `port` of the first host.
    pub fn jaccl(&self, port: u16) -> Result<Distributed, DistributedError> {
        if self.backend == Backend::Ring {
            return Err(self.other("jaccl", "ring"));
        }
        let names = |cables: &Option<Cables>| match cables {
            None => Vec::new(),
            Some(Cables::One(name)) => vec![name.clone()],
            Some(Cables::Several(names)) => names.clone(),
        };
        let devices = self.hosts.iter().map(|host| host.rdma.iter().map(names).collect()).collect();
        let ip = self.hosts.first().and_then(|host| host.ips.first());
        let problem = "has no address, which JACCL's ranks need to connect".to_owned();
        let ip = *ip.ok_or(DistributedError::Address { rank: 0, problem })?;
        let prefer_ring = self.backend == Backend::JacclRing;
        let coordinator = SocketAddr::new(ip, port);
        Ok(Distributed::Jaccl { devices, coordinator, prefer_ring })
    }

    /// JACCL in a ring over all cables between neighbours, whatever the file's own backend says of
    /// mesh and ring.
    pub fn jaccl_ring(&self, port: u16) -> Result<Distributed, DistributedError> {
        let mut found = self.jaccl(port)?;
        if let Distributed::Jaccl { prefer_ring, .. } = &mut found {
            *prefer_ring = true;
        }
        Ok(found)
    }

    /// Whether a ring over TCP has no way to some rank.
    fn has_no_addresses(&self) -> bool {
        self.hosts.iter().any(|host| host.ips.is_empty())
    }

    fn other(&self, asked: &'static str, fits: &'static str) -> DistributedError {
        let found = match self.backend {
            Backend::Any => "any",
            Backend::Ring => "ring",
            Backend::Jaccl => "jaccl",
            Backend::JacclRing => "jaccl-ring",
        };
        DistributedError::Backend { found: found.to_owned(), asked, fits }
    }
}

/// The port of a rank of a ring.
fn port_of(first: u16, rank: usize) -> Result<u16, DistributedError> {
    let port = u16::try_from(rank).ok().and_then(|rank| first.checked_add(rank));
    let problem = format!("there is no port {rank} above {first}");
    port.ok_or(DistributedError::Address { rank, problem })
}

impl Distributed {
    /// A ring over one address for each rank, with ports from `first_port` on.
    pub fn ring_over(ips: &[IpAddr], first_port: u16) -> Result<Self, DistributedError> {
        let host = |ip: &IpAddr| Host { ips: vec![*ip], rdma: Vec::new() };
        let hosts = ips.iter().map(host).collect();
        HostFile { hosts, backend: Backend::Any }.ring(first_port)
    }

    /// MLX's name of the layer.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ring { .. } => "ring",
            Self::Jaccl { .. } => "jaccl",
        }
    }

    /// Ranks that it describes.
    #[must_use]
    pub fn ranks(&self) -> usize {
        match self {
            Self::Ring { hosts } => hosts.len(),
            Self::Jaccl { devices, .. } => devices.len(),
        }
    }

    /// Whether it describes a group of `ranks`, in which each can reach those that it must.
    pub fn check(&self, ranks: usize) -> Result<(), DistributedError> {
        let found = self.ranks();
        if found != ranks || ranks > MAX_RANKS {
            return Err(DistributedError::Ranks { expected: ranks, found });
        }
        match self {
            Self::Ring { hosts } => check_hosts(hosts),
            Self::Jaccl { devices, coordinator, prefer_ring } => {
                if !coordinator.is_ipv4() {
                    let problem =
                        format!("{coordinator} is not an IPv4 address, which JACCL needs");
                    return Err(DistributedError::Address { rank: 0, problem });
                }
                check_names(devices)?;
                if *prefer_ring { check_ring(devices) } else { topology(devices).map(drop) }
            }
        }
    }

    /// The variables that tell MLX in `rank`'s process what to do; the files that they name are
    /// written into `folder`, and are read when the process joins.
    pub fn environment(&self, rank: u32, folder: &Path) -> io::Result<Vec<(&'static str, String)>> {
        let rank = ("MLX_RANK", rank.to_string());
        let write = |name: &str, json: String| {
            let path = folder.join(name);
            fs::write(&path, json)?;
            path.into_os_string().into_string().map_err(|path| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{} is not UTF-8", path.display()),
                )
            })
        };
        match self {
            Self::Ring { hosts } => {
                let json = serde_json::to_string(hosts)?;
                Ok(vec![rank, ("MLX_HOSTFILE", write("ring.json", json)?)])
            }
            Self::Jaccl { devices, coordinator, prefer_ring } => {
                let mut variables = vec![
                    rank,
                    ("MLX_IBV_DEVICES", write("devices.json", device_matrix(devices))?),
                    ("MLX_JACCL_COORDINATOR", coordinator.to_string()),
                ];
                // Its presence counts.
                let is_ring = topology(devices).is_ok_and(|topology| topology == Topology::Ring);
                if *prefer_ring || is_ring {
                    variables.push(("MLX_JACCL_RING", "1".to_owned()));
                }
                Ok(variables)
            }
        }
    }
}

/// Variables that would tell MLX something else than [`Distributed::environment`] does.
pub const FOREIGN_VARIABLES: [&str; 9] = [
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "JACCL_RANK",
    "JACCL_IBV_DEVICES",
    "JACCL_COORDINATOR",
    "JACCL_RING",
];

fn check_hosts(hosts: &[Vec<SocketAddr>]) -> Result<(), DistributedError> {
    let mut seen = BTreeSet::new();
    for (rank, addresses) in hosts.iter().enumerate() {
        let problem = |problem: String| DistributedError::Address { rank, problem };
        if addresses.is_empty() {
            return Err(problem("has no address".to_owned()));
        }
        if addresses.len() != hosts[0].len() {
            let (found, expected) = (addresses.len(), hosts[0].len());
            return Err(problem(format!("has {found} addresses, and rank 0 has {expected}")));
        }
        for address in addresses {
            if address.port() == 0 || address.ip().is_unspecified() {
                return Err(problem(format!("{address} is not a usable address")));
            }
            if !seen.insert(*address) {
                return Err(problem(format!("{address} is also another rank's")));
            }
        }
    }
    Ok(())
}

fn check_names(devices: &[Vec<Vec<String>>]) -> Result<(), DistributedError> {
    for (rank, row) in devices.iter().enumerate() {
        if row.len() != devices.len() {
            return Err(DistributedError::Ranks { expected: devices.len(), found: row.len() });
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        for name in row.iter().flatten() {
            if name.is_empty() || name.len() > MAX_DEVICE_BYTES || !name.chars().all(is_plain) {
                return Err(DistributedError::Device { rank, name: name.clone() });
            }
        }
    }
    Ok(())
}

/// How a square matrix of devices connects the ranks. Two ranks with several cables are a ring, which
/// uses all of them; a mesh takes the first of each pair.
pub fn topology(devices: &[Vec<Vec<String>>]) -> Result<Topology, DistributedError> {
    let ranks = devices.len();
    let cables = |from: usize, to: usize| devices[from][to].len();
    let pairs = || (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    let is_mesh = ranks <= MAX_MESH_RANKS
        && pairs().filter(|(from, to)| from != to).all(|(from, to)| cables(from, to) > 0);
    let ring = check_ring(devices);
    if is_mesh && !(ranks == 2 && cables(0, 1) > 1 && ring.is_ok()) {
        return Ok(Topology::Mesh);
    }
    match ring {
        Ok(()) => Ok(Topology::Ring),
        Err(DistributedError::Ring { from, to, .. }) => Err(DistributedError::Devices { from, to }),
        Err(error) => Err(error),
    }
}

/// Whether each rank has as many cables to the one before as to the one after.
fn check_ring(devices: &[Vec<Vec<String>>]) -> Result<(), DistributedError> {
    let ranks = devices.len();
    let cables = |from: usize, to: usize| devices[from][to].len();
    let expected = cables(0, 1 % ranks.max(1));
    for from in 0..ranks {
        for to in [(from + 1) % ranks, (from + ranks - 1) % ranks] {
            let found = cables(from, to);
            if from != to && (found == 0 || found != expected || found > MAX_RING_CABLES) {
                return Err(DistributedError::Ring { from, to, expected, found });
            }
        }
    }
    Ok(())
}

impl Distributed {
    /// How many cables of each pair stay unused, at most: a mesh takes the first.
    #[must_use]
    pub fn unused_cables(&self) -> usize {
        match self {
            Self::Jaccl { devices, prefer_ring: false, .. }
                if topology(devices).is_ok_and(|it| it == Topology::Mesh) =>
            {
                devices
                    .iter()
                    .flatten()
                    .map(|names| names.len().saturating_sub(1))
                    .max()
                    .unwrap_or(0)
            }
            _ => 0,
        }
    }
}

/// The matrix as JACCL reads it: null, a name, or a list of names.
fn device_matrix(devices: &[Vec<Vec<String>>]) -> String {
    let cell = |names: &Vec<String>| match names.as_slice() {
        [] => serde_json::Value::Null,
        [name] => name.as_str().into(),
        names => names.into(),
    };
    let row = |row: &Vec<Vec<String>>| row.iter().map(cell).collect::<serde_json::Value>();
    devices.iter().map(row).collect::<serde_json::Value>().to_string()
}

#[cfg(test)]
mod tests;
