//! The command line: parses arguments, runs a command, prints its result or error as text or JSON.
#![forbid(unsafe_code)]

mod args;
mod cluster;
mod commands;
mod descriptors;
mod discovery;
mod engines;
mod failure;
mod kill_points;
mod leftovers;
mod own_program;
mod progress;
mod sd_notify;
mod sleep_inhibitor;
mod source;
mod text_file;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    descriptors::raise_limit();
    commands::text_worker::try_templates_in_sandboxes();
    let (result, json) = match cli.command {
        Command::Demo(args) => (commands::demo::run(&args), false),
        Command::Plan(args) => (commands::plan::run(&args), args.listing.form.json),
        Command::Calibrate(args) => (commands::calibrate::run(&args), args.form.json),
        Command::Convert(args) => (commands::convert::run(&args), args.form.json),
        Command::Reshard(args) => (commands::reshard::run(&args), args.form.json),
        Command::Export(args) => (commands::export::run(&args), args.form.json),
        Command::Keygen(args) => (commands::keygen::run(&args), args.form.json),
        Command::Sign(args) => (commands::sign::run(&args), args.form.json),
        Command::Verify(args) => (commands::verify::run(&args), args.form.json),
        Command::Inspect(args) => (commands::inspect::run(&args), args.listing.form.json),
        Command::Node(args) => (commands::node::run(&args), args.json),
        Command::Cluster(args) => (commands::cluster::run(&args), args.json),
        Command::Push(args) => (commands::push::run(&args), args.form.json),
        Command::Pull(args) => (commands::pull::run(&args), args.form.json),
        Command::PushHub(args) => (commands::push_hub::run(&args), args.form.json),
        Command::PullHub(args) => (commands::pull_hub::run(&args), args.form.json),
        Command::Serve(args) => (commands::serve::run(&args), args.json),
        Command::Model(args) => (commands::model::run(&args), args.json),
        Command::List(args) => (commands::store::list(&args), args.form.json),
        Command::Rm(args) => (commands::store::remove(&args), false),
        Command::Du(args) => (commands::store::disk_usage(&args), args.form.json),
        Command::Eval(args) => (commands::eval::run(&args), args.form.json),
        Command::Bench(args) => (commands::bench::run(&args), args.form.json),
        Command::Doctor(args) => (commands::doctor::run(&args), args.json),
        Command::SelfTest(args) => (commands::self_test::run(&args), true),
        Command::Engine(args) => (commands::engine::run(&args), commands::engine::json(&args)),
        Command::Chat(args) => (commands::chat::run(&args), false),
        Command::Keys(args) => (commands::keys::run(&args), false),
        Command::Usage(args) => (commands::usage::run(&args), args.json),
        Command::Audit(args) => (commands::audit::run(&args), commands::audit::json(&args)),
        Command::Logits(args) => (commands::logits::run(&args), false),
        Command::Completions(args) => (commands::shell::completions(&args), false),
        Command::Man(args) => (commands::shell::man(&args), false),
        Command::Front(args) => (commands::front::run(&args), false),
        Command::TextWorker(_) => (commands::text_worker::run(), false),
        Command::Rank(args) => (commands::rank::run(&args), false),
    };
    let code = result.unwrap_or_else(|failure| failure.report(json));
    match progress::unwritten() {
        Some(error) => {
            failure::Failure::from(anyhow::anyhow!("standard output: {error}")).report(false)
        }
        None => code,
    }
}
