//! The compiled-in family whose tensors and configuration keys are most like a model's.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};

use super::{Group, groups, layer, pattern};
use crate::{
    expr::{Scope, Value},
    normalise::{
        MAX_LAYERS, SourceTensor,
        accounting::expand,
        family::FamilyRules,
        scopes::{config_scope, evaluate, flag, size},
    },
    rules::{Presence, RulePack, TensorRule, builtin_text, matches},
};
use shardpack_containers::neutral::is_neutral;

/// A family and where the model differs from it.
pub(super) struct Nearest<'a> {
    pub(super) family: FamilyRules<'a>,
    /// Values of the family's names for this configuration, as far as they have any.
    pub(super) scope: Scope<'static>,
    /// Patterns of tensors that its rules know.
    pub(super) known: usize,
    /// Tensors that no rule names.
    pub(super) unknown: BTreeMap<String, Group>,
    /// Tensors whose shapes are not those of the rules: pattern, found, expected.
    pub(super) reshaped: Vec<(String, Vec<u64>, String)>,
    /// Names of rules whose tensors are not there, as the rules spell them.
    pub(super) missing: Vec<String>,
    /// Keys of the configuration that it does not know and that are not neutral.
    pub(super) keys: Vec<String>,
}

impl<'a> Nearest<'a> {
    /// The nearest of all families of the packs; `None` without any.
    pub(super) fn of(
        config: &Map<String, Json>,
        sources: &[SourceTensor],
        packs: &'a [RulePack],
    ) -> Option<Self> {
        let families = packs
            .iter()
            // Only these can be built on.
            .filter(|pack| builtin_text(pack.id()).is_some())
            .flat_map(|pack| {
                pack.file.families.iter().map(move |(name, family)| FamilyRules {
                    name,
                    pack,
                    family,
                    lets: &pack.lets[name],
                })
            });
        let all = families.filter_map(|family| Self::compare(family, config, sources));
        all.min_by_key(Self::distance)
    }

    /// Differences first, then whether it stands by itself (the text model of a wrapper is met only
    /// within it), then whether its own keys are those of the model.
    fn distance(&self) -> (usize, usize, usize, bool, usize) {
        let differences = self.unknown.len() + self.reshaped.len() + self.missing.len();
        let own = &self.family.family.used;
        (
            differences * 1000 / (self.known + differences).max(1),
            self.keys.len(),
            differences,
            self.family.name.ends_with("_text"),
            own.len(),
        )
    }

    fn compare(
        family: FamilyRules<'a>,
        config: &Map<String, Json>,
        sources: &[SourceTensor],
    ) -> Option<Self> {
        let mut scope = config_scope(&family, config).ok()?;
        for entry in family.lets.iter().filter(|entry| !entry.per_layer) {
            if let Ok(value) = evaluate(&entry.value, &scope, "let") {
                scope.set(&entry.name, value);
            }
        }
        let stripped = strip(&family, sources);
        let mut seen = Seen::default();
        {
            let layers = stripped.keys().filter_map(|name| layer(name)).max();
            let count = layers.map_or(0, |last| last.saturating_add(1).min(MAX_LAYERS));
            let scopes: Vec<Scope<'_>> =
                (0..count).map(|layer| layer_scope(&family, &scope, layer)).collect();
            for rule in &family.pack.file.tensors {
                seen.rule(rule, &scope, &scopes, &stripped);
            }
        }
        let unknown = stripped.iter().filter(|(name, _)| !seen.claimed.contains(&pattern(name)));
        let unknown = groups(unknown.map(|(name, shape)| (name.as_str(), *shape)));
        let is_unknown = |key: &&String| !family.knows(key) && !is_neutral(&config[key.as_str()]);
        let keys = config.keys().filter(is_unknown).cloned().collect();
        Some(Self {
            known: seen.claimed.len(),
            unknown,
            reshaped: seen.reshaped,
            missing: seen.missing,
            keys,
            scope,
            family,
        })
    }
}

