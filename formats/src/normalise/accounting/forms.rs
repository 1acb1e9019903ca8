//! A tensor in the forms that its rule describes: as publishers have it, and as packages list it.

use super::{Wanted, expand};
use crate::{
    expr::{Scope, Value},
    normalise::{
        Published, ResolveError, StoredAs, View, rows_and_columns,
        scopes::{evaluate, size, wrong},
    },
    rules::{FromRule, TensorRule, Turn},
};

/// The form in which publishers have a tensor, if not under its own name: the first whose words all
/// mean something in this family.
pub(in crate::normalise) fn published_form<'r>(
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
pub(super) fn published(wanted: &Wanted<'_, '_>) -> Option<Published> {
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
pub(super) fn stored_as(wanted: &Wanted<'_, '_>) -> Result<Option<StoredAs>, ResolveError> {
    let Wanted { rule, layer, place, scope, shape } = wanted;
    let is_none = |word: &str| scope.get(word) == Some(&Value::Text("none".to_owned()));
    let Some(name) = rule.stored_as.as_ref().filter(|name| !name.words().any(is_none)) else {
        return Ok(None);
    };
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
pub(super) fn view(
    from: &FromRule,
    wanted: &Wanted<'_, '_>,
    shape: &[u64],
) -> Result<View, ResolveError> {
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

/// Whether the family's own experts are stored `[in, out]`.
pub(super) fn turns_sources(rule: &TensorRule, scope: &Scope<'_>) -> bool {
    let is_none = |word: &str| scope.get(word) == Some(&Value::Text("none".to_owned()));
    rule.from.iter().any(|from| from.transpose == Turn::Source && !from.name.words().any(is_none))
}
