//! What must hold in a rule file before any model is looked at.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    EXPERTS_AXIS, Let, RuleError, RulePack, SCHEMA,
    file::{Family, PackFile, Presence, TensorRule},
    name::NamePattern,
};
use crate::expr::{Expr, ExprError};

/// The layer's index in expressions.
pub(crate) const LAYER_NAME: &str = "L";

pub(super) fn check(file: PackFile) -> Result<RulePack, RuleError> {
    if file.schema != SCHEMA {
        return Err(RuleError::Schema { found: file.schema });
    }
    if file.families.is_empty() {
        return invalid("families", "none");
    }
    let mut lets = BTreeMap::new();
    for (name, family) in &file.families {
        if let Some(other) = &family.same_as
            && file.families.get(other).is_none_or(|other| other.same_as.is_some())
        {
            let problem = format!("is the same as {other:?}, which is no family of its own here");
            return invalid(&format!("families.{name}"), &problem);
        }
        let keys = Keys::of(&file, name, family)?;
        let ordered = order_lets(&file, family, &keys)?;
        check_expressions(&file, family, &Names::of(keys, &ordered))?;
        lets.insert(name.clone(), ordered);
    }
    check_axes(&file)?;
    check_tensors(&file)?;
    Ok(RulePack { file: Arc::new(file), lets })
}

fn invalid<T>(place: &str, problem: &str) -> Result<T, RuleError> {
    Err(RuleError::Invalid { place: place.to_owned(), problem: problem.to_owned() })
}

/// Configuration keys that a family's expressions may name.
struct Keys<'a> {
    used: BTreeSet<&'a str>,
    place: String,
}

impl<'a> Keys<'a> {
    fn of(file: &'a PackFile, name: &str, family: &'a Family) -> Result<Self, RuleError> {
        let place = format!("families.{name}");
        let mut all = BTreeSet::new();
        let used = file.config.used.iter().chain(&family.used);
        let ignored = file.config.ignored.iter().chain(&family.ignored);
        for key in used.clone().chain(ignored) {
            if !all.insert(key.as_str()) {
                return invalid(&place, &format!("config key {key:?} is listed twice"));
            }
        }
        let used = used.map(String::as_str).collect::<BTreeSet<_>>();
        if let Some(key) = file
            .lets
            .keys()
            .chain(family.lets.keys())
            .find(|name| used.contains(name.as_str()) || name.as_str() == LAYER_NAME)
        {
            return invalid(
                &place,
                &format!("{key:?} is defined by `let` and has a meaning already"),
            );
        }
        Ok(Self { used, place })
    }
}

/// Names that expressions may use.
struct Names<'a> {
    global: BTreeSet<&'a str>,
    per_layer: BTreeSet<&'a str>,
    place: String,
}

impl<'a> Names<'a> {
    fn of(keys: Keys<'a>, lets: &'a [Let]) -> Self {
        let mut names =
            Self { global: keys.used, per_layer: BTreeSet::from([LAYER_NAME]), place: keys.place };
        for entry in lets {
            let set = if entry.per_layer { &mut names.per_layer } else { &mut names.global };
            set.insert(&entry.name);
        }
        names
    }

    fn check(&self, expression: &Expr, place: &str, per_layer: bool) -> Result<(), RuleError> {
        for name in expression.names() {
            if self.global.contains(name) || per_layer && self.per_layer.contains(name) {
                continue;
            }
            let place = format!("{place} (in {})", self.place);
            let (expression, name) = (expression.text().to_owned(), name.to_owned());
            if self.per_layer.contains(name.as_str()) {
                let problem = format!("`{expression}` depends on the layer by `{name}`");
                return Err(RuleError::Invalid { place, problem });
            }
            let source = ExprError::UnknownName { expression, name };
            return Err(RuleError::Expression { place, source });
        }
        Ok(())
    }

    /// Words in a tensor's name are the same in every layer.
    fn check_words(&self, name: &NamePattern, place: &str) -> Result<(), RuleError> {
        match name.words().find(|word| !self.global.contains(word)) {
            None => Ok(()),
            Some(word) => {
                let place = format!("{place} (in {})", self.place);
                let problem = format!("{{{word}}} is not the name of anything");
                Err(RuleError::Invalid { place, problem })
            }
        }
    }
}

