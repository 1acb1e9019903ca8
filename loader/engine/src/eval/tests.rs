//! Figures against plain arithmetic.

use super::*;
use crate::{
    engine::memory_group,
    testing::{
        models::Expected,
        package::{Recipe, Weights},
    },
};

fn load(recipe: Recipe) -> LocalModel {
    LocalModel::load(&recipe.open(), &memory_group(recipe.ranks).unwrap(), 1).unwrap()
}

#[test]
fn windows_count_their_second_halves() {
    assert_eq!(windows(10, 10), [(0..10, 0)]);
    assert_eq!(windows(25, 10), [(0..10, 5), (10..20, 5)]);
}

#[test]
fn figures_are_those_of_the_definitions() {
    let ln = |logits: &[f32], i: usize| {
        let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        f64::from(logits[i]) - sum.ln()
    };
    let rows = [([1.0, 2.0, 0.5], [1.5, 1.0, 0.0], 2), ([0.0, 3.0, 1.0], [0.1, 2.0, 1.0], 1)];
    let mut sums = Sums::default();
    let (mut nll, mut kls) = (0.0, Vec::new());
    for (own, base, next) in &rows {
        sums.add(&LogSoftmax::of(own), Some(&LogSoftmax::of(base)), *next);
        nll -= ln(own, *next) / 2.0;
        kls.push((0..3).map(|i| ln(base, i).exp() * (ln(base, i) - ln(own, i))).sum::<f64>());
    }
    let found = result(1, sums);
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
    near(found.perplexity.value, nll.exp());
    let against = found.against.unwrap();
    near(against.kl_mean.value, f64::midpoint(kls[0], kls[1]));
    near(against.kl_mean.error, (kls[0] - kls[1]).abs() / 2.0);
    near(against.kl.median, f64::midpoint(kls[0], kls[1]));
    near(against.kl.maximum, kls[0].max(kls[1]));
    near(against.same_top.value, 0.5);
    assert_eq!((found.tokens, found.windows), (2, 1));
}

#[test]
fn a_model_agrees_with_itself_on_any_number_of_ranks() {
    let [a, b] = Expected::of("llama").tokens;
    let tokens: Vec<_> = a.iter().chain(&b).map(|token| TokenId(*token)).collect();
    let options = EvalOptions { context: 24, first: None };
    let plain = load(Recipe::plain("llama", 1));
    let sharded = load(Recipe::plain("llama", 2));
    let found = evaluate(&sharded, Some(&plain), &tokens, &options, &mut |_, _| {}).unwrap();
    let against = found.against.unwrap();
    assert_eq!(found.tokens, tokens.len() / 24 * 11);
    assert!(against.kl_mean.value < 1e-9 && against.same_top.value > 0.999);
    let rough =
        Recipe { weights: Weights::Affine { bits: 4, group: 64 }, ..Recipe::plain("llama", 1) };
    let found = evaluate(&load(rough), Some(&plain), &tokens, &options, &mut |_, _| {}).unwrap();
    assert!(found.against.unwrap().kl_mean.value > 1e-6);
    // The values that transformers gives for the sequence as one window.
    let Expected { tokens: [sequence, _], logits: [logits, _], .. } = Expected::of("llama");
    let vocab = plain.spec().vocab_size as usize;
    let nll: f64 = sequence[1..]
        .iter()
        .zip(logits.chunks(vocab))
        .map(|(next, row)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*next as usize])
        })
        .sum::<f64>();
    let expected = (nll / (sequence.len() - 1) as f64).exp();
    let ids: Vec<_> = sequence.iter().map(|token| TokenId(*token)).collect();
    let options = EvalOptions { context: 512, first: None };
    let found = evaluate(&plain, None, &ids, &options, &mut |_, _| {}).unwrap();
    assert!((found.perplexity.value / expected - 1.0).abs() < 1e-3, "{found:?} {expected}");
    let wrong =
        evaluate(&plain, None, &ids, &EvalOptions { context: 513, first: None }, &mut |_, _| {});
    assert!(matches!(wrong, Err(EvalError::Context { most: 512, .. })));
}
