//! The tensors that a checkpoint of a configuration should hold, as far as the configuration says:
//! what rules expect, in the first form in which they find each.

use serde_json::Value;

use super::{
    ResolveError, SourceTensor,
    accounting::{expand, published_form},
    family,
    scopes::{self, flag, size},
};
use crate::{
    expr::Scope,
    rules::{Presence, Role, RulePack, TensorRule},
};
use shardpack_quantize::dtype::Dtype;

/// Most tensors that are listed: the largest published model has under 100,000.
const MAX_TENSORS: usize = 1 << 20;

/// Lists the tensors of a checkpoint of `config`, all in BF16. Names are the published ones of the
/// text model, without what tools and wrappers put before them.
pub fn expected_tensors(
    config: &Value,
    packs: &[RulePack],
) -> Result<Vec<SourceTensor>, ResolveError> {
    let config = config.as_object().ok_or(ResolveError::NotAnObject)?;
    let config = &family::text_model(config, packs).config;
    let family = family::choose(config, packs)?;
    family.check_keys(config)?;
    let mut scope = scopes::config_scope(&family, config)?;
    scopes::add_lets(&family, &mut scope)?;
    let layers = scopes::layer_scopes(&family, &scope)?;
    let mut tensors: Vec<SourceTensor> = Vec::new();
    for rule in &family.pack.file.tensors {
        if rule.name.per_layer() {
            for (layer, scope) in layers.iter().enumerate() {
                add(rule, layer as u32, scope, &mut tensors)?;
            }
        } else {
            add(rule, 0, &scope, &mut tensors)?;
        }
    }
    // Several tensors may be parts of one.
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors.dedup();
    Ok(tensors)
}

fn add(
    rule: &TensorRule,
    layer: u32,
    scope: &Scope<'_>,
    tensors: &mut Vec<SourceTensor>,
) -> Result<(), ResolveError> {
    let place = rule.name.to_string();
    let exists = match &rule.required {
        Presence::Always => true,
        Presence::Maybe => false,
        Presence::Exactly(expression) => flag(expression, scope, &place)?,
    };
    if !exists || tensors.len() > MAX_TENSORS {
        return Ok(());
    }
    let sizes = |expressions: &[crate::expr::Expr]| -> Result<Vec<u64>, ResolveError> {
        expressions.iter().map(|one| size(one, scope, &place).map(u64::from)).collect()
    };
    let shape = sizes(&rule.shape)?;
    let dtype = if rule.role == Role::Router { Dtype::F32 } else { Dtype::BF16 };
    let Some(from) = published_form(rule, scope, shape.len()) else {
        tensors.push(SourceTensor { name: expand(&rule.name, scope, layer, 0)?, dtype, shape });
        return Ok(());
    };
    let (count, own) =
        if from.name.per_expert() { (shape[0], shape[1..].to_vec()) } else { (1, shape) };
    let own = from.shape.as_deref().map_or(Ok(own), sizes)?;
    for expert in 0..count {
        let name = expand(&from.name, scope, layer, expert)?;
        tensors.push(SourceTensor { name, dtype, shape: own.clone() });
    }
    Ok(())
}
