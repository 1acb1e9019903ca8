//! `serve --detach`: the same server in the background.

use std::{
    env, fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, anyhow};

use crate::{
    args::ServeArgs,
    commands::Outcome,
    failure::Failure,
    own_program,
    progress::{result, say},
};

/// Starts the server and returns once it serves.
pub(super) fn start(args: &ServeArgs) -> Outcome {
    let log = log_file()?;
    let file = fs::File::create(&log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(own_program::path()?);
    command.args(env::args_os().skip(1).filter(|argument| argument != "--detach"));
    if !args.json {
        command.arg("--json");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // Neither Ctrl-C nor the terminal's end reaches it.
        command.process_group(0);
    }
    let mut child = command.spawn().context("the server cannot be started")?;
    let output = child.stdout.take().context("the server's output")?;
    let mut line = String::new();
    // Ends with the server where it does not come up; loading has its own limit.
    let read = BufReader::new(output).read_line(&mut line);
    if read.is_err() || line.is_empty() {
        let status = child.wait().context("the server's end")?;
        let written = fs::read_to_string(&log).unwrap_or_default();
        for line in written.lines().rev().take(10).collect::<Vec<_>>().into_iter().rev() {
            say(line);
        }
        let error = anyhow!("the server ended ({status})");
        return Err(Failure::from(error).hint(format!("all it wrote is in {}", log.display())));
    }
    let (process, log) = (child.id(), log.display());
    if args.json {
        let mut json: serde_json::Value =
            serde_json::from_str(&line).context("the server's first line is no JSON")?;
        json["process"] = process.into();
        json["log"] = log.to_string().into();
        result(&json.to_string());
    } else {
        say(&format!("serve: process {process}, `kill {process}` stops it; it writes to {log}"));
        result(line.trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the server writes.
fn log_file() -> anyhow::Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    let folder = state.context("no folder for its log: neither XDG_STATE_HOME nor HOME is set")?;
    let folder = folder.join("shardpack");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(format!("serve-{}.log", std::process::id())))
}
