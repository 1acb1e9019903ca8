//! Where the cluster's folder is, and which nodes are meant.

use std::{
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use shardpack_trust::{Endpoint, Home, HomeError, date};

use crate::{args::ClusterChoice, failure::Failure, progress::say};

/// The folder that was chosen, or the user's own.
pub(crate) fn folder(choice: &ClusterChoice) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &choice.folder {
        return Ok(folder.clone());
    }
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    let config = config.context("neither XDG_CONFIG_HOME nor HOME says where settings are")?;
    Ok(config.join("shardpack/cluster"))
}

/// The cluster, which must be there.
pub(crate) fn open(choice: &ClusterChoice) -> Result<Home, Failure> {
    open_at(&folder(choice)?)
}

fn open_at(folder: &Path) -> Result<Home, Failure> {
    Home::open(folder).map_err(|error| match error {
        HomeError::Missing { .. } => Failure::from(error)
            .hint("make one with `shardpack cluster init`, or say with --cluster where it is"),
        error => error.into(),
    })
}

/// The nodes of these names and addresses. Members are called in TLS; any other node must be on
/// this machine.
pub(crate) fn nodes(texts: &[String], choice: &ClusterChoice) -> Result<Vec<Endpoint>, Failure> {
    let home = match folder(choice).map(|folder| Home::open(&folder)) {
        Ok(Ok(home)) => Some(home),
        // Nodes of this machine need none.
        Ok(Err(HomeError::Missing { .. })) | Err(_) if choice.folder.is_none() => None,
        Ok(Err(error)) => return Err(error.into()),
        Err(error) => return Err(error.into()),
    };
    texts.iter().map(|text| node(text, home.as_ref())).collect()
}

fn node(text: &str, home: Option<&Home>) -> Result<Endpoint, Failure> {
    if let Some((home, member)) = home.and_then(|home| Some((home, home.member(text)?))) {
        if member.is_about_to_end() {
            let (name, end) = (&member.name, date(member.expires));
            say(&format!("{name} is a member until {end}: shardpack cluster renew {name}"));
        }
        return Ok(home.endpoint(member));
    }
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().to_canonical().is_loopback() => Ok(Endpoint::plain(text)),
        _ if text.starts_with("localhost:") => Ok(Endpoint::plain(text)),
        _ => Err(match home {
            Some(home) => {
                let known: Vec<&str> = home.members().iter().map(|it| it.name.as_str()).collect();
                let known = match known.as_slice() {
                    [] => "it has none yet".to_owned(),
                    known => format!("its members are {}", known.join(", ")),
                };
                Failure::from(anyhow!("{text} is no node of cluster {}: {known}", home.cluster()))
                    .hint("start `shardpack node --listen ADDRESS:PORT --store FOLDER` on that machine, and say the `shardpack cluster add` line that it prints")
            }
            None => Failure::from(anyhow!(
                "{text} is not a loopback address with a port, and there is no cluster on this machine"
            ))
            .hint("nodes on other machines are reached through a cluster: see `shardpack cluster --help`"),
        }),
    }
}
