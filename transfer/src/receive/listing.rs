//! What a store holds, for people and programs.

use serde_json::{Map, Value, json};

use super::{
    active::{Active, ActiveModel, StoredRelease},
    gc::Links,
    store::{Store, StoreError},
};
use crate::protocol::PackageKey;

/// The listing: packages, active models, and a problem with the record of releases if there is one,
/// which hides nothing else.
pub(super) fn of(store: &Store) -> Result<Value, StoreError> {
    let packages = store.packages()?;
    let (active, problem) = match store.active() {
        Ok(active) => (active, None),
        Err(error @ StoreError::Record { .. }) => (Active::default(), Some(error.to_string())),
        Err(error) => return Err(error),
    };
    let models = active.models.iter().filter_map(|(name, model)| {
        let current = model.current.as_ref()?;
        Some((name.clone(), model_of(model, current)))
    });
    let models: Map<String, Value> = models.collect();
    let pending = active.models.iter().filter_map(|(name, model)| {
        let pending = model.pending.as_ref()?;
        let key = key_of(pending.package);
        Some(json!({ "model": name, "release": pending.release, "package": key }))
    });
    let pending: Vec<Value> = pending.collect();
    let held = packages.iter().map(|package| {
        let mut json = key_of(package.key);
        // One that is removed at this moment has none.
        if let Ok(links) = Links::of([package.path.as_path()]) {
            json["size_bytes"] = links.size_bytes.into();
            json["shared_bytes"] = links.shared_bytes().into();
        }
        json["in_use"] = store.is_in_use(package.key).into();
        json
    });
    let held: Vec<Value> = held.collect();
    let stored = Links::of(packages.iter().map(|package| package.path.as_path()));
    let mut listing = json!({
        "packages": held,
        "active": models,
        "pending": pending,
        "stored_bytes": stored.map(|links| links.distinct_bytes()).ok(),
        "free_bytes": store.free_bytes()?,
    });
    if let Some(problem) = problem {
        listing["problem"] = problem.into();
    }
    Ok(listing)
}

fn key_of(key: PackageKey) -> Value {
    json!({ "layout": key.layout, "rank": key.rank })
}

fn model_of(model: &ActiveModel, current: &StoredRelease) -> Value {
    let previous = model.previous().map(key_of);
    json!({
        "current": key_of(current.package),
        "previous": previous,
        "release": current.release,
        "previous_release": model.history.first().map(|release| release.release),
    })
}
