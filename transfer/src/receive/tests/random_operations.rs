//! A thousand random operations on a store, cut off at random steps, against a model of it.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::{
    protocol::{Incoming, Intent},
    receive::{
        files::crash,
        stage::{Meter, Stage},
        usage::InUse,
    },
};
use shardpack_manifests::digest::chunk_range;

/// Packages: three of one model, which share a file, and two of another.
const PACKAGES: usize = 5;

#[derive(Clone, Copy, Debug)]
enum Operation {
    Receive {
        package: usize,
    },
    /// A push that ends after some chunks.
    ReceiveSome {
        package: usize,
        chunks: usize,
    },
    /// As a controller of an earlier version asks.
    Activate {
        package: usize,
    },
    Prepare {
        package: usize,
        ahead: u64,
        order: bool,
    },
    Commit {
        model: usize,
    },
    Abort {
        model: usize,
    },
    /// Both phases at once, to the release before.
    Rollback {
        model: usize,
    },
    Hold {
        package: usize,
    },
    Release {
        package: usize,
    },
    Collect {
        keep: usize,
        all: bool,
        dry_run: bool,
    },
    Reopen,
}

fn operation() -> impl Strategy<Value = Operation> {
    let package = 0..PACKAGES;
    prop_oneof![
        4 => package.clone().prop_map(|package| Operation::Receive { package }),
        1 => (package.clone(), 0_usize..4)
            .prop_map(|(package, chunks)| Operation::ReceiveSome { package, chunks }),
        1 => package.clone().prop_map(|package| Operation::Activate { package }),
        4 => (package.clone(), 0_u64..3, any::<bool>())
            .prop_map(|(package, ahead, order)| Operation::Prepare { package, ahead, order }),
        4 => (0_usize..2).prop_map(|model| Operation::Commit { model }),
        1 => (0_usize..2).prop_map(|model| Operation::Abort { model }),
        2 => (0_usize..2).prop_map(|model| Operation::Rollback { model }),
        1 => package.clone().prop_map(|package| Operation::Hold { package }),
        2 => package.prop_map(|package| Operation::Release { package }),
        2 => (0_usize..3, any::<bool>(), any::<bool>())
            .prop_map(|(keep, all, dry_run)| Operation::Collect { keep, all, dry_run }),
        1 => Just(Operation::Reopen),
    ]
}

const MODELS: [&str; 2] = ["tiny", "other"];

fn plan(package: usize) -> SetPlan {
    let shared_seed = if package < 3 { 7 } else { package as u64 };
    SetPlan { name: MODELS[package / 3], shared_seed, ..small(1 + package as u64) }
}

/// A number, a package, and whether there is a record.
type Numbered = (u64, usize, bool);

/// What a model's releases should be.
#[derive(Clone, Debug, Default, PartialEq)]
struct Releases {
    current: Option<Numbered>,
    history: Vec<Numbered>,
    pending: Option<Numbered>,
}

impl Releases {
    fn all(&self) -> impl Iterator<Item = Numbered> {
        self.current.into_iter().chain(self.history.clone()).chain(self.pending)
    }

    fn next(&self) -> u64 {
        self.all().map(|(number, ..)| number).max().unwrap_or(0) + 1
    }

    fn make_current(&mut self, next: Numbered) {
        let before = self.current.replace(next);
        self.history.retain(|(_, package, _)| *package != next.1);
        if let Some(before) = before.filter(|(_, package, _)| *package != next.1) {
            self.history.insert(0, before);
            self.history.truncate(8);
        }
    }
}

/// What a store should be.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    packages: BTreeSet<usize>,
    releases: [Releases; 2],
}

impl Model {
    fn named(&self) -> BTreeSet<usize> {
        self.releases.iter().flat_map(Releases::all).map(|(_, package, _)| package).collect()
    }
}

struct Scene {
    root: tempfile::TempDir,
    /// Where the packages come from.
    sources: Vec<tempfile::TempDir>,
    keys: Vec<PackageKey>,
    store: Option<Arc<Store>>,
    held: BTreeMap<usize, InUse>,
    model: Model,
    /// Operations that were cut off.
    crashes: u32,
}

impl Scene {
    fn new() -> Self {
        let make = |package| {
            let directory = tempfile::tempdir().unwrap();
            let plan = SetPlan { ranks: 1, ..plan(package) };
            let set = write_set(directory.path(), &plan);
            (directory, PackageKey { layout: set.ids.layout, rank: 0 })
        };
        let (sources, keys) = (0..PACKAGES).map(make).unzip();
        let root = tempfile::tempdir().unwrap();
        let store = Some(Arc::new(Store::open(root.path()).unwrap()));
        let (held, model) = (BTreeMap::new(), Model::default());
        Self { root, sources, keys, store, held, model, crashes: 0 }
    }

    fn store(&self) -> &Arc<Store> {
        self.store.as_ref().unwrap()
    }

    /// The process ends and another begins.
    fn reopen(&mut self) {
        self.held.clear();
        self.store = None;
        self.store = Some(Arc::new(Store::open(self.root.path()).unwrap()));
    }

