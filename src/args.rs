//! What the user typed, as types. Parsing only; no command is carried out here.
//!
//! One module per command; `shared` has the options that several commands take.

mod accounts;
mod bench;
mod calibrate;
mod cluster;
mod convert;
mod demo;
mod doctor;
mod engine;
mod eval;
mod export;
mod front;
mod inspect;
mod logits;
mod model;
mod node;
mod plan;
mod pull;
mod push;
mod rank;
mod reshard;
mod serve;
mod shared;
mod shell;
mod sign;
mod store;
mod text_worker;
mod verify;

use clap::{Parser, Subcommand};

pub(crate) use accounts::{AuditAction, AuditArgs, KeyAction, KeyLimitArgs, KeysArgs, UsageArgs};
pub(crate) use bench::BenchArgs;
pub(crate) use calibrate::{CalibrateArgs, CalibrationTextArgs, SENSITIVITY_TOKENS};
pub(crate) use cluster::{
    Ago, ClusterAction, ClusterArgs, PassphraseChoice, ServerChoice, UpgradeArgs,
};
pub(crate) use convert::{ConvertArgs, FormatArgs};
pub(crate) use demo::DemoArgs;
pub(crate) use doctor::{DoctorArgs, ProbeName, SelfTestArgs};
pub(crate) use engine::{
    CollectivesName, EngineAction, EngineArgs, EngineChoice, EngineFolderArgs, EngineInstallArgs,
    EngineName, FastSyncName, SpeculateName,
};
pub(crate) use eval::EvalArgs;
pub(crate) use export::ExportArgs;
pub(crate) use front::FrontArgs;
pub(crate) use inspect::InspectArgs;
pub(crate) use logits::LogitsArgs;
pub(crate) use model::{ModelAction, ModelArgs};
pub(crate) use node::{NodeAction, NodeArgs, NodeServiceArgs, ServiceTarget};
pub(crate) use plan::PlanArgs;
pub(crate) use pull::PullArgs;
pub(crate) use push::{PullHubArgs, PushArgs, PushHubArgs};
pub(crate) use rank::RankArgs;
pub(crate) use reshard::ReshardArgs;
pub(crate) use serve::{ChatArgs, ServeArgs};
pub(crate) use shared::{ClusterChoice, KvFormat, SourceArgs};
pub(crate) use shell::{CompletionsArgs, ManArgs, page, pages};
pub(crate) use sign::{KeygenArgs, SignArgs};
pub(crate) use store::{RemoveArgs, StoreArgs};
pub(crate) use text_worker::TextWorkerArgs;
pub(crate) use verify::VerifyArgs;

/// Run the largest open models on a few machines: quantize, shard, push and serve.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The command of a line that the program itself has written.
pub(crate) fn parse(line: impl IntoIterator<Item = String>) -> anyhow::Result<Command> {
    Ok(Cli::try_parse_from(line)?.command)
}

