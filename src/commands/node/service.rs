//! `node install` and `node uninstall`: the node as a service that starts with the machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, anyhow};

use crate::{
    args::{NodeServiceArgs, ServiceTarget},
    commands::Outcome,
    failure::Failure,
    own_program,
    progress::{result, say},
};

/// What the service is called.
const NAME: &str = "shardpack-node";

/// What launchd calls it.
const LABEL: &str = "org.shardpack.node";

/// A service manager's file for the node, and the commands around it.
struct Service {
    file: PathBuf,
    text: String,
    start: Vec<Vec<String>>,
    stop: Vec<Vec<String>>,
}

impl Service {
    fn new(
        target: ServiceTarget,
        args: &NodeServiceArgs,
        arguments: &[String],
    ) -> anyhow::Result<Self> {
        let program = match &args.program {
            Some(program) => program.clone(),
            None => own_program::path()?,
        };
        let program = program.to_str().context("the program's path is no text")?;
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        Ok(match target {
            ServiceTarget::Systemd => Self {
                file: format!("/etc/systemd/system/{NAME}.service").into(),
                text: unit(program, arguments, args.user.as_deref()),
                start: vec![
                    words("systemctl daemon-reload"),
                    words(&format!("systemctl enable --now {NAME}.service")),
                ],
                stop: vec![words(&format!("systemctl disable --now {NAME}.service"))],
            },
            ServiceTarget::Launchd => {
                let file = format!("/Library/LaunchDaemons/{LABEL}.plist");
                Self {
                    text: property_list(program, arguments, args.user.as_deref()),
                    start: vec![words(&format!("launchctl bootstrap system {file}"))],
                    stop: vec![words(&format!("launchctl bootout system/{LABEL}"))],
                    file: file.into(),
                }
            }
        })
    }
}

/// The manager of this system.
const fn own_target() -> ServiceTarget {
    if cfg!(target_os = "macos") { ServiceTarget::Launchd } else { ServiceTarget::Systemd }
}

/// Makes the node a service and starts it. `arguments` are those of `shardpack node`.
pub(crate) fn install(args: &NodeServiceArgs, arguments: &[String]) -> Outcome {
    let target = args.target.unwrap_or_else(own_target);
    let service = Service::new(target, args, arguments)?;
    if args.print {
        result(service.text.trim_end());
        say(&format!("this goes to {}, then:", service.file.display()));
        for command in &service.start {
            say(&format!("  {}", command.join(" ")));
        }
        return Ok(ExitCode::SUCCESS);
    }
    write(&service.file, &service.text)?;
    run(&service.start)?;
    say(&format!("node: installed as {}", service.file.display()));
    Ok(ExitCode::SUCCESS)
}

/// Ends the service. The store stays.
pub(crate) fn uninstall(args: &NodeServiceArgs) -> Outcome {
    let target = args.target.unwrap_or_else(own_target);
    let service = Service::new(target, args, &[])?;
    if args.print {
        for command in &service.stop {
            result(&command.join(" "));
        }
        result(&format!("rm {}", service.file.display()));
        return Ok(ExitCode::SUCCESS);
    }
    if !service.file.exists() {
        say(&format!("node: {} is not there: nothing is installed", service.file.display()));
        return Ok(ExitCode::SUCCESS);
    }
    // One that does not run is stopped.
    if let Err(error) = run(&service.stop) {
        say(&format!("node: {error:#}"));
    }
    fs::remove_file(&service.file).map_err(|error| explained(&service.file, "remove", error))?;
    say("node: uninstalled; its store stays");
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| explained(path, "write", error))
}

fn explained(path: &Path, verb: &str, error: std::io::Error) -> Failure {
    let failure = Failure::from(
        anyhow::Error::new(error).context(format!("cannot {verb} {}", path.display())),
    );
    failure.hint("services of the system are root's: use sudo, or see --print")
}

fn run(commands: &[Vec<String>]) -> anyhow::Result<()> {
    for command in commands {
        let shown = command.join(" ");
        let status = Command::new(&command[0]).args(&command[1..]).status();
        let status = status.with_context(|| format!("cannot run `{shown}`"))?;
        if !status.success() {
            return Err(anyhow!("`{shown}` ended with {status}"));
        }
    }
    Ok(())
}

/// A word of systemd's command lines, in quotes where it needs them.
fn quoted(word: &str) -> String {
    let word = word.replace('%', "%%").replace('$', "$$");
    if word.contains([' ', '"', '\'', '\\', ';']) {
        format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        word
    }
}

fn unit(program: &str, arguments: &[String], user: Option<&str>) -> String {
    let mut line = quoted(program);
    for argument in ["node"].into_iter().chain(arguments.iter().map(String::as_str)) {
        line.push(' ');
        line.push_str(&quoted(argument));
    }
    let user = user.map_or_else(String::new, |user| format!("User={user}\n"));
    format!(
        "[Unit]\nDescription=shardpack node\nAfter=network-online.target\n\
         Wants=network-online.target\n\n[Service]\nType=notify\nNotifyAccess=main\nExecStart={line}\n{user}Restart=always\n\
         RestartSec=1\nLimitNOFILE=8192\nTimeoutStopSec=30\n\n[Install]\n\
         WantedBy=multi-user.target\n"
    )
}

fn property_list(program: &str, arguments: &[String], user: Option<&str>) -> String {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut words = String::new();
    for word in [program, "node"].into_iter().chain(arguments.iter().map(String::as_str)) {
        words.push_str("        <string>");
        words.push_str(&escaped(word));
        words.push_str("</string>\n");
    }
    let user = user.map_or_else(String::new, |user| {
        format!("    <key>UserName</key>\n    <string>{}</string>\n", escaped(user))
    });
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n    <key>Label</key>\n    <string>{LABEL}</string>\n{user}    \
         <key>ProgramArguments</key>\n    <array>\n{words}    </array>\n    \
         <key>RunAtLoad</key>\n    <true/>\n    <key>KeepAlive</key>\n    <true/>\n    \
         <key>ThrottleInterval</key>\n    <integer>10</integer>\n    \
         <key>ProcessType</key>\n    <string>Interactive</string>\n    \
         <key>SoftResourceLimits</key>\n    <dict>\n        <key>NumberOfFiles</key>\n        \
         <integer>8192</integer>\n    </dict>\n    \
         <key>StandardErrorPath</key>\n    <string>/var/log/{NAME}.log</string>\n    \
         <key>StandardOutPath</key>\n    <string>/var/log/{NAME}.log</string>\n</dict>\n</plist>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> Vec<String> {
        ["--listen", "10.0.0.1:7420", "--store", "/srv/my packages"].map(str::to_owned).to_vec()
    }

    #[test]
    fn a_unit_starts_the_node_with_its_arguments() {
        let text = unit("/usr/local/bin/shardpack", &arguments(), Some("llm"));
        let line = "ExecStart=/usr/local/bin/shardpack node --listen 10.0.0.1:7420 --store \"/srv/my packages\"\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("\nType=notify\n"), "{text}");
        assert!(text.contains("\nUser=llm\n") && text.contains("\nRestart=always\n"), "{text}");
        assert_eq!(quoted("100%"), "100%%");
    }

    #[test]
    fn a_property_list_names_the_same() {
        let text = property_list("/a&b", &arguments(), None);
        assert!(
            text.contains("<string>/a&amp;b</string>\n        <string>node</string>"),
            "{text}"
        );
        assert!(text.contains("<string>/srv/my packages</string>"), "{text}");
        assert!(!text.contains("UserName"));
    }
}