    fn receive(&self, package: usize, most_chunks: usize) -> Result<(), StoreError> {
        let source = self.sources[package].path().join("node-0");
        let manifest_bytes = fs::read(source.join("manifest.json")).unwrap();
        let manifest = Manifest::parse(&manifest_bytes).unwrap();
        let incoming = Incoming {
            intent: Intent::Send,
            key: self.keys[package],
            manifest_digest: Digest::of(&manifest_bytes),
            manifest: Arc::new(manifest),
            manifest_bytes,
            signature: Vec::new(),
        };
        let files = incoming.manifest.files.clone();
        let meter = Meter::default();
        let stage = Stage::open(self.store(), Box::new(incoming), Duration::ZERO, &meter)?;
        let missing: Vec<(u32, u32, u64)> = stage.held().lock().missing().collect();
        for (file, chunk, _) in missing.iter().take(most_chunks).copied() {
            let entry = &files[file as usize];
            let range = chunk_range(entry.size, u64::from(chunk));
            let bytes = fs::read(source.join(&entry.name)).unwrap();
            let bytes = &bytes[range.start as usize..range.end as usize];
            stage.write(file, chunk, range.start, bytes)?;
        }
        if missing.len() > most_chunks {
            return stage.sync();
        }
        stage.seal(&meter)
    }

    fn record(&self, number: u64, package: usize) -> SignedRelease {
        let key = self.keys[package];
        let bytes = fs::read(self.sources[package].path().join("node-0/manifest.json")).unwrap();
        let packages = vec![ReleasePackage { package: key, manifest: Digest::of(&bytes) }];
        let name = MODELS[package / 3].to_owned();
        let mut release = Release::new(name, number, None, key.layout, packages);
        // The same release is the same record, whenever it is made.
        release.time = 0;
        SignedRelease::sign(release, None).unwrap()
    }

    /// The record of the pending release, as the store has it.
    fn pending(&self, model: usize) -> Option<SignedRelease> {
        let active = self.store().active().unwrap();
        active.models.get(MODELS[model])?.pending.as_ref()?.record.clone()
    }

    /// Carries an operation out on the store.
    fn perform(&self, operation: Operation) -> Result<(), StoreError> {
        let store = self.store();
        match operation {
            Operation::Receive { package } => self.receive(package, usize::MAX),
            Operation::ReceiveSome { package, chunks } => self.receive(package, chunks),
            Operation::Activate { package } => store.activate(self.keys[package]).map(drop),
            Operation::Prepare { package, ahead, order } => {
                let number = self.number(package, ahead);
                let order = if order { ReleaseOrder::Any } else { ReleaseOrder::Newer };
                store.prepare_release(0, self.record(number, package), order).map(drop)
            }
            Operation::Commit { model } => {
                let record = self.pending(model).map_or(Digest::of(b""), |it| it.digest());
                store.commit_release(MODELS[model], record).map(drop)
            }
            Operation::Abort { model } => {
                let record = self.pending(model).map_or(Digest::of(b""), |it| it.digest());
                store.abort_release(MODELS[model], record).map(drop)
            }
            Operation::Rollback { model } => {
                let releases = &self.model.releases[model];
                let Some((_, package, _)) = releases.history.first().copied() else {
                    return Ok(());
                };
                let record = self.record(releases.next(), package);
                store.prepare_release(0, record.clone(), ReleaseOrder::Newer)?;
                store.commit_release(MODELS[model], record.digest()).map(drop)
            }
            Operation::Collect { keep, all, dry_run } => {
                let older_than_seconds = if all { 0 } else { 1_000_000 };
                let options = GcOptions { keep, older_than_seconds, dry_run };
                store.collect(options, &Meter::default()).map(drop)
            }
            Operation::Hold { .. } | Operation::Release { .. } | Operation::Reopen => Ok(()),
        }
    }

    /// The number of a release that is prepared: some are not newer than the current one.
    fn number(&self, package: usize, ahead: u64) -> u64 {
        let releases = &self.model.releases[package / 3];
        (releases.next() + ahead).saturating_sub(1).max(1)
    }