/// A family's `let` entries, those of the family in place of the pack's, each after those that
/// it names.
fn order_lets(file: &PackFile, family: &Family, keys: &Keys<'_>) -> Result<Vec<Let>, RuleError> {
    let mut open: BTreeMap<&str, &Expr> = BTreeMap::new();
    for (name, value) in file.lets.iter().chain(&family.lets) {
        open.insert(name, value);
    }
    let mut ordered: Vec<Let> = Vec::new();
    while !open.is_empty() {
        let ready: Vec<&str> = open
            .iter()
            .filter(|(_, value)| value.names().iter().all(|name| !open.contains_key(name)))
            .map(|(name, _)| *name)
            .collect();
        if ready.is_empty() {
            let names: Vec<&str> = open.into_keys().collect();
            return invalid(&keys.place, &format!("`let` in a circle: {}", names.join(", ")));
        }
        for name in ready {
            let value = open.remove(name).expect("taken from the same map").clone();
            let per_layer = value.names().iter().any(|name| {
                *name == LAYER_NAME
                    || ordered.iter().any(|entry| entry.name == *name && entry.per_layer)
            });
            for mentioned in value.names() {
                let known = mentioned == LAYER_NAME
                    || keys.used.contains(mentioned)
                    || ordered.iter().any(|entry| entry.name == mentioned);
                if !known {
                    let expression = value.text().to_owned();
                    let place = format!("let.{name} (in {})", keys.place);
                    let source = ExprError::UnknownName { expression, name: mentioned.to_owned() };
                    return Err(RuleError::Expression { place, source });
                }
            }
            ordered.push(Let { name: name.to_owned(), value, per_layer });
        }
    }
    Ok(ordered)
}

fn check_expressions(file: &PackFile, family: &Family, names: &Names<'_>) -> Result<(), RuleError> {
    for rule in file.require.iter().chain(&family.require) {
        names.check(&rule.that, "require", true)?;
    }
    for (key, value) in &family.absent {
        if !names.global.contains(key.as_str()) {
            return invalid(&names.place, &format!("absent.{key} is not a used config key"));
        }
        // Keys come before everything that is computed from them.
        if let Some(name) = value.names().into_iter().next() {
            return invalid(&names.place, &format!("absent.{key} depends on {name:?}"));
        }
    }
    let spec = &file.spec;
    for expression in spec.expressions() {
        names.check(expression, "spec", false)?;
    }
    let parts = spec
        .moe
        .iter()
        .flat_map(super::parts::MoeRules::expressions)
        .chain(spec.mla.iter().flat_map(super::parts::MlaRules::expressions))
        .chain(spec.compressed.iter().flat_map(super::parts::CompressedAttentionRules::expressions))
        .chain(spec.streams.iter().flat_map(super::parts::HyperConnectionRules::expressions))
        .chain(spec.delta.iter().flat_map(super::parts::LinearAttentionRules::expressions));
    for expression in parts {
        names.check(expression, "spec", false)?;
    }
    for expression in spec.layer.expressions() {
        names.check(expression, "spec.layer", true)?;
    }
    for expression in file.mlx.iter().flat_map(super::mlx::MlxRules::expressions) {
        names.check(expression, "mlx", false)?;
    }
    for (name, axis) in &file.axes {
        for expression in [&axis.len].into_iter().chain(&axis.unit).chain(&axis.also) {
            names.check(expression, &format!("axes.{name}"), false)?;
        }
    }
    for rule in &file.tensors {
        let place = format!("tensor {}", rule.name);
        names.check_words(&rule.name, &place)?;
        for expression in &rule.shape {
            names.check(expression, &place, rule.name.per_layer())?;
        }
        if let Presence::Exactly(expression) = &rule.required {
            names.check(expression, &place, rule.name.per_layer())?;
        }
        if let Some(stored_as) = &rule.stored_as {
            names.check_words(stored_as, &place)?;
        }
        for expression in rule.stored_inner.iter().flatten().chain(&rule.below) {
            names.check(expression, &place, rule.name.per_layer())?;
        }
        for from in &rule.from {
            names.check_words(&from.name, &place)?;
            let rows = from.rows.iter().flat_map(|rows| [&rows.first, &rows.count]);
            let shape = from.shape.iter().flatten();
            for expression in shape.chain(&from.blocks).chain(rows) {
                names.check(
                    expression,
                    &format!("{place} from {}", from.name),
                    rule.name.per_layer(),
                )?;
            }
        }
    }
    Ok(())
}

