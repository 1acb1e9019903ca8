//! Arguments of `completions` and `man`, and what these write: both are made of the arguments of all
//! commands.

use std::{io, path::PathBuf};

use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

use super::Cli;

/// The program's name on a command line.
const NAME: &str = "shardpack";

/// `completions`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack completions bash > ~/.local/share/bash-completion/completions/shardpack
  shardpack completions zsh > ~/.zfunc/_shardpack      (a folder of $fpath)
  shardpack completions fish > ~/.config/fish/completions/shardpack.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_name = "SHELL", value_enum)]
    pub shell: Shell,
}

/// `man`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack man ~/.local/share/man/man1 && man shardpack-convert
  shardpack man | man -l -")]
pub(crate) struct ManArgs {
    /// A folder for a page of each command; without it the program's own page is printed.
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

impl CompletionsArgs {
    /// The script.
    pub(crate) fn script(&self) -> Vec<u8> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut visible_commands(), NAME, &mut script);
        script
    }
}

/// The program's manual page, in roff.
pub(crate) fn page() -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(visible_commands()).render(&mut page)?;
    Ok(page)
}

/// The program without its hidden commands, which completions would offer.
fn visible_commands() -> Command {
    let program = Cli::command();
    let shown = program.get_subcommands().filter(|command| !command.is_hide_set());
    let mut visible = Command::new(NAME)
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .disable_help_subcommand(true);
    if let Some(about) = program.get_about() {
        visible = visible.about(about.clone());
    }
    visible.args(program.get_arguments().cloned()).subcommands(shown.cloned())
}

/// The manual pages of the program and of each of its commands, by their file names.
pub(crate) fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut program = visible_commands();
    program.build();
    let mut pages = Vec::new();
    collect(&program, &mut pages)?;
    Ok(pages)
}

fn collect(command: &Command, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    pages.push((format!("{name}.1"), page));
    command.get_subcommands().try_for_each(|command| collect(command, pages))
}
