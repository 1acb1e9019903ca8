//! Releases of a store: the two phases in which one becomes current.

use std::sync::Arc;

use shardpack_manifests::{
    Digest,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    verify::read_document,
};

use super::{
    active::{Active, ReleaseOrder, ReleaseRefusal, ReleaseState, model_name},
    store::{PackageDir, Store, StoreError, locked},
};
use crate::{
    protocol::PackageKey,
    release::{ReleasePackage, SignedRelease},
};

/// The record, in the store's directory.
pub(super) const RECORD_FILE: &str = "active.json";

impl PackageDir {
    /// Digest of its `manifest.json`.
    pub fn manifest_digest(&self) -> Result<Digest, StoreError> {
        let bytes = read_document(&self.path.join(MANIFEST_FILE), MAX_MANIFEST_BYTES).map_err(
            |problem| StoreError::Unusable { key: self.key, problem: problem.to_string() },
        )?;
        Ok(Digest::of(&bytes))
    }
}

impl Store {
    /// The releases of all models.
    pub fn active(&self) -> Result<Active, StoreError> {
        Active::read(&self.root().join(RECORD_FILE))
    }

    /// Makes a prepared package the current one of its model without an activation record, as
    /// controllers of earlier versions ask; returns the one before, which is kept.
    pub fn activate(self: &Arc<Self>, key: PackageKey) -> Result<Option<PackageKey>, StoreError> {
        let held = self.hold(key)?;
        let model = model_name(&held.package().read_manifest()?);
        self.change_record(|active| Ok(active.activate(model, key)))
    }

    /// First phase: keeps the release of which this node has the package of `rank` as pending. The
    /// release that is current stays so. The caller has verified the record's signature.
    pub fn prepare_release(
        self: &Arc<Self>,
        rank: u32,
        signed: SignedRelease,
        order: ReleaseOrder,
    ) -> Result<ReleaseState, StoreError> {
        let release = signed.release();
        let ReleasePackage { package: key, manifest: expected } = *release
            .package(rank)
            .ok_or(StoreError::NoSuchRank { rank, ranks: release.packages.len() })?;
        let held = self.hold(key)?;
        let found = held.package().manifest_digest()?;
        if found != expected {
            return Err(StoreError::OtherManifest { key, expected, found });
        }
        let found = model_name(&held.package().read_manifest()?);
        if found != release.model {
            return Err(StoreError::OtherModel { key, expected: release.model.clone(), found });
        }
        // Once it is pending, the record itself keeps the package.
        self.change_record(|active| active.prepare(signed, key, order))
    }

    /// Second phase: makes the pending release with this record current; returns the package
    /// before, which is kept.
    pub fn commit_release(
        &self,
        model: &str,
        record: Digest,
    ) -> Result<Option<PackageKey>, StoreError> {
        self.change_record(|active| active.commit(model, record))
    }

    /// Instead of the second phase: drops a pending release; whether there was one.
    pub fn abort_release(&self, model: &str, record: Digest) -> Result<bool, StoreError> {
        self.change_record(|active| active.abort(model, record))
    }

    /// Changes the record in one step, or not at all.
    pub(super) fn change_record<T>(
        &self,
        change: impl FnOnce(&mut Active) -> Result<T, ReleaseRefusal>,
    ) -> Result<T, StoreError> {
        let _guard = locked(&self.record);
        let before = self.active()?;
        let mut active = before.clone();
        let changed = change(&mut active)?;
        if active != before {
            active.write(&self.root().join(RECORD_FILE))?;
        }
        Ok(changed)
    }
}
