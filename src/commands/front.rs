//! A front that a node runs for a controller: what it is to serve and how ([`Assignment`]), and the
//! process that does. The controller's machine may be away meanwhile.

use std::{
    fs,
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use shardpack_identity::{Endpoint, FrontCertificate, PeerKey};
use shardpack_manifests::Digest;
use shardpack_transfer::protocol::PackageKey;

use super::{Outcome, serve};
use crate::args::{self, CollectivesName, Command, FrontArgs, ServeArgs};

/// Version of the document.
const FORMAT: u32 = 1;

/// Longest name of an assignment: it names files.
const MAX_NAME_BYTES: usize = 100;

/// The file of a front's API keys.
const KEYS: &str = "keys.json";

/// What a front serves, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Assignment {
    format: u32,
    /// The model's name in the API, and what the front is called.
    pub name: String,
    /// The set's layout.
    pub layout: Digest,
    /// Where its ranks are, in rank order.
    pub ranks: Vec<Place>,
    /// Lets the front start ranks on members of the cluster.
    pub certificate: Option<FrontCertificate>,
    /// How it serves.
    pub options: FrontOptions,
}

/// The node of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Place {
    name: String,
    address: String,
    /// The key that it must show; none of a node on the front's own machine.
    key: Option<PeerKey>,
}

/// The options of `serve` that a front has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrontOptions {
    listen: SocketAddr,
    aliases: Vec<String>,
    /// The file of API keys, which holds their hashes.
    keys: Option<String>,
    /// Certificate and key in PEM.
    tls: Option<[String; 2]>,
    insecure: bool,
    cors: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    allow_host: Vec<String>,
    queue: u32,
    request_timeout: u64,
    resume_timeout: u64,
    drain_timeout: u64,
    log: bool,
    collectives: String,
    require_encryption: bool,
}

impl Assignment {
    /// What `args` ask for, of a set of this layout on these nodes.
    pub(crate) fn new(
        args: &ServeArgs,
        name: String,
        layout: Digest,
        nodes: &[Endpoint],
        certificate: Option<FrontCertificate>,
    ) -> anyhow::Result<Self> {
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let tls = match (&args.tls_cert, &args.tls_key) {
            (Some(certificate), Some(key)) => Some([read(certificate)?, read(key)?]),
            _ => None,
        };
        let collectives = match args.engine.collectives {
            CollectivesName::Auto => "auto",
            CollectivesName::Tcp => "tcp",
            CollectivesName::Rdma => "rdma",
            _ => anyhow::bail!("--on: MLX's own collectives need a server on this machine"),
        };
        let place = |node: &Endpoint| Place {
            name: node.name().to_owned(),
            address: node.address().to_owned(),
            key: node.tls().map(|tls| tls.key),
        };
        let assignment = Self {
            format: FORMAT,
            name,
            layout,
            ranks: nodes.iter().map(place).collect(),
            certificate,
            options: FrontOptions {
                listen: args.address(),
                aliases: args.alias.clone(),
                keys: args.keys.as_deref().map(read).transpose()?,
                tls,
                insecure: args.insecure,
                cors: args.cors.clone(),
                allow_host: args.allow_host.clone(),
                queue: args.queue,
                request_timeout: args.request_timeout,
                resume_timeout: args.resume_timeout,
                drain_timeout: args.drain_timeout,
                log: args.log,
                collectives: collectives.to_owned(),
                require_encryption: args.require_encryption,
            },
        };
        assignment.check()?;
        Ok(assignment)
    }

