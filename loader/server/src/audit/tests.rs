//! The chain of an audit log, broken in every way.

use std::fs;

use tempfile::tempdir;

use super::*;

fn request(name: &str) -> Map<String, Value> {
    Map::from_iter([("key".to_owned(), name.into())])
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn chain_goes_on_over_a_restart_and_a_torn_line() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let mut log = AuditLog::open(&path).unwrap();
    assert!(log.add(request("a")) && log.add(request("b")));
    assert!(matches!(AuditLog::open(&path), Err(AuditError::InUse { .. })));
    drop(log);
    let mut torn = fs::read(&path).unwrap();
    torn.extend_from_slice(b"{\"seq\":4,\"ti");
    fs::write(&path, torn).unwrap();
    let error = verify_audit(std::slice::from_ref(&path)).unwrap_err();
    assert!(error.line == 4 && error.what.contains("torn"), "{error}");
    let mut log = AuditLog::open(&path).unwrap();
    assert!(log.add(request("c")));
    let summary = verify_audit(std::slice::from_ref(&path)).unwrap();
    assert_eq!((summary.lines, summary.requests, summary.seq), (6, 3, [1, 6]));
    let found = lines(&path);
    assert_eq!((&found[3]["event"], &found[3]["bytes"]), (&json!("torn_line"), &json!(12)));
}

#[test]
fn changed_missing_and_swapped_lines_are_found() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let mut log = AuditLog::open(&path).unwrap();
    for name in ["a", "b", "c", "d"] {
        assert!(log.add(request(name)));
    }
    drop(log);
    let text = fs::read_to_string(&path).unwrap();
    let whole: Vec<&str> = text.lines().collect();
    let check = |changed: Vec<String>, line: u64| {
        fs::write(&path, changed.join("\n") + "\n").unwrap();
        let error = verify_audit(std::slice::from_ref(&path)).unwrap_err();
        assert_eq!(error.line, line, "{error}");
    };
    let owned = || whole.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    let mut changed = owned();
    changed[2] = changed[2].replace("\"b\"", "\"x\"");
    check(changed, 4);
    let mut missing = owned();
    missing.remove(2);
    check(missing, 3);
    let mut swapped = owned();
    swapped.swap(2, 3);
    check(swapped, 3);
    let mut beheaded = owned();
    beheaded.remove(0);
    check(beheaded, 1);
}

#[test]
fn rotation_carries_the_chain_over() {
    let folder = tempdir().unwrap();
    let (path, old) = (folder.path().join("audit.jsonl"), folder.path().join("audit.1"));
    let mut log = AuditLog::open(&path).unwrap();
    assert!(log.add(request("a")));
    assert!(!log.reopen().unwrap(), "nothing was moved");
    fs::rename(&path, &old).unwrap();
    assert!(log.add(request("b")));
    assert!(log.reopen().unwrap());
    assert!(log.add(request("c")));
    let summary = verify_audit(&[old.clone(), path.clone()]).unwrap();
    assert_eq!((summary.lines, summary.requests), (5, 3));
    assert_eq!(verify_audit(std::slice::from_ref(&path)).unwrap().seq, [4, 5]);
    assert!(verify_audit(&[path, old]).is_err(), "in another order");
}

#[test]
fn foreign_files_are_left_alone() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    fs::write(&path, "my notes\n").unwrap();
    assert!(matches!(AuditLog::open(&path), Err(AuditError::Foreign { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "my notes\n");
}
