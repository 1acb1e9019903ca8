//! Every source tensor to its place, or a refusal that says which have none.

mod forms;
mod shapes;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Axis, ResolveError, SourceTensor, TensorList, TensorPlan, View,
    elsewhere::Lost,
    family::FamilyRules,
    rows_and_columns,
    scopes::{at_layer, flag, size},
};
use crate::{
    expr::Scope,
    rules::{FromRule, IgnoreRule, NamePattern, Presence, Role, StripRule, TensorRule, matches},
};
pub(super) use forms::published_form;
use forms::{published, stored_as, turns_sources, view};
use shapes::{check_apart, check_axis, check_float, check_shape, same_elements};

/// The source tensors by normalised name.
pub(super) struct Inventory<'a> {
    tensors: BTreeMap<String, &'a SourceTensor>,
    used: BTreeSet<String>,
    ignored: Vec<(String, String)>,
    /// Whether experts have gates.
    gated: bool,
}

/// The sources of a tensor, as they are there.
struct Found<'a> {
    sources: Vec<&'a SourceTensor>,
    view: View,
}

/// What a rule says of a tensor in a layer.
struct Wanted<'r, 's> {
    rule: &'r TensorRule,
    layer: u32,
    place: &'r str,
    scope: &'r Scope<'s>,
    shape: &'r [u64],
}

/// What the rules make of an [`Inventory`].
pub(super) struct Plan {
    pub(super) tensors: Vec<TensorPlan>,
    pub(super) tied_duplicate: Option<String>,
    pub(super) ignored: Vec<(String, String)>,
    missing: TensorList,
}

impl Wanted<'_, '_> {
    fn name_of(&self, from: &FromRule, expert: u64) -> Result<String, ResolveError> {
        expand(&from.name, self.scope, self.layer, expert)
    }
}

/// Whether a stack of gates is among the tensors.
fn has_gates(rules: &[TensorRule]) -> bool {
    rules
        .iter()
        .any(|rule| rule.shard.is_expert() && rule.name.to_string().ends_with("gate_proj.weight"))
}

/// A name of the rules in a layer for an expert.
pub(super) fn expand(
    name: &NamePattern,
    scope: &Scope<'_>,
    layer: u32,
    expert: u64,
) -> Result<String, ResolveError> {
    name.expand(scope, layer, expert).map_err(|word| ResolveError::Value {
        place: name.to_string(),
        expression: word.to_owned(),
        expected: "a text".to_owned(),
        found: scope.get(word).map_or_else(|| "nothing".to_owned(), ToString::to_string),
    })
}

impl<'a> Inventory<'a> {
    pub(super) fn new(
        family: &FamilyRules<'_>,
        sources: &'a [SourceTensor],
    ) -> Result<Self, ResolveError> {
        let file = &family.pack.file;
        let mut inventory = Self {
            tensors: BTreeMap::new(),
            used: BTreeSet::new(),
            ignored: Vec::new(),
            gated: has_gates(&file.tensors),
        };
        let is_seen = |rule: &&StripRule| {
            let begins = |seen: &String| sources.iter().any(|it| it.name.starts_with(seen));
            rule.seen.as_ref().is_none_or(begins)
        };
        let strip: Vec<&StripRule> = file.strip.iter().filter(is_seen).collect();
        for tensor in sources {
            let mut name = tensor.name.clone();
            for rule in &strip {
                if let Some(rest) = name.strip_prefix(&rule.from) {
                    name = format!("{}{rest}", rule.to);
                }
            }
            if let Some(IgnoreRule { reason, .. }) = file
                .ignore
                .iter()
                .chain(&family.family.ignore)
                .find(|rule| matches(&rule.pattern, &name))
            {
                inventory.ignored.push((tensor.name.clone(), reason.clone()));
            } else if let Some(first) = inventory.tensors.insert(name.clone(), tensor) {
                let (first, second) = (first.name.clone(), tensor.name.clone());
                return Err(ResolveError::Duplicate { name, first, second });
            }
        }
        Ok(inventory)
    }

    /// Rows of a matrix.
    pub(super) fn rows(&self, name: &str) -> Option<i64> {
        i64::try_from(*self.tensors.get(name)?.shape.first()?).ok()
    }

