//! Figures against plain arithmetic.

use std::{fs, path::Path};

use shardpack_manifests::Digest;

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

fn found_in(
    model: &LocalModel,
    reference: Reference<'_>,
    texts: &[Vec<TokenId>],
    options: &EvalOptions,
) -> Result<Evaluation, EvalError> {
    evaluate(model, reference, texts, options, &mut |_, _| {}).map(|found| found.all)
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
        sums.add(&LogSoftmax::of(own), Some(Truth::Whole(&LogSoftmax::of(base))), *next);
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
    let tokens = [a.iter().chain(&b).map(|token| TokenId(*token)).collect::<Vec<_>>()];
    let options = EvalOptions { context: 24, first: None };
    let plain = load(Recipe::plain("llama", 1));
    let sharded = load(Recipe::plain("llama", 2));
    let found = found_in(&sharded, Reference::Model(&plain), &tokens, &options).unwrap();
    let against = found.against.unwrap();
    assert_eq!(found.tokens, tokens[0].len() / 24 * 11);
    assert!(against.kl_mean.value < 1e-9 && against.same_top.value > 0.999);
    let rough =
        Recipe { weights: Weights::Affine { bits: 4, group: 64 }, ..Recipe::plain("llama", 1) };
    let found = found_in(&load(rough), Reference::Model(&plain), &tokens, &options).unwrap();
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
    let ids = [sequence.iter().map(|token| TokenId(*token)).collect::<Vec<_>>()];
    let options = EvalOptions { context: 512, first: None };
    let found = found_in(&plain, Reference::None, &ids, &options).unwrap();
    assert!((found.perplexity.value / expected - 1.0).abs() < 1e-3, "{found:?} {expected}");
    let options = EvalOptions { context: 513, first: None };
    let wrong = found_in(&plain, Reference::None, &ids, &options);
    assert!(matches!(wrong, Err(EvalError::Context { most: 512, .. })));
}

/// Two texts of the model's tokens, and how they are read.
fn texts() -> (Vec<Vec<TokenId>>, EvalOptions) {
    let texts = Expected::of("llama").tokens.map(|it| it.into_iter().map(TokenId).collect());
    (texts.to_vec(), EvalOptions { context: 24, first: None })
}

/// A file of what `model` predicts for the texts.
fn save(model: &LocalModel, path: &Path, top: u32) -> Evaluations {
    let (texts, options) = texts();
    let text = |tokens: &Vec<TokenId>| StoredText {
        name: "text".to_owned(),
        blake3: Digest::of(b"text"),
        tokens: tokens.len() as u64,
    };
    let document = LogitsDocument {
        model: "llama".to_owned(),
        weights: Digest::of(b"weights"),
        tokenizer: None,
        vocab_size: model.spec().vocab_size,
        context: options.context as u32,
        first: None,
        top,
        texts: texts.iter().map(text).collect(),
    };
    let mut file = fs::File::create(path).unwrap();
    let mut writer = LogitsWriter::new(path, &mut file, &document, &texts).unwrap();
    let found = record(model, &texts, &options, &mut writer, &mut |_, _| {}).unwrap();
    writer.finish().unwrap();
    found
}

