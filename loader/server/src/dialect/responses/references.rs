//! References to items of stored responses (`item_reference`), which some clients send in place of
//! what they were answered with.

use shardpack_chat::json::{Json, Object};

use crate::{dialect::StoredItems, error::ApiError};

/// The input with the items that its references name. Thinking that is not stored any more is left
/// out and named; another item is missed.
pub(super) fn resolve(
    input: Option<Json>,
    earlier: StoredItems<'_>,
    ignored: &mut Vec<String>,
) -> Result<Option<Json>, ApiError> {
    let Some(Json::Array(items)) = input else { return Ok(input) };
    let mut resolved = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let Some(id) = item.as_object().and_then(reference) else {
            resolved.push(item);
            continue;
        };
        let path = format!("input[{index}]");
        if let Some(found) = find(id, earlier) {
            resolved.push(found);
        } else if id.starts_with("rs_") {
            ignored.push(path);
        } else {
            let message = format!("{path}: item {id:?} is not stored: send the item itself");
            return Err(ApiError::param(path, message).with_code("item_not_found"));
        }
    }
    Ok(Some(Json::Array(resolved)))
}

/// The id that an item refers to. The type may be left out.
fn reference(item: &Object) -> Option<&str> {
    let id = item.get("id")?.as_str()?;
    match item.get("type").and_then(Json::as_str) {
        Some("item_reference") => Some(id),
        None if item.get("role").is_none() => Some(id),
        _ => None,
    }
}

/// An item's id holds that of its response: `msg_{response}_{number}`.
fn find(id: &str, earlier: StoredItems<'_>) -> Option<Json> {
    let (_, rest) = id.split_once('_')?;
    let (response, _) = rest.rsplit_once('_')?;
    let items = earlier(&format!("resp_{response}"))?;
    let is_it = |item: &&Json| {
        item.as_object().and_then(|item| item.get("id")).and_then(Json::as_str) == Some(id)
    };
    items.iter().find(is_it).cloned()
}