    /// Takes every tensor that the rules name, in their order; the rules of a block with `{L}`
    /// are repeated layer by layer.
    pub(super) fn plan(
        mut self,
        family: &FamilyRules<'_>,
        scope: &Scope<'_>,
        layers: &[Scope<'_>],
        axes: &[Axis],
    ) -> Result<Plan, ResolveError> {
        let mut plan = Plan {
            tensors: Vec::new(),
            tied_duplicate: None,
            ignored: std::mem::take(&mut self.ignored),
            missing: TensorList::default(),
        };
        let rules = &family.pack.file.tensors;
        for block in rules.chunk_by(|left, right| left.name.per_layer() == right.name.per_layer()) {
            if block[0].name.per_layer() {
                for (layer, scope) in layers.iter().enumerate() {
                    for rule in block {
                        self.place(rule, Some(layer as u32), scope, axes, &mut plan)?;
                    }
                }
            } else {
                for rule in block {
                    self.place(rule, None, scope, axes, &mut plan)?;
                }
            }
        }
        self.drop_surplus_layers(family, layers.len(), &mut plan);
        let unknown = self
            .tensors
            .iter()
            .filter(|(name, _)| !self.used.contains(*name))
            .map(|(_, tensor)| (tensor.name.clone(), tensor.shape.clone()));
        let unknown = TensorList(unknown.collect());
        if plan.missing.0.is_empty() && unknown.0.is_empty() {
            return Ok(plan);
        }
        Err(ResolveError::Accounting { missing: plan.missing, unknown })
    }

    fn place(
        &mut self,
        rule: &TensorRule,
        layer: Option<u32>,
        scope: &Scope<'_>,
        axes: &[Axis],
        plan: &mut Plan,
    ) -> Result<(), ResolveError> {
        let name = expand(&rule.name, scope, layer.unwrap_or(0), 0)?;
        let place = layer.map_or_else(|| name.clone(), |layer| at_layer(&name, layer as usize));
        let (wanted, required) = match &rule.required {
            Presence::Always => (true, true),
            Presence::Maybe => (true, false),
            Presence::Exactly(expression) => {
                let exists = flag(expression, scope, &place)?;
                (exists, exists)
            }
        };
        // A head that should not be there is the embedding once more, or an error.
        let duplicate = !wanted && rule.role == Role::Head;
        if !wanted && !duplicate {
            return Ok(());
        }
        let mut shape = Vec::with_capacity(rule.shape.len());
        for expression in &rule.shape {
            shape.push(u64::from(size(expression, scope, &place)?));
        }
        let wanted =
            Wanted { rule, layer: layer.unwrap_or(0), place: &place, scope, shape: &shape };
        let Some(found) = self.find(&name, &wanted)? else {
            if required {
                plan.missing.0.push((name, shape));
            }
            return Ok(());
        };
        check_axis(rule, &name, &shape, axes)?;
        let sources: Vec<String> = found.sources.iter().map(|source| source.name.clone()).collect();
        if duplicate {
            plan.tied_duplicate = sources.into_iter().next();
            return Ok(());
        }
        let below = rule.below.as_ref().map(|below| size(below, scope, &place)).transpose()?;
        let stored_as = stored_as(&wanted)?.filter(|stored_as| stored_as.name != name);
        plan.tensors.push(TensorPlan {
            stored_as,
            published: published(&wanted),
            name,
            sources,
            view: found.view,
            dtype: found.sources[0].dtype,
            sharding: rule.shard.clone(),
            role: rule.role,
            quantizable: shape.len() > 1 && rule.quantize.unwrap_or(rule.role.is_quantized()),
            exact: rule.exact || rule.role == Role::Router,
            below,
            shape,
            layer,
        });
        Ok(())
    }

    /// The sources of a tensor: those of the first form that is there.
    fn find(
        &mut self,
        name: &str,
        wanted: &Wanted<'_, '_>,
    ) -> Result<Option<Found<'a>>, ResolveError> {
        // By its own name first: that is how packages hold it, and how other programs' do. Where a
        // form of the rules has the same name, shapes tell them apart.
        let mut is_of_a_form = false;
        for from in &wanted.rule.from {
            is_of_a_form |= wanted.name_of(from, 0)? == name;
        }
        let fits =
            |tensor: &&SourceTensor| !is_of_a_form || same_elements(&tensor.shape, wanted.shape);
        if let Some(tensor) = self.tensors.get(name).copied().filter(fits) {
            self.used.insert(name.to_owned());
            check_shape(&wanted.rule.shape, tensor, wanted.shape)?;
            check_float(tensor)?;
            let [rows, columns] = rows_and_columns(wanted.shape);
            return Ok(Some(Found { sources: vec![tensor], view: View::whole(rows, columns) }));
        }
        for from in &wanted.rule.from {
            if self.tensors.contains_key(&wanted.name_of(from, 0)?) {
                return match self.find_from(from, wanted) {
                    // The name is one of several tools', and shapes tell them apart.
                    Err(error @ ResolveError::Shape { .. }) => {
                        self.find_elsewhere(name, wanted)?.map(Some).ok_or(error)
                    }
                    other => other,
                };
            }
        }
        self.find_elsewhere(name, wanted)
    }

