//! Files of keys, scopes, limits, and files that are read again.

use std::{
    error::Error,
    fs,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::*;
use crate::error::ErrorKind;

const INFER: Access = Access::Scope(Scope::Infer);

fn keys(limits: KeyLimits) -> (ApiKeys, String) {
    let mut file = KeyFile::default();
    let key = file.add("me", BTreeSet::from([Scope::Infer]), limits).unwrap();
    let text = serde_json::to_string(&file).unwrap();
    assert!(!text.contains(&key), "the key itself is not in the file");
    (ApiKeys::new(KeyFile::parse(text.as_bytes()).unwrap()).unwrap(), key)
}

#[test]
fn only_known_keys_open_and_only_their_scopes() {
    let (keys, key) = keys(KeyLimits::default());
    let kind = |sent: Option<&str>, scope| keys.check(sent, scope).map_err(|error| error.kind);
    assert_eq!(kind(Some(&key), INFER).unwrap().name(), "me");
    assert_eq!(kind(Some(&key), Access::Scope(Scope::Admin)).unwrap_err(), ErrorKind::Forbidden);
    assert_eq!(kind(None, INFER).unwrap_err(), ErrorKind::Unauthenticated);
    for wrong in ["", "sp-", &key[1..], &key.to_uppercase()] {
        let error = kind(Some(wrong), INFER).unwrap_err();
        assert_eq!(error, ErrorKind::Unauthenticated, "{wrong}");
    }
}

#[test]
fn requests_of_a_minute_are_spread_over_it() {
    let limits = KeyLimits { requests_per_minute: Some(2), ..KeyLimits::default() };
    let (keys, key) = keys(limits);
    let key = keys.check(Some(&key), INFER).unwrap();
    let now = Instant::now();
    assert!(key.begin(now).is_ok() && key.begin(now).is_ok());
    let error = key.begin(now).unwrap_err();
    assert_eq!((error.kind, error.retry_after_ms), (ErrorKind::RateLimited, Some(30_000)));
    assert!(key.begin(now + Duration::from_secs(29)).is_err());
    assert!(key.begin(now + Duration::from_secs(31)).is_ok());
}

#[test]
fn tokens_are_paid_back_before_the_next_request() {
    let limits = KeyLimits { tokens_per_minute: Some(60), ..KeyLimits::default() };
    let (keys, key) = keys(limits);
    let key = keys.check(Some(&key), INFER).unwrap();
    let now = Instant::now();
    key.begin(now).unwrap().spend(90);
    let error = key.begin(now).unwrap_err();
    assert_eq!(error.retry_after_ms, Some(30_001));
    assert!(key.begin(now + Duration::from_secs(31)).is_ok());
}

#[test]
fn slots_are_released() {
    let limits = KeyLimits { concurrency: Some(1), ..KeyLimits::default() };
    let (keys, key) = keys(limits);
    let key = keys.check(Some(&key), INFER).unwrap();
    let now = Instant::now();
    let slot = key.begin(now).unwrap();
    assert!(key.begin(now).is_err());
    drop(slot);
    assert!(key.begin(now).is_ok());
}

#[test]
fn files_that_hold_no_keys_are_refused() {
    let check = |text: &str, words: &str| {
        let error = KeyFile::parse(text.as_bytes()).unwrap_err();
        let reason = error.source().map(ToString::to_string).unwrap_or_default();
        let error = format!("{error}: {reason}");
        assert!(error.contains(words), "{text}: {error}");
    };
    check("{", "not a key file");
    check(r#"{"keys":[{"name":"a","blake3":"00","scopes":[]}]}"#, "64 hex");
    check(r#"{"keys":[{"name":"a","blake3":"00","scopes":["root"]}]}"#, "root");
    assert!(matches!(ApiKeys::new(KeyFile::default()), Err(KeyError::Empty)));
}

#[test]
fn bytes_of_bodies_are_paid_before_they_are_read() {
    let limits = KeyLimits { body_bytes_per_minute: Some(1000), ..KeyLimits::default() };
    let (keys, key) = keys(limits);
    let key = keys.check(Some(&key), INFER).unwrap();
    let now = Instant::now();
    let slot = key.begin(now).unwrap();
    slot.spend_bytes_at(700, now).unwrap();
    let error = slot.spend_bytes_at(700, now).unwrap_err();
    assert_eq!((error.kind, error.retry_after_ms), (ErrorKind::RateLimited, Some(24_000)));
    slot.spend_bytes_at(200, now).unwrap();
    assert_eq!(slot.spend_bytes_at(1001, now).unwrap_err().kind, ErrorKind::TooLarge);
    assert_eq!(key.stats(now)["left"]["body_bytes"], 100);
    assert!(slot.spend_bytes_at(700, now + Duration::from_secs(36)).is_ok());
}

#[test]
fn grammars_are_paid_afterwards() {
    let limits = KeyLimits { grammar_ms_per_minute: Some(600), ..KeyLimits::default() };
    let (keys, key) = keys(limits);
    let key = keys.check(Some(&key), INFER).unwrap();
    let slot = key.begin(Instant::now()).unwrap();
    slot.check_grammar().unwrap();
    // A debt of a hundred days.
    slot.spend_grammar(Duration::from_hours(24));
    assert_eq!(slot.check_grammar().unwrap_err().kind, ErrorKind::RateLimited);
    assert!(key.begin(Instant::now()).is_ok(), "requests without a grammar go on");
}

#[test]
fn tenants_are_keys_or_their_groups() {
    let mut file = KeyFile::default();
    let scopes = || BTreeSet::from([Scope::Infer]);
    let sent: Vec<String> = ["a", "b", "c", "team"]
        .into_iter()
        .map(|name| file.add(name, scopes(), KeyLimits::default()).unwrap())
        .collect();
    for name in ["a", "b"] {
        file.entry_mut(name).unwrap().share_prefix_cache = Some("team".to_owned());
    }
    let keys = ApiKeys::new(file).unwrap();
    let tenant = |sent: &str| keys.check(Some(sent), INFER).unwrap().tenant().prefix_cache;
    let [a, b, c, team] = [0, 1, 2, 3].map(|index| tenant(&sent[index]));
    assert_eq!(a, b);
    assert!(a != c && c != team && a != team, "a name is no group");
}

#[test]
fn a_file_that_is_read_again_keeps_what_its_keys_have_spent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    let mut file = KeyFile::default();
    let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    let stays = file.add("stays", BTreeSet::from([Scope::Infer]), limits).unwrap();
    let goes = file.add("goes", BTreeSet::from([Scope::Infer]), limits).unwrap();
    let write = |text: &str| fs::write(&path, text).unwrap();
    write(&serde_json::to_string(&file).unwrap());
    let told = std::sync::Arc::<Mutex<Vec<String>>>::default();
    let report = std::sync::Arc::clone(&told);
    let keys = ApiKeys::new(file.clone())
        .unwrap()
        .watching(&path, Box::new(move |text| report.lock().unwrap().push(text.to_owned())));
    keys.reload(Reload::IfChanged);
    assert_eq!(told.lock().unwrap().len(), 0, "the same keys");
    let now = Instant::now();
    let running = keys.check(Some(&stays), INFER).unwrap().begin(now).unwrap();
    for broken in ["", "{", r#"{"keys":[]}"#] {
        write(broken);
        keys.reload(Reload::IfChanged);
        assert!(keys.check(Some(&goes), INFER).is_ok(), "{broken:?}");
        assert!(keys.reload_failed().is_some(), "{broken:?}");
    }
    fs::remove_file(&path).unwrap();
    keys.reload(Reload::IfChanged);
    assert!(keys.reload_failed().unwrap().contains("cannot be read"));
    let errors = told.lock().unwrap().iter().filter(|text| text.starts_with("error: ")).count();
    assert_eq!(errors, 4);

    file.remove("goes");
    let new = file.add("new", BTreeSet::from([Scope::Infer]), KeyLimits::default()).unwrap();
    write(&serde_json::to_string(&file).unwrap());
    keys.reload(Reload::IfChanged);
    assert_eq!(keys.reload_failed(), None);
    assert!(keys.check(Some(&new), INFER).is_ok());
    let gone = keys.check(Some(&goes), INFER).unwrap_err();
    assert_eq!(gone.kind, ErrorKind::Unauthenticated);
    let stays = keys.check(Some(&stays), INFER).unwrap();
    assert!(stays.begin(now).is_err(), "it has had its request");
    assert_eq!(stays.stats(Instant::now())["running"], 1);
    drop(running);
    assert_eq!(stays.stats(Instant::now())["running"], 0);
    let last = told.lock().unwrap().last().unwrap().clone();
    assert!(last.ends_with("2 keys, 1 added, 1 removed"), "{last}");
}