fn check_axes(file: &PackFile) -> Result<(), RuleError> {
    for (name, axis) in &file.axes {
        let place = format!("axes.{name}");
        match axis.follow.as_ref().map(|leader| (leader, file.axes.get(leader))) {
            Some((leader, None)) => {
                return invalid(&place, &format!("follows {leader:?}, which is not an axis"));
            }
            Some((leader, Some(axis))) if axis.follow.is_some() => {
                return invalid(&place, &format!("follows {leader:?}, which follows another"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_tensors(file: &PackFile) -> Result<(), RuleError> {
    let mut seen = BTreeSet::new();
    for rule in &file.tensors {
        let place = format!("tensor {}", rule.name);
        let condition = match &rule.required {
            Presence::Exactly(expression) => expression.text(),
            Presence::Always | Presence::Maybe => "",
        };
        // The same name under another condition: sharded otherwise in other models.
        if !seen.insert((place.clone(), condition))
            || condition.is_empty() && rules_of(file, rule) > 1
        {
            return invalid(&place, "listed twice");
        }
        if rule.name.per_expert() {
            return invalid(&place, "only a source's name has {E}");
        }
        if rule.shape.len() > 3 {
            return invalid(&place, "a shape has at most three dimensions");
        }
        if let Some(axis) = rule.shard.axis()
            && !file.axes.contains_key(axis)
        {
            return invalid(&place, &format!("is sharded along {axis:?}, which is not an axis"));
        }
        if rule.shard.is_expert() && !file.axes.contains_key(EXPERTS_AXIS) {
            return invalid(
                &place,
                &format!("is sharded along {EXPERTS_AXIS:?}, which is not an axis"),
            );
        }
        let [fewest, most] = rule.shard.dimensions();
        if !(fewest..=most).contains(&rule.shape.len()) {
            return invalid(&place, &format!("its sharding rule needs {fewest} dimensions"));
        }
        if rule.quantize == Some(true) && rule.shape.len() < 2 {
            return invalid(&place, "only matrices are quantized");
        }
        check_from(rule, &place)?;
        if let Some(stored_as) = &rule.stored_as
            && (stored_as.per_expert() || stored_as.per_layer() != rule.name.per_layer())
        {
            return invalid(&place, "`stored_as` is for the tensor itself, in each of its layers");
        }
        check_rows(file, rule, &place)?;
    }
    Ok(())
}

fn check_rows(file: &PackFile, rule: &TensorRule, place: &str) -> Result<(), RuleError> {
    let Some(key) = &rule.rows else { return Ok(()) };
    if rule.name.per_layer() {
        return invalid(place, "`rows` needs a tensor that exists once");
    }
    if !file.config.used.contains(key) {
        return invalid(place, &format!("`rows` names {key:?}, which is not in config.used"));
    }
    Ok(())
}

fn rules_of(file: &PackFile, rule: &TensorRule) -> usize {
    file.tensors.iter().filter(|other| other.name == rule.name).count()
}

fn check_from(rule: &TensorRule, place: &str) -> Result<(), RuleError> {
    for from in &rule.from {
        if from.name.per_layer() != rule.name.per_layer() {
            return invalid(place, &format!("{} is of another number of layers", from.name));
        }
        if from.name.per_expert() && (rule.shape.len() < 2 || from.shape.is_some()) {
            let problem =
                format!("{} has the tensor's shape without the first dimension", from.name);
            return invalid(place, &problem);
        }
    }
    Ok(())
}
