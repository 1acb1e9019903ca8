//! `/api/pull` and `/api/delete` of models that are not served, over a store that plays a script.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_chat::ChatModel;

use super::{
    STOP,
    scripted::{HANG, PATIENT, Reply, Scripted, kjv, start_changed},
};
use crate::{
    ApiKeys, KeyFile, KeyLimits, ModelStore, ModelStoreError, PullReport, PullStatus, Scope, Server,
};

/// Between two reports of a model that is being fetched.
const PAUSE: Duration = Duration::from_millis(1);

/// A store with one model that can be fetched.
struct Store {
    stored: Mutex<BTreeSet<String>>,
    /// Lets a pull end.
    gate: Mutex<mpsc::Receiver<()>>,
    /// Told whether somebody waited to the end.
    ended: mpsc::Sender<bool>,
}

impl ModelStore for Store {
    fn pull(&self, name: &str, report: PullReport) -> Result<(), ModelStoreError> {
        if name != "org/other" {
            return Err(ModelStoreError::NotFound(format!("model '{name}' not found")));
        }
        let moved = |completed| {
            report(PullStatus { status: "pulling files".into(), bytes: Some([100, completed]) })
        };
        report(PullStatus { status: "pulling manifest".into(), bytes: None });
        let gate = self.gate.lock().unwrap();
        let mut waited = moved(10);
        while waited && gate.recv_timeout(PAUSE).is_err() {
            waited = moved(10);
        }
        waited = waited && moved(100);
        self.ended.send(waited).unwrap();
        if !waited {
            return Err(ModelStoreError::Failed("cancelled".into()));
        }
        self.stored.lock().unwrap().insert(name.to_owned());
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), ModelStoreError> {
        let removed = self.stored.lock().unwrap().remove(name);
        removed.then_some(()).ok_or_else(|| {
            ModelStoreError::NotFound(format!("model '{name}' not found in the store"))
        })
    }
}

struct Served {
    server: Scripted,
    open: mpsc::Sender<()>,
    ended: mpsc::Receiver<bool>,
}

fn served(change: impl FnOnce(Server) -> Server) -> Served {
    let (open, gate) = mpsc::channel();
    let (sender, ended) = mpsc::channel();
    let store = Store { stored: Mutex::default(), gate: Mutex::new(gate), ended: sender };
    let model = ChatModel::open(kjv()).unwrap();
    let limits = PATIENT;
    let server = start_changed(vec![STOP], limits, model, |server| {
        change(server.with_store(Arc::new(store)))
    });
    Served { server, open, ended }
}

fn delete(server: &Scripted, name: &str) -> Reply {
    let body = json!({"model": name}).to_string();
    Reply::read(server.send("DELETE", "/api/delete", &body))
}

#[test]
fn a_model_is_fetched_with_its_progress_and_deleted() {
    let Served { server, open, ended } = served(|server| server);
    let body = json!({"model": "org/other:latest"});
    open.send(()).unwrap();
    let reply = server.post("/api/pull", &body);
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines: Vec<Value> =
        reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let moved = |completed: u64| {
        json!({"status": "pulling files", "digest": "pulling files", "total": 100,
            "completed": completed})
    };
    assert_eq!(
        lines,
        [
            json!({"status": "pulling manifest"}),
            moved(10),
            moved(100),
            json!({"status": "success"})
        ]
    );
    assert!(ended.recv_timeout(HANG).unwrap());
    open.send(()).unwrap();
    let whole = server.post("/api/pull", &json!({"name": "org/other", "stream": false}));
    assert_eq!(whole.json(), json!({"status": "success"}));
    assert_eq!(delete(&server, "org/other").status, 200);
    let gone = delete(&server, "org/other");
    assert!(gone.status == 404 && gone.body.contains("not found"), "{}", gone.body);
    // What the hub does not have fails in the stream, as Ollama's does, or by status.
    let reply = server.post("/api/pull", &json!({"model": "nobody/nothing"}));
    assert_eq!(
        (reply.status, reply.json()),
        (200, json!({"error": "model 'nobody/nothing' not found"}))
    );
    let reply = server.post("/api/pull", &json!({"model": "nobody/nothing", "stream": false}));
    assert_eq!(reply.status, 404, "{}", reply.body);
}

#[test]
fn one_model_is_fetched_at_a_time_and_ends_with_its_client() {
    let Served { server, open, ended } = served(|server| server);
    let body = json!({"model": "org/other"}).to_string();
    let mut first = server.send("POST", "/api/pull", &body);
    let mut head = [0; 12];
    std::io::Read::read_exact(&mut first, &mut head).unwrap();
    let second = server.post("/api/pull", &json!({"model": "org/other", "stream": false}));
    assert!(second.status == 503 && second.body.contains("being fetched"), "{}", second.body);
    drop(first);
    assert!(!ended.recv_timeout(HANG).unwrap(), "nobody waits for it any more");
    assert_eq!(delete(&server, "org/other").status, 404);
    drop(open);
}

#[test]
fn only_administrators_change_what_is_stored() {
    let mut file = KeyFile::default();
    let mut key = |name: &str, scopes: &[Scope]| {
        file.add(name, scopes.iter().copied().collect(), KeyLimits::default()).unwrap()
    };
    let infer = key("me", &[Scope::Infer]);
    let admin = key("root", &[Scope::Infer, Scope::Admin]);
    let served = served(|server| server.with_keys(ApiKeys::new(file).unwrap()));
    let ask = |key: &str, method: &str, path: &str, name: &str| {
        let head = format!("authorization: Bearer {key}\r\n");
        let body = json!({"model": name, "stream": false}).to_string();
        Reply::read(served.server.send_with(&head, method, path, &body)).status
    };
    assert_eq!(ask(&infer, "POST", "/api/pull", "kjv-4m"), 200, "it is served");
    assert_eq!(ask(&infer, "POST", "/api/pull", "org/other"), 403);
    assert_eq!(ask(&infer, "DELETE", "/api/delete", "org/other"), 403);
    served.open.send(()).unwrap();
    assert_eq!(ask(&admin, "POST", "/api/pull", "org/other"), 200);
    assert_eq!(ask(&admin, "DELETE", "/api/delete", "org/other"), 200);
}
