//! `shardpack demo`: convert, push and serve on one machine, with real processes.

pub(super) mod ask;
pub(super) mod children;
pub(super) mod model;

use std::{process::ExitCode, time::Instant};

use shardpack_converter::{ConvertOptions, Pickles};
use shardpack_identity::Endpoint;
use shardpack_transfer::push::{Activation, PushMode};

use super::{Outcome, convert, push};
use crate::{
    args::{CollectivesName, DemoArgs, EngineChoice},
    failure::Failure,
    progress::{result, say, size},
    source::{Input, Keep},
};
use children::{Child, node, serve};

/// Nodes of the demo: the smallest tensor-parallel group.
const NODES: u32 = 2;

/// Runs the command.
pub(crate) fn run(args: &DemoArgs) -> Outcome {
    args.engine.check()?;
    let folder = tempfile::Builder::new().prefix("shardpack-demo-").tempdir()?;
    let source = folder.path().join("kjv-4m");
    model::unpack(&source)?;
    let set = folder.path().join("set");

    step(1, "convert a 4-million-parameter Llama (King James Bible) to 4 bits for two nodes");
    let input = Input {
        source: &source,
        subfolder: None,
        adapters: &[],
        pickles: Pickles::Refuse,
        ignored_config_keys: &[],
        keep: Keep::All,
    };
    let converted = convert::convert_source(&input, options(&set))?;
    let sizes: Vec<String> =
        converted.set.packages.iter().map(|package| size(package.size_bytes)).collect();
    done(&format!(
        "{:.1} million weights, {:.2} bits each, packages of {}",
        converted.report.parameters as f64 / 1e6,
        converted.report.bits_per_weight,
        sizes.join(" and ")
    ));

    step(2, "start two nodes");
    // The server, which knows all ranks, chooses the collectives.
    let of_nodes = EngineChoice { collectives: CollectivesName::Auto, ..args.engine.clone() };
    let nodes: Vec<Child> = (0..NODES)
        .map(|rank| node(&folder.path().join(format!("node-{rank}")), &of_nodes))
        .collect::<Result<_, _>>()?;
    let addresses: Vec<String> = nodes.iter().map(|node| node.address.clone()).collect();
    done(&format!("listening on {}", addresses.join(" and ")));

    step(3, "push each node its own package, every chunk verified on arrival");
    let started = Instant::now();
    let endpoints: Vec<Endpoint> = addresses.iter().map(Endpoint::plain).collect();
    let pushed = push::push_set(&set, &endpoints, PushMode::Send(Activation::WhenAllPrepared), 1)?;
    if !pushed.is_done() {
        return Err(Failure::from(anyhow::anyhow!("the push did not complete on every node")));
    }
    let sent: u64 = pushed.nodes.iter().map(|node| node.traffic.sent_bytes).sum();
    done(&format!("{} sent and active in {:.1} s", size(sent), started.elapsed().as_secs_f64()));

    step(4, "serve the model from both nodes at once");
    let mut server = serve(&set, &addresses, &args.engine.arguments())?;
    done(&format!("OpenAI-compatible API at {}", server.address));

    step(5, &format!("ask for {}", args.ask));
    let answer = ask::stream(&server.address, &args.ask)?;
    done(&format!(
        "{} tokens, {:.0} tokens per second after the first, which took {:.0} ms",
        answer.tokens,
        answer.tokens_per_second,
        answer.first_token_seconds * 1000.0
    ));
    match model::known(&args.ask) {
        Some(verse) if verse != answer.text.trim() => {
            return Err(Failure::wrong(anyhow::anyhow!("the answer should be: {verse}")));
        }
        Some(_) => done("word for word what the model was trained on"),
        None => {}
    }
    if args.keep {
        say(&format!("\nThe server runs at {} until Ctrl-C. Try:\n", server.address));
        result(&ask::curl(&server.address, "Psalms 23:1"));
        server.wait()?;
    }
    // The server first, so that it stops its ranks before the nodes end.
    drop(server);
    drop(nodes);
    Ok(ExitCode::SUCCESS)
}

fn options(output: &std::path::Path) -> ConvertOptions {
    ConvertOptions {
        name: Some("kjv-4m".to_owned()),
        ..ConvertOptions::new(output.to_owned(), NODES)
    }
}

fn step(number: u32, what: &str) {
    say(&format!("{number}. {what}"));
}

fn done(what: &str) {
    say(&format!("   {what}"));
}
