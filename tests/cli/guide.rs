//! The guide and the pages around it: every command that can run here runs, every flag exists,
//! every link resolves, and every message in the troubleshooting page is one that the code prints.
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
    path::{Component, Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{ports::free_port, running::HANG};

/// For a server to end when it is asked to; then it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a block does not run here.
const NEEDS: &[&str] = &["needs-mac", "needs-hub", "needs-machines", "needs-software"];

/// Languages that a shell reads.
const SHELLS: &[&str] = &["sh", "bash", "zsh", "shell", "console"];

/// Ports of the pages; each run takes free ones in their place.
const PORTS: &[u16] = &[8080, 8443, 7420, 7421];

/// A fenced block of a page.
struct Block {
    line: usize,
    /// What stands behind the fence: the language and its marks.
    info: Vec<String>,
    text: String,
}

impl Block {
    fn is_shell(&self) -> bool {
        SHELLS.contains(&self.info[0].as_str())
    }

    fn has(&self, mark: &str) -> bool {
        self.info.iter().any(|it| it == mark)
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn book() -> PathBuf {
    root().join("docs/guide/src")
}

/// Every Markdown file below a folder, in order.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|it| it == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The pages whose commands are held: the guide's own (the reference has tests of its own), and
/// README.md.
fn guide() -> Vec<PathBuf> {
    let reference = book().join("reference");
    let mut found = pages(&book());
    found.retain(|page| !page.starts_with(&reference));
    found.push(root().join("README.md"));
    found
}

fn shown(page: &Path) -> String {
    page.strip_prefix(root()).unwrap_or(page).display().to_string()
}

/// The fenced blocks of a page.
fn blocks(page: &Path) -> Vec<Block> {
    let text = fs::read_to_string(page).unwrap();
    let mut found: Vec<Block> = Vec::new();
    let mut open = None;
    for (line, text) in (1..).zip(text.lines()) {
        let fence = text.trim_start().starts_with("```");
        match (&mut open, fence) {
            (None, true) => {
                let info = text.trim_start().trim_start_matches('`');
                let info = info.split(',').map(|it| it.trim().to_owned()).collect();
                open = Some(Block { line, info, text: String::new() });
            }
            (None, false) => {}
            (Some(_), true) => found.extend(open.take()),
            (Some(block), false) => {
                block.text.push_str(text);
                block.text.push('\n');
            }
        }
    }
    assert!(open.is_none(), "{}: a block does not end", shown(page));
    found
}

/// A page's text without its fenced blocks and code spans.
fn prose(page: &Path) -> String {
    let text = fs::read_to_string(page).unwrap();
    let mut is_code = false;
    let mut found = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            // Every second part stands between backticks.
            found.extend(line.split('`').step_by(2));
            found.push('\n');
        }
    }
    found
}

#[test]
fn every_shell_block_says_whether_it_runs_here() {
    let (mut tested, mut others) = (0, 0);
    for page in guide() {
        for block in blocks(&page) {
            let place = format!("{}:{}", shown(&page), block.line);
            assert!(!block.info[0].is_empty(), "{place}: a block without a language");
            if !block.is_shell() {
                continue;
            }
            let needs = NEEDS.iter().filter(|mark| block.has(mark)).count();
            let marks = usize::from(block.has("test")) + needs;
            assert_eq!(marks, 1, "{place}: write `sh,test`, or one of {NEEDS:?} and why");
            let known = |it: &String| {
                ["sh", "test", "background"].contains(&it.as_str()) || NEEDS.contains(&it.as_str())
            };
            assert!(block.info.iter().all(known), "{place}: unknown marks {:?}", block.info);
            if block.has("test") { tested += 1 } else { others += 1 }
        }
    }
    assert!(tested >= 30, "only {tested} blocks run here: was a mark lost?");
    assert!(others >= 10, "only {others} blocks are marked as not running here");
}

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

#[test]
fn every_link_resolves() {
    let mut files = pages(&root().join("docs"));
    files.extend(["README.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut checked = 0;
    let mut broken = Vec::new();
    for page in &files {
        for link in links(&prose(page)) {
            checked += 1;
            if let Err(problem) = resolve(page, &link) {
                broken.push(format!("{}: {link}: {problem}", shown(page)));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(checked >= 80, "only {checked} links were found");
}

/// The targets of a page's links and pictures, those of the web apart.
fn links(prose: &str) -> Vec<String> {
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let is_web = |target: &&str| target.contains("://") || target.starts_with("mailto:");
    targets.filter(|target| !is_web(target)).map(str::to_owned).collect()
}

fn resolve(page: &Path, link: &str) -> Result<(), String> {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target =
        if file.is_empty() { page.to_owned() } else { plain(&page.parent().unwrap().join(file)) };
    if page.starts_with(book()) && !target.starts_with(book()) {
        return Err("leaves the book".to_owned());
    }
    if !target.exists() {
        return Err("no such file".to_owned());
    }
    if !anchor.is_empty() && !anchors(&target).contains(anchor) {
        return Err("no such heading".to_owned());
    }
    Ok(())
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                found.pop();
            }
            part => found.push(part),
        }
    }
    found
}

/// The names by which a page's headings are linked to, as mdBook and code hosts make them.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(page).unwrap();
    let mut is_code = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if is_code || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|it| match it {
            ' ' => Some('-'),
            '-' | '_' => Some(it),
            it if it.is_alphanumeric() => Some(it),
            _ => None,
        });
        let name = kept.collect::<String>().to_lowercase();
        let mut numbered = name.clone();
        for number in 1.. {
            if found.insert(numbered) {
                break;
            }
            numbered = format!("{name}-{number}");
        }
    }
    found
}

