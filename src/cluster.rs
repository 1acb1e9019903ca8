//! Finds the cluster's folder, and the nodes that arguments name.

use std::{
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use shardpack_identity::{Endpoint, Home, HomeError, Member, date, is_local};

use crate::{args::ClusterChoice, failure::Failure, progress::say};

/// The folder that was chosen, or the user's own.
pub(crate) fn folder(choice: &ClusterChoice) -> anyhow::Result<PathBuf> {
    // An empty variable counts as not set.
    if let Some(folder) = choice.folder.as_ref().filter(|it| !it.as_os_str().is_empty()) {
        return Ok(folder.clone());
    }
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    let config =
        config.context("no configuration folder: neither XDG_CONFIG_HOME nor HOME is set")?;
    Ok(config.join("shardpack/cluster"))
}

/// The cluster, which must be there.
pub(crate) fn open(choice: &ClusterChoice) -> Result<Home, Failure> {
    open_at(&folder(choice)?)
}

fn open_at(folder: &Path) -> Result<Home, Failure> {
    Home::open(folder).map_err(|error| match error {
        HomeError::Missing { .. } => Failure::from(error)
            .hint("create one with `shardpack cluster init`, or give its folder with --cluster"),
        error => unusable(error),
    })
}

/// Says what to do about a folder that cannot be used as it is.
fn unusable(error: HomeError) -> Failure {
    match error {
        HomeError::Standby { .. } => Failure::from(error)
            .hint("`shardpack cluster handover` makes it the controller that acts"),
        error => error.into(),
    }
}

/// The nodes of these names and addresses. Members use TLS, and their certificates are renewed when
/// that is due; any other node must be on this machine.
pub(crate) fn nodes(texts: &[String], choice: &ClusterChoice) -> Result<Vec<Endpoint>, Failure> {
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    let mut home = home(texts, choice)?;
    texts.iter().map(|text| node(text, home.as_mut())).collect()
}

/// The cluster, which these nodes may do without.
fn home(texts: &[String], choice: &ClusterChoice) -> Result<Option<Home>, Failure> {
    match folder(choice).map(|folder| Home::open(&folder)) {
        Ok(Ok(home)) => Ok(Some(home)),
        Ok(Err(HomeError::Missing { .. })) if choice.folder.is_none() => Ok(None),
        // Nodes on this machine need no cluster, and no configuration folder either.
        _ if texts.iter().all(|text| names_this_machine(text)) && choice.folder.is_none() => {
            Ok(None)
        }
        Ok(Err(error)) => Err(unusable(error)),
        Err(error) => Err(error.into()),
    }
}

/// The nodes of these names and addresses, and what the cluster knows of each. Nobody is called, so that
/// no node can hold up those who only look.
pub(crate) fn known(
    texts: &[String],
    choice: &ClusterChoice,
) -> Result<Vec<(Endpoint, Option<Member>)>, Failure> {
    let home = home(texts, choice)?;
    let known =
        |text: &String| match home.as_ref().and_then(|home| Some((home, home.member(text)?))) {
            Some((home, member)) => Ok((home.endpoint(member), Some(member.clone()))),
            None => stranger(text, home.as_ref()).map(|endpoint| (endpoint, None)),
        };
    texts.iter().map(known).collect()
}

fn names_this_machine(text: &str) -> bool {
    let address = text.parse::<SocketAddr>();
    text.starts_with("localhost:") || address.is_ok_and(|address| is_local(address.ip()))
}

fn node(text: &str, mut home: Option<&mut Home>) -> Result<Endpoint, Failure> {
    if let Some(home) = home.as_mut()
        && let Some(member) = home.member(text).cloned()
    {
        if member.wants_renewal()
            && let Err(error) = home.renew(&member.name)
        {
            // If it is offline, connecting to it fails later.
            let (name, end, error) =
                (&member.name, date(member.expires), anyhow::Error::from(error));
            say(&format!("{name} is a member until {end} and could not be renewed: {error:#}"));
        }
        return Ok(home.endpoint(&member));
    }
    stranger(text, home.as_deref())
}

/// A node that is no member.
fn stranger(text: &str, home: Option<&Home>) -> Result<Endpoint, Failure> {
    if names_this_machine(text) {
        return Ok(Endpoint::plain(text));
    }
    Err(match home {
        Some(home) => {
            let known: Vec<&str> = home.members().iter().map(|it| it.name.as_str()).collect();
            let known = match known.as_slice() {
                [] => "it has none yet".to_owned(),
                known => format!("its members are {}", known.join(", ")),
            };
            Failure::from(anyhow!("{text} is no node of cluster {}: {known}", home.cluster()))
                .hint("start `shardpack node --listen ADDRESS:PORT --store FOLDER` on that machine, and run the `shardpack cluster add` command that it prints")
        }
        None => Failure::from(anyhow!(
            "{text} is not a loopback address with a port, and there is no cluster on this machine"
        ))
        .hint(
            "nodes on other machines are reached through a cluster: see `shardpack cluster --help`",
        ),
    })
}