#[test]
fn a_file_of_logits_stands_for_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits");
    let (texts, options) = texts();
    let plain = load(Recipe::plain("llama", 1));
    let affine = Weights::Affine { bits: 4, group: 64 };
    let rough = load(Recipe { weights: affine, ..Recipe::plain("llama", 1) });
    let note: &mut dyn FnMut(usize, usize) = &mut |_, _| {};
    let whole = evaluate(&rough, Reference::Model(&plain), &texts, &options, note).unwrap();
    let expected = whole.all.against.clone().unwrap();
    let vocab = plain.spec().vocab_size;
    let mut last = 0.0;
    for top in [1, 4, 16, 64, vocab] {
        let own = save(&plain, &path, top).all;
        assert_eq!(own.perplexity, expected.perplexity);
        let mut reader = LogitsReader::open(&path).unwrap();
        assert_eq!((reader.texts(), reader.options()), (&texts[..], options));
        // Twice, as for several sets.
        for _ in 0..2 {
            let reference = Reference::Stored(&mut reader);
            let found = evaluate(&rough, reference, &texts, &options, note).unwrap();
            assert_eq!(found.texts.len(), 2);
            let against = found.all.against.unwrap();
            let [kl, rest] = [against.kl_mean.value, against.rest.unwrap()];
            // Logarithms are in f32: sums are as far apart as those are rounded.
            assert!(kl > last - 1e-6 && kl < expected.kl_mean.value + 1e-6, "{top}: {kl}");
            assert_eq!(against.same_top, expected.same_top);
            assert!((against.perplexity.value / expected.perplexity.value - 1.0).abs() < 1e-5);
            let difference =
                against.rms_probability_difference - expected.rms_probability_difference;
            assert!(difference.abs() < 1e-6);
            if top == vocab {
                assert!((kl - expected.kl_mean.value).abs() < 1e-6 && rest == 0.0, "{kl} {rest}");
                assert!((against.kl.p999 - expected.kl.p999).abs() < 1e-5);
                last = 0.0;
            } else {
                assert!(rest > 0.0);
                last = kl;
            }
        }
    }
}

#[test]
fn a_sum_of_tokens_loses_nothing_where_both_divide_it_alike() {
    let base = LogSoftmax::of(&[4.0, 3.0, 1.0, 0.5, 0.25]);
    let own = LogSoftmax::of(&[3.0, 3.5, 2.0, 1.5, 1.25]);
    let whole = Truth::Whole(&base).divergence(&own);
    for top in 2..=5 {
        let row = base.row(top, 0);
        let found = Truth::Top(&row).divergence(&own);
        assert!((found - whole).abs() < 1e-12, "{top}: {found} {whole}");
    }
    assert!(Truth::Top(&base.row(1, 0)).divergence(&own) < whole);
}

#[test]
fn a_file_of_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logits");
    let plain = load(Recipe::plain("llama", 1));
    save(&plain, &path, 4);
    let good = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        LogitsReader::open(&path).err().expect("it was read").to_string()
    };
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        refused(&bytes)
    };
    assert!(changed(0).contains("no logits"));
    assert!(changed(8).contains("version"));
    assert!(changed(12).contains("damaged") && changed(good.len() / 2).contains("damaged"));
    assert!(refused(&good[..good.len() - 8]).contains("damaged"));
    assert!(refused(b"").contains("too short"));
    // A digest that is right over numbers that are not.
    let mut bytes = good[..good.len() - 32].to_vec();
    bytes.extend([0; 4]);
    let digest = Digest::of(&bytes);
    bytes.extend(digest.0);
    assert!(refused(&bytes).contains("impossible"));
    fs::write(&path, &good).unwrap();
    let mut reader = LogitsReader::open(&path).unwrap();
    let (mut texts, options) = texts();
    texts[1].pop();
    let wrong = found_in(&plain, Reference::Stored(&mut reader), &texts, &options).unwrap_err();
    assert!(wrong.to_string().contains("other texts"), "{wrong}");
}

#[test]
fn a_continuation_is_as_likely_as_the_logits_say() {
    let plain = load(Recipe::plain("llama", 1));
    let Expected { tokens: [sequence, _], logits: [logits, _], .. } = Expected::of("llama");
    let vocab = plain.spec().vocab_size as usize;
    let rows: Vec<LogSoftmax> = logits.chunks(vocab).map(LogSoftmax::of).collect();
    let mut tokens: Vec<TokenId> = sequence.iter().map(|token| TokenId(*token)).collect();
    for from in [1, tokens.len() / 2, tokens.len() - 1] {
        let expected: f64 =
            (from..tokens.len()).map(|it| rows[it - 1].log(tokens[it].0 as usize)).sum();
        let found = likelihood(&plain, &tokens, from).unwrap();
        assert!((found.log / expected - 1.0).abs() < 1e-3, "{found:?} {expected}");
    }
    let (from, last) = (tokens.len() - 1, tokens.len() - 2);
    for (token, expected) in [(rows[last].top(), true), ((rows[last].top() + 1) % vocab, false)] {
        tokens[from] = TokenId(token as u32);
        assert_eq!(likelihood(&plain, &tokens, from).unwrap().is_greedy, expected);
    }
}
