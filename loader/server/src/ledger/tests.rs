//! What is counted, over kills and torn lines.

use std::fs;

use tempfile::tempdir;

use super::*;

fn sums(ledger: &Ledger) -> Sums {
    let rows = ledger.rows(0, u64::MAX, Period::Total, None);
    rows.into_iter().fold(Sums::default(), |all, row| all.plus(row.sums))
}

fn opened(key: &str) -> Opened {
    Opened { key: Some(key.to_owned()), dialect: Some("chat".to_owned()), ..Opened::default() }
}

#[test]
fn what_was_counted_outlives_a_kill_and_a_torn_line() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("usage");
    let open = || Ledger::open(Some(&file), None, Box::new(|text| panic!("{text}")));
    let ledger = Arc::new(open().unwrap());
    let record = Record::open(&ledger, opened("a"));
    record.submitted("m", 7);
    record.completed(2);
    ledger.tick(&[]);
    assert_eq!(sums(&ledger).completion_tokens, 2, "a running request is counted");
    record.completed(1);
    record.cached(9);
    record.streamed(None);
    record.completed(5);
    ledger.tick(&[]);
    let counted = sums(&ledger);
    let found = [counted.requests, counted.prompt_tokens, counted.cached_tokens];
    assert_eq!((found, counted.completion_tokens), ([1, 7, 7], 3));
    assert!(matches!(open(), Err(LedgerError::Usage(UsageError::InUse { .. }))));
    // Neither is dropped in order: a kill.
    drop((record, ledger));
    let mut torn = fs::read(&file).unwrap();
    torn.extend_from_slice(b"{\"hour\":1,\"su");
    fs::write(&file, torn).unwrap();
    let ledger = open().unwrap();
    assert_eq!(sums(&ledger), counted);
    assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 1, "written anew");
    drop(ledger);
    fs::write(&file, "my notes\n").unwrap();
    let error = open().err().unwrap().to_string();
    assert!(error.contains("line 1 is no line of a file of usage"), "{error}");
}

#[test]
fn requests_that_reach_no_engine_are_refused_ones() {
    let ledger = Arc::new(Ledger::default());
    Record::open(&ledger, opened("a")).responded(429, Some("rate_limit_exceeded"));
    Record::open(&ledger, opened("a")).responded(200, None);
    // Its client leaves.
    drop(Record::open(&ledger, opened("b")));
    // One that computes nothing.
    drop(Record::open(&ledger, Opened::default()));
    let keys = ledger.by_key();
    let found: Vec<_> =
        keys.iter().map(|(key, sums)| (key.as_deref(), sums.requests, sums.refused)).collect();
    assert_eq!(found, [(Some("a"), 1, 1), (Some("b"), 0, 1)]);
}

#[test]
fn old_hours_become_days_and_no_sum_changes() {
    let mut book = Book::default();
    let sums = Sums { requests: 1, ..Sums::default() };
    let add = |book: &mut Book, hour| book.add(Entry { hour, key: None, model: None, sums });
    for hour in 48..72 {
        add(&mut book, hour);
    }
    assert_eq!(book.len(), 24);
    add(&mut book, 48 + 24 * 40);
    assert_eq!(book.len(), 2);
    let rows = book.rows(0, u64::MAX, Period::Day, None);
    let found: Vec<_> = rows.iter().map(|row| (row.begin, row.sums.requests)).collect();
    assert_eq!(found, [(Some(2 * 86_400), 24), (Some(42 * 86_400), 1)]);
    assert_eq!(book.rows(0, 3 * 86_400, Period::Total, Some("a")), []);
}
