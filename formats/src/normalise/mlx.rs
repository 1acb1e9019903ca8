//! Which values of a checkpoint mlx-lm has changed, by the rules of its family: seen from shapes and
//! names, and where these could be anybody's from what the files say of themselves.

use serde_json::Value;

use super::{
    ResolveError, SourceTensor, family,
    scopes::{self, evaluate, size, wrong},
};
use crate::{
    expr::Scope,
    rules::{MlxRules, MlxValueRule, RulePack, matches},
};
use shardpack_containers::stored::Adjustment;

/// Who wrote a checkpoint's files, as far as they say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// This program: a package with its manifest.
    Packages,
    /// Tools of MLX (`"format": "mlx"` in every file).
    Mlx,
    /// Somebody else, or nobody knows.
    Other,
}

/// Whether a checkpoint may need [`changed_values`] at all.
#[must_use]
pub fn may_be_changed(sources: &[SourceTensor]) -> bool {
    sources.iter().any(|tensor| is_turned(tensor) || tensor.name.contains(".switch_mlp."))
}

/// A convolution as MLX has it.
fn is_turned(tensor: &SourceTensor) -> bool {
    matches!(tensor.shape[..], [_, kernel, 1] if kernel > 1)
}

/// The tensors whose values mlx-lm has changed, and how. What no rules know is not looked at here.
pub fn changed_values(
    config: &Value,
    sources: &[SourceTensor],
    writer: Writer,
    packs: &[RulePack],
) -> Result<Vec<(String, Adjustment)>, ResolveError> {
    let Some(config) = config.as_object() else { return Ok(Vec::new()) };
    let text = family::text_model(config, packs);
    let Ok(family) = family::choose(&text.config, packs) else { return Ok(Vec::new()) };
    let Some(rules) = &family.pack.file.mlx else { return Ok(Vec::new()) };
    if !is_copy(rules, sources, writer)? {
        return Ok(Vec::new());
    }
    let mut scope = scopes::config_scope(&family, &text.config)?;
    scopes::add_lets(&family, &mut scope)?;
    let mut changed = Vec::new();
    for tensor in sources {
        let rule = rules
            .values
            .iter()
            .find(|rule| rule.patterns.iter().any(|pattern| matches(pattern, &tensor.name)));
        if let Some(rule) = rule {
            changed.push((tensor.name.clone(), adjustment(rule, tensor, &scope)?));
        }
    }
    Ok(changed)
}

/// Whether mlx-lm has written the checkpoint.
fn is_copy(
    rules: &MlxRules,
    sources: &[SourceTensor],
    writer: Writer,
) -> Result<bool, ResolveError> {
    let named = |patterns: &[String]| {
        let patterns: Vec<&String> = patterns.iter().collect();
        let is = move |tensor: &&SourceTensor| {
            patterns.iter().any(|pattern| matches(pattern, &tensor.name))
        };
        sources.iter().filter(is).collect::<Vec<_>>()
    };
    if let Some(first) = named(&rules.convolutions).first() {
        return Ok(is_turned(first));
    }
    if !named(&rules.published).is_empty() {
        return Ok(false);
    }
    match (named(&rules.names).first(), writer) {
        (None, _) | (_, Writer::Packages) => Ok(false),
        (Some(_), Writer::Mlx) => Ok(true),
        (Some(tensor), Writer::Other) => {
            Err(ResolveError::UnknownWriter { tensor: tensor.name.clone() })
        }
    }
}

fn adjustment(
    rule: &MlxValueRule,
    tensor: &SourceTensor,
    scope: &Scope<'_>,
) -> Result<Adjustment, ResolveError> {
    if let Some(added) = rule.added {
        return Ok(Adjustment::Added(added as f32));
    }
    let place = format!("mlx {}", tensor.name);
    let mut runs = Vec::new();
    for (index, factor) in rule.multiplied.iter().enumerate() {
        let value = evaluate(factor, scope, &place)?;
        let number = value.as_float().filter(|number| number.is_finite() && *number != 0.0);
        let number = number
            .ok_or_else(|| wrong(factor, &place, "a number other than 0", &value.to_string()))?;
        let rows = match rule.rows.get(index) {
            Some(rows) => u64::from(size(rows, scope, &place)?),
            None => u64::MAX,
        };
        runs.push((rows, number as f32));
    }
    Ok(Adjustment::Multiplied(runs))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use shardpack_quantize::dtype::Dtype;

    fn changed(
        model_type: &str,
        tensors: &[(&str, &[u64])],
        writer: Writer,
    ) -> Result<Vec<String>, ResolveError> {
        let tensor = |(name, shape): &(&str, &[u64])| SourceTensor {
            name: (*name).to_owned(),
            dtype: Dtype::BF16,
            shape: shape.to_vec(),
        };
        let sources: Vec<SourceTensor> = tensors.iter().map(tensor).collect();
        let config = json!({"model_type": model_type, "rope_theta": [1e4, 1e4],
            "num_attention_groups": 2, "num_attention_heads": 4, "hidden_size": 8});
        let found = changed_values(&config, &sources, writer, &RulePack::builtin())?;
        Ok(found.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn names_that_a_copy_shares_with_packages_need_a_signature() {
        let expert: (&str, &[u64]) = ("model.layers.3.mlp.switch_mlp.up_proj.weight", &[2, 4, 8]);
        let published: (&str, &[u64]) = ("model.layers.3.moe.up_proj.weight", &[2, 4, 8]);
        let norm: (&str, &[u64]) = ("model.norm.weight", &[8]);
        let check = |tensors: &[(&str, &[u64])], writer, expected: &[&str]| {
            assert_eq!(changed("step3p5", tensors, writer).unwrap(), expected, "{writer:?}");
        };
        check(&[expert, norm], Writer::Mlx, &["model.norm.weight"]);
        check(&[expert, norm], Writer::Packages, &[]);
        check(&[published, norm], Writer::Mlx, &[]);
        check(&[published, norm], Writer::Other, &[]);
        // A package without its manifest lists one tensor as mlx-lm expects it of publishers.
        let listed: (&str, &[u64]) = ("model.layers.3.moe.router_bias", &[2]);
        check(&[expert, listed, norm], Writer::Mlx, &[]);
        let error = changed("step3p5", &[expert, norm], Writer::Other).unwrap_err();
        assert!(matches!(error, ResolveError::UnknownWriter { .. }), "{error}");
    }
}
