//! Models of the store: pulled, found, cancelled, removed.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use super::{PullEvent, PullObserver, PullRequest, PullSource, Store, StoreError};
use crate::{Cancel, convert::ConvertEvent};

/// The model that the tests convert.
fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models/llama")
}

fn request(path: &Path, nodes: u32) -> PullRequest {
    let source = PullSource::Local(path.to_owned());
    PullRequest { source, bits: Some(8), nodes, served_as: None, cancel: Cancel::default() }
}

fn quiet() -> PullObserver {
    Arc::new(|_: &PullEvent| ())
}

#[test]
fn a_model_is_pulled_once_listed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("models"));
    assert!(store.list().unwrap().is_empty());
    assert_eq!(store.size_bytes().unwrap(), 0);
    let request = request(&model(), 2);
    assert!(store.pulled(&request).unwrap().is_none());
    // Bytes of the plan, and of what was converted.
    let seen = Arc::new(Mutex::new((0, 0)));
    let counted = Arc::clone(&seen);
    let observe: PullObserver = Arc::new(move |event: &PullEvent| {
        let mut seen = counted.lock().unwrap();
        match event {
            PullEvent::Conversion(ConvertEvent::Planned(plan)) => seen.0 = plan.source_bytes,
            PullEvent::Conversion(ConvertEvent::Converted(bytes)) => seen.1 += bytes,
            _ => {}
        }
    });
    let stored = store.pull(&request, &observe).unwrap();
    let seen = *seen.lock().unwrap();
    assert!(seen.0 > 0 && seen.0 == seen.1, "{seen:?}");
    assert!(stored.name.starts_with("llama-") && stored.name.ends_with("-8bit-2nodes"));
    assert_eq!((stored.set.packages.len(), stored.set.name.as_deref()), (2, Some("llama")));
    assert_eq!(stored.digest(), stored.set.ids.model);
    // The second time nothing happens.
    let again: PullObserver = Arc::new(|event: &PullEvent| panic!("{event:?}"));
    assert_eq!(store.pull(&request, &again).unwrap().name, stored.name);

    let listed = store.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0].name, listed[0].size_bytes), (&stored.name, stored.size_bytes));
    assert_eq!(store.size_bytes().unwrap(), stored.size_bytes);
    for name in ["", ".", "..", "../models", "other"] {
        assert!(matches!(store.remove(name), Err(StoreError::NotStored { .. })), "{name:?}");
    }
    assert_eq!(store.remove(&stored.name).unwrap(), stored.size_bytes);
    assert!(store.list().unwrap().is_empty() && !stored.folder.exists());
}

#[test]
fn a_cancelled_pull_leaves_no_model_and_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().to_owned());
    let request = request(&model(), 1);
    let cancel = request.cancel.clone();
    let observe: PullObserver = Arc::new(move |event: &PullEvent| {
        if matches!(event, PullEvent::Conversion(ConvertEvent::TensorFinished { .. })) {
            cancel.cancel();
        }
    });
    let error = store.pull(&request, &observe).unwrap_err();
    assert!(error.is_cancelled() && !error.is_wrong(), "{error}");
    assert!(store.list().unwrap().is_empty());

    let request = PullRequest { cancel: Cancel::default(), ..request };
    let resumed = Arc::new(Mutex::new(0));
    let noted = Arc::clone(&resumed);
    let observe: PullObserver = Arc::new(move |event: &PullEvent| {
        if let PullEvent::Conversion(ConvertEvent::Resumed { tensors, .. }) = event {
            *noted.lock().unwrap() = *tensors;
        }
    });
    store.pull(&request, &observe).unwrap();
    assert!(*resumed.lock().unwrap() > 0);
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn a_model_that_has_changed_is_converted_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("models"));
    let copy = folder.path().join("Model-1.5B");
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(model()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    let first = store.pull(&request(&copy, 1), &quiet()).unwrap();
    // Dots are part of a name.
    assert_eq!(first.set.name.as_deref(), Some("Model-1.5B"));
    assert!(first.name.starts_with("Model-1.5B-"), "{}", first.name);
    let config = std::fs::File::options().append(true).open(copy.join("config.json")).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(10);
    config.set_modified(later).unwrap();
    assert_ne!(store.pull(&request(&copy, 1), &quiet()).unwrap().name, first.name);
    assert_eq!(store.list().unwrap().len(), 2);
}

#[test]
fn a_newer_set_takes_the_name_of_an_older_one() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("models"));
    let [old, new, newer] = [1, 2, 4].map(|nodes| {
        let request = request(&model(), nodes);
        (store.pull(&request, &quiet()).unwrap(), request)
    });
    // The requests stand for those of two revisions: the old set is called otherwise from now on.
    let aside = PullRequest { bits: Some(6), ..old.1.clone() };
    let kept = store.supersede(&old.0, &new.0, &aside).unwrap().unwrap();
    assert!(kept.ends_with("-6bit"), "{kept}");
    let ranks = |name: &str| store.find(name).unwrap().unwrap().set.packages.len();
    assert_eq!([ranks(&old.0.name), ranks(&kept), ranks(&new.0.name)], [2, 1, 2]);
    // Once more: the name is a link now.
    let called = store.find(&old.0.name).unwrap().unwrap();
    store.supersede(&called, &newer.0, &new.1).unwrap().unwrap();
    assert_eq!([ranks(&old.0.name), ranks(&kept), ranks(&new.0.name)], [4, 1, 2]);
    // The name goes, and the set stays.
    assert_eq!(store.remove(&old.0.name).unwrap(), 0);
    assert_eq!(ranks(&newer.0.name), 4);
    // A set that has the other name stays as it is.
    assert!(store.supersede(&newer.0, &new.0, &aside).unwrap().is_none());
    assert_eq!([ranks(&newer.0.name), ranks(&kept)], [4, 1]);
}
