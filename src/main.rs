//! The command line: arguments in, a command carried out, results and errors for people and
//! machines.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod pause;
mod progress;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let (result, json) = match cli.command {
        Command::Convert(args) => (commands::convert::run(&args), args.json),
        Command::Inspect(args) => (commands::inspect::run(&args), args.json),
        _ => (Ok(ExitCode::SUCCESS), false),
    };
    result.unwrap_or_else(|failure| failure.report(json))
}