    /// Refuses what is of another version, or has a name that is no file's.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let Self { format, name, ranks, .. } = self;
        ensure!(*format == FORMAT, "a front of format {format}, this program knows {FORMAT}");
        ensure!(!ranks.is_empty(), "a front without ranks");
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name = (1..=MAX_NAME_BYTES).contains(&name.len())
            && !name.starts_with(['.', '-'])
            && name.bytes().all(is_allowed);
        ensure!(
            is_name,
            "{name:?} cannot name a front: letters, digits, '-', '_' and '.' can; give another with --name"
        );
        Ok(())
    }

    /// Whether they differ in no more than a renewed certificate.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        Self { certificate: None, ..self.clone() } == Self { certificate: None, ..other.clone() }
    }

    /// Whether both need keys and differ in no more than these and a renewed certificate: a running front
    /// reads its keys again.
    pub(crate) fn is_like_but_for_keys(&self, other: &Self) -> bool {
        let mut with_keys = self.clone();
        with_keys.options.keys.clone_from(&other.options.keys);
        self.options.keys.is_some() && other.options.keys.is_some() && with_keys.is_like(other)
    }

    /// Replaces the keys of a running front, whose files are in `folder`.
    pub(crate) fn write_keys(&self, folder: &Path) -> anyhow::Result<()> {
        let Some(keys) = &self.options.keys else { return Ok(()) };
        write(&folder.join(KEYS), keys.as_bytes())
    }

    /// How long its requests may take to finish when it ends.
    pub(crate) const fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.options.drain_timeout)
    }

    /// How its ranks are reached, by a front on the node of this identity.
    fn nodes(&self, identity: Option<&Path>) -> anyhow::Result<Vec<(Endpoint, PackageKey)>> {
        let credentials = match (&self.certificate, identity) {
            (Some(certificate), Some(identity)) => Some(certificate.credentials(identity)?),
            (None, _) => None,
            (Some(_), None) => anyhow::bail!("this node is in no cluster, and the front is of one"),
        };
        let node = |(rank, place): (u32, &Place)| {
            let Place { name, address, key } = place.clone();
            let endpoint = match (key, &credentials) {
                (Some(key), Some(credentials)) => {
                    Endpoint::member(name, address, credentials.clone(), key)
                }
                (Some(_), None) => {
                    anyhow::bail!("{name} is a member, and the front has no certificate")
                }
                (None, _) => Endpoint::plain(address),
            };
            Ok((endpoint, PackageKey { layout: self.layout, rank }))
        };
        (0..).zip(&self.ranks).map(node).collect()
    }

    /// The arguments of `serve`; keys and certificates are written to files in `folder`, for this user
    /// only.
    fn arguments(&self, package: &Path, folder: &Path) -> anyhow::Result<ServeArgs> {
        let options = &self.options;
        let file = |name: &str, text: &str| -> anyhow::Result<String> {
            let path = folder.join(name);
            write(&path, text.as_bytes())?;
            path.to_str().map(str::to_owned).context("the store's path is no text")
        };
        let mut line = vec!["shardpack".to_owned(), "serve".to_owned()];
        line.push(package.to_str().context("the store's path is no text")?.to_owned());
        let mut option = |name: &str, value: String| line.push(format!("--{name}={value}"));
        option("listen", options.listen.to_string());
        option("name", self.name.clone());
        for alias in &options.aliases {
            option("alias", alias.clone());
        }
        for host in &options.allow_host {
            option("allow-host", host.clone());
        }
        for origin in &options.cors {
            option("cors", origin.clone());
        }
        option("queue", options.queue.to_string());
        option("request-timeout", options.request_timeout.to_string());
        option("resume-timeout", options.resume_timeout.to_string());
        option("drain-timeout", options.drain_timeout.to_string());
        option("collectives", options.collectives.clone());
        if let Some(keys) = &options.keys {
            option("keys", file(KEYS, keys)?);
        }
        if let Some([certificate, key]) = &options.tls {
            option("tls-cert", file("tls-cert.pem", certificate)?);
            option("tls-key", file("tls-key.pem", key)?);
        }
        let flags = [
            ("insecure", options.insecure),
            ("log", options.log),
            ("require-encryption", options.require_encryption),
            ("json", true),
        ];
        line.extend(
            flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| format!("--{name}")),
        );
        match args::parse(line)? {
            Command::Serve(args) => Ok(*args),
            _ => anyhow::bail!("not the arguments of a server"),
        }
    }
}

/// Replaces a file in one step; only this user may read it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    use std::io::Write as _;
    let shown = || path.display().to_string();
    let folder = path.parent().context("a file in a folder")?;
    fs::create_dir_all(folder).with_context(shown)?;
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(shown)?;
    file.write_all(bytes).with_context(shown)?;
    file.as_file().sync_all().with_context(shown)?;
    file.persist(path).with_context(shown)?;
    Ok(())
}

/// Reads an assignment.
pub(crate) fn read(path: &Path) -> anyhow::Result<Assignment> {
    let shown = || path.display().to_string();
    let bytes = fs::read(path).with_context(shown)?;
    let assignment: Assignment = serde_json::from_slice(&bytes).with_context(shown)?;
    assignment.check().with_context(shown)?;
    Ok(assignment)
}

/// Runs the hidden command: serves until it is told to end, or its node ends.
pub(crate) fn run(args: &FrontArgs) -> Outcome {
    let assignment = read(&args.assignment)?;
    let folder: PathBuf = args.assignment.with_extension("files");
    let serve_args = assignment.arguments(&args.package, &folder)?;
    let nodes = assignment.nodes(args.identity.as_deref())?;
    let stop = shardpack_server::Stop::default();
    let node_ends = stop.clone();
    thread::Builder::new().name("node".to_owned()).spawn(move || {
        // The node holds the other end, and never writes.
        let _ = std::io::stdin().read(&mut [0]);
        node_ends.stop();
    })?;
    serve::run_assigned(&serve_args, nodes, stop)
}
