//! The formats that recipes and overrides give to matrices.

use super::*;

const MAIN: MainFormat = MainFormat { bits: 4, group_size: 64, float: None };

fn affine(bits: u32, group_size: u32) -> MatrixFormat {
    MatrixFormat::Affine { bits, group_size }
}

/// The bits that a recipe gives `kind` in each layer of a model.
fn bits_by_layer(recipe: Recipe, kind: &str, layers: u32, main: u32) -> Vec<u32> {
    let bits = |layer| {
        let module = format!("model.layers.{layer}.{kind}");
        let matrix = Matrix { module: &module, layer: Some(layer), role: Role::Linear };
        match recipe.format(&matrix, layers, MainFormat { bits: main, ..MAIN }) {
            MatrixFormat::Affine { bits, group_size: 64 } => bits,
            MatrixFormat::Plain => 16,
            other @ (MatrixFormat::Affine { .. } | MatrixFormat::Float(_)) => panic!("{other:?}"),
        }
    };
    (0..layers).map(bits).collect()
}

#[test]
fn uniform_is_the_main_format_everywhere() {
    for (module, role) in [("lm_head", Role::Head), ("model.embed_tokens", Role::Embed)] {
        let matrix = Matrix { module, layer: None, role };
        assert_eq!(Recipe::Uniform.format(&matrix, 4, MAIN), affine(4, 64));
    }
    assert_eq!(bits_by_layer(Recipe::Uniform, "mlp.down_proj", 3, 4), [4; 3]);
    assert_eq!(bits_by_layer(Recipe::Uniform, "mlp.down_proj", 3, 16), [16; 3]);
}

#[test]
fn sensitive_raises_the_outer_eighths_of_two_kinds_by_a_step() {
    let sensitive = |kind, layers, main| bits_by_layer(Recipe::Sensitive, kind, layers, main);
    let mut expected = [4; 32];
    expected[..4].fill(6);
    expected[28..].fill(6);
    assert_eq!(sensitive("mlp.down_proj", 32, 4), expected);
    assert_eq!(sensitive("self_attn.v_proj", 32, 4), expected);
    assert_eq!(sensitive("mlp.switch_mlp.down_proj", 32, 4), expected);
    assert_eq!(sensitive("mlp.up_proj", 32, 4), [4; 32]);
    assert_eq!(sensitive("self_attn.kv_proj", 32, 4), [4; 32]);
    assert_eq!(sensitive("mlp.down_proj", 9, 6), [8, 8, 6, 6, 6, 6, 6, 8, 8]);
    assert_eq!(sensitive("mlp.down_proj", 4, 8), [8; 4]);
    assert_eq!(sensitive("mlp.down_proj", 3, 3), [4, 3, 4]);
    assert_eq!(sensitive("mlp.down_proj", 1, 4), [6]);
    assert_eq!(sensitive("mlp.down_proj", 2, 16), [16; 2]);
}

#[test]
fn sensitive_gives_head_and_embedding_six_bits_at_least() {
    for (main, expected) in [(2, 6), (4, 6), (6, 6), (8, 8)] {
        for role in [Role::Head, Role::Embed] {
            let matrix = Matrix { module: "lm_head", layer: None, role };
            let main = MainFormat { bits: main, group_size: 32, float: None };
            assert_eq!(Recipe::Sensitive.format(&matrix, 4, main), affine(expected, 32));
        }
    }
    // A name alone does not raise what is no matrix of a layer.
    let matrix = Matrix { module: "v_proj", layer: None, role: Role::Linear };
    assert_eq!(Recipe::Sensitive.format(&matrix, 4, MAIN), affine(4, 64));
}

#[test]
fn recipes_are_named() {
    for recipe in [Recipe::Uniform, Recipe::Sensitive] {
        assert_eq!(recipe.to_string().parse(), Ok(recipe));
    }
    let error = "Sensitive".parse::<Recipe>().unwrap_err().to_string();
    assert_eq!(error, "recipe \"Sensitive\" is no file, and neither uniform nor sensitive");
}

#[test]
fn the_last_override_that_matches_wins() {
    let overrides =
        Overrides::parse(&["*.mlp.*=6", "*.layers.0.*=8:32", "*.layers.0.mlp.up_proj=16"]).unwrap();
    let format = |module| overrides.format(module, affine(4, 64), MAIN);
    assert_eq!(format("model.layers.1.mlp.up_proj"), affine(6, 64));
    assert_eq!(format("model.layers.0.mlp.down_proj"), affine(8, 32));
    assert_eq!(format("model.layers.0.mlp.up_proj"), MatrixFormat::Plain);
    assert_eq!(format("lm_head"), affine(4, 64));
    // What a recipe has chosen stays where nothing matches, and its group size counts for nothing
    // where something does.
    assert_eq!(overrides.format("lm_head", affine(6, 32), MAIN), affine(6, 32));
    let plain = MainFormat { bits: 16, group_size: 128, float: None };
    let chosen = overrides.format("model.layers.1.mlp.up_proj", plain.stored(), plain);
    assert_eq!(chosen, affine(6, 128));
}

#[track_caller]
fn check_refused(text: &str, expected: &str) {
    let error = Overrides::parse(&[text]).unwrap_err().to_string();
    assert!(error.contains(expected) && error.contains(text), "{error}");
}

#[test]
fn overrides_of_another_form_are_refused() {
    check_refused("lm_head", "it has no '='");
    check_refused("=4", "a pattern has 1 to 256 bytes");
    check_refused("lm_head=7", "7 bits are not possible");
    check_refused("lm_head=0", "0 bits are not possible");
    check_refused("lm_head=", "\"\" is not a number");
    check_refused("lm_head=4:", "\"\" is not a number");
    check_refused("lm_head=-4", "\"-4\" is not a number");
    check_refused("lm_head=4:16", "groups of 16 are not possible");
    check_refused("lm_head=16:64", "have no groups");
    check_refused("lm_head=99999999999", "is not a number");
    check_refused("lm_head=4:64:64", "\"64:64\" is not a number");
}

#[test]
fn an_override_without_a_matrix_is_named() {
    let modules = ["model.embed_tokens", "model.layers.0.mlp.up_proj", "lm_head"];
    let overrides = Overrides::parse(&["lm_head=8", "*.up_proj.weight=6"]).unwrap();
    let error = overrides.check_used(&modules).unwrap_err().to_string();
    assert!(error.contains("\"*.up_proj.weight=6\" matches no matrix"), "{error}");
    assert!(error.contains("\"model.layers.0.mlp.up_proj\""), "{error}");
    let overrides = Overrides::parse(&["lm_head=8", "*.up_proj=6"]).unwrap();
    assert_eq!(overrides.check_used(&modules), Ok(()));
    assert!(overrides.check_used(&[]).is_err());
    assert_eq!(Overrides::default().check_used(&[]), Ok(()));
}

#[test]
fn what_chooses_keys_has_eight_bits_at_least_in_every_recipe() {
    let module = "model.layers.0.self_attn.indexer.wq_b";
    let matrix = Matrix { module, layer: Some(0), role: Role::Indexer };
    for recipe in [Recipe::Uniform, Recipe::Sensitive] {
        for bits in [2, 4, 6, 8] {
            let main = MainFormat { bits, group_size: 32, float: None };
            assert_eq!(recipe.format(&matrix, 4, main), affine(8, 32));
        }
        let main = MainFormat { bits: 16, ..MAIN };
        assert_eq!(recipe.format(&matrix, 4, main), MatrixFormat::Plain);
    }
}
