//! Nodes and servers as running processes.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::harness::{path, shardpack};

/// Only a test that hangs waits that long.
pub(crate) const HANG: Duration = Duration::from_mins(10);

/// Waits for what nothing announces.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A process of the program, killed when dropped.
pub(crate) struct Running {
    child: Child,
    /// What it said on standard output to be found by.
    pub(crate) json: Value,
    errors: mpsc::Receiver<String>,
}

impl Running {
    /// Starts the program and waits for its line of JSON.
    pub(crate) fn start(args: &[&str], pause: Option<&str>) -> Self {
        let mut command = shardpack();
        if let Some(point) = pause {
            command.env("SHARDPACK_PAUSE_AT", point);
        }
        command.args(args);
        Self::spawn(command)
    }

    /// The same of a command with an environment of its own.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        let errors = read_lines(child.stderr.take().unwrap());
        let Ok(line) = lines.recv_timeout(HANG) else {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{command:?} did not come up: {:?}", errors.iter().collect::<Vec<_>>());
        };
        Self { child, json: serde_json::from_str(&line).unwrap(), errors }
    }

    /// Starts a node over `store`.
    pub(crate) fn node(store: &Path, pause: Option<&str>) -> Self {
        Self::start(
            &[
                "node",
                "--listen",
                "127.0.0.1:0",
                "--json",
                "--threads",
                "1",
                "--store",
                path(store),
            ],
            pause,
        )
    }

    /// Starts the server of a set and waits until it answers.
    pub(crate) fn serve(set: &Path, options: &[&str]) -> Self {
        let mut args = vec!["serve", path(set), "--listen", "127.0.0.1:0", "--json"];
        args.extend(options);
        Self::start(&args, None)
    }

    /// The node's address.
    pub(crate) fn address(&self) -> String {
        self.json["listening"].as_str().unwrap().to_owned()
    }

    /// The server's URL.
    pub(crate) fn url(&self) -> String {
        self.json["url"].as_str().unwrap().to_owned()
    }

    /// Waits for a line on standard error that contains `text`.
    pub(crate) fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + HANG;
        let mut seen = Vec::new();
        loop {
            match self.errors.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return,
                Ok(line) => seen.push(line),
                Err(error) => panic!("never said {text:?} ({error}): {seen:?}"),
            }
        }
    }

    /// Ends the process as a power cut would.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and returns the exit code.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(
            std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success()
        );
        self.exit_code()
    }

    /// Waits for the process's end.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let mut ended = None;
        wait_until("the process ends", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.and_then(|status| status.code())
    }

    /// Its process id, to be sent signals.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Its process id.
    #[cfg(target_os = "linux")]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Process ids of the children of this process: of its ranks and servers.
    pub(crate) fn children(&self) -> Vec<u32> {
        self.children_of_kind(false)
    }

    /// Process ids of its sandboxes of chat templates and tokenizers.
    pub(crate) fn sandboxes(&self) -> Vec<u32> {
        self.children_of_kind(true)
    }

    fn children_of_kind(&self, sandboxes: bool) -> Vec<u32> {
        let pid = self.child.id().to_string();
        let mut ps = std::process::Command::new("ps");
        let out = ps.args(["-ww", "-eo", "pid=,ppid=,args="]).output().unwrap();
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .filter_map(|line| {
                let mut fields = line.split_whitespace();
                let child = fields.next()?.parse().ok()?;
                let is_child = fields.next()? == pid;
                let is_sandbox = fields.any(|field| field == "text-worker");
                (is_child && is_sandbox == sandboxes).then_some(child)
            })
            .collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process with this id lives.
pub(crate) fn lives(pid: u32) -> bool {
    std::process::Command::new("kill")
        .args(["-0", &pid.to_string()])
        .output()
        .unwrap()
        .status
        .success()
}

fn read_lines(from: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (lines, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // The test may be over.
            let _ = lines.send(line);
        }
    });
    receiver
}

/// One answer of a server: status and JSON.
pub(crate) fn post(url: &str, body: &Value) -> (u16, Value) {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(HANG))
        .build()
        .into();
    let mut response =
        agent.post(url).content_type("application/json").send(body.to_string()).unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_reader(response.body_mut().as_reader()).unwrap())
}

/// A page of a server: status and text.
pub(crate) fn get(url: &str) -> (u16, String) {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(HANG))
        .build()
        .into();
    let mut response = agent.get(url).call().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

/// What the server says to one question, greedily.
pub(crate) fn ask(url: &str, question: &str) -> String {
    let body = serde_json::json!({
        "messages": [{ "role": "user", "content": question }],
        "temperature": 0,
        "max_tokens": 160,
    });
    let (status, answer) = post(&format!("{url}/chat/completions"), &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}
