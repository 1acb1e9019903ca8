//! The guide and the pages around it: every command that can run here runs, and every flag exists.
//! `tests/layering/guide.rs` has what needs no program: links, places and messages.
//!
//! A shell block of `docs/guide` or README.md carries a mark behind its language:
//!
//! - `sh,test` runs here, block after block of a page in one folder;
//! - `sh,test,background` is a server: it runs until the page ends;
//! - `sh,needs-mac`, `sh,needs-hub`, `sh,needs-machines`, `sh,needs-software` cannot run here.
//!
//! A block `text,output` below a tested one holds lines of its output; `…` stands for anything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::unix::{fs::symlink, process::CommandExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    documents::{blocks, guide, root, shown},
    ports::free_port,
    running::HANG,
};

/// For a server to end when it is asked to; then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Ports of the pages; each run takes free ones in their place.
const PORTS: &[u16] = &[8080, 8443, 7420, 7421];

#[test]
fn every_command_that_can_run_here_runs() {
    // Each page has a folder and ports of its own.
    let pages = guide();
    thread::scope(|scope| {
        let runs: Vec<_> = pages.iter().map(|page| scope.spawn(|| run_page(page))).collect();
        let failures: Vec<String> =
            runs.into_iter().filter_map(|run| run.join().unwrap().err()).collect();
        assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    });
}

