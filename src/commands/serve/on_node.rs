//! `serve --on NODE`: a node runs the server, from now on and after every start of the node.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::receive::NodeClient;

use super::Served;
use crate::{
    args::ServeArgs,
    cluster,
    commands::{Outcome, front::Assignment},
    failure::Failure,
    progress::{result, say},
};

/// Between two looks at the front.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Has the node `on` serve, and waits until it does.
pub(super) fn start(args: &ServeArgs, served: &Served, nodes: &[Endpoint], on: &str) -> Outcome {
    if nodes.len() != served.manifests.len() {
        let (found, packages) = (nodes.len(), served.manifests.len());
        let error = anyhow!("the set has {packages} packages and {found} nodes were given");
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    let on = cluster::nodes(&[on.to_owned()], &args.nodes.cluster)?.remove(0);
    if !nodes.iter().any(|node| node.address() == on.address()) {
        let error = anyhow!("{on} has no rank of this model, and so no tokenizer of it");
        return Err(Failure::from(error).hint("choose one of --nodes for --on"));
    }
    let certificate = match on.tls() {
        Some(_) => Some(cluster::open(&args.nodes.cluster)?.front_certificate(on.name())?),
        None => None,
    };
    let name = args.name.clone().unwrap_or_else(|| served.name.clone());
    let layout = served.manifests[0].ids.layout;
    let assignment = Assignment::new(args, name.clone(), layout, nodes, certificate)?;
    ask(&on, "front.start", &json!({ "assignment": assignment }))?;
    let url = wait(args, &on, &name)?;
    let ranks = nodes.len();
    if args.json {
        let json = json!({ "serving": name, "url": url, "ranks": ranks, "on": on.name() });
        result(&json.to_string());
    } else {
        say(&format!(
            "serve: {name} on {ranks} ranks at {url}, run by {on} (shardpack cluster stop {name} ends it)"
        ));
    }
    Ok(std::process::ExitCode::SUCCESS)
}

/// Waits until the front serves; shows what it does meanwhile.
fn wait(args: &ServeArgs, on: &Endpoint, name: &str) -> Result<String, Failure> {
    let mut shown = String::new();
    // Loading has a limit of its own, which the front keeps.
    let deadline = Instant::now() + Duration::from_hours(2);
    while Instant::now() < deadline {
        let fronts = ask(on, "front.list", &json!({}))?;
        let mut all = fronts["fronts"].as_array().into_iter().flatten();
        let front = all.find(|front| front["name"] == name);
        let front = front.with_context(|| format!("{on} has no front {name} any more"))?;
        if front["state"] == "serving" {
            return Ok(front["url"].as_str().unwrap_or_default().to_owned());
        }
        if let (Some("waiting"), Some(fault)) = (front["state"].as_str(), front["fault"].as_str()) {
            return Err(Failure::from(anyhow!("{on}: the server {fault}")).hint(format!(
                "its node tries again; see `shardpack cluster logs {name}`, or end it with `shardpack cluster stop {name}`"
            )));
        }
        let last = front["last"].as_str().unwrap_or_default();
        if !args.json && !last.is_empty() && last != shown {
            say(last);
            last.clone_into(&mut shown);
        }
        thread::sleep(LOOK_AGAIN);
    }
    Err(anyhow!("{on}: {name} did not serve within two hours").into())
}

fn ask(node: &Endpoint, operation: &str, parameters: &Value) -> anyhow::Result<Value> {
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    Ok(client.operate(operation, parameters)?)
}
