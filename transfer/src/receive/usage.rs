//! Packages in use: what runs, or is being read, is not removed.

use std::{collections::BTreeMap, sync::Arc};

use super::store::{PackageDir, Store, StoreError, locked};
use crate::protocol::PackageKey;

/// How many hold each package.
pub(super) type Uses = BTreeMap<PackageKey, usize>;

/// Keeps a package from being removed, until dropped.
#[derive(Debug)]
pub struct InUse {
    store: Arc<Store>,
    package: PackageDir,
}

impl InUse {
    /// The package.
    #[must_use]
    pub const fn package(&self) -> &PackageDir {
        &self.package
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut uses = locked(&self.store.in_use);
        let key = self.package.key;
        if let Some(count) = uses.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                uses.remove(&key);
            }
        }
    }
}

impl Store {
    /// Keeps a prepared package in the store as long as the result lives.
    pub fn hold(self: &Arc<Self>, key: PackageKey) -> Result<InUse, StoreError> {
        // Invariant: removal holds this lock too, so a package that is found here stays.
        let mut uses = locked(&self.in_use);
        let package = self.package(key)?;
        *uses.entry(key).or_default() += 1;
        Ok(InUse { store: Arc::clone(self), package })
    }

    /// Whether somebody holds a package.
    #[must_use]
    pub fn is_in_use(&self, key: PackageKey) -> bool {
        locked(&self.in_use).contains_key(&key)
    }
}
