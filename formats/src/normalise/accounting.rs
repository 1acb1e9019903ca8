//! Every source tensor to its place, or a refusal that says which have none.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Axis, Published, ResolveError, SourceTensor, StoredAs, TensorList, TensorPlan, View,
    elsewhere::Lost,
    family::FamilyRules,
    rows_and_columns,
    scopes::{at_layer, evaluate, flag, size, wrong},
};
use crate::{
    expr::{Scope, Value},
    rules::{
        EXPERTS_AXIS, FromRule, IgnoreRule, NamePattern, Presence, Role, TensorRule, Turn, matches,
    },
};

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
        for tensor in sources {
            let mut name = tensor.name.clone();
            for rule in &file.strip {
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
        // By its own name first: that is how packages hold it, and how other programs' do.
        if let Some(tensor) = self.tensors.get(name).copied() {
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

/// The form in which publishers have a tensor, if not under its own name: the first whose words all
/// mean something in this family.
pub(super) fn published_form<'r>(
    rule: &'r TensorRule,
    scope: &Scope<'_>,
    dimensions: usize,
) -> Option<&'r FromRule> {
    let is_none = |word: &str| scope.get(word) == Some(&Value::Text("none".to_owned()));
    let is_possible = |from: &&FromRule| {
        !from.name.words().any(is_none) && (!from.name.per_expert() || dimensions > 1)
    };
    rule.from.iter().find(is_possible)
}

/// The same with its sizes; nothing where they do not fit, as those of a form that no checkpoint of
/// this configuration has.
fn published(wanted: &Wanted<'_, '_>) -> Option<Published> {
    let Wanted { rule, scope, shape, place, .. } = wanted;
    let from = published_form(rule, scope, shape.len())?;
    let (experts, own) = if from.name.per_expert() { (shape[0], &shape[1..]) } else { (1, *shape) };
    let size = |expression| size(expression, scope, place).ok().map(u64::from);
    let shape = match &from.shape {
        Some(other) => other.iter().map(size).collect::<Option<Vec<u64>>>()?,
        None => own.to_vec(),
    };
    let view = view(from, wanted, &shape).ok()?;
    let elements = view.rows_per_source() * view.result()[1] * experts;
    if !view.is_possible() || elements != wanted.shape.iter().product::<u64>() {
        return None;
    }
    let names = (0..experts).map(|expert| wanted.name_of(from, expert).ok());
    Some(Published { names: names.collect::<Option<_>>()?, shape, view })
}

/// How weight files list a tensor, if the rules say so.
fn stored_as(wanted: &Wanted<'_, '_>) -> Result<Option<StoredAs>, ResolveError> {
    let Wanted { rule, layer, place, scope, shape } = wanted;
    let Some(name) = &rule.stored_as else { return Ok(None) };
    let name = expand(name, scope, *layer, 0)?;
    let Some(inner) = &rule.stored_inner else { return Ok(Some(StoredAs { name, inner: None })) };
    let sizes = inner.iter().map(|expression| size(expression, scope, place).map(u64::from));
    let sizes: Vec<u64> = sizes.collect::<Result<_, _>>()?;
    let (found, expected) = (sizes.iter().product::<u64>(), shape[1..].iter().product::<u64>());
    match inner.first() {
        Some(first) if found != expected => {
            let expected = format!("{expected} elements a row in all dimensions together");
            Err(wrong(first, place, &expected, &found.to_string()))
        }
        _ => Ok(Some(StoredAs { name, inner: Some(sizes) })),
    }
}

/// The view that a rule describes, onto a source of `shape`.
fn view(from: &FromRule, wanted: &Wanted<'_, '_>, shape: &[u64]) -> Result<View, ResolveError> {
    let place = &format!("{} from {}", wanted.place, from.name);
    let number = |expression| size(expression, wanted.scope, place).map(u64::from);
    let blocks = from.blocks.as_ref().map_or(Ok(1), number)?;
    let [mut rows, mut columns] = rows_and_columns(shape);
    if from.elements {
        (rows, columns) = (rows * columns, 1);
    }
    if rows % blocks != 0 {
        let expression = from.blocks.as_ref().expect("one block divides everything");
        let expected = format!("a divisor of {rows}, the rows of {}", from.name);
        return Err(wrong(expression, place, &expected, &blocks.to_string()));
    }
    rows /= blocks;
    if from.transpose == Turn::Source {
        std::mem::swap(&mut rows, &mut columns);
    }
    let mut view = View { blocks, turn: from.transpose, ..View::whole(rows, columns) };
    if let Some(taken) = &from.rows {
        view.first = match evaluate(&taken.first, wanted.scope, place)? {
            Value::Int(0) => 0,
            _ => number(&taken.first)?,
        };
        view.count = number(&taken.count)?;
        view.step = taken.step;
    }
    Ok(view)
}

/// One of several sources of a tensor that are all alike.
fn check_apart(
    tensor: &SourceTensor,
    shape: &[u64],
    first: Option<&SourceTensor>,
) -> Result<(), ResolveError> {
    check_float(tensor)?;
    if !same_elements(&tensor.shape, shape) {
        let (tensor, found) = (tensor.name.clone(), tensor.shape.clone());
        return Err(ResolveError::Shape { tensor, found, expected: format!("{shape:?}") });
    }
    match first.filter(|first| first.dtype != tensor.dtype) {
        None => Ok(()),
        Some(first) => Err(ResolveError::MixedTypes {
            tensor: tensor.name.clone(),
            found: tensor.dtype,
            expected: first.dtype,
        }),
    }
}

/// Whether the family's own experts are stored `[in, out]`.
fn turns_sources(rule: &TensorRule, scope: &Scope<'_>) -> bool {
    let is_none = |word: &str| scope.get(word) == Some(&Value::Text("none".to_owned()));
    rule.from.iter().any(|from| from.transpose == Turn::Source && !from.name.words().any(is_none))
}

fn check_float(tensor: &SourceTensor) -> Result<(), ResolveError> {
    if tensor.dtype.is_float() {
        return Ok(());
    }
    let (tensor, found) = (tensor.name.clone(), tensor.dtype);
    Err(ResolveError::ElementType { tensor, found })
}

/// Whether two shapes are of the same elements in the same order: dimensions of one are nobody's.
fn same_elements(found: &[u64], expected: &[u64]) -> bool {
    let real = |shape: &[u64]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
    real(found) == real(expected)
}

fn check_shape(
    expressions: &[crate::expr::Expr],
    tensor: &SourceTensor,
    shape: &[u64],
) -> Result<(), ResolveError> {
    if same_elements(&tensor.shape, shape) {
        return Ok(());
    }
    let expected: Vec<String> = expressions
        .iter()
        .zip(shape)
        .map(|(expression, value)| format!("{expression} = {value}"))
        .collect();
    Err(ResolveError::Shape {
        tensor: tensor.name.clone(),
        found: tensor.shape.clone(),
        expected: format!("[{}]", expected.join(", ")),
    })
}

/// A slip in a user's rules must not split heads.
fn check_axis(
    rule: &TensorRule,
    name: &str,
    shape: &[u64],
    axes: &[Axis],
) -> Result<(), ResolveError> {
    let find = |axis: &str| axes.iter().find(|other| other.name == axis);
    if rule.shard.is_expert() {
        let axis = find(EXPERTS_AXIS).expect("checked when the rules were parsed");
        if axis.size() != shape[0] {
            return Err(axis_size(name, axis, shape[0]));
        }
    }
    let Some(dimension) = rule.shard.dimension(shape.len()) else { return Ok(()) };
    let axis = rule.shard.axis().and_then(find);
    let axis = axis.expect("rules name only axes that exist: checked when they were parsed");
    let found = shape[dimension];
    let sizes = std::iter::once(&axis.unit).chain(&axis.also);
    if sizes.into_iter().any(|unit| u64::from(axis.len) * u64::from(*unit) == found) {
        return Ok(());
    }
    Err(axis_size(name, axis, found))
}

fn axis_size(name: &str, axis: &Axis, found: u64) -> ResolveError {
    ResolveError::AxisSize {
        tensor: name.to_owned(),
        axis: axis.name.clone(),
        axis_size: axis.size(),
        found,
    }
}
