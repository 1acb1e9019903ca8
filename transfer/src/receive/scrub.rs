//! Reads what is stored again from time to time, slowly, so that damage is found before it is in the
//! way. When each package was read last is kept in the store; what to do about damage is not known here.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    num::NonZero,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use shardpack_manifests::{digest::chunk_range, manifest::MANIFEST_FILE};

use super::{
    event::ReceiveEvent,
    files,
    node::Shutdown,
    reuse::read_checked,
    store::{PackageDir, Store, StoreError},
};
use crate::limit::Limit;

/// Its name in a store.
pub(super) const SCRUB_FILE: &str = "scrub.json";

/// Between two looks at what is due.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Between two looks at whether the node ends.
const LOOK_FOR_END: Duration = Duration::from_millis(100);

/// Most findings of a package that are told.
const MAX_FINDINGS: usize = 20;

/// How stored packages are read again.
#[derive(Clone, Copy, Debug)]
pub struct ScrubOptions {
    /// Most bytes that are read in a second.
    pub bytes_per_second: NonZero<u64>,
    /// How long after it was read, or received, a package is read again.
    pub interval: Duration,
}

/// When packages were read last, in seconds since 1970, by their key.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Scrubbed {
    #[serde(default)]
    packages: BTreeMap<String, u64>,
}

/// Reads packages again until `shutdown`, and tells `observer` of each.
pub fn scrub(
    store: &Arc<Store>,
    options: ScrubOptions,
    shutdown: &Shutdown,
    observer: &dyn Fn(&ReceiveEvent),
) {
    let limit = Limit::new(options.bytes_per_second);
    while !shutdown.is_stopped() {
        // What cannot be listed or noted now is tried again.
        if let Ok(Some(package)) = next(store, options.interval)
            && let Some(event) = read(store, &package, &limit, shutdown)
        {
            observer(&event);
            let _ = note(store, &package);
        }
        rest(LOOK_AGAIN, shutdown);
    }
}

/// Reads a package at the pace of `limit`; nothing if it was removed meanwhile, or the node ends.
fn read(
    store: &Arc<Store>,
    package: &PackageDir,
    limit: &Limit,
    shutdown: &Shutdown,
) -> Option<ReceiveEvent> {
    let held = store.hold(package.key).ok()?;
    let (mut read_bytes, mut findings) = (0, Vec::new());
    match held.package().read_manifest() {
        Err(error) => findings.push(error.to_string()),
        Ok(manifest) => {
            for entry in &manifest.files {
                let file = match File::open(package.path.join(&entry.name)) {
                    Ok(file) => file,
                    Err(error) => {
                        findings.push(format!("file {}: {error}", entry.name));
                        continue;
                    }
                };
                for chunk in 0..entry.chunks.len() as u32 {
                    let range = chunk_range(entry.size, u64::from(chunk));
                    rest(limit.take(range.end - range.start, Instant::now()), shutdown);
                    if shutdown.is_stopped() {
                        return None;
                    }
                    read_bytes += range.end - range.start;
                    let problem = match read_checked(&file, entry, chunk) {
                        Ok(Some(_)) => continue,
                        Ok(None) => "its bytes are not those of the manifest".to_owned(),
                        Err(error) => error.to_string(),
                    };
                    findings.push(format!("file {}, chunk {chunk}: {problem}", entry.name));
                }
            }
        }
    }
    findings.truncate(MAX_FINDINGS);
    Some(ReceiveEvent::Scrubbed { package: package.key, read_bytes, findings })
}

/// Waits, at most until the node ends.
fn rest(time: Duration, shutdown: &Shutdown) {
    let end = Instant::now() + time;
    while !shutdown.is_stopped() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(LOOK_FOR_END));
    }
}

/// The package that was read longest ago, if it is due.
fn next(store: &Arc<Store>, interval: Duration) -> Result<Option<PackageDir>, StoreError> {
    let scrubbed = load(store);
    let now = now();
    let due = |package: PackageDir| {
        let read = scrubbed.packages.get(&package.key.to_string()).copied();
        let last = read.unwrap_or_default().max(received(&package));
        // A clock that was set back must not put a package off for years.
        let is_due = last > now || now - last >= interval.as_secs();
        is_due.then_some((last, package))
    };
    let due = store.packages()?.into_iter().filter_map(due);
    Ok(due.min_by_key(|(last, _)| *last).map(|(_, package)| package))
}

/// When a package was received: all of it was read then.
fn received(package: &PackageDir) -> u64 {
    let written = fs::metadata(package.path.join(MANIFEST_FILE)).and_then(|it| it.modified());
    written.ok().and_then(|it| it.duration_since(UNIX_EPOCH).ok()).map_or(0, |it| it.as_secs())
}

/// A file that is damaged or absent tells nothing: all is read again.
fn load(store: &Store) -> Scrubbed {
    let read = fs::read(store.root().join(SCRUB_FILE)).ok();
    read.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// Notes that a package was read, and forgets those that are gone.
fn note(store: &Arc<Store>, package: &PackageDir) -> Result<(), StoreError> {
    let mut scrubbed = load(store);
    let stored: Vec<String> = store.packages()?.iter().map(|it| it.key.to_string()).collect();
    scrubbed.packages.retain(|key, _| stored.contains(key));
    scrubbed.packages.insert(package.key.to_string(), now());
    let bytes = serde_json::to_vec(&scrubbed).expect("keys are texts");
    let path = store.root().join(SCRUB_FILE);
    files::write_durably(&path, &bytes).map_err(StoreError::io("write", &path))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs())
}