/// A server of a page; it ends with the page.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // The whole process group: a shell and what it started.
        let group = format!("-{}", self.0.id());
        let signal = |name| {
            let mut kill = Command::new("kill");
            kill.args([name, "--", &group]).stderr(Stdio::null()).status()
        };
        let deadline = Instant::now() + STOP_TIMEOUT;
        let _ = signal("-TERM");
        while matches!(self.0.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = signal("-KILL");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn run_page(page: &Path) -> Result<(), String> {
    let blocks = blocks(page);
    if !blocks.iter().any(|block| block.has("test")) {
        return Ok(());
    }
    let scene = scene(page);
    let folder = scene.path();
    let ports = free_ports();
    let mut running = Vec::new();
    let mut output = String::new();
    for block in &blocks {
        let place = format!("{}:{}", shown(page), block.line);
        if block.is_shell() && block.has("test") {
            let text = with_ports(&block.text, &ports);
            output = if block.has("background") {
                let (child, output) = start(folder, &text, &place)?;
                running.push(child);
                output
            } else {
                run(folder, &text, &place)?
            };
        } else if block.has("output") {
            let said = with_ports(&block.text, &ports);
            for line in said.lines().filter(|line| !line.trim().is_empty()) {
                if !output.lines().any(|said| is_like(said.trim(), line.trim())) {
                    return Err(format!("{place}: {line:?} is not in the output:\n{output}"));
                }
            }
        }
    }
    // Servers end before their folder does.
    drop(running);
    Ok(())
}

/// A free port for each port of the pages: below those that the system gives to whoever asks for any, which
/// the other tests do, and each but once.
fn free_ports() -> BTreeMap<u16, u16> {
    let free = |own: &u16| (*own, free_port());
    PORTS.iter().map(free).collect()
}

/// An empty folder with the program on its path and the test data where a checkout has it.
fn scene(page: &Path) -> TempDir {
    let name = shown(page).replace(['/', '.'], "-");
    let scene = tempfile::Builder::new().prefix(&name).tempdir().unwrap();
    let folder = scene.path();
    for inner in ["bin", "tests", "home"] {
        fs::create_dir_all(folder.join(inner)).unwrap();
    }
    symlink(env!("CARGO_BIN_EXE_shardpack"), folder.join("bin/shardpack")).unwrap();
    symlink(root().join("tests/data"), folder.join("tests/data")).unwrap();
    scene
}

/// The block with free ports in place of its own.
fn with_ports(text: &str, ports: &BTreeMap<u16, u16>) -> String {
    let mut found = String::new();
    for line in text.lines() {
        let mut line = line.to_owned();
        if line.contains("shardpack serve ") && !line.contains("--listen") {
            line = line.replace("shardpack serve ", "shardpack serve --listen 127.0.0.1:8080 ");
        }
        for (own, free) in ports {
            for host in ["127.0.0.1", "localhost"] {
                line = line.replace(&format!("{host}:{own}"), &format!("{host}:{free}"));
            }
        }
        found.push_str(&line);
        found.push('\n');
    }
    found
}

fn shell(folder: &Path, text: &str, output: &Path) -> Child {
    let mut path = folder.join("bin").into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let file = File::create(output).unwrap();
    Command::new("bash")
        .args(["-euo", "pipefail", "-c", text])
        .current_dir(folder)
        .env("PATH", path)
        // Whoever runs the tests may have a cluster, engines and a proxy.
        .env("HOME", folder.join("home"))
        .env("XDG_CONFIG_HOME", folder.join("home/.config"))
        .env("NO_PROXY", "127.0.0.1,localhost")
        .env_remove("SHARDPACK_CLUSTER")
        .env_remove("SHARDPACK_PAUSE_AT")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .expect("bash starts")
}

fn run(folder: &Path, text: &str, place: &str) -> Result<String, String> {
    let path = folder.join("output");
    let mut child = Background(shell(folder, text, &path));
    let deadline = Instant::now() + HANG;
    loop {
        let status = child.0.try_wait().unwrap();
        let output = || fs::read_to_string(&path).unwrap_or_default();
        match status {
            Some(status) if status.success() => return Ok(output()),
            Some(status) => return Err(format!("{place}: {status}\n{text}{}", output())),
            None if Instant::now() > deadline => {
                return Err(format!("{place}: did not end\n{text}{}", output()));
            }
            None => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Starts a server and waits until it says where it is.
fn start(folder: &Path, text: &str, place: &str) -> Result<(Background, String), String> {
    let path = folder.join(format!("output-{}", place.rsplit(':').next().unwrap_or_default()));
    let mut child = Background(shell(folder, text, &path));
    let deadline = Instant::now() + HANG;
    loop {
        let output = fs::read_to_string(&path).unwrap_or_default();
        if output.contains(" at http") || output.contains("listening on ") {
            return Ok((child, output));
        }
        if let Some(status) = child.0.try_wait().unwrap() {
            return Err(format!("{place}: ended ({status})\n{text}{output}"));
        }
        if Instant::now() > deadline {
            return Err(format!("{place}: does not serve\n{text}{output}"));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a line is the expected one, where `…` stands for anything.
fn is_like(line: &str, expected: &str) -> bool {
    let parts: Vec<&str> = expected.split('…').collect();
    let (first, last) = (parts[0], parts[parts.len() - 1]);
    if parts.len() == 1 {
        return line == expected;
    }
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    for part in &parts[1..parts.len() - 1] {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[test]
fn every_flag_in_the_guide_exists() {
    let mut helps = BTreeMap::new();
    let mut checked = 0;
    for page in guide() {
        for block in blocks(&page).iter().filter(|block| block.is_shell()) {
            for command in commands(&block.text) {
                let place = format!("{}:{}: {}", shown(&page), block.line, command.join(" "));
                check_command(&command, &place, &mut helps);
                checked += 1;
            }
        }
    }
    assert!(checked >= 60, "only {checked} commands were found");
}

/// The words of each call of the program within a shell block.
fn commands(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n", " ");
    let mut found = Vec::new();
    for line in joined.lines() {
        let line = line.split(" #").next().unwrap_or_default();
        for part in line.split(['|', ';', '(', ')', '&']) {
            let part = part.replace("cargo run --release --", "shardpack");
            let words: Vec<String> = part
                .split_whitespace()
                .map(|word| word.trim_matches(['\'', '"']).to_owned())
                .collect();
            let start = words.iter().position(|word| word == "shardpack");
            // Only where a command may begin: first, or behind `sudo` and variables.
            let Some(start) = start else { continue };
            if words[..start].iter().all(|word| word == "sudo" || word.contains('=')) {
                found.push(words[start + 1..].to_vec());
            }
        }
    }
    found
}

fn check_command(words: &[String], place: &str, helps: &mut BTreeMap<Vec<String>, String>) {
    let mut call: Vec<String> = words.iter().take(1).cloned().collect();
    if call.first().is_none_or(|word| word.starts_with('-') || word == "help") {
        call.clear();
    }
    let mut text = help(&call, place, helps);
    // `cluster add`, and `keys FILE add`.
    if !call.is_empty() && text.contains("\nCommands:") {
        let named = text.split("\nCommands:").nth(1).unwrap_or_default().to_owned();
        let names: BTreeSet<&str> =
            named.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
        let inner = words.iter().skip(1).position(|word| names.contains(word.as_str()));
        // `node` does something without one.
        assert!(inner.is_some() || call == ["node"], "{place}: none of {names:?}");
        if let Some(inner) = inner {
            call = words[..=inner + 1].to_vec();
            text.push_str(&help(&call, place, helps));
        }
    }
    for word in words {
        let flag = word.split('=').next().unwrap_or_default();
        let is_flag = flag.len() > 1 && flag.starts_with('-') && flag != "--";
        let is_known = text.match_indices(flag).any(|(at, _)| {
            let next = text[at + flag.len()..].chars().next();
            !next.is_some_and(|next| next.is_ascii_alphanumeric() || next == '-')
        });
        assert!(!is_flag || is_known, "{place}: there is no {flag}");
    }
}

fn help(call: &[String], place: &str, helps: &mut BTreeMap<Vec<String>, String>) -> String {
    let ask = || {
        let output = Command::new(env!("CARGO_BIN_EXE_shardpack"))
            .args(call)
            .arg("--help")
            .output()
            .unwrap();
        assert!(output.status.success(), "{place}: no help of {call:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    helps.entry(call.to_vec()).or_insert_with(ask).clone()
}
