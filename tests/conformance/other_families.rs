//! Reference models that no other list of families names: logits of transformers, and packages that
//! join to the one-node package. A new folder of `tests/data/models` is tested here.

use std::collections::BTreeSet;

use shardpack_formats::Spec;

use crate::{
    dense_families, hybrid_families,
    manifest_requires::architectures,
    moe_families,
    reference_models::{all_models, check_families, check_families_joined},
};

/// Folders of the reference models with tests of their own.
fn listed() -> BTreeSet<&'static str> {
    let dense = dense_families::FAMILIES.iter().map(|(model, ..)| *model);
    let lists = [moe_families::FAMILIES, hybrid_families::FAMILIES];
    let others = lists.iter().copied().flatten().map(|(model, _)| *model);
    dense.chain(others).collect()
}

/// All others, and whether they have experts.
fn others(architectures: &[(String, Spec)]) -> Vec<(&str, bool)> {
    let listed = listed();
    let all = architectures.iter().map(|(model, spec)| (model.as_str(), spec.moe.is_some()));
    all.filter(|(model, _)| !listed.contains(model)).collect()
}

#[test]
fn logits_at_16_bits_match_transformers() {
    check_families(&others(&architectures()), 3);
}

#[test]
fn packages_of_any_number_of_nodes_join_to_the_one_node_package() {
    check_families_joined(&others(&architectures()));
}

#[test]
fn every_reference_model_is_compared_with_transformers() {
    let architectures = architectures();
    let others = others(&architectures);
    let compared: BTreeSet<&str> =
        listed().into_iter().chain(others.iter().map(|(model, _)| *model)).collect();
    let models = all_models();
    assert!(models.len() >= 93, "{} models", models.len());
    assert_eq!(compared, models.iter().map(String::as_str).collect());
    let experts = others.iter().filter(|(_, has_experts)| *has_experts).count();
    assert!(others.len() >= 59 && experts >= 33, "{} models, {experts} with experts", others.len());
}