#[test]
fn every_place_for_a_contribution_exists() {
    let mut pages = pages(&book().join("contributing"));
    pages.push(root().join("CONTRIBUTING.md"));
    let mut places = 0;
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        // Every second part stands between backticks.
        for span in text.split('`').skip(1).step_by(2) {
            let is_code = Path::new(span).extension().is_some_and(|it| it == "rs");
            let is_path = span.contains('/') && (span.ends_with('/') || is_code);
            if is_path && !span.contains(' ') {
                places += 1;
                assert!(root().join(span).exists(), "{}: there is no {span}", shown(page));
            }
        }
    }
    assert!(places >= 15, "only {places} places were found");
}

#[test]
fn the_summary_names_every_page_once() {
    let summary = book().join("SUMMARY.md");
    let mut named: Vec<PathBuf> =
        links(&prose(&summary)).iter().map(|link| book().join(link)).collect();
    named.sort();
    let mut there = pages(&book());
    there.retain(|page| *page != summary);
    let show = |pages: &[PathBuf]| pages.iter().map(|page| shown(page)).collect::<Vec<_>>();
    assert_eq!(show(&named), show(&there));
}

#[test]
fn every_message_in_troubleshooting_is_in_the_code() {
    let page = book().join("operate/troubleshooting.md");
    let mut code = String::new();
    for folder in
        ["src", "formats", "manifests", "converter", "transfer", "loader", "identity", "trust"]
    {
        read_code(&root().join(folder), &mut code);
    }
    let text = fs::read_to_string(&page).unwrap();
    let mut messages = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("### `")) {
        let message = line.trim_end().trim_end_matches('`');
        messages += 1;
        for part in message.split('…').map(str::trim).filter(|part| part.len() > 3) {
            assert!(code.contains(part), "no code says {part:?} (of {message:?})");
        }
    }
    assert!(messages >= 30, "only {messages} messages are explained");
}

/// Adds all code below a folder, with strings on one line and without escapes.
fn read_code(folder: &Path, code: &mut String) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            read_code(&path, code);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for (index, piece) in text.split("\\\n").enumerate() {
                let piece = if index == 0 { piece } else { piece.trim_start() };
                code.push_str(&piece.replace("\\\"", "\""));
            }
            code.push('\n');
        }
    }
}