/// The command of a line of the user's; like at the start, help and mistakes end the program.
pub(crate) fn parse_or_exit(line: impl IntoIterator<Item = String>) -> Command {
    Cli::parse_from(line).command
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 the given model, package or set was read and is wrong; 2 could not run.

Start with:  shardpack demo";

/// The commands, in the order in which a model meets them.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Convert, push and serve a small model on this machine, and ask it a question.
    Demo(DemoArgs),
    /// Show what a conversion would write and whether it fits the nodes' memory.
    Plan(PlanArgs),
    /// Measure what a model's matrices read, for `convert --rounding gptq`.
    Calibrate(CalibrateArgs),
    /// Quantize a model and shard it into one package per node.
    Convert(ConvertArgs),
    /// Shard packages again for another number of nodes, without the source.
    Reshard(ReshardArgs),
    /// Write packages as one model for other programs.
    Export(ExportArgs),
    /// Make a key pair that signs packages.
    Keygen(KeygenArgs),
    /// Sign every package of a set.
    Sign(SignArgs),
    /// Verify every byte of a package or a package set.
    Verify(VerifyArgs),
    /// Show the contents of a package or a package set.
    Inspect(InspectArgs),
    /// Receive packages on this machine and run ranks of them.
    Node(NodeArgs),
    /// Create a cluster of machines and add nodes to it.
    Cluster(ClusterArgs),
    /// Send each node its package.
    Push(PushArgs),
    /// Fetch packages from nodes into a folder.
    Pull(PullArgs),
    /// Upload a package set to the hub.
    PushHub(PushHubArgs),
    /// Fetch a package set from the hub, or one node's package of it.
    PullHub(PullHubArgs),
    /// Measure how fast a set runs on this machine.
    Bench(BenchArgs),
    /// Measure the perplexity of a set on a text, and its KL divergence from another set.
    Eval(EvalArgs),
    /// Install, list and check engines other than the built-in one.
    Engine(EngineArgs),
    /// Check this machine, or every node of a set; the report can be attached to a bug.
    Doctor(DoctorArgs),
    /// Serve a model behind an OpenAI-compatible API: a package set, or a model that is converted
    /// when it is needed.
    #[command(visible_alias = "run")]
    Serve(Box<ServeArgs>),
    /// List, load, unload, update and verify the models of a running server.
    Model(ModelArgs),
    /// List the models that `serve` has converted.
    #[command(visible_alias = "ls")]
    List(StoreArgs),
    /// Remove models that `serve` has converted.
    Rm(RemoveArgs),
    /// Show the disk space of the models that `serve` has converted.
    Du(StoreArgs),
    /// Chat with a server, or with a package set, from the terminal.
    Chat(ChatArgs),
    /// Create, change, list and remove API keys of a server.
    Keys(KeysArgs),
    /// Show what API keys have used of a running server.
    Usage(UsageArgs),
    /// Check the audit log of a server.
    Audit(AuditArgs),
    /// Compute the logits of given tokens (for tests and comparisons).
    Logits(LogitsArgs),
    /// Print a script that completes commands and options in a shell.
    Completions(CompletionsArgs),
    /// Write the manual pages.
    Man(ManArgs),
    /// One rank of a group; started by `serve` and `node`.
    #[command(hide = true)]
    Rank(RankArgs),
    /// A server that a node runs for a controller; started by `node`.
    #[command(hide = true)]
    Front(FrontArgs),
    /// One rank of a self-test; started by `doctor`.
    #[command(hide = true)]
    SelfTest(SelfTestArgs),
    /// The sandbox of a model's chat template and tokenizer; started by whoever needs one.
    #[command(hide = true)]
    TextWorker(TextWorkerArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    fn help(command: &str) -> String {
        let mut cli = Cli::command();
        let command = cli.find_subcommand_mut(command).expect("the command exists");
        command.render_long_help().to_string()
    }

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nodes_default_to_one_in_convert_and_plan_and_are_required_in_reshard() {
        let Ok(Command::Convert(convert)) = parse("shardpack convert m -o out") else { panic!() };
        assert_eq!(convert.format.sharding.nodes, "1");
        let Ok(Command::Plan(plan)) = parse("shardpack plan m --nodes a=64g,b=64g") else {
            panic!()
        };
        assert_eq!(plan.format.sharding.nodes, "a=64g,b=64g");
        assert!(parse("shardpack reshard set -o out").is_err());
        let Ok(Command::Reshard(reshard)) = parse("shardpack reshard set -o out --nodes 2") else {
            panic!()
        };
        assert_eq!((reshard.sharding.nodes.as_str(), reshard.sharding.stages), ("2", 1));
        assert_eq!(reshard.budget.memory.0, 512 << 20);
    }

    #[test]
    fn the_old_name_of_scaffold_rules_is_accepted_and_not_shown() {
        for option in ["--scaffold-rules", "--draft"] {
            let Ok(Command::Plan(plan)) = parse(&format!("shardpack plan m {option} new.toml"))
            else {
                panic!("{option}")
            };
            assert_eq!(plan.scaffold_rules, Some("new.toml".into()));
        }
        let help = help("plan");
        assert!(help.contains("--scaffold-rules") && !help.contains("--draft "), "{help}");
    }

    #[test]
    fn doctor_needs_a_set_and_its_nodes_together() {
        assert!(parse("shardpack doctor").is_ok());
        assert!(parse("shardpack doctor set --nodes a,b").is_ok());
        assert!(parse("shardpack doctor set").is_err());
        assert!(parse("shardpack doctor --nodes a,b").is_err());
        assert!(parse("shardpack serve set --hostfile macs.json --threads 4").is_ok());
    }
}