    /// The sources of a tensor that is in no form of the rules', in a form that other tools have.
    fn find_elsewhere(
        &mut self,
        name: &str,
        wanted: &Wanted<'_, '_>,
    ) -> Result<Option<Found<'a>>, ResolveError> {
        let rule = wanted.rule;
        let mut names = vec![name.to_owned()];
        for from in &rule.from {
            names.push(wanted.name_of(from, 0)?);
        }
        let lost = Lost {
            names: &names,
            shape: wanted.shape,
            role: rule.role,
            of_experts: rule.shard.is_expert(),
            gated: self.gated,
            turned: turns_sources(rule, wanted.scope),
        };
        for candidate in lost.candidates() {
            let is_free = |source: &SourceTensor| {
                same_elements(&source.shape, &candidate.shape) && source.dtype.is_float()
            };
            let first = candidate.names.first().and_then(|name| self.tensors.get(name));
            if let Some(first) = first
                && candidate.names.len() > 1
                && !is_free(first)
            {
                // Experts one by one in another orientation: what they were cut from is not known.
                return check_apart(first, &candidate.shape, None).map(|()| None);
            }
            if !first.is_some_and(|first| is_free(first)) {
                continue;
            }
            // Of a tensor that another rule has taken only another part is free.
            let is_whole = candidate.view.is_whole();
            if is_whole && candidate.names.iter().any(|name| self.used.contains(name)) {
                continue;
            }
            let mut sources = Vec::new();
            for name in &candidate.names {
                let Some(tensor) = self.tensors.get(name).copied() else {
                    let (first, missing) = (candidate.names[0].clone(), name.clone());
                    let count = candidate.names.len() as u64;
                    return Err(ResolveError::Incomplete { first, missing, count });
                };
                check_apart(tensor, &candidate.shape, sources.first().copied())?;
                sources.push(tensor);
            }
            self.used.extend(candidate.names);
            return Ok(Some(Found { sources, view: candidate.view }));
        }
        Ok(None)
    }

    fn find_from(
        &mut self,
        from: &FromRule,
        wanted: &Wanted<'_, '_>,
    ) -> Result<Option<Found<'a>>, ResolveError> {
        let (experts, own) = if from.name.per_expert() {
            (wanted.shape[0], &wanted.shape[1..])
        } else {
            (1, wanted.shape)
        };
        let mut shape = own.to_vec();
        let mut expressions = &wanted.rule.shape[wanted.rule.shape.len() - own.len()..];
        if let Some(other) = &from.shape {
            let place = wanted.place;
            let size = |expression| Ok(u64::from(size(expression, wanted.scope, place)?));
            shape = other.iter().map(size).collect::<Result<_, ResolveError>>()?;
            expressions = other;
        }
        let mut sources: Vec<&'a SourceTensor> = Vec::new();
        for expert in 0..experts {
            let name = wanted.name_of(from, expert)?;
            let Some(tensor) = self.tensors.get(&name).copied() else {
                let (first, missing) = (wanted.name_of(from, 0)?, name);
                return Err(ResolveError::Incomplete { first, missing, count: experts });
            };
            check_shape(expressions, tensor, &shape)?;
            check_float(tensor)?;
            if let Some(first) = sources.first()
                && tensor.dtype != first.dtype
            {
                let (tensor, found, expected) = (tensor.name.clone(), tensor.dtype, first.dtype);
                return Err(ResolveError::MixedTypes { tensor, found, expected });
            }
            self.used.insert(name);
            sources.push(tensor);
        }
        let view = view(from, wanted, &shape)?;
        let rows = view.rows_per_source() * experts;
        let columns = view.result()[1];
        // Single elements may fill rows of any length.
        let [wanted_rows, wanted_columns] = rows_and_columns(wanted.shape);
        let fits = rows * columns == wanted_rows * wanted_columns
            && (columns == wanted_columns || columns == 1);
        if view.is_possible() && fits {
            return Ok(Some(Found { sources, view }));
        }
        Err(ResolveError::View {
            tensor: wanted.place.to_owned(),
            source_name: from.name.to_string(),
            gives: [rows, columns],
            expected: wanted.shape.to_vec(),
        })
    }

    /// Ignores layers beyond the model's last one, if the rules say so.
    fn drop_surplus_layers(&mut self, family: &FamilyRules<'_>, layers: usize, plan: &mut Plan) {
        let Some(rule) = &family.pack.file.surplus_layers else { return };
        let is_surplus = |name: &str| {
            let index = name.strip_prefix(&rule.prefix)?.split_once('.')?.0;
            Some(index.parse::<usize>().ok()? >= layers)
        };
        for (name, tensor) in &self.tensors {
            if !self.used.contains(name) && is_surplus(name) == Some(true) {
                plan.ignored.push((tensor.name.clone(), rule.reason.clone()));
            }
        }
        self.tensors.retain(|name, _| is_surplus(name) != Some(true));
    }
}
