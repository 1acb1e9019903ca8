//! Readers that leave before the program has said everything: `| head`, a closed log viewer, a full disk.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Output, Stdio},
};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{path, shardpack, text},
    running::ask,
    sets::kjv,
};

/// Commands that print: a table, JSON, many lines, and an error in JSON.
const PRINTING: [(&[&str], i32); 4] = [
    (&["inspect", "SET"], 0),
    (&["inspect", "SET", "--json"], 0),
    (&["verify", "SET", "--json"], 0),
    (&["inspect", "nowhere", "--json"], 2),
];

fn command(args: &[&str], set: &str) -> std::process::Command {
    let mut command = shardpack();
    command.args(args.iter().map(|arg| if *arg == "SET" { set } else { arg }));
    command
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    for (args, code) in PRINTING {
        let mut command = command(args, path(&set));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}: {}", text(&stderr));
        assert!(!text(&stderr).contains("panicked"), "{args:?}: {}", text(&stderr));
        // Nor is one of messages; the exit code is that of the command.
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stderr.take());
        assert_eq!(child.wait().unwrap().code(), Some(code), "{args:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn output_that_cannot_be_written_is_an_error() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    for (args, _) in PRINTING {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output =
            command(args, path(&set)).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains("error: standard output: No space left on device"), "{said}");
    }
}

/// A server whose messages nobody reads, killed when dropped.
struct Unread(Child);

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_whose_messages_nobody_reads_goes_on() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let mut command = shardpack();
    command.args(["serve", path(&set), "--listen", "127.0.0.1:0", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut server = Unread(child);
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
    for _ in 0..2 {
        assert_eq!(ask(&url, "John 11:35"), "Jesus wept.");
    }
    // Nor its results, from now on.
    drop(lines);
    assert_eq!(ask(&url, "John 11:35"), "Jesus wept.");
    let terminated = std::process::Command::new("kill").arg(server.0.id().to_string()).status();
    assert!(terminated.unwrap().success());
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
}