/// Tensors by the names that the rules see, without those that they ignore.
fn strip<'s>(family: &FamilyRules<'_>, sources: &'s [SourceTensor]) -> BTreeMap<String, &'s [u64]> {
    let file = &family.pack.file;
    let mut tensors = BTreeMap::new();
    for tensor in sources {
        let mut name = tensor.name.clone();
        for rule in &file.strip {
            if let Some(rest) = name.strip_prefix(&rule.from) {
                name = format!("{}{rest}", rule.to);
            }
        }
        if !file
            .ignore
            .iter()
            .chain(&family.family.ignore)
            .any(|rule| matches(&rule.pattern, &name))
        {
            tensors.insert(name, tensor.shape.as_slice());
        }
    }
    tensors
}

/// The names of a layer, as far as they have values.
fn layer_scope<'s>(family: &FamilyRules<'_>, scope: &'s Scope<'s>, layer: u32) -> Scope<'s> {
    let mut inner = Scope::within(scope);
    inner.set("L", Value::Int(i64::from(layer)));
    for entry in family.lets.iter().filter(|entry| entry.per_layer) {
        if let Ok(value) = evaluate(&entry.value, &inner, "let") {
            inner.set(&entry.name, value);
        }
    }
    inner
}

/// What comparing rule by rule finds.
#[derive(Default)]
struct Seen {
    claimed: BTreeSet<String>,
    reshaped: Vec<(String, Vec<u64>, String)>,
    missing: Vec<String>,
}

impl Seen {
    fn rule(
        &mut self,
        rule: &TensorRule,
        scope: &Scope<'_>,
        layers: &[Scope<'_>],
        stripped: &BTreeMap<String, &[u64]>,
    ) {
        let mut is_missing = false;
        let once = [scope];
        let per_layer: Vec<&Scope<'_>> = layers.iter().collect();
        let scopes = if rule.name.per_layer() { per_layer.as_slice() } else { &once };
        for (layer, scope) in scopes.iter().enumerate() {
            let exists = match &rule.required {
                Presence::Always => Some(true),
                Presence::Maybe => None,
                Presence::Exactly(expression) => flag(expression, scope, "required").ok(),
            };
            if exists == Some(false) {
                continue;
            }
            let found = self.find(rule, layer as u32, scope, stripped);
            is_missing |= exists == Some(true) && !found;
        }
        if is_missing {
            self.missing.push(rule.name.to_string());
        }
    }

    /// Whether a rule's tensor is there in one of its forms.
    fn find(
        &mut self,
        rule: &TensorRule,
        layer: u32,
        scope: &Scope<'_>,
        stripped: &BTreeMap<String, &[u64]>,
    ) -> bool {
        let Ok(name) = expand(&rule.name, scope, layer, 0) else { return false };
        if let Some(found) = stripped.get(&name) {
            let pattern = pattern(&name);
            let expected = rule.shape.iter().map(|dimension| size(dimension, scope, "shape"));
            let expected: Option<Vec<u64>> =
                expected.map(|size| size.ok().map(u64::from)).collect();
            // What decides the key is right whatever the key says.
            let differs = rule.rows.is_none() && expected.is_some_and(|shape| shape != **found);
            let is_new = self.claimed.insert(pattern.clone());
            if differs && (is_new || !self.reshaped.iter().any(|(known, ..)| *known == pattern)) {
                let words: Vec<&str> = rule.shape.iter().map(crate::expr::Expr::text).collect();
                self.reshaped.push((pattern, found.to_vec(), format!("[{}]", words.join(", "))));
            }
            return true;
        }
        for from in &rule.from {
            let Ok(name) = expand(&from.name, scope, layer, 0) else { continue };
            if stripped.contains_key(&name) {
                self.claimed.insert(pattern(&name));
                return true;
            }
        }
        false
    }
}