    /// What the operation makes of the model: the states that a crash may leave, the last one being
    /// what it ends with; and whether it succeeds.
    fn expect(&self, operation: Operation) -> (Vec<Model>, bool) {
        let before = self.model.clone();
        let mut after = before.clone();
        let mut between = Vec::new();
        let is_done = match operation {
            Operation::Receive { package } => {
                after.packages.insert(package);
                true
            }
            Operation::Activate { package } => {
                let is_here = before.packages.contains(&package);
                let releases = &mut after.releases[package / 3];
                if is_here && releases.current.is_none_or(|(_, current, _)| current != package) {
                    releases.make_current((releases.next(), package, false));
                }
                is_here
            }
            Operation::Prepare { package, ahead, order } => {
                let number = self.number(package, ahead);
                let releases = &mut after.releases[package / 3];
                let is_newer = releases.current.is_none_or(|(current, ..)| number > current);
                let is_current = releases.current == Some((number, package, true));
                let is_taken = order || is_newer || is_current;
                let is_done = before.packages.contains(&package) && is_taken;
                if is_done && !is_current {
                    releases.pending = Some((number, package, true));
                }
                is_done
            }
            Operation::Commit { model } => {
                let releases = &mut after.releases[model];
                let pending = releases.pending.take();
                if let Some(pending) = pending {
                    releases.make_current(pending);
                }
                pending.is_some()
            }
            Operation::Abort { model } => {
                after.releases[model].pending = None;
                true
            }
            Operation::Rollback { model } => {
                let releases = &mut after.releases[model];
                if let Some((_, package, _)) = releases.history.first().copied() {
                    releases.pending = Some((releases.next(), package, true));
                    between.push(after.clone());
                    let releases = &mut after.releases[model];
                    let pending = releases.pending.take().unwrap();
                    releases.make_current(pending);
                }
                true
            }
            Operation::Collect { keep, all, dry_run: false } => {
                self.expect_collection(&mut after, &mut between, keep, all);
                true
            }
            Operation::Collect { dry_run: true, .. }
            | Operation::ReceiveSome { .. }
            | Operation::Hold { .. }
            | Operation::Release { .. }
            | Operation::Reopen => true,
        };
        let mut states = vec![before];
        states.extend(between);
        states.push(after);
        (states, is_done)
    }

    fn expect_collection(
        &self,
        after: &mut Model,
        between: &mut Vec<Model>,
        keep: usize,
        all: bool,
    ) {
        let named_before = after.named();
        for releases in &mut after.releases {
            releases.history.truncate(keep);
        }
        between.push(after.clone());
        let named = after.named();
        let is_kept = |package: &usize| {
            let goes = all || named_before.contains(package);
            named.contains(package) || self.held.contains_key(package) || !goes
        };
        after.packages.retain(is_kept);
    }

    /// The store's state in the model's terms.
    fn read(&self) -> Model {
        let index = |key: PackageKey| self.keys.iter().position(|it| *it == key).unwrap();
        let packages = self.store().packages().unwrap();
        let packages = packages.iter().map(|package| index(package.key)).collect();
        let active = self.store().active().unwrap();
        let releases = MODELS.map(|name| {
            let Some(model) = active.models.get(name) else { return Releases::default() };
            let numbered = |stored: &StoredRelease| {
                (stored.release, index(stored.package), stored.record.is_some())
            };
            Releases {
                current: model.current.as_ref().map(numbered),
                history: model.history.iter().map(numbered).collect(),
                pending: model.pending.as_ref().map(numbered),
            }
        });
        Model { packages, releases }
    }

    /// Every package is whole, every release has its package, what is held is there.
    fn check(&self) -> Result<(), TestCaseError> {
        let report = self.store().check(FsckOptions::default(), None, &Meter::default()).unwrap();
        prop_assert!(report.is_clean(), "{report:?}");
        for held in self.held.values() {
            prop_assert!(held.package().path.is_dir());
        }
        Ok(())
    }

    fn step(&mut self, operation: Operation, cut: Option<u32>) -> Result<(), TestCaseError> {
        match operation {
            Operation::Hold { package } => {
                if let Ok(held) = self.store().hold(self.keys[package]) {
                    self.held.insert(package, held);
                }
            }
            Operation::Release { package } => drop(self.held.remove(&package)),
            Operation::Reopen => self.reopen(),
            _ => {}
        }
        let (states, succeeds) = self.expect(operation);
        let done = match cut {
            None => Some(self.perform(operation)),
            Some(steps) => crash::after(steps, || self.perform(operation)),
        };
        let is_cut = done.is_none();
        if is_cut {
            self.crashes += 1;
            self.reopen();
        }
        let found = self.read();
        let is_partial = matches!(operation, Operation::ReceiveSome { .. });
        if let Some(result) = done {
            prop_assert_eq!(result.is_ok(), succeeds, "{:?}", result);
        }
        let (first, last) = (&states[0], states.last().unwrap());
        // All that was missing may have been few enough, or other packages' files.
        let received = is_partial && found.releases == first.releases;
        // Packages are removed one by one, after the record.
        let partly = is_cut
            && matches!(operation, Operation::Collect { .. })
            && found.releases == last.releases
            && found.packages.is_superset(&last.packages)
            && found.packages.is_subset(&first.packages);
        let whole = if is_cut { states.contains(&found) } else { found == *last };
        prop_assert!(whole || partly || received, "{:?} became {:?}", states, found);
        self.model = found;
        self.check()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2))]

    #[test]
    fn store_is_what_its_model_says_after_any_operation_and_any_crash(
        operations in prop::collection::vec((operation(), prop::option::weighted(0.3, 0_u32..7)), 1_000),
    ) {
        let mut scene = Scene::new();
        for (operation, cut) in operations {
            scene.step(operation, cut)?;
        }
        prop_assert!(scene.crashes > 20, "only {} operations were cut off", scene.crashes);
    }
}
