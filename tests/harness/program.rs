//! Running the program as its users do.

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

/// Models that most commands are tried on.
pub(crate) const MODELS: [&str; 4] =
    ["kjv-4m", "models/llama", "models/llama-tied", "models/qwen3"];

/// The program under test.
pub(crate) fn shardpack() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardpack"));
    command.stdin(Stdio::null()).env_remove("SHARDPACK_PAUSE_AT");
    // Whoever runs the tests may have a cluster.
    command.env_remove("SHARDPACK_CLUSTER").env("XDG_CONFIG_HOME", env!("CARGO_TARGET_TMPDIR"));
    // A node of a busy machine is not one that is down.
    command.env("SHARDPACK_GLANCE_MS", "600000");
    command
}

/// Copies the program under test to where a test executes it, replaces it, or removes it.
///
/// Another process writes the copy. If this process wrote it, a child that another test starts at the
/// same moment would inherit the open file until it executes its program, and Linux refuses to execute
/// a file that is open for writing (`ETXTBSY`, execve(2)).
pub(crate) fn copy_program(to: &Path) {
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_shardpack")).arg(to).status().unwrap();
    assert!(copied.success(), "cp to {}: {copied}", to.display());
}

/// A file or folder of `tests/data`.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Runs the program to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    shardpack().args(args).output().unwrap()
}

/// Runs the program, which must succeed; returns standard output.
pub(crate) fn succeed(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "shardpack {}\n{}", args.join(" "), text(&output.stderr));
    text(&output.stdout)
}

/// Runs the program, which must end with `code` and one line of error; returns that line.
pub(crate) fn fail(code: i32, args: &[&str]) -> String {
    let output = run(args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "shardpack {}\n{stderr}", args.join(" "));
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line of error:\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    errors[0].to_owned()
}

/// Converts a model of `tests/data` and returns the set's folder.
pub(crate) fn convert(model: &str, output: &Path, options: &[&str]) -> PathBuf {
    let source = data(model);
    let mut args = vec!["convert", path(&source), "--output", path(output)];
    args.extend(options);
    succeed(&args);
    output.to_owned()
}

/// A path as an argument.
pub(crate) fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Bytes as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An error with all that led to it.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Every file below a folder, by its path within; `run.json` apart, which tells of the run.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap().path();
            if entry.is_dir() {
                waiting.push(entry);
            } else if entry.file_name().unwrap() != "run.json" {
                let name = entry.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                found.insert(name, fs::read(entry).unwrap());
            }
        }
    }
    found
}

/// Copies a model folder, so that a test may damage the copy.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    for (name, bytes) in files(from) {
        let target = to.join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, bytes).unwrap();
    }
}

/// Starts the program so that it stops at a named point, and waits until it is there.
pub(crate) fn paused(point: &str, args: &[&str]) -> Child {
    let mut command = shardpack();
    command.args(args);
    paused_command(point, command)
}

/// The same with a command that is ready.
pub(crate) fn paused_command(point: &str, mut command: Command) -> Child {
    let mut child = command
        .env("SHARDPACK_PAUSE_AT", point)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut seen = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        seen.push(line.unwrap());
        if seen.last().is_some_and(|line| *line == format!("paused at {point}")) {
            return child;
        }
    }
    let status = child.wait().unwrap();
    panic!("ended ({status}) before {point}: {seen:?}");
}

/// Ends a process as a power cut would.
pub(crate) fn kill(mut child: Child) {
    // SIGKILL on Unix.
    child.kill().unwrap();
    child.wait().unwrap();
}
